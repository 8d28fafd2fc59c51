"""Checkpoints by what is known of them: structure of the file, statistics of tensors, steps of their parts.

A torch.save file is a ZIP: without the record at its end it was cut off, and that is seen before anything
is unpickled. Equal digests prove the transport and not the sense: weights near zero load well and are
useless. All parts of a checkpoint come from one step, by one resolver.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gridagent.signals.values import number
from gridctl.detect.diagnose.reading import (
    bare,
    field,
    key_of,
    leaves,
    objects_of,
    ranks_in,
    words_of,
)
from gridctl.detect.diagnose.ruling import limits, rule_says
from gridctl.detect.diagnose.texts import all_lines, lines_with
from gridctl.model.diagnosis import Diagnosis, Material

_HEX_LINE = re.compile(
    r"\s*(?P<bytes>(?:0x)?[0-9a-fA-F]{2,4}(?:[ ,]{1,2}(?:0x)?[0-9a-fA-F]{2,4}){0,31})"
    r"(?:\s{2,}\S.*|\s*\|.*\|?)?\s*"
)
_OFFSET = re.compile(r"\s*[0-9a-fA-F]{6,16}(?::|\s{2})\s*")
_ZIP_BEGIN, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_HEX_BYTES_MAX = 1 << 24
_LOAD_ERRORS = re.compile(
    r"(?:[\w.]{0,60}(?:Error|Exception|BadZipFile): )?(?:"
    r"PytorchStreamReader failed (?:reading zip archive|reading file|locating file)"
    r"|Ran out of input|unexpected EOF|pickle data was truncated|File is not a zip file"
    r"|failed finding central directory|End-of-central-directory signature not found"
    r"|Error while deserializing header: (?:MetadataIncomplete|HeaderToo|InvalidHeader)"
    r"|invalid load key, '\\x00'|Truncated file|truncated file"
    r"|Unable to (?:synchronously )?open file \(truncated file)"
)
_LOAD_WORDS = (
    "PytorchStream",
    "input",
    "EOF",
    "truncated",
    "zip",
    "central",
    "deserializ",
    "invalid load key",
    "Trunc",
)
_STATISTICS = (
    "abs_mean",
    "mean_abs",
    "absmean",
    "rms",
    "norm",
    "l2",
    "l2_norm",
    "abs_max",
    "max_abs",
    "std",
    "amax",
)
_PARTS = {
    *(
        "metadata",
        "payload",
        "model",
        "optimizer",
        "optim",
        "scheduler",
        "rng",
        "data",
        "dataloader",
        "index",
        "weights",
    ),
    *(
        "params",
        "shards",
        "manifest",
        "state",
        "header",
        "tensors",
        "sampler",
        "scaler",
        "args",
        "config",
        "loaded",
    ),
}
_STEP_NAME = re.compile(r"(?:step|iter(?:ation)?|checkpoint|ckpt)[_=-]?(\d{1,12})/?$", re.IGNORECASE)
_STEP_WORDS = {"step", "iteration", "iter", "global"}
_ASKED = {"requested", "request", "wanted", "asked", "target", "want"}
_ROOTS = (
    "metadata payload model optim loaded manifest state params parameter tensor weights stat expected bad"
)
_ROOTS += " suspect head magic first_bytes"
_TENSORS_MAX = 1_000_000


class _Bad(msgspec.Struct):
    names: list[str] = []
    what: list[str] = []
    seen: int = 0


def checkpoint_facts(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: what is told of single checkpoints."""
    for material in materials:
        yield from _hex(material)
        yield from _load_error(material)
    bad = _Bad()
    previous: dict[str, float] = {}
    for _, document in objects_of(materials, _ROOTS):
        yield from _steps(document)
        yield from _length(document)
        yield from _ends(document)
        yield from _since(document)
        if len(previous) < _TENSORS_MAX:
            previous |= _before(document)
        for name, values in _tensors(document):
            _tensor(bad, name, values, previous)
    if bad.what:
        events = [{"tensor": name} for name in bad.names]
        yield rule_says("checkpoint.tainted", bad.what, events=events)
    elif bad.seen:
        yield rule_says("checkpoint.sane", [f"{bad.seen} tensors have sane statistics"], event_count=0)


