"""PCIe errors in the kernel log: Advanced Error Reporting, containment, links that went down.

Forms as printed by the Linux kernel (drivers/pci/pcie/aer.c, err.c, dpc.c, hotplug/pciehp_ctrl.c) over its
versions: "Uncorrected" and "Uncorrectable", "received:" and "message received from".
"""

import re

import msgspec

_BDF = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
_HEAD = re.compile(rf"(?P<driver>[\w-]{{1,40}}) (?P<pci>{_BDF}): {{1,8}}(?:AER: {{1,8}})?")
_SEVERITY = r"(?P<severity>Correct(?:ed|able)|Uncorrect(?:ed|able))(?: \((?P<fatal>Fatal|Non-Fatal)\))?"
_REPORT = re.compile(
    rf"(?:Multiple )?{_SEVERITY} error (?:message )?received(?: from)?:? {{0,4}}(?P<source>{_BDF})?"
)
_BUS_ERROR = re.compile(rf"PCIe Bus Error: severity={_SEVERITY}, type=(?P<type>[^,]{{1,40}})")
_STATUS = re.compile(r"device \[[0-9a-f]{4}:[0-9a-f]{4}\] error status")
_BIT = re.compile(r"\[ {0,2}(?P<bit>\d{1,2})\] (?P<name>[\w ]{1,40}?) {0,40}(?:\(First\))?\s*$")


class PcieLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line about a PCIe error.

    `says`: report (a port received an error message), error (what it was), detail, unrecoverable (the
    device's driver cannot recover), failed, recovered, contained, link_down.
    """

    pci: str
    driver: str
    says: str
    severity: str = ""  #: corrected, nonfatal or fatal; "" where the line does not tell
    source: str = ""  #: of a report: the device that sent the message
    error: str = ""  #: of a detail: the name of its bit


def pcie_line(message: str) -> PcieLine | None:
    """What a kernel message says of a PCIe error; None for every other message."""
    head = _HEAD.match(message)
    if head is None:
        return None
    pci, driver, rest = head["pci"].lower(), head["driver"], message[head.end() :]
    if match := _REPORT.match(rest):
        source = (match["source"] or pci).lower()
        return PcieLine(pci=pci, driver=driver, says="report", severity=_severity(match), source=source)
    if match := _BUS_ERROR.match(rest):
        return PcieLine(pci=pci, driver=driver, says="error", severity=_severity(match))
    if _STATUS.match(rest):
        return PcieLine(pci=pci, driver=driver, says="detail")
    if match := _BIT.match(rest):
        return PcieLine(pci=pci, driver=driver, says="detail", error=match["name"].strip())
    return _outcome(pci, driver, rest)


def _outcome(pci: str, driver: str, rest: str) -> PcieLine | None:
    if rest.lower().startswith("can't recover"):
        return PcieLine(pci=pci, driver=driver, says="unrecoverable")
    if rest.startswith("device recovery "):
        says = "recovered" if rest.startswith("device recovery successful") else "failed"
        return PcieLine(pci=pci, driver=driver, says=says)
    if rest.startswith("DPC: containment event"):
        return PcieLine(pci=pci, driver=driver, says="contained", severity="fatal")
    if rest.startswith("pciehp: Slot(") and "Link Down" in rest[:80]:
        return PcieLine(pci=pci, driver=driver, says="link_down", severity="fatal")
    return None


def _severity(match: re.Match[str]) -> str:
    if match["severity"].startswith("Correct"):
        return "corrected"
    return "nonfatal" if match["fatal"] == "Non-Fatal" else "fatal"
