"""Reads materials: lines without the wrappers of log collectors, telemetry by meaning.

Telemetry comes in ad-hoc shapes: JSON lines, one array, one object around a list, CSV with a heading.
A field is found by what it means: `FIELDS` lists the spellings under which it is known, compared without
case and punctuation ("linkDowned", "link_downed" and "Link-Downed" are one). Nothing here raises.
"""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from gridagent.signals.lines import LINE_CHARS_MAX, unwrap
from gridagent.signals.values import number as as_number
from gridctl.detect.diagnose.documents import documents, looks_like_json, sized_documents
from gridctl.detect.diagnose.texts import all_lines, holds, lines_of, lines_with
from gridctl.model.diagnosis import WHOLE_CHARS_MAX, Material

#: Meaning -> spellings, the most exact first.
FIELDS: dict[str, str] = {
    "time": "t ts time timestamp t_unix_s unix_s unixtime epoch ts_s t_s time_s at date datetime elapsed_s",
    "host": "host hostname node nodename node_hostname machine server instance",
    "job": "job job_id slurm_job_id run run_id",
    "rank": "rank global_rank rank_id world_rank",
    "replica": "dp_rank data_parallel_rank replica replica_id replica_rank dp",
    "step": "step iteration iter global_step train_step steps_done completed_steps current_step",
    "line": "line message msg log text",
    "by": "by actor user owner who set_by issuer",
    "reason": "reason why comment note detail message msg text",
    "event": "event kind type what action",
}

_PUNCTUATION = re.compile(r"[^a-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_CACHED_MAX = 4096
_DEPTH_MAX = 6
_KEYS_MAX = 20_000
_NAMES_MAX = 4096
_SORTED_MAX = 16_384
_RANKS = re.compile(r"\d{1,7}(?: ?(?:-|\.\.) ?\d{1,7})?")
_LABEL = re.compile(r"(?:\d{1,6}: ?|\[[a-z]{4,8} ?\d{1,6}\]: ?)(?=\S)")
_KUBE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) std(?:out|err) [FP] ")
_BRACKET_TIME = re.compile(r"\[\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,:]\d{1,9})?\] ?")


@lru_cache(_CACHED_MAX)  # the same few names come in every record
def key_of(text: str) -> str:
    """A field's name without case and punctuation; at most 200 characters count."""
    return _PUNCTUATION.sub("", text[:200].lower())


@lru_cache(_CACHED_MAX)
def words_of(text: str) -> tuple[str, ...]:
    """The words of a name: "rngDigest_saved" is rng, digest, saved; at most 200 characters count."""
    return tuple(word for word in _PUNCTUATION.split(_CAMEL.sub(" ", text[:200]).lower()) if word)


_SPELLINGS = {meaning: tuple(key_of(name) for name in names.split()) for meaning, names in FIELDS.items()}


def bare(line: str) -> str:
    """A program's line without the wrappers of srun, torchrun, syslog and container logs."""
    line = line[:LINE_CHARS_MAX].lstrip(" \t")
    for _ in range(3):
        begin = line
        for pattern in (_KUBE, _LABEL, _BRACKET_TIME):
            if match := pattern.match(line):
                line = line[match.end() :].lstrip(" \t")
        if line[:1].isdigit() or line[:1].isupper():
            line = unwrap(line).message
        if line == begin:
            break
    return line


class Row:
    """One record of telemetry; nested objects are looked into by the name of their leaves."""

    def __init__(self, record: Mapping[str, object], around: Mapping[str, object] | None = None) -> None:
        self.record = record
        self.values: dict[str, object] = {}
        for mapping in (record, around or {}):
            deep = False
            for name, value in mapping.items():
                if isinstance(value, dict):
                    deep = True
                else:
                    self.values.setdefault(key_of(name), value)
            if deep:
                for path, value in leaves(mapping):
                    self.values.setdefault(key_of(path[-1]), value)
        metric = self.values.get("metric")
        if isinstance(metric, str) and "value" in self.values:
            self.values.setdefault(key_of(metric), self.values["value"])

    def get(self, *names: str) -> object:
        """The first value that is known under one of the names: a meaning of FIELDS, or a spelling."""
        for name in names:
            for key in _SPELLINGS.get(name) or (key_of(name),):
                if self.values.get(key) is not None:
                    return self.values[key]
        return None

    def number(self, *names: str) -> float | None:
        """The value as a number, None where it is none or stands for "unknown"."""
        return as_number(self.get(*names))

    def text(self, *names: str) -> str:
        """The value as text, "" where there is none; at most LINE_CHARS_MAX long."""
        value = self.get(*names)
        return "" if value is None or isinstance(value, dict | list) else str(value)[:LINE_CHARS_MAX]

    def time_s(self) -> float | None:
        """When, in seconds from any origin; days and hours count, ISO times and milliseconds are turned."""
        value = self.get("time")
        if isinstance(value, str) and (time := unwrap(value.strip() + " .").t_unix_s) is not None:
            return time
        t_s = as_number(value)
        if t_s is not None:
            for limit, divisor in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
                if abs(t_s) >= limit:
                    return t_s / divisor
            return t_s
        for names, factor in (
            (("d", "day", "days"), 86400.0),
            (("h", "hour", "hours"), 3600.0),
            (("min", "minute", "t_min"), 60.0),
        ):
            if (amount := self.number(*names)) is not None:
                return amount * factor
        return None


