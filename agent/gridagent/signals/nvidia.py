"""What the NVIDIA kernel driver prints: Xid lines, a GPU that left the bus, failed initialisation.

Forms as printed by the open kernel modules (github.com/NVIDIA/open-gpu-kernel-modules) and described in
NVIDIA's Xid documentation (docs.nvidia.com/deploy/xid-errors). The name of a process is chosen by its
user and printed as it is: it may hold commas, brackets or the beginning of another Xid line. So patterns
match from the start of the message only, and nothing that decides is looked for inside the name.
"""

import re
from collections import deque

import msgspec

from gridagent.signals.lines import unwrap

_PCI = re.compile(
    r"(?:PCI:)?([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.([0-7]))?(?![0-9A-Fa-f:.])"
)
_XID = re.compile(r"NVRM: Xid \((?P<device>[^()]{1,64})\): (?P<xid>\d{1,5})(?:, (?P<rest>.*))?\s*", re.DOTALL)
_MIG = re.compile(r"GPU-I:\d{2}(?: GPU-CI:\d{2})?")
_PID = re.compile(r"pid=(?:(\d{1,10})|'?<unknown>'?)(?:, name=)?")
_CAUSED_BY = re.compile(r" caused by previous Xid (\d{1,5})\s*$")
_RECOVERY = re.compile(
    r"GPU recovery action changed from 0x[0-9a-f]{1,8} \([^()]{1,40}\) "
    r"to 0x([0-9a-f]{1,8}) \([^()]{1,40}\)\s*$"
)
_TEXT_START = re.compile(
    r"(?:Ch |[Cc]hannel |Contained|Uncontained|GPU |Timeout|DBE|Double Bit|Row Remapper|Dynamic Page|"
    r"Graphics |Class Error|NVLink|Additional to|intr |MMU Fault|errorString|An unrec|High single|SPI |"
    r"[A-Z]{3,6}_[A-Z_]{3,})"
)
_RESETS = re.compile(r"RST: (Yes|No), D-RST: (Yes|No)")
_UNIT = re.compile(r"\(GPC (\d{1,3}), TPC (\d{1,3})(?:, SM (\d{1,3}))?\)")
#: A process name has at most 15 characters (TASK_COMM_LEN less the closing zero).
_NAME_CHARS_MAX = 15

_LOST = re.compile(r"NVRM: GPU (?:at )?(?P<pci>[0-9A-Fa-f:.PCI]{7,24}): GPU has fallen off the bus")
_LOST_BEGIN = re.compile(r"NVRM: The NVIDIA GPU (?P<pci>[0-9A-Fa-f:.]{7,20})")
_LOST_END = re.compile(
    r"\s*(?:NVRM: )?(?:installed in this system has )?fallen off the bus and is not responding"
)
_LOST_NOT = re.compile(r"NVRM: (?:\(PCI ID: [0-9a-f:]{9}\) )?installed in this system (?!has)")
_LOST_ANYWHERE = re.compile(r"\bhas\s+fallen off the bus and is not responding")
_INIT_FAILED = re.compile(
    r"NVRM: GPU (?P<pci>[0-9A-Fa-f:.]{7,20}): (?:RmInitAdapter failed|rm_init_adapter failed)"
)
_SILENCED = re.compile(r"NVRM: Rate limiting GSP RPC error prints for GPU at (?P<pci>[0-9A-Fa-f:.PCI]{7,24})")
_IDENTITY = re.compile(r"NVRM: GPU at (?P<pci>[0-9A-Fa-f:.PCI]{7,24}): (?P<uuid>GPU-[0-9a-f-]{36})\s*$")
_INTERESTING = ("NVRM: ", "fallen off", "installed in")
#: Other records may stand between the first and the last line of the form without a number.
_PENDING_LINES = 64
_PENDING_MAX = 32


class Xid(msgspec.Struct, frozen=True, kw_only=True, tag="xid"):
    """An Xid line. `pci` is "dddd:bb:dd.f" in lower case, "" if it cannot be read."""

    pci: str
    xid: int
    text: str = ""
    pid: int | None = None
    process: str = ""  #: as its user named it: data, never markup
    mig: str = ""  #: GPU instance and compute instance, where the GPU is partitioned
    caused_by: int | None = None  #: an earlier Xid of which this one is only the consequence
    recovery_action: int | None = None  #: of Xid 154: the value of NVML field 230
    reset_advice: int | None = (
        None  #: of Xid 94 and 95: 1 reset, 4 drain and reset, 0 neither; None: not told
    )

    @property
    def unit(self) -> tuple[int, int] | None:
        """Of a compute exception: the GPC and TPC that it names."""
        match = _UNIT.search(self.text[:400])
        return (int(match[1]), int(match[2])) if match else None


class GpuLost(msgspec.Struct, frozen=True, kw_only=True, tag="gpu_lost"):
    """A GPU has fallen off the bus, told without an Xid number. It means what Xid 79 means."""

    pci: str


class InitFailed(msgspec.Struct, frozen=True, kw_only=True, tag="init_failed"):
    """The driver could not initialise a GPU."""

    pci: str


class Silenced(msgspec.Struct, frozen=True, kw_only=True, tag="silenced"):
    """The driver prints only some of its time-outs of a GPU's system processor from here on."""

    pci: str


class Identity(msgspec.Struct, frozen=True, kw_only=True, tag="identity"):
    """Which GPU sits at an address; printed once, before the GPU's first Xid."""

    pci: str
    uuid: str


