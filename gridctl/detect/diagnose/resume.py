"""Did a run come back as it was? What was saved against what was loaded, rank by rank.

Bit-identity needs more than loss: random state, optimizer and data position can be wrong while the loss
looks well for long. Two runs at the same step must print the same; a loss before and after a resume may
move a little. A value that is missing on one side is not equal.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gridagent.signals.values import number
from gridctl.detect.diagnose.reading import Row, key_of, leaves, rows_of, words_of
from gridctl.detect.diagnose.ruling import limits, rule_says
from gridctl.model.diagnosis import Diagnosis, Material

SAVED = set(
    "saved save before source src expected checkpoint ckpt old sent captured reference ref original orig "
    "baseline uninterrupted continuous golden".split()
)
LOADED = set(
    "loaded load resumed restored after target dst actual new received resume restart restarted".split()
)
DIGESTS = set("digest sha sha256 hash crc checksum fingerprint md5 xxhash offset state counter".split())
#: What words of a name say is wrong.
_SUSPECTS: tuple[tuple[str, set[str]], ...] = tuple(
    (name, set(words.split()))
    for name, words in (
        ("rng_state", "rng random seed philox generator"),
        ("optimizer", "optim optimizer adam exp avg moment moments momentum variance"),
        ("environment", "env environment vocab vocabulary tokenizer"),
        ("data_position", "data loader dataloader sampler sample samples consumed dataset"),
        ("scheduler", "lr scheduler schedule"),
        ("parameters", "param params parameter parameters weight weights model"),
    )
)
#: What is measured and not carried over: it may differ.
_MEASURED = set(
    "time ms s seconds duration mem memory throughput tokens host node path file rank size world step "
    "latency power util name mean std nan inf shape load id".split()
)
#: What a program prints at each step.
_CURVES = ("loss", "grad norm", "gradnorm", "gradient norm")
#: Words of two moments, and not of two runs.
_AROUND = {"before", "after", "old", "new"}
#: Environment variables that change results; others differ between hosts for good reasons.
_ENVIRONMENT = set(
    "PYTHONHASHSEED CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NCCL_ALGO "
    "NCCL_PROTO CUDNN_DETERMINISTIC TF_DETERMINISTIC_OPS".split()
)
_ROOTS = " ".join(LOADED)
_PHASES = ("phase", "when", "side", "moment", "stage", "source", "run", "at")
_RANKS_MAX = 1_000_000
_KEEP = 64
#: (rank, step, what) -> side and value, of values whose other side has not come yet.
_Open = dict[tuple[str, str, str], tuple[str, object]]


class _Pairs(msgspec.Struct):
    """What was compared, in counts and a few examples."""

    compared: int = 0
    bad_ranks: set[str] = set()
    bad: dict[str, tuple[str, str]] = {}  #: what -> (saved, loaded) of the first that differs
    unknown: dict[str, str] = {}  #: what -> the side that is missing
    alone: dict[str, str] = {}  #: what came without its other side -> the side that is missing
    both: set[str] = set()  #: what was compared at least once
    unset: list[str] = []  #: variables that a run should pin and does not
    loss: tuple[float, float] | None = None  #: before and after a resume
    curve_same: int = 0  #: values of two runs that agree at the same step
    curve: tuple[str, str, float, float] | None = None  #: where they first differ: step, what, the two values


def resume(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: verification of a resumed or handed-over run."""
    pairs, waiting = _Pairs(), _Open()
    for material in materials:
        for row in rows_of(material, _ROOTS):
            _row(pairs, row, waiting)
    for (_, _, stem), (side, _) in waiting.items():
        pairs.alone[stem] = "loaded" if side == "saved" else "saved"
    pairs.unknown |= {stem: side for stem, side in pairs.alone.items() if stem in pairs.both}
    yield from _compared(pairs)


def side_of(words: Sequence[str]) -> str:
    """Which side the words name: "saved", "loaded", or "" where it is none or both."""
    saved, loaded = bool(SAVED.intersection(words)), bool(LOADED.intersection(words))
    return "" if saved == loaded else "saved" if saved else "loaded"


def _row(pairs: _Pairs, row: Row, waiting: _Open) -> None:
    """Finds the two sides of each value, in one record or in one record for each side."""
    phases = (words_of(row.text(name)) for name in _PHASES)
    phase_words: tuple[str, ...] = next((words for words in phases if side_of(words)), ())
    phase = side_of(phase_words)
    sides: dict[str, dict[str, object]] = {}
    around = bool(_AROUND.intersection(phase_words))
    for path, value in leaves(row.record):
        words = words_of(path[0]) if len(path) == 1 else [word for name in path for word in words_of(name)]
        side = side_of(words)
        if "env" in path and str(path[-1]) in _ENVIRONMENT and not side:
            if value is None and len(pairs.unset) < _KEEP:
                pairs.unset.append(str(path[-1]))
            continue
        around = around or bool(side and _AROUND.intersection(words))
        kept = [word for word in words if word not in SAVED and word not in LOADED]
        by_rank = side and kept and kept[-1].isdecimal()  # {"saved": {"0": ..., "1": ...}, "loaded": ...}
        stem = " ".join(kept[:-1] or ["value digest"]) + f" #{kept[-1]}" if by_rank else " ".join(kept)
        side = side or (phase if DIGESTS.intersection(words) or stem.endswith(_CURVES) else "")
        if side and stem:
            sides.setdefault(stem, {}).setdefault(side, value)
    rank, step = row.text("rank", "replica"), row.text("step")
    for stem, values in sides.items():
        curve = stem.endswith(_CURVES)
        if len(values) == 1 and phase:
            values = _other_side(waiting, (rank, step if curve and not around else "", stem), values)
        if len(values) == 1:
            if len(pairs.alone) < _KEEP or stem in pairs.alone:
                pairs.alone[stem] = "saved" if "loaded" in values else "loaded"
        elif len(values) == 2 and curve:
            _curve(pairs, "" if around else step, stem, values)
        elif len(values) == 2:
            stem, _, of_rank = stem.partition(" #")
            for number_of, (saved, loaded) in enumerate(_each(values)):
                _pair(pairs, of_rank or rank or str(number_of or ""), stem, saved, loaded)