def _hex(material: Material) -> Iterator[Diagnosis]:
    """A dump of a file's bytes: xxd, hexdump -C, od or plain pairs."""
    data = _bytes(material)
    if len(data) < 4:
        return
    event = {"file": material.name, "bytes": len(data)}
    if data.startswith(_ZIP_BEGIN):
        if _ZIP_END not in data:
            what = [f"{len(data)} bytes begin as a ZIP", "zip end record missing"]
            yield rule_says("checkpoint.truncated", what, events=[event])
        else:
            yield rule_says(
                "checkpoint.whole-zip", [f"{len(data)} bytes of a ZIP with its end record"], event_count=0
            )
    elif len(data) >= 8 and not any(data):
        yield rule_says("checkpoint.truncated", [f"all {len(data)} bytes are zero"], events=[event])
    elif len(data) > 9 and data[8:9] == b"{" and int.from_bytes(data[:8], "little") > len(data) - 8:
        what = [
            f"a safetensors header of {int.from_bytes(data[:8], 'little')} bytes, {len(data) - 8} are there"
        ]
        yield rule_says("checkpoint.truncated", what, events=[event])


def _bytes(material: Material) -> bytes:
    """The bytes that a text dumps; none if more than comments stand beside them."""
    out = bytearray()
    for line in all_lines(material):
        if not line.strip() or line.lstrip().startswith(("#", "//", ";", "*")):
            continue
        offset = _OFFSET.match(line)
        match = _HEX_LINE.fullmatch(line[offset.end() :] if offset else line)
        if match is None:
            return b"" if len(out) < 4 or not offset else bytes(out)
        digits = re.sub(r"0x|[ ,]", "", match["bytes"])
        out += bytes.fromhex(digits if len(digits) % 2 == 0 else digits[:-1])
        if len(out) > _HEX_BYTES_MAX:
            break
    return bytes(out)


def _load_error(material: Material) -> Iterator[Diagnosis]:
    for line in lines_with(material, *_LOAD_WORDS):
        if _LOAD_ERRORS.match(message := bare(line).strip()):
            yield rule_says("checkpoint.load-failed", [message])
            return


def _steps(document: Mapping[str, object]) -> Iterator[Diagnosis]:
    """The steps of a checkpoint's parts: one for all, and the one that was asked for."""
    parts: dict[str, float] = {}
    asked: float | None = None
    for path, value in leaves(document):
        words = {word for name in path for word in words_of(name)}
        named = _STEP_NAME.search(value[-200:]) if isinstance(value, str) else None
        step = float(named[1]) if named else number(value)
        if step is None or not (named or words & _STEP_WORDS) or len(path) > 3:
            continue
        if words & _ASKED:
            asked = step
        elif words & _PARTS:
            parts[".".join(path)] = step
    if len(parts) + (asked is not None) < 2 or not parts:
        return
    what = ", ".join(f"{name} {step:g}" for name, step in parts.items())
    if len(set(parts.values())) > 1 or (asked is not None and asked not in parts.values()):
        more = [] if asked is None else [f"step {asked:g} was asked for"]
        yield rule_says(
            "checkpoint.inconsistent", [what, *more], events=[{"steps": parts, "requested": asked}]
        )
    else:
        yield rule_says("checkpoint.one-step", [what], event_count=0)


def _length(document: Mapping[str, object]) -> Iterator[Diagnosis]:
    size = number(field(document, "size", "bytes", "size_bytes", "length", "actual_size"))
    expected = number(field(document, "expected_size", "expected_bytes", "size_expected", "manifest_size"))
    name = str(field(document, "file", "path", "name", "checkpoint") or "the file")
    if size is not None and expected is not None and size < expected:
        yield rule_says("checkpoint.truncated", [f"{name} has {size:g} of {expected:g} bytes"])


