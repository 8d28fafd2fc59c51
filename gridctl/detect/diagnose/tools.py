"""What tools say when they cannot work at all: no handle, no driver, no device, versions that do not fit."""

import re
from collections.abc import Iterator, Mapping

from gridagent.signals.nvidia import canonical_pci
from gridctl.detect.diagnose.ruling import clean
from gridctl.detect.diagnose.saying import rule
from gridctl.model.diagnosis import Diagnosis

_HANDLE = re.compile(
    r"Unable to determine the device handle for (?:GPU|gpu) ?"
    r"(?P<pci>[0-9A-Fa-f:.]{4,20}): {1,2}(?P<why>.{1,200})"
)
_WHOLE = (
    (
        re.compile(r"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"),
        "smi.no_driver",
    ),
    (re.compile(r"Failed to initialize NVML: Driver/library version mismatch"), "smi.mismatch"),
    (re.compile(r"Failed to initialize NVML: (?:Driver Not Loaded|Unknown Error|Timeout)"), "smi.no_driver"),
    (re.compile(r"No devices were found"), "smi.no_devices"),
    (re.compile(r"WARNING: infoROM is corrupted at gpu"), "smi.inforom"),
    (re.compile(r"\|\s{0,4}Overall Health\s{0,30}[|:]\s{0,4}(?:Failure|Warning)\b"), "dcgm.unhealthy"),
)
_LISTED = re.compile(r"GPU (?P<index>\d{1,3}): .{1,100}? \(UUID")
_SLOT = re.compile(
    r"(?P<pci>(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?:3D|VGA compatible) controller"
    r"(?: \[[0-9a-f]{4}\])?: NVIDIA.{0,120}?(?: \(rev (?P<rev>[0-9a-f]{2})\))?\s*$"
)
_ROW = re.compile(r"\|\s{1,4}(?P<index>\d{1,3})\s.{1,60}\|\s{0,4}(?P<pci>[0-9A-Fa-f]{8}:[0-9A-Fa-f:.]{7})\s")
_ERR = re.compile(r"\|.{0,60}\bERR!")
_WORDS = (
    "Unable to determine",
    "NVIDIA-SMI has",
    "Failed to init",
    "No devices",
    "WARNING: info",
    "|",
    "GPU ",
)
_FEW = 64


class Tools:
    """What was said, per GPU where one is named."""

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}  #: address as canonical as it can be -> the line
        self.no_handle: dict[str, str] = {}
        self.whole: dict[str, str] = {}  #: rule -> the line
        self.errors: dict[str, str] = {}
        self.listed: set[str] = set()  #: GPUs that the driver lists
        self.slots: dict[str, str] = {}  #: GPUs that the bus lists -> revision
        self._row = ""

    def feed(self, line: str) -> bool:
        """One line; False if it says nothing of this kind."""
        if not line.startswith(_WORDS):
            return self._slot(line)
        if (listed := _LISTED.match(line)) and len(self.listed) < _FEW:
            self.listed.add(listed["index"])
            return False  # the fabric wants to know, too
        if match := _HANDLE.match(line):
            pci = canonical_pci(match["pci"])
            told = self.lost if "is lost" in match["why"] else self.no_handle
            if len(told) < _FEW:
                told[pci] = clean(line)
            return True
        for pattern, name in _WHOLE:
            if pattern.match(line):
                self.whole.setdefault(name, clean(line))
                return True
        if row := _ROW.match(line):
            self._row = canonical_pci(row["pci"])
        elif self._row and _ERR.match(line) and len(self.errors) < _FEW:
            self.errors[self._row] = clean(line)
        return line.startswith("|")

    def _slot(self, line: str) -> bool:
        match = _SLOT.match(line) if "NVIDIA" in line else None
        if match is None or len(self.slots) >= _FEW:
            return False
        pci = match["pci"] if match["pci"].count(":") > 1 else f"0000:{match['pci']}"
        self.slots[pci] = match["rev"] or ""
        return True

    @property
    def suspect(self) -> str:
        """The address of a GPU that no tool reaches, "" if there is none."""
        return next((pci for pci in [*self.lost, *self.no_handle] if pci), "")

    def findings(self, explained: bool, incidents: Mapping[str, bool]) -> Iterator[Diagnosis]:
        """`explained`: something worse is known; `incidents`: addresses of GPUs that it was."""
        if self.lost and not any(incidents.get(pci) for pci in self.lost):
            yield self._of_gpus("smi.lost", self.lost)
        if self.no_handle and not explained and not any(incidents.get(pci) for pci in self.no_handle):
            yield self._of_gpus("smi.no_handle", self.no_handle)
        gone = {
            pci: "the bus reads all ones from it (rev ff)" for pci, rev in self.slots.items() if rev == "ff"
        }
        if gone and not any(incidents.get(pci) for pci in gone):
            yield self._of_gpus("smi.rev_ff", gone)
        elif self.listed and len(self.listed) < len(self.slots) and not explained and not incidents:
            seen = f"the bus lists {len(self.slots)} GPUs, the driver {len(self.listed)}"
            yield rule(
                "smi.gpus_missing", [seen], events=[{"seen": len(self.listed), "want": len(self.slots)}]
            )
        for name, line in self.whole.items():
            yield rule(name, [line])
        if self.errors:
            yield self._of_gpus("smi.values_bad", self.errors)

    @staticmethod
    def _of_gpus(name: str, lines: Mapping[str, str]) -> Diagnosis:
        events: list[dict[str, object]] = [{"pci": pci or None} for pci in lines]
        return rule(name, lines.values(), pci=next(iter(lines)), count=len(lines), events=events)
