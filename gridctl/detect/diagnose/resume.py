"""Did a run come back as it was? What was saved against what was loaded, and replicas against each other.

Bit-identity needs more than loss: random state, optimizer and data position can be wrong while the loss
looks well for long. Compared is before the first step, rank by rank. A value that is missing on one side
is not equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gridagent.signals.values import number
from gridctl.detect.diagnose.reading import Row, key_of, leaves, rows_of, words_of
from gridctl.detect.diagnose.ruling import limits, rule_says
from gridctl.model.diagnosis import Diagnosis, Material

_SAVED = {
    "saved",
    "save",
    "before",
    "source",
    "src",
    "expected",
    "checkpoint",
    "ckpt",
    "old",
    "sent",
    "captured",
}
_LOADED = {
    "loaded",
    "load",
    "resumed",
    "restored",
    "after",
    "target",
    "dst",
    "actual",
    "new",
    "received",
    "resume",
}
_DIGESTS = {
    "digest",
    "sha",
    "sha256",
    "hash",
    "crc",
    "checksum",
    "fingerprint",
    "md5",
    "xxhash",
    "offset",
    "state",
}
_SUSPECTS: tuple[tuple[str, set[str]], ...] = (
    ("rng_state", {"rng", "random", "seed", "philox", "generator"}),
    ("optimizer", {"optim", "optimizer", "adam", "exp", "avg", "moment", "moments", "momentum", "variance"}),
    ("environment", {"env", "environment", "vocab", "vocabulary", "tokenizer", "token"}),
    (
        "data_position",
        {"data", "loader", "dataloader", "sampler", "sample", "samples", "consumed", "dataset"},
    ),
    ("scheduler", {"lr", "scheduler", "schedule"}),
    ("parameters", {"param", "params", "parameter", "parameters", "weight", "weights", "model"}),
)
#: What is measured, not carried over: it may differ.
_MEASURED = {
    "loss",
    "time",
    "ms",
    "s",
    "seconds",
    "duration",
    "mem",
    "memory",
    "throughput",
    "tokens",
    "host",
    "node",
}
_MEASURED |= {
    "path",
    "file",
    "rank",
    "size",
    "world",
    "step",
    "latency",
    "power",
    "util",
    "name",
    "norm",
    "grad",
}
_MEASURED |= {"mean", "std", "nan", "inf", "shape"}
#: Environment variables that change results; others differ between hosts for good reasons.
_ENVIRONMENT = {
    *(
        "PYTHONHASHSEED",
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    ),
    *("NCCL_ALGO", "NCCL_PROTO", "CUDNN_DETERMINISTIC", "TF_DETERMINISTIC_OPS"),
}
#: What all replicas have alike.
_REPLICATED = {
    "param",
    "params",
    "parameter",
    "parameters",
    "weight",
    "weights",
    "model",
    "master",
    "buffer",
    "buffers",
}
_OTHER_RANKS = (
    "tp_rank",
    "pp_rank",
    "ep_rank",
    "cp_rank",
    "shard",
    "stage",
    "layer",
    "bucket",
    "tensor",
    "name",
)
_PHASES = ("phase", "when", "side", "moment", "stage", "source", "run", "at")
_RANKS_MAX = 1_000_000
_KEEP = 64


class _Pairs(msgspec.Struct):
    """What was compared, in counts and a few examples."""

    compared: int = 0
    bad_ranks: set[str] = set()
    bad: dict[str, tuple[str, str]] = {}  #: what -> (saved, loaded) of the first that differs
    unknown: dict[str, str] = {}  #: what -> the side that is missing
    alone: dict[str, str] = {}  #: what came without its other side -> the side that is missing
    both: set[str] = set()  #: what was compared at least once
    loss: tuple[float, float] | None = None
    unset: list[str] = []  #: variables that a run should pin and does not


def resume(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: verification of a resumed or handed-over run."""
    pairs = _Pairs()
    open_sides: dict[tuple[str, str], tuple[str, object]] = {}
    replicas: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for material in materials:
        for row in rows_of(material):
            _row(pairs, row, open_sides)
            _replica(replicas, row)
    pairs.alone |= {
        stem: "loaded" if side == "saved" else "saved" for (_, stem), (side, _) in open_sides.items()
    }
    pairs.unknown |= {stem: side for stem, side in pairs.alone.items() if stem in pairs.both}
    yield from _compared(pairs)
    yield from _replicas(replicas)