def leaves(
    record: Mapping[str, object], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """The values of nested objects with their paths, those near the root first; lists are values."""
    deeper = deque([(path, record)])
    count = 0
    while deeper:
        here, mapping = deeper.popleft()
        for name, value in mapping.items():
            count += 1
            if count > _KEYS_MAX:
                return
            inner = _unwrapped(value)
            if isinstance(inner, dict) and len(here) < _DEPTH_MAX:
                deeper.append(((*here, str(name)), inner))
            elif not isinstance(inner, dict):
                yield (*here, str(name)), inner


def _unwrapped(value: object) -> object:
    """Slurm's REST service wraps a number as {set, infinite, number}."""
    if isinstance(value, dict) and "number" in value and set(value) <= {"set", "infinite", "number"}:
        return value["number"] if value.get("set", True) is True and not value.get("infinite") else None
    return value


def rows_of(material: Material, roots: str = "") -> Iterator[Row]:
    """The records of a material: of JSON lines, arrays, objects around a list of objects, and CSV.

    With `roots` only of a material that mentions one of them.
    """
    return (row for row, _ in _sized_rows(material, roots))


def rows_in_order(materials: Iterable[Material], roots: str = "") -> Iterator[Row]:
    """The records of all materials in the order of their times, those of one time as they stand.

    Records without a time stay where they are, before all others. Of very many, or very large ones, the rest
    is not sorted.
    """
    rows = (pair for material in materials for pair in _sized_rows(material, roots))
    first: list[Row] = []
    chars = 0
    for row, size in rows:
        first.append(row)
        chars += size
        if len(first) >= _SORTED_MAX or chars > WHOLE_CHARS_MAX:
            break
    times = [row.time_s() for row in first]
    yield from (
        row
        for _, row in sorted(
            zip(times, first, strict=True), key=lambda one: -math.inf if one[0] is None else one[0]
        )
    )
    del first
    yield from (row for row, _ in rows)


def _sized_rows(material: Material, roots: str) -> Iterator[tuple[Row, int]]:
    """The records, the first of a JSON value or line with how many characters that takes, the rest with 0."""
    if looks_like_json(material):
        for value, chars in sized_documents(material, roots):
            for row in _rows(value, {}, 0):
                yield row, chars
                chars = 0
    else:
        yield from _csv(material)


def _rows(value: object, around: Mapping[str, object], depth: int) -> Iterator[Row]:
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list) and depth < _DEPTH_MAX:
                yield from _rows(item, around, depth + 1)
    elif isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        if len(lists) == 1 and depth < _DEPTH_MAX:
            rest = {name: v for name, v in value.items() if not isinstance(v, list)}
            yield from _rows(lists[0], {**around, **rest}, depth + 1)
        else:
            yield Row(value, around)


def _csv(material: Material) -> Iterator[tuple[Row, int]]:
    rest = all_lines(material)
    heading = [cell.strip().strip('"') for cell in next(rest, "").lstrip("#").split(",")]
    if len(heading) < 2 or not all(re.fullmatch(r"[A-Za-z_@][\w .()/%-]{0,60}", cell) for cell in heading):
        return
    for line in rest:
        cells = [cell.strip().strip('"') for cell in line.split(",")]
        if len(cells) == len(heading):
            yield Row(dict(zip(heading, cells, strict=True))), len(line)


def log_lines(material: Material, *words: str) -> Iterator[str]:
    """The log lines of a material that hold one of `words`, also those inside JSON records."""
    if looks_like_json(material) and holds(material, *words):
        for row in rows_of(material):
            yield from (line for line in lines_of(row.text("line")) if any(word in line for word in words))
    for line in lines_with(material, *words):
        if not line.startswith(("{", "[{")):
            yield line


def objects_of(
    materials: Iterable[Material], roots: str = ""
) -> Iterator[tuple[Material, dict[str, object]]]:
    """The JSON objects of all materials, those in arrays too, with the material; `roots` as above."""
    for material in materials:
        for value in documents(material, roots):
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, dict):
                    yield material, item


def field(record: Mapping[str, object], *names: str) -> object:
    """The value at the first of the names, whatever their case and punctuation; None where there is none."""
    by_key = {key_of(str(name)): value for name, value in record.items()}
    for name in names:
        if (value := by_key.get(key_of(name))) is not None:
            return _unwrapped(value)
    return None


def ranks_in(value: object) -> set[int]:
    """Ranks of "0-3,7", "{1, 2}", [1, 2] or 5; at most 4096, so that no text can name millions."""
    found: set[int] = set()
    if isinstance(value, list):
        for item in value[:_NAMES_MAX]:
            found |= ranks_in(item)
    elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000_000:
        found.add(value)
    elif isinstance(value, str):
        for match in _RANKS.finditer(value[:LINE_CHARS_MAX]):
            first, *last = (int(n) for n in re.findall(r"\d+", match[0]))
            found.update(range(first, min(last[0] if last else first, first + _NAMES_MAX) + 1))
            if len(found) > _NAMES_MAX:
                break
    return set(sorted(found)[:_NAMES_MAX])


def hosts_in(text: str) -> list[str]:
    """Host names of Slurm's form "c[003,020-022],d1"; at most 4096."""
    names: list[str] = []
    for match in re.finditer(
        r"([\w.-]{1,200})(?:\[([\d,-]{1,2000})\])?([\w.-]{0,60})", text[:LINE_CHARS_MAX]
    ):
        if match[2] is None:
            names.append(match[1] + match[3])
        for part in (match[2] or "").split(","):
            first, _, last = part.partition("-")
            if first.isdigit() and (last or first).isdigit() and len(first) < 9 and len(last) < 9:
                end = min(int(last or first), int(first) + _NAMES_MAX)
                width = len(first)
                names += [f"{match[1]}{n:0{width}}{match[3]}" for n in range(int(first), end + 1)]
        if len(names) >= _NAMES_MAX:
            break
    return names[:_NAMES_MAX]
