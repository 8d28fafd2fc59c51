"""Reads kernel logs: takes wrappers off, sorts lines to what collects them, tells boots apart."""

from collections.abc import Iterator, Sequence

from gridagent.signals.amd import amd_event
from gridagent.signals.host import host_event, log_gap
from gridagent.signals.lines import KernelLine, unwrap
from gridagent.signals.nvidia import Event, KernelParser
from gridagent.signals.nvlink import switch_error
from gridagent.signals.pcie import pcie_line
from gridctl.detect.diagnose.amd import Amd
from gridctl.detect.diagnose.clocks import When
from gridctl.detect.diagnose.incidents import Incidents, is_lost
from gridctl.detect.diagnose.machine import Machine
from gridctl.detect.diagnose.pcie import Pcie
from gridctl.detect.diagnose.switches import Switches
from gridctl.detect.meaning import by_rule, by_site, mean
from gridctl.detect.policy import DetectPolicy
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis

#: A line with none of these is of no interest; to find out costs less than to take off its wrapper.
WORDS = (
    "NVRM", "fallen off", "installed in", "nvswitch", "AER: ", "PCIe Bus Error", "] error status", ":   [",
    ":    [", "DPC: ", "pciehp", "EDAC ", " temperature", "blocked for more", "power on the PCIe slot",
    "ut of memory", "nvme", ", dev ", "filesystem", "forced readonly", "amdgpu", "[drm] VRAM",
    "Linux version", "-- Boot ", "-- Reboot ", "messages lost", "imjournal", "imuxsock",
)  # fmt: skip
_KEEPERS = ("systemd-journald", "rsyslogd")
_HOSTS_MAX = 4096
_GPUS_MAX = 65_536
#: Lines of one boot are out of order by less than this.
_BACK_S = 60.0


class KernelLogs:
    """All kernel logs of the materials. Lines go in, one after the other; findings come out at the end."""

    def __init__(self, policy: DetectPolicy) -> None:
        window_s = policy.thresholds.chain.window_s
        self._policy = policy
        self._parsers: dict[str, KernelParser] = {}
        self._uptimes: dict[str, float] = {}  #: node -> the last one that its syslog tells
        self.incidents = Incidents(policy)
        self.pcie = Pcie(window_s)
        self.switches = Switches(window_s)
        self.amd = Amd()
        self.machine = Machine(window_s)
        self.lines = 0  #: lines of the kernel that were read

    def feed(
        self, line: str, host: str = "", t_unix_s: float | None = None, words: Sequence[str] = WORDS
    ) -> bool:
        """One line in any known wrapper. False if it is of no interest to kernel logs.

        `host` and `t_unix_s` are what a record around the line tells, `words` those that may be in it.
        """
        for word in words:
            if word in line:
                break
        else:
            return False
        record = unwrap(line)
        if not record.kernel:
            if record.program in _KEEPERS and (gap := log_gap(record.message)):
                self.machine.take(record.host or host, When.of(record, t_unix_s), gap, record.message)
                return True
            return False
        if record.host and record.uptime_s is not None:
            if record.uptime_s < self._uptimes.get(record.host, 0.0) - _BACK_S:
                self._reboot(record.host)  # uptime goes back at boots only
            if record.host in self._uptimes or len(self._uptimes) < _HOSTS_MAX:
                self._uptimes[record.host] = record.uptime_s
        taken = False
        for part in record.message.split("\n"):
            taken |= self._take(record.host or host, When.of(record, t_unix_s), part, record)
        self.lines += taken
        return taken

    def _take(self, host: str, when: When, message: str, record: KernelLine) -> bool:
        if message.startswith("NVRM: ") and self._driver(host, when, message, record.repeats):
            return True
        if message.startswith("nvidia-nvswitch") and (error := switch_error(message)):
            self.switches.take(host, when, error, message)
        elif message.startswith(("amdgpu ", "[drm")) and (amd := amd_event(message)):
            self.amd.take(host, amd, message)
        elif told := host_event(message):
            if told.says == "boot":
                self._reboot(host)
            else:
                self.machine.take(host, when, told, message)
        elif pcie := pcie_line(message):
            grave = pcie.severity in ("nonfatal", "fatal") or pcie.says == "unrecoverable"
            lost = grave and self.incidents.lost_lately(host, "", when)
            self.pcie.take(host, when, pcie, message, lost)
        else:
            return self._driver(host, when, message, record.repeats)
        return True

    def _driver(self, host: str, when: When, message: str, repeats: int) -> bool:
        if host not in self._parsers:
            if len(self._parsers) >= _HOSTS_MAX:
                return False
            self._parsers[host] = KernelParser()
        events = self._parsers[host].take(message)
        for event in events:
            self.event(host, when, event, message, repeats)
        return bool(events)

    def event(self, host: str, when: When, event: Event, message: str, lines: int = 1) -> None:
        """An event of a GPU's driver, also one that another source than the log has told."""
        cause = None
        if event.pci and len(self.pcie.gpus) < _GPUS_MAX:
            self.pcie.gpus.add(event.pci[:-2])
        if is_lost(event) and (link := self.pcie.failed_before(host, event.pci, when)):
            told = mean(self._policy, event)
            more = link[0][:120]
            cause = by_rule(hardware().rules["gpu_lost.pcie_first"], told.xid if told else None, more)
            cause = by_site(self._policy, 79, cause)
        self.incidents.feed(host, when, event, message, lines, cause)

    def _reboot(self, host: str) -> None:
        self.incidents.reboot(host)
        for book in (self.pcie, self.switches, self.amd, self.machine):
            book.reboot(host)
        self._parsers.pop(host, None)

    def around(self, suspect: str) -> Iterator[Diagnosis]:
        """Findings on what is around the GPUs. `suspect`: see `Switches.findings`."""
        yield from self.switches.findings(suspect)
        yield from self.amd.findings()
        yield from self.pcie.findings()
        yield from self.machine.findings()