def _row(pairs: _Pairs, row: Row, open_sides: dict[tuple[str, str], tuple[str, object]]) -> None:
    """Finds the two sides of each value, in one record or in one record for each side."""
    rank = row.text("rank", "replica")
    phase = next((side for name in _PHASES if (side := _side(words_of(row.text(name))))), "")
    sides: dict[str, dict[str, object]] = {}
    for path, value in leaves(row.record):
        if (
            "env" in path
            and str(path[-1]) in _ENVIRONMENT
            and not _side([w for n in path for w in words_of(n)])
        ):
            if value is None and len(pairs.unset) < _KEEP:
                pairs.unset.append(str(path[-1]))
            continue
        words = [word for name in path for word in words_of(name)]
        side = _side(words) or (phase if set(words) & _DIGESTS else "")
        stem = " ".join(word for word in words if word not in _SAVED and word not in _LOADED)
        if side and stem:
            sides.setdefault(stem, {}).setdefault(side, value)
    for stem, values in sides.items():
        if len(values) == 1 and phase:
            (side, value) = next(iter(values.items()))
            other = open_sides.pop((rank, stem), None)
            if other is None or other[0] == side:
                if len(open_sides) < _RANKS_MAX:
                    open_sides[rank, stem] = (side, value)
                continue
            values = {side: value, other[0]: other[1]}
        if len(values) == 2:
            _pair(pairs, rank, stem, values)
        elif len(pairs.alone) < _KEEP or stem in pairs.alone:
            pairs.alone[stem] = "saved" if "loaded" in values else "loaded"


def _side(words: Sequence[str]) -> str:
    """Which side the words name: "saved", "loaded", or "" where it is none or both."""
    saved, loaded = bool(_SAVED.intersection(words)), bool(_LOADED.intersection(words))
    return "" if saved == loaded else "saved" if saved else "loaded"


def _pair(pairs: _Pairs, rank: str, stem: str, values: Mapping[str, object]) -> None:
    words = set(stem.split())
    saved, loaded = values.get("saved"), values.get("loaded")
    if "loss" in words:
        before, after = number(saved), number(loaded)
        if before is not None and after is not None:
            pairs.loss = (before, after)
        return
    if "env" in words and not any(key_of(name) in stem.replace(" ", "") for name in _ENVIRONMENT):
        return
    if words & _MEASURED and not words & _DIGESTS:
        return
    if not words & _DIGESTS and _suspect(stem) == "unknown":
        return
    pairs.compared += 1
    if len(pairs.both) < _KEEP:
        pairs.both.add(stem)
    if (saved is None or loaded is None) and ("env" not in words or saved == loaded):
        if len(pairs.unknown) < _KEEP:
            pairs.unknown.setdefault(stem, "saved" if saved is None else "loaded")
        return
    if not _same(saved, loaded):
        if len(pairs.bad) < _KEEP or stem in pairs.bad:
            pairs.bad.setdefault(stem, (str(saved)[:80], str(loaded)[:80]))
        if len(pairs.bad_ranks) < _RANKS_MAX:
            pairs.bad_ranks.add(rank)


def _same(saved: object, loaded: object) -> bool:
    if isinstance(saved, str) and isinstance(loaded, str):
        return saved.strip().lower().removeprefix("0x") == loaded.strip().lower().removeprefix("0x")
    return saved == loaded


