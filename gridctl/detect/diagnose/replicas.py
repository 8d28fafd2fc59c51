"""Replicas against each other: what data-parallel ranks must have alike, at the same step."""

import re
from collections.abc import Iterator, Sequence

from gridctl.detect.diagnose.reading import Row, leaves, rows_of, words_of
from gridctl.detect.diagnose.resume import DIGESTS, LOADED, SAVED
from gridctl.detect.diagnose.ruling import rule_says
from gridctl.model.diagnosis import Diagnosis, Material

#: What all replicas have alike. Random state and shards of an optimizer are each rank's own.
_REPLICATED = set("param params parameter parameters weight weights model master buffer buffers".split())
_CHECKS = DIGESTS - {"state", "offset", "counter"}
#: What each rank has for itself.
_OWN = set(
    "rng random seed philox generator optim optimizer adam data loader sampler shard offset counter".split()
)
_RANK_NAME = re.compile(r"(?:(?:dp|rank|replica|gpu)[_ -]?)?(\d{1,7})", re.IGNORECASE)
#: Other coordinates of a rank, or parts of a model: compared is only what has them in common.
_PLACES = ("tp_rank", "pp_rank", "ep_rank", "cp_rank", "shard", "stage", "layer", "bucket", "tensor", "name")
_ROOTS = " ".join(_CHECKS)
_KEYS_MAX = 1_000_000
#: (step, places ..., what, kind of rank) -> value -> ranks
_Values = dict[tuple[str, ...], dict[str, list[str]]]


def replicas(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: digests of parameters by rank."""
    values: _Values = {}
    for material in materials:
        for row in rows_of(material, _ROOTS):
            _row(values, row)
    yield from _judged(values)


def _row(values: _Values, row: Row) -> None:
    replica = row.text("replica")
    rank = replica or row.text("rank")
    if len(values) > _KEYS_MAX:
        return
    place = [row.text("step"), *(row.text(name) for name in _PLACES)]
    for path, value in leaves(row.record):
        words = {word for name in path for word in words_of(name)}
        if not words & _CHECKS or words & (SAVED | LOADED | _OWN) or value is None:
            continue
        sure = "replica" if replica and words & _REPLICATED else "rank" if words & _REPLICATED else "guess"
        if isinstance(value, list):  # by rank
            for number, member in enumerate(value):
                _add(values, (*place, ".".join(path), sure), member, str(number))
        elif rank:
            _add(values, (*place, ".".join(path), sure), value, rank)
        elif len(path) > 1 and (named := _RANK_NAME.fullmatch(path[-1])):
            _add(values, (*place, ".".join(path[:-1]), sure), value, named[1])


def _add(values: _Values, key: tuple[str, ...], value: object, rank: str) -> None:
    if isinstance(value, str | int | float) and len(values) <= _KEYS_MAX:
        values.setdefault(key, {}).setdefault(str(value)[:128].strip().lower(), []).append(rank)


def _judged(values: _Values) -> Iterator[Diagnosis]:
    compared = alike = 0
    for key, by_value in values.items():
        ranks = sum(len(members) for members in by_value.values())
        if ranks < 2:
            continue
        compared += 1
        alike += len(by_value) == 1
        most = max(by_value.values(), key=len)
        clear = 2 * len(most) > ranks
        shards = (key[-1] == "rank" and len(most) == 1 and ranks > 2) or (key[-1] == "guess" and not clear)
        if len(by_value) == 1 or shards:
            continue  # alike, or each rank has another: shards and no replicas
        others = (rank for members in by_value.values() if members is not most for rank in members)
        minority = sorted(others, key=lambda rank: (len(rank), rank)) if clear else []
        named = ", ".join(minority[:16]) or "none: no value has a majority"
        what = f"step {key[0] or 'unknown'}, {key[-2]}: {len(by_value)} values on {ranks} replicas"
        event = {"minority_ranks": [_whole(rank) for rank in minority[:1024]], "suspect": "param_sync"}
        yield rule_says("resume.replicas-differ", [what, f"minority: {named}"], events=[event])
        return
    if compared:
        rule = "resume.replicas-same" if alike else "resume.replicas-unclear"
        yield rule_says(rule, [f"{compared} values compared over replicas"], event_count=0)


def _whole(rank: str) -> int | str:
    return int(rank) if rank.isdigit() and len(rank) < 10 else rank
