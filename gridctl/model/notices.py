"""Telling people of incidents, as the controller and the faces speak of it."""

import msgspec


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody is told of what fits, until then. What still holds at its end is told."""

    id: str
    match: dict[str, str]  #: label -> patterns
    until_unix_s: float
    who: str
    reason: str


class SilenceWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/silence"""

    match: dict[str, str]
    until_unix_s: float
    who: str
    reason: str


class ReceiverStatus(msgspec.Struct, frozen=True):
    """A receiver, and the threads that it knows of and that are not over."""

    name: str
    kind: str
    threads: list[str]


class Late(msgspec.Struct, frozen=True):
    """A notice that its receiver has not taken yet."""

    receiver: str
    event: str
    thread: str
    attempts: int
    next_unix_s: float
    why: str


class NotifyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/notify"""

    file: str
    error: str  #: why the file cannot be read; what was read before stays in force
    read_only: str  #: why this controller tells nobody
    receivers: list[ReceiverStatus]
    late: list[Late]
    silences: list[Silence]


def in_words(match: dict[str, str]) -> str:
    """What a silence is about."""
    return " ".join(f"{name}={patterns}" for name, patterns in sorted(match.items()))
