"""Is the machine that comes as a replacement one that was sent away? Names change, serial numbers do not."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gridctl.detect.diagnose.reading import field, key_of, objects_of, words_of
from gridctl.detect.diagnose.ruling import rule_says
from gridctl.model.diagnosis import Diagnosis, Material

_QUARANTINE = set(
    "quarantine quarantined blocklist blacklist denylist rma returned banned lemons excluded faulty "
    "defective retired rejected decommissioned condemned".split()
)
_CANDIDATE = set(
    "candidate candidates spare spares replacement replacements offered incoming delivered proposed "
    "new".split()
)
_ROOTS = " ".join(_QUARANTINE | _CANDIDATE) + " serial uuid sn tag guid"
_IDENTITY = re.compile(r"serial|uuid|assettag|servicetag|boardid|chassisid|guid$|^sn$|machineid")
#: What firmware gives where nobody has written a number.
_EMPTY = re.compile(
    r"(?:0+|f+|x+|n/?a|\[n/a\]|none|null|unknown|-+|default ?string|not ?(?:specified|available|applicable)"
    r"|to be filled.*|system serial number|0123456789|123456789|.{0,3})",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d{7,20}|(?:GPU-)?[0-9a-f]{8}-[0-9a-f-]{27}", re.IGNORECASE)
_NAMES_MAX = 1_000_000
_DEPTH_MAX = 12


def spares(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: descriptions of quarantined machines and of candidates."""
    sent_away: dict[str, str] = {}
    offered: dict[str, str] = {}
    asked = listed = told = False
    for material, document in objects_of(materials, _ROOTS):
        file = set(words_of(material.name[-200:].rpartition("/")[2]))
        role = _role(document)
        for name, part in _parts(document, role, file):
            for entry in part if isinstance(part, list) else (part,):
                known = sent_away if name == "quarantine" else offered
                _merge(known, dict(_identities([entry], 0)), _named(entry))
            if name == "quarantine":
                listed, told = True, told or bool(part)
            else:
                asked = True
    if asked and listed and (offered and (sent_away or not told)):
        yield _verdict(sent_away, offered)
    elif asked and listed:
        side = "quarantine list" if offered else "candidate"
        yield rule_says(
            "spare.no-identity", [f"the {side} gives no serial number, UUID or tag"], event_count=0
        )


def _merge(known: dict[str, str], ids: Mapping[str, str], of: str) -> None:
    for identity in ids:
        if len(known) < _NAMES_MAX:
            known.setdefault(identity, of)


def _role(document: Mapping[str, object]) -> str:
    words = set(words_of(str(field(document, "role", "status", "state", "list", "set", "kind") or "")))
    flagged = any(key_of(str(key)) in _QUARANTINE and value is True for key, value in document.items())
    if flagged or words & _QUARANTINE:
        return "quarantine"
    return "candidate" if words & _CANDIDATE else ""


def _parts(document: Mapping[str, object], role: str, file: set[str]) -> Iterator[tuple[str, object]]:
    """The parts of a document that describe machines sent away, and machines offered."""
    found = False
    for key, value in document.items():
        words = set(words_of(str(key)))
        if words & (_QUARANTINE | _CANDIDATE) and isinstance(value, dict | list | str):
            found = True
            yield ("quarantine" if words & _QUARANTINE else "candidate"), value
    if not found and (role or file & (_QUARANTINE | _CANDIDATE)):
        yield role or ("quarantine" if file & _QUARANTINE else "candidate"), document


def _identities(part: object, depth: int) -> Iterator[tuple[str, str]]:
    """Serial numbers and the like, in one spelling, with the field that held them."""
    if depth > _DEPTH_MAX:
        return
    if isinstance(part, list):
        for item in part:
            yield from _identities(item, depth + 1)
    elif isinstance(part, dict):
        for key, value in part.items():
            named = _IDENTITY.search(key_of(str(key)))
            if _NUMBER.fullmatch(str(key)):
                yield _spelled(str(key)), ""
            for one in value if isinstance(value, list) else (value,):
                if isinstance(one, dict | list):
                    yield from _identities(one, depth + 1)
                elif named and (identity := _spelled(one)):
                    yield identity, str(key)
    elif identity := _spelled(part):  # a bare list of numbers
        yield identity, ""


def _spelled(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    text = str(value)[:200].strip().lower()
    return "" if _EMPTY.fullmatch(text) else text.removeprefix("gpu-") if _NUMBER.fullmatch(text) else text


def _named(entry: object) -> str:
    """What an entry says of its machine: the host's name, and why it was sent away."""
    if not isinstance(entry, dict):
        return ""
    host = field(entry, "host", "hostname", "host_at_time", "node", "name")
    reason = field(entry, "reason", "why", "cause", "comment")
    return " ".join(str(part)[:100] for part in (host, reason and f"({reason})") if part)


def _verdict(sent_away: Mapping[str, str], offered: Mapping[str, str]) -> Diagnosis:
    same = sorted(set(sent_away) & set(offered))
    if same:
        events: list[dict[str, Any]] = [
            {"serial": one, "node": offered[one], "was": sent_away[one]} for one in same
        ]
        what = [
            f"{one} of {offered[one] or 'the candidate'} was {sent_away[one] or 'sent away'}" for one in same
        ]
        return rule_says("spare.quarantined", what, events=events)
    return rule_says("spare.not-listed", [f"none of {len(offered)} identities is listed"], event_count=0)
