"""What `gridctl diagnose` says of what an engineer has in hand: materials in, diagnoses out."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gridctl.model.findings import SEVERITIES

#: Characters of a text that is held as a whole. A JSON document cannot be cut: a longer one is not read.
WHOLE_CHARS_MAX = 32 << 20
_PIECE_CHARS = 64 << 10


class Material(msgspec.Struct, frozen=True):
    """One input: a log, the output of a tool, telemetry. It may be larger than memory.

    `text` is all of it, or a function that gives it from its beginning in pieces of whole lines, the same
    each time; of a line longer than `WHOLE_CHARS_MAX` at least one character more than these.
    """

    name: str  #: of its file; "-" for standard input
    text: str | Callable[[], Iterator[str]]

    def pieces(self) -> Iterator[str]:
        """The text in pieces that end with a line; none is empty."""
        if isinstance(self.text, str):
            yield from _pieces(self.text)
        else:
            yield from self.text()

    def head(self, chars: int) -> str:
        """The first characters."""
        if isinstance(self.text, str):
            return self.text[:chars]
        parts: list[str] = []
        for piece in self.pieces():
            parts.append(piece)
            chars -= len(piece)
            if chars <= 0:
                parts[-1] = piece[: len(piece) + chars]
                break
        return "".join(parts)

    def whole(self) -> str | None:
        """All of it; None if that is more than `WHOLE_CHARS_MAX`."""
        head = self.head(WHOLE_CHARS_MAX + 1)
        return head if len(head) <= WHOLE_CHARS_MAX else None


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + _PIECE_CHARS) + 1 or len(text)
        yield text[begin:end]
        begin = end


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """What a diagnosis rests on."""

    rule: str  #: its id
    evidence: list[str]  #: what was seen, a few lines at most, cleaned of control characters
    source: str  #: of the rule: a vendor's document, a public report


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. All keys are always printed, null where they do not apply."""

    kind: str
    severity: str  #: one of SEVERITIES
    action: str
    fault: str  #: node, app, fabric, driver, config, environment, monitor or unknown
    preempt_job: bool  #: must a job that is running be moved off now?
    when: str  #: none, now, after_job, after_restart, window or before_admission
    why: Why
    xid: int | None = None
    sxid: int | None = None
    pci: str | None = None  #: dddd:bb:dd.f, lower case
    event_count: int | None = None  #: distinct events behind it, bursts collapsed
    raw_lines: int | None = None
    events: list[dict[str, Any]] = []  #: single events or devices

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"{self.severity} is no severity")
