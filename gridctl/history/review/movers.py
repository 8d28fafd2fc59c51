"""Whose risk index is another one than a week ago, out of the journal's records alone. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gridctl.assess.rates import tables
from gridctl.assess.record import FleetRecord
from gridctl.assess.risk import NODE, Known, Part, indices, weights
from gridctl.history.review.facts import Mover

_MONTH_S = 30 * 86400.0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the journal."""

    t_unix_s: float
    kind: str
    data: Mapping[str, Any]


def movers(entries: Iterable[Entry], from_unix_s: float, until_unix_s: float) -> list[Mover]:
    """Those whose index changed between the two moments, the greatest change first. `entries`: in order."""
    record = FleetRecord(tables())
    before: dict[str, tuple[int, list[Part]]] | None = None
    for entry in entries:
        if before is None and entry.t_unix_s >= from_unix_s:
            before = _indices(record, from_unix_s)
        record.take(entry.kind, entry.data, entry.t_unix_s)
    after = _indices(record, until_unix_s)
    before = after if before is None else before
    found = [_mover(name, before.get(name, (0, [])), after[name]) for name in after]
    changed = [mover for mover in found if mover.before != mover.after]
    return sorted(changed, key=lambda mover: (-abs(mover.after - mover.before), mover.node))


def _mover(name: str, before: tuple[int, list[Part]], after: tuple[int, list[Part]]) -> Mover:
    had, has = Counter(map(_told, before[1])), Counter(map(_told, after[1]))
    gone = [f"no more: {what}" for what in had - has]
    return Mover(node=name, before=before[0], after=after[0], why=[*(has - had), *gone])


def _told(part: Part) -> str:
    return part.what if part.device == NODE else f"{part.device}: {part.what}"


def _indices(record: FleetRecord, now_unix_s: float) -> dict[str, tuple[int, list[Part]]]:
    found = {}
    for name in record.nodes():
        faults = [t for t, _ in record.faults_since(name, now_unix_s - _MONTH_S) if t <= now_unix_s]
        known = Known(
            faults_30d=len(faults),
            repaired_h_ago=record.node(name, now_unix_s).repaired_h_ago,
        )
        index = indices(record.live(name), known, weights())[0]
        found[name] = (index.index, index.parts)
    return found
