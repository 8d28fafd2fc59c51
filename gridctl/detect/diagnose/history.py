"""What JSON documents tell of a GPU's past: earlier incidents, remapped rows. Read by meaning."""

from collections.abc import Iterator, Mapping

import msgspec

from gridagent.signals.nvidia import canonical_pci
from gridagent.signals.values import number
from gridctl.detect.diagnose.incident import MEMORY_XIDS
from gridctl.detect.diagnose.reading import key_of
from gridctl.detect.policy.hardware import hardware

_LISTS_MAX = 4096
_PAST = ("incident", "history", "prior", "previous", "earlier", "event")
#: For a past that names no GPU, which then is the one that the log tells of.
ANY = "*"


class Past(msgspec.Struct):
    """Of one GPU, before what the log tells."""

    losses: int = 0  #: it left the bus
    memory_incidents: int = 0
    fresh_row: bool = False  #: one more row was remapped just after a boot


def past_of(document: object) -> Iterator[tuple[str, Past]]:
    """The pasts of GPUs in a document, by address and by UUID."""
    records = document if isinstance(document, list) else [document]
    for record in records[:_LISTS_MAX]:
        if isinstance(record, dict):
            past = _past(record)
            if past.losses or past.memory_incidents or past.fresh_row:
                yield from ((name, past) for name in list(_names(record)) or [ANY])


def _names(record: Mapping[str, object]) -> Iterator[str]:
    for name, value in record.items():
        if not isinstance(value, str):
            continue
        if key_of(name) in ("pci", "pcibusid", "busid", "pciaddress", "bdf") and (
            pci := canonical_pci(value)
        ):
            yield pci
        elif key_of(name) in ("uuid", "gpuuuid"):
            yield value


def _past(record: Mapping[str, object]) -> Past:
    past = Past()
    window_days = hardware().limit("repeat", "window_days")
    for name, value in record.items():
        if any(word in key_of(name) for word in _PAST):
            for item in _items(value):
                _count(past, item, window_days)
        if isinstance(value, dict) and "row" in key_of(name):
            before = _field(value, "before")
            after = _field(value, "after")
            uptime_s = number(record.get("uptime_s"))
            fresh = uptime_s is not None and uptime_s <= hardware().limit("repeat", "fresh_boot_s")
            past.fresh_row = before is not None and after is not None and after > before and fresh
    return past


def _items(value: object) -> list[object]:
    """Earlier incidents, listed as records or numbers, or counted by number."""
    if isinstance(value, dict):
        counts = ((str(xid), number(count)) for xid, count in value.items())
        return [xid for xid, count in counts if xid.isdecimal() for _ in range(int(min(count or 0, 64)))]
    return value[:_LISTS_MAX] if isinstance(value, list) else []


def _count(past: Past, item: object, window_days: float) -> None:
    xid, days = number(item), None
    if isinstance(item, dict):
        xid = number(item.get("xid"))
        days = next((number(value) for name, value in item.items() if "day" in key_of(str(name))), None)
    if xid is None or (days is not None and abs(days) > window_days):
        return
    past.losses += xid == 79
    past.memory_incidents += int(xid) in MEMORY_XIDS


def _field(record: Mapping[str, object], word: str) -> float | None:
    """The first number whose name holds the word, uncorrectable rows before corrected ones."""
    names = sorted((str(name) for name in record if word in key_of(str(name))), key=lambda n: "unc" not in n)
    return next((value for name in names if (value := number(record.get(name))) is not None), None)
