"""NVLink errors in detail: what the texts of Xid 74, of Xid 144 to 150 and of NVSwitch errors (SXid) carry.

Forms as in NVIDIA's Xid documentation (docs.nvidia.com/deploy/xid-errors), whose sheet for 144 to 150 gives
the layout before and since driver branch R575, and as printed by the NVSwitch driver. What the values mean
is policy and not decided here.
"""

import re

import msgspec

from gridagent.signals.nvidia import canonical_pci

_REGISTERS = re.compile(r"\blink\s{1,4}(?P<link>\d{1,3})\s{0,4}\((?P<registers>[0-9A-Fa-fx, ]{1,160})\)")
_FAULT = re.compile(
    r"(?P<unit>[A-Z][A-Za-z0-9_/]{2,60}(?: Degraded)?)\s{1,16}(?P<word>Fatal|Non-?fatal)\b"
    r"(?:\s{1,16}XC ?(?P<cross>\d{1,2}))?(?:\s{1,16}i ?\d{1,2})?"
    r"(?:\s{1,16}Link\s{1,16}(?P<link>-?\d{1,3}))?(?:\s{0,16}[(\[](?P<words>[0-9A-Fa-fx, ]{1,160}))?",
    re.IGNORECASE,
)
_SXID = re.compile(
    r"nvidia-nvswitch(?P<switch>\d{1,3}): SXid \((?:PCI:)?(?P<pci>[0-9A-Fa-f:.]{7,20})\): (?P<sxid>\d{1,6}), "
    r"(?P<rest>.{0,400})",
    re.DOTALL,
)
_HEADLINE = re.compile(r"(?P<word>Fatal|Non-?fatal),? *(?:Link (?P<link>-?\d{1,3}) ?)?", re.IGNORECASE)
_SEVERITY = re.compile(r"Severity (?P<severity>\d{1,3})\b")


class LinkRegisters(msgspec.Struct, frozen=True, kw_only=True):
    """Of Xid 74: the link, and its registers from the first one on."""

    link: int
    registers: list[int]


class LinkFault(msgspec.Struct, frozen=True, kw_only=True):
    """Of Xid 144 to 150. `link` is None if the whole device is meant (-1) or none is told."""

    unit: str
    fatal: bool
    link: int | None = None
    words: list[int] = []  #: interrupt information, error status, debug data

    @property
    def reason(self) -> int:
        """Why the link went down, bits 20 to 25 of the interrupt information."""
        return (self.words[0] >> 20) & 0x3F if self.words else 0

    @property
    def status(self) -> int:
        """The error status; 0 if it is not told."""
        return self.words[1] if len(self.words) > 1 else 0


class SwitchError(msgspec.Struct, frozen=True, kw_only=True):
    """A line about an SXid. `fatal` is None for lines that only dump registers."""

    pci: str
    switch: int
    sxid: int
    fatal: bool | None
    link: int | None = None
    text: str = ""


def registers(text: str) -> LinkRegisters | None:
    """The registers in the text of an Xid 74; None if it has none."""
    match = _REGISTERS.search(text[:400])
    if match is None:
        return None
    return LinkRegisters(link=int(match["link"]), registers=_words(match["registers"]))


def link_fault(text: str) -> LinkFault | None:
    """Unit, severity, link and words in the text of an Xid 144 to 150; None if it is worded otherwise."""
    match = _FAULT.match(text[:400])
    if match is None:
        return None
    link = int(match["link"]) if match["link"] else -1
    return LinkFault(
        unit=match["unit"],
        fatal=match["word"].lower() == "fatal",
        link=link if link >= 0 else None,
        words=_words(match["words"] or ""),
    )


def switch_error(message: str) -> SwitchError | None:
    """What an NVSwitch's driver says of an SXid; None for every other message."""
    match = _SXID.match(message)
    if match is None:
        return None
    fatal, link = None, None
    if headline := _HEADLINE.match(match["rest"]):
        fatal = headline["word"].lower() == "fatal"
        link = int(headline["link"]) if headline["link"] else None
    elif severity := _SEVERITY.match(match["rest"]):
        fatal = True if int(severity["severity"]) > 0 else None
    return SwitchError(
        pci=canonical_pci(match["pci"]),
        switch=int(match["switch"]),
        sxid=int(match["sxid"]),
        fatal=fatal,
        link=link,
        text=match["rest"].strip(),
    )


def _words(text: str) -> list[int]:
    values = []
    for word in re.split(r"[, ]{1,8}", text.strip()):
        digits = word.removeprefix("0x")
        if re.fullmatch(r"[0-9A-Fa-f]{1,16}", digits):
            values.append(int(digits, 16))
    return values