def _suspect(stem: str) -> str:
    words = set(stem.split())
    return next((name for name, known in _SUSPECTS if words & known), "unknown")


def _compared(pairs: _Pairs) -> Iterator[Diagnosis]:
    suspects = list(dict.fromkeys(_suspect(stem) for stem in pairs.bad))
    jump = pairs.loss is not None and pairs.loss[1] > pairs.loss[0] * limits().resume["loss_ratio_max"]
    event: dict[str, Any] = {"suspect": suspects, "ranks_bad": len(pairs.bad_ranks)}
    what = [f"{stem}: saved {saved}, loaded {loaded}" for stem, (saved, loaded) in pairs.bad.items()]
    if jump and pairs.loss is not None:
        what.append(f"loss went from {pairs.loss[0]:g} to {pairs.loss[1]:g}")
    if pairs.bad:
        if pairs.unset:
            what.insert(1, f"{', '.join(pairs.unset)} is not set")
            event["env_key"] = pairs.unset
        ranks = f"{len(pairs.bad_ranks)} ranks differ" if pairs.bad_ranks - {""} else "the two sides differ"
        yield rule_says("resume.differs", [ranks, *what], events=[event])
    elif jump:
        yield rule_says("resume.loss-jumped", what, events=[event])
    elif pairs.unknown:
        missing = [f"{stem}: the {side} side is missing" for stem, side in pairs.unknown.items()]
        yield rule_says("resume.unknown", missing, event_count=0)
    elif pairs.compared:
        yield rule_says("resume.same", [f"{pairs.compared} values are the same on both sides"], event_count=0)


def _replica(replicas: dict[tuple[str, ...], dict[str, list[str]]], row: Row) -> None:
    """Takes up the digests that replicas must have alike, by step and by place in the model."""
    replica = row.text("replica")
    rank = replica or row.text("rank")
    if not rank or len(replicas) > _RANKS_MAX:
        return
    place = [row.text("step"), *(row.text(name) for name in _OTHER_RANKS)]
    for path, value in leaves(row.record):
        words = {word for name in path for word in words_of(name)}
        if not words & _REPLICATED or not words & _DIGESTS or words & (_SAVED | _LOADED) or value is None:
            continue
        key = (*place, ".".join(path), "replica" if replica else "rank")
        members = replicas.setdefault(key, {}).setdefault(str(value)[:128].strip().lower(), [])
        members.append(rank)


def _replicas(replicas: dict[tuple[str, ...], dict[str, list[str]]]) -> Iterator[Diagnosis]:
    compared = alike = 0
    for key, values in replicas.items():
        ranks = sum(len(members) for members in values.values())
        if ranks < 2:
            continue
        compared += 1
        if len(values) == 1:
            alike += 1
            continue
        sizes = sorted(len(members) for members in values.values())
        if key[-1] == "rank" and sizes[-1] == 1 and ranks > 2:
            continue  # each has another: shards, not replicas
        most = max(values.values(), key=len)
        clear = 2 * len(most) > ranks
        minority = sorted((r for m in values.values() if m is not most for r in m), key=lambda r: (len(r), r))
        named = ", ".join(minority[:16]) if clear else "none: no value has a majority"
        what = [
            f"step {key[0] or 'unknown'}, {key[-2]}: {len(values)} values on {ranks} replicas",
            f"minority: {named}",
        ]
        event = {
            "minority_ranks": [_whole(r) for r in minority[:1024]] if clear else [],
            "suspect": "param_sync",
        }
        yield rule_says("resume.replicas-differ", what, events=[event])
        return
    if compared:
        rule = "resume.replicas-same" if alike else "resume.replicas-unclear"
        yield rule_says(rule, [f"{compared} values compared over replicas"], event_count=0)


def _whole(rank: str) -> int | str:
    return int(rank) if rank.isdigit() and len(rank) < 10 else rank