def _each(values: Mapping[str, object]) -> list[tuple[object, object]]:
    """The two sides; of two lists, which are by rank, each pair of members."""
    saved, loaded = values["saved"], values["loaded"]
    if isinstance(saved, list) and isinstance(loaded, list) and len(saved) == len(loaded):
        return list(zip(saved, loaded, strict=True))
    return [(saved, loaded)]


def _other_side(waiting: _Open, key: tuple[str, str, str], values: dict[str, object]) -> dict[str, object]:
    """Both sides, where the other one has come before; {} while it has not."""
    side, value = next(iter(values.items()))
    other = waiting.pop(key, None)
    if other is not None and other[0] != side:
        return {side: value, other[0]: other[1]}
    if len(waiting) < _RANKS_MAX:
        waiting[key] = (side, value)
    return {}


def _curve(pairs: _Pairs, step: str, stem: str, values: Mapping[str, object]) -> None:
    one, other = number(values["saved"]), number(values["loaded"])
    if one is None or other is None:
        return
    if not step:
        pairs.loss = (one, other) if "loss" in stem else pairs.loss
    elif math.isclose(one, other, rel_tol=limits().resume["curve_tolerance"], abs_tol=1e-12):
        pairs.curve_same += 1
    elif pairs.curve is None:
        pairs.curve = (step, stem, one, other)


def _pair(pairs: _Pairs, rank: str, stem: str, saved: object, loaded: object) -> None:
    words = set(stem.split())
    if "env" in words and not any(key_of(name) in stem.replace(" ", "") for name in _ENVIRONMENT):
        return
    if not words & DIGESTS and (words & _MEASURED or suspect_of(stem) == "unknown"):
        return
    pairs.compared += 1
    if len(pairs.both) < _KEEP:
        pairs.both.add(stem)
    if (saved is None or loaded is None) and ("env" not in words or saved == loaded):
        if len(pairs.unknown) < _KEEP:
            pairs.unknown.setdefault(stem, "saved" if saved is None else "loaded")
        return
    if not _same(saved, loaded):
        if len(pairs.bad) < _KEEP:
            pairs.bad.setdefault(stem, (str(saved)[:80], str(loaded)[:80]))
        if len(pairs.bad_ranks) < _RANKS_MAX:
            pairs.bad_ranks.add(rank)


def _same(saved: object, loaded: object) -> bool:
    if isinstance(saved, str) and isinstance(loaded, str):
        one, other = (text.strip().lower().removeprefix("0x") for text in (saved, loaded))
        return one == other
    return saved == loaded


def suspect_of(stem: str) -> str:
    """What the words of a name are about: rng_state, optimizer, ... or "unknown"."""
    words = set(stem.split())
    return next((name for name, known in _SUSPECTS if words & known), "unknown")


def _compared(pairs: _Pairs) -> Iterator[Diagnosis]:
    suspects = list(dict.fromkeys(suspect_of(stem) for stem in pairs.bad))
    jump = pairs.loss is not None and pairs.loss[1] > pairs.loss[0] * limits().resume["loss_ratio_max"]
    event: dict[str, Any] = {"suspect": suspects or ["unknown"], "ranks_bad": len(pairs.bad_ranks)}
    what = [f"{stem}: saved {saved}, loaded {loaded}" for stem, (saved, loaded) in pairs.bad.items()]
    if jump and pairs.loss is not None:
        what.append(f"loss went from {pairs.loss[0]:g} to {pairs.loss[1]:g}")
    if pairs.curve is not None:
        step, stem, one, other = pairs.curve
        what.append(f"{stem} at step {step}: {one:g} and {other:g}, after {pairs.curve_same} equal values")
    if pairs.bad:
        if pairs.unset:
            what.insert(1, f"{', '.join(pairs.unset)} is not set")
            event["env_key"] = pairs.unset
        ranks = f"{len(pairs.bad_ranks)} ranks differ" if pairs.bad_ranks - {""} else "the two sides differ"
        yield rule_says("resume.differs", [ranks, *what], events=[event])
    elif pairs.curve is not None:
        yield rule_says("resume.curve-differs", what, events=[event])
    elif jump:
        yield rule_says("resume.loss-jumped", what, events=[event])
    elif pairs.unknown:
        missing = [f"{stem}: the {side} side is missing" for stem, side in pairs.unknown.items()]
        yield rule_says("resume.unknown", missing, event_count=0)
    elif pairs.compared or pairs.curve_same:
        same = pairs.compared + pairs.curve_same
        yield rule_says("resume.same", [f"{same} values are the same on both sides"], event_count=0)