Event = Xid | GpuLost | InitFailed | Silenced | Identity


def canonical_pci(text: str) -> str:
    """A PCI address as "dddd:bb:dd.f", lower case, function 0 if none is given; "" if it is none."""
    match = _PCI.match(text.strip()[:40])
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function or 0}".lower()


def burst_key(event: Event) -> tuple[str, str, int, int, str]:
    """What makes two events repeats of one. A teardown (45) names another channel each time."""
    if isinstance(event, Xid):
        text = "" if event.xid == 45 and event.caused_by is None else event.text[:160]
        return ("xid", event.pci, event.xid, event.pid or 0, text)
    return (type(event).__name__, event.pci, 0, 0, "")


_WORDS = (
    ("p2p", 3),
    ("peer", 3),
    ("drain", 4),
    ("imex", 5),
    ("bus", 6),
    ("system", 7),
    ("reboot", 2),
    ("reset", 1),
    ("none", 0),
)


def recovery_value(value: object) -> int | None:
    """The value of NVML field 230 for a number or for what tools print ("Drain and Reset"); None: unknown."""
    text = str(value).strip().lower()[:60]
    if text.isdecimal() and len(text) <= 3:
        return int(text)
    if text.startswith("0x") and (match := re.fullmatch(r"0x([0-9a-f]{1,4})(?: .*)?", text)):
        return int(match[1], 16)
    if text.startswith("["):  # "[N/A]", "[GPU requires reset]": no value
        return None
    words = re.findall(r"[a-z0-9]+", text)
    return next((number for word, number in _WORDS if word in words), None)


class KernelParser:
    """Reads the kernel log of one node, line by line; remembers only messages that are still unfinished."""

    def __init__(self) -> None:
        self._lines = 0
        self._pending: deque[tuple[str, int]] = deque(maxlen=_PENDING_MAX)  #: address, number of the line

    def feed(self, line: str) -> list[Event]:
        """Events of one log line in any known wrapper; [] for everything else, whatever it contains."""
        if any(word in line for word in _INTERESTING) and (record := unwrap(line)).kernel:
            return self.take(record.message)
        self._lines += 1
        return []

    def take(self, message: str) -> list[Event]:
        """Events of a message whose wrapper is off and that the kernel wrote."""
        self._lines += 1
        return [event for part in message.split("\n") if (event := self._message(part)) is not None]

    def _message(self, message: str) -> Event | None:
        if message.startswith("NVRM: Xid ("):
            return _xid(message)
        for pattern, kind in ((_LOST, GpuLost), (_INIT_FAILED, InitFailed), (_SILENCED, Silenced)):
            if match := pattern.match(message):
                return kind(pci=canonical_pci(match["pci"].rstrip(":")))
        if match := _IDENTITY.match(message):
            return Identity(pci=canonical_pci(match["pci"]), uuid=match["uuid"])
        if match := _LOST_BEGIN.match(message):
            self._pending.append((canonical_pci(match["pci"]), self._lines))
            return self._lost() if _LOST_ANYWHERE.search(message, match.end()) else None
        if self._pending and _LOST_NOT.match(message):
            self._pending.pop()
        return self._lost() if _LOST_END.match(message) else None

    def _lost(self) -> GpuLost:
        while self._pending:
            pci, line = self._pending.popleft()
            if self._lines - line < _PENDING_LINES:
                return GpuLost(pci=pci)
        return GpuLost(pci="")


def _xid(message: str) -> Xid | None:
    match = _XID.fullmatch(message)
    if match is None:
        return None
    pid, process, text = _process(match["rest"] or "")
    xid = int(match["xid"])
    cause = _CAUSED_BY.search(text)
    recovery = _RECOVERY.match(text) if xid == 154 else None
    mig = _MIG.search(match["device"])
    return Xid(
        pci=canonical_pci(match["device"]),
        xid=xid,
        text=text.strip(),
        pid=pid,
        process=process,
        mig=mig[0] if mig else "",
        caused_by=int(cause[1]) if cause else None,
        recovery_action=int(recovery[1], 16) if recovery else None,
        reset_advice=_reset_advice(text) if xid in (94, 95) else None,
    )


def _reset_advice(text: str) -> int | None:
    match = _RESETS.search(text[:400])
    if match is None:
        return None
    return 1 if match[1] == "Yes" else 4 if match[2] == "Yes" else 0


def _process(rest: str) -> tuple[int | None, str, str]:
    """Splits "pid=P, name=S, text". All parts but the text may be missing."""
    match = _PID.match(rest)
    if match is None:
        return None, "", rest
    pid = int(match[1]) if match[1] else None
    after = rest[match.end() :]
    if not match[0].endswith("name="):
        return pid, "", after.removeprefix(", ")
    if after.startswith("<unknown>"):
        return pid, "", after.removeprefix("<unknown>").removeprefix(", ")
    first = at = after.find(", ", 0, _NAME_CHARS_MAX + 2)
    while at >= 0:
        if _TEXT_START.match(after, at + 2):
            return pid, after[:at], after[at + 2 :]
        at = after.find(", ", at + 1, _NAME_CHARS_MAX + 2)
    if first >= 0:
        return pid, after[:first], after[first + 2 :]
    return pid, after[:_NAME_CHARS_MAX], after[_NAME_CHARS_MAX:]
