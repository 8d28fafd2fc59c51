"""A Slurm node's state: one base state and a set of flags, in all the ways in which Slurm writes them.

scontrol writes words ("MIXED+DRAIN"), sinfo short words with one character behind ("mix*"), the REST
service lists. Tokens are compared whole: POWER_DOWN (asked for, jobs still run), POWERING_DOWN and
POWERED_DOWN are three things. Source: slurm.schedmd.com (sinfo, "NODE STATE CODES"; scontrol; REST).
"""

import re
from collections.abc import Iterable

import msgspec

BASES = ("ALLOCATED", "DOWN", "ERROR", "FUTURE", "IDLE", "MIXED", "UNKNOWN")
FLAGS = (
    "BLOCKED CLOUD COMPLETING DRAIN DYNAMIC_FUTURE DYNAMIC_NORM EXTERNAL FAIL INVALID_REG MAINTENANCE "
    "NOT_RESPONDING PLANNED POWERED_DOWN POWERING_DOWN POWERING_UP POWER_DOWN POWER_UP REBOOT_ISSUED "
    "REBOOT_REQUESTED RESERVED RESUME PERFCTRS UNDRAIN"
).split()
#: What sinfo appends to a state. "+" says that some of the node's jobs are ending.
SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "%": "POWERING_DOWN",
    "!": "POWER_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
    "+": "",
}
_SHORT = {
    "ALLOC": "ALLOCATED",
    "MIX": "MIXED",
    "ERR": "ERROR",
    "FUTR": "FUTURE",
    "UNK": "UNKNOWN",
    "COMP": "COMPLETING",
    "DRAINED": "DRAIN",
    "DRAINING": "DRAIN",
    "DRNG": "DRAIN",
    "FAILING": "FAIL",
    "FAILG": "FAIL",
    "INVAL": "INVALID_REG",
    "MAINT": "MAINTENANCE",
    "RESV": "RESERVED",
    "PLND": "PLANNED",
    "POW_DN": "POWER_DOWN",
    "POW_UP": "POWERING_UP",
    "NO_RESPOND": "NOT_RESPONDING",
    "NPC": "PERFCTRS",
    "BLOCK": "BLOCKED",
    "REBOOT": "REBOOT_REQUESTED",
    "BOOT": "REBOOT_ISSUED",
}
_HARMLESS = {"CLOUD", "DYNAMIC_FUTURE", "DYNAMIC_NORM", "EXTERNAL"}
_WITH_JOBS = {"DRAINING", "DRNG", "FAILING", "FAILG", "COMP", "COMPLETING"}
_TOKEN = re.compile(r"([A-Z_]{2,30})([*~#%!$@^-]?)")


class State(msgspec.Struct, frozen=True):
    """A node's state. `base` is UNKNOWN where only flags are told."""

    base: str
    flags: tuple[str, ...] = ()
    busy: bool = False  #: the word itself says that jobs run: "drng" but not "drain"

    @property
    def running(self) -> bool:
        """Do jobs run on it?"""
        return self.base in ("ALLOCATED", "MIXED") or self.busy

    @property
    def available(self) -> bool:
        """May new work start on it now?"""
        return self.base in ("IDLE", "MIXED") and set(self.flags) <= _HARMLESS

    @property
    def drained(self) -> bool:
        """Drained, and nothing runs any more."""
        return "DRAIN" in self.flags and not self.running

    @property
    def draining(self) -> bool:
        """Drained while jobs still run."""
        return "DRAIN" in self.flags and self.running

    def facts(self) -> dict[str, object]:
        """As an entry of a table."""
        return {
            "base": self.base,
            "flags": list(self.flags),
            "available": self.available,
            "drained": self.drained,
            "draining": self.draining,
            "running": self.running,
        }


def parse_state(value: object, more: object = None) -> State | None:
    """The state of text or a list of words, with further flags; None if no word of it is Slurm's."""
    if isinstance(value, list) and not value and not more:
        return State("UNKNOWN")
    words = [word for part in (value, more) for word in _words(part)]
    if not words or len(words) > 64:
        return None
    base, flags, busy, known = "UNKNOWN", [], False, 0
    for token, suffix in words:
        word = _SHORT.get(token, token)
        known += word in BASES or word in FLAGS
        busy = busy or token in _WITH_JOBS
        if word in BASES:
            base = word if base == "UNKNOWN" else base
        else:
            flags.append(word)
        if SUFFIXES.get(suffix):
            flags.append(SUFFIXES[suffix])
    return State(base, tuple(dict.fromkeys(flags)), busy) if 2 * known >= len(words) else None


def _words(value: object) -> Iterable[tuple[str, str]]:
    """Tokens with the character behind them; a token that cannot be one makes all of it none."""
    if isinstance(value, list):
        return [word for item in value[:64] if isinstance(item, str) for word in _words(item)]
    if not isinstance(value, str) or len(value) > 400:
        return []
    matches = [_TOKEN.fullmatch(part) for part in re.split(r"[+,|]", value.strip().upper()) if part]
    return [(match[1], match[2]) for match in matches if match] if all(matches) else []