def _ends(document: Mapping[str, object]) -> Iterator[Diagnosis]:
    """The first and the last bytes of a file, in hexadecimal."""
    head = field(document, "head", "head_hex", "magic", "first_bytes", "header_hex")
    tail = field(document, "tail", "tail_hex", "last_bytes", "trailer_hex", "end_hex")
    if isinstance(head, str) and isinstance(tail, str):
        begin, end = (re.sub(r"0x|[^0-9a-f]", "", text.lower()[:100_000]) for text in (head, tail))
        if begin.startswith(_ZIP_BEGIN.hex()) and _ZIP_END.hex() not in end:
            name = str(field(document, "file", "path", "name") or "the file")
            yield rule_says("checkpoint.truncated", [f"{name} begins as a ZIP", "zip end record missing"])


def _since(document: Mapping[str, object]) -> Iterator[Diagnosis]:
    """Checkpoints saved after the first step at which something was wrong carry the damage."""
    first = number(
        field(document, "first_suspect_step", "suspect_since_step", "first_bad_step", "corrupt_since_step")
    )
    saved = field(document, "checkpoints", "saved_steps", "checkpoint_steps", "steps")
    steps = (
        sorted(ranks_in([item for item in saved if isinstance(item, int)])) if isinstance(saved, list) else []
    )
    if first is None or not steps:
        return
    tainted, older = [s for s in steps if s >= first], [s for s in steps if s < first]
    event: dict[str, Any] = {"tainted": tainted, "latest_valid": older[-1] if older else None}
    what = [f"suspect since step {first:g}: saved after it {tainted[:8]}, before it {older[-1:]}"]
    if tainted:
        yield rule_says("checkpoint.use-older" if older else "checkpoint.tainted", what, events=[event])


def _tensors(document: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    tensors = field(document, "tensors", "parameters", "params", "weights", "statistics", "stats")
    count = 0
    if isinstance(tensors, dict):
        for name, values in tensors.items():
            count += 1
            if isinstance(values, dict) and count < _TENSORS_MAX:
                yield str(name), values
    elif isinstance(tensors, list):
        for values in tensors[:_TENSORS_MAX]:
            if isinstance(values, dict):
                yield str(field(values, "name", "tensor", "param") or "?"), values
    else:
        name = field(document, "tensor", "param", "parameter", "tensor_name")
        if isinstance(name, str) and any(
            field(document, s) is not None for s in (*_STATISTICS, "nan", "inf")
        ):
            yield name, document


def _before(document: Mapping[str, object]) -> dict[str, float]:
    """What the statistics were in the checkpoint before, by tensor."""
    found: dict[str, float] = {}
    for key, values in document.items():
        words = set(words_of(str(key)))
        if isinstance(values, dict) and words & {
            "previous",
            "prev",
            "before",
            "baseline",
            "reference",
            "last",
        }:
            for name, value in values.items():
                inner = _statistic(value) if isinstance(value, dict) else number(value)
                if inner is not None:
                    found[str(name)] = inner
    return found


def _statistic(values: Mapping[str, object]) -> float | None:
    return next((v for name in _STATISTICS if (v := number(field(values, name))) is not None), None)


def _tensor(bad: _Bad, name: str, values: Mapping[str, object], previous: Mapping[str, float]) -> None:
    limit = limits().checkpoint
    now = _statistic(values)
    counts = {
        w: number(int(v) if isinstance(v, bool) else v) for w in ("nan", "inf") for v in [_count(values, w)]
    }
    spelled = {key_of(str(v)) for v in values.values() if isinstance(v, str | float)}
    before = number(field(values, "previous", "prev", "before", "previous_abs_mean", "prev_abs_mean"))
    before = previous.get(name) if before is None else before
    bad.seen += now is not None or any(count is not None for count in counts.values())
    why = ""
    if any(counts.values()) or spelled & {"nan", "inf", "infinity"}:
        why = "holds values that are no numbers"
    elif now is not None and 0 < abs(now) < limit["magnitude_min"]:
        why = f"has a magnitude of {now:g}, below what 32 bits hold in full"
    elif now is not None and before and not limit["ratio_min"] <= abs(now / before) <= limit["ratio_max"]:
        why = f"went from {before:g} to {now:g}"
    if why:
        bad.what.append(f"{name} {why}") if len(bad.what) < 16 else None
        bad.names.append(name) if len(bad.names) < 4096 else None


def _count(values: Mapping[str, object], what: str) -> object:
    return field(values, what, f"{what}s", f"{what}_count", f"num_{what}", f"has_{what}", f"n_{what}")
