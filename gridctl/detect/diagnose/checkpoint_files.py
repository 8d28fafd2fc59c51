"""Checkpoints by their files: listings of folders, and descriptions of which host holds which files.

A checkpoint counts only if all of it is there: no shard is empty, missing or still under its temporary
name, and the marker that is written last stands where its siblings have one. It is rejected as a whole.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gridagent.signals.values import number
from gridctl.detect.diagnose.documents import looks_like_json
from gridctl.detect.diagnose.reading import field, objects_of, words_of
from gridctl.detect.diagnose.ruling import limits, rule_says
from gridctl.detect.diagnose.texts import all_lines
from gridctl.model.diagnosis import Diagnosis, Material

_HEADING = re.compile(
    r"(?:#+ *|=+ *)?(?:(?P<host>[\w.-]{1,100}):)?(?P<path>[./~\w][^\s:]{0,400}?)/?:? *(?:=+)?"
)
_SIZED = re.compile(r"\s*(?P<size>\d{1,20})\s+(?P<path>[^\s]{1,400})\s*")
_LS = re.compile(r"[-l][rwxsStT-]{9}\S? +\d+ +\S+ +\S+ +(?P<size>\d{1,20}) .{3,40}? (?P<path>\S{1,400})\s*")
_S3 = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?P<size>\d{1,20}) (?P<path>\S{1,400})\s*")
_STEP = re.compile(
    r"(?:^|[/._-])(?:global_?step|step|iter(?:ation)?|checkpoint|ckpt|epoch|save)[_=-]?(?P<step>\d{1,12})(?=$|[/._-])",
    re.IGNORECASE,
)
_BARE_STEP = re.compile(r"(?:^|/)(?P<step>\d{1,12})/?$")
_SHARD = re.compile(
    r"\.(?:pt|pth|ckpt|bin|safetensors|distcp|npz|npy|h5|msgpack|pkl)\b|shard|rank|optim|model|weights",
    re.IGNORECASE,
)
_TEMPORARY = re.compile(
    r"(?:\.(?:tmp|temp|part|partial|incomplete|inprogress|writing|swp|lock)\b|^\.?(?:tmp|temp)[_.-]|~$|\.tmp[_.-])",
    re.IGNORECASE,
)
_MARKER = re.compile(
    r"\.?_?(?:complete[d]?|success|done|commit(?:ted|_success)?|finished|ready|ok)(?:\.\w{1,8})?",
    re.IGNORECASE,
)
_OF = re.compile(r"(?P<at>\d{1,6})-of-(?P<all>\d{1,6})")
_DIGITS = re.compile(r"\d{1,12}")
_HOST_WORDS = {"host", "hosts", "node", "nodes", "listing", "listings"}
_FILES_MAX = 1_000_000
_CHECKPOINTS_MAX = 65_536


class Checkpoint(msgspec.Struct):
    """The files of one step: name -> size in bytes, None where it is not told."""

    name: str
    step: int | None
    files: dict[str, int | None] = {}
    by_host: dict[str, set[str]] = {}
    marked: bool | None = None  #: what a description says of completeness

    def complete(self) -> bool:
        """Does the marker that is written last stand there?"""
        return self.marked is True or any(_MARKER.fullmatch(name) for name in self.files)


def checkpoint_files(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: listings and descriptions of checkpoints' files."""
    found: dict[str, Checkpoint] = {}
    for material in materials:
        if not looks_like_json(material):
            _listing(found, material)
    for _, document in objects_of(materials, "files shards contents objects host node listing"):
        named = (value for key, value in document.items() if _HOST_WORDS.intersection(words_of(key)))
        files = next((files for hosts in named if (files := _files_of_hosts(hosts))), None)
        if files:
            yield from _shared(document, files)
        else:
            for item in _items(document):
                _described(found, item)
    real = [c for c in found.values() if any(_SHARD.search(name) for name in c.files)]
    spread = [c for c in real if len(c.by_host) > 1]
    for one in spread:
        yield from _shared({"step": one.step}, one.by_host)
    if real and not spread:
        yield _judged(real)


def _listing(found: dict[str, Checkpoint], material: Material) -> None:
    """Folders with their files: headings, ls -l, ls -lR, find -printf "%s %p", aws s3 ls."""
    folder, host, count = "", "", 0
    for line in all_lines(material):
        text = line.strip()
        begin = text[:1]
        if not begin or (" " in text and not (begin.isdigit() or begin in "-l#=" or text[-1] == "=")):
            continue  # most lines of a log, at the least cost
        match = _LS.fullmatch(line) or _S3.fullmatch(line) or _SIZED.fullmatch(line)
        if match:
            count += 1
            path = match["path"]
            where, _, name = path.rpartition("/")
            if count <= _FILES_MAX:
                _add(found, where or folder, host, name, int(match["size"]))
        elif heading := _HEADING.fullmatch(text):
            folder, host = heading["path"], heading["host"] or ""


def _add(found: dict[str, Checkpoint], folder: str, host: str, name: str, size: int | None) -> None:
    step = _step_of(folder)
    if step is None or not name:
        return
    key = folder.rstrip("/").rpartition("/")[2]
    checkpoint = found.setdefault(key, Checkpoint(key, step))
    checkpoint.files[name] = size
    if host:
        checkpoint.by_host.setdefault(host, set()).add(name)


def _step_of(folder: str) -> int | None:
    match = _STEP.search(folder) or _BARE_STEP.search(folder)
    return int(match["step"]) if match else None


def _items(document: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    inner = field(document, "checkpoints", "steps", "saves", "snapshots", "dirs", "directories")
    if isinstance(inner, dict):
        for name, value in inner.items():
            yield (
                {"name": name, **value}
                if isinstance(value, dict) and "files" in value
                else {"name": name, "files": value}
            )
    elif isinstance(inner, list):
        yield from (item for item in inner if isinstance(item, dict))
    else:
        yield document


def _described(found: dict[str, Checkpoint], item: Mapping[str, object]) -> None:
    """{"step" or "name", "files": names or {name: size} or [{"name", "size"}], "complete"}."""
    files = field(item, "files", "shards", "contents", "objects")
    name = str(field(item, "name", "dir", "path", "directory", "step", "iteration") or "")[-200:]
    told = number(field(item, "step", "iteration", "global_step"))
    step = int(told) if told is not None and abs(told) < 1e15 else _step_of(name)
    sizes = dict(_sizes(files))
    if step is None or not sizes:
        return
    done = field(item, "complete", "committed", "marker", "success", "finished")
    marked = done if isinstance(done, bool) else None
    if len(found) < _CHECKPOINTS_MAX:
        found.setdefault(name or str(step), Checkpoint(name or str(step), step, sizes, {}, marked))


def _sizes(files: object) -> Iterator[tuple[str, int | None]]:
    if isinstance(files, dict):
        for name, size in files.items():
            inner = field(size, "size", "bytes", "size_bytes", "length") if isinstance(size, dict) else size
            value = number(inner)
            yield str(name).rpartition("/")[2], int(value) if value is not None else None
    for file in files if isinstance(files, list) else ():
        if isinstance(file, str):
            yield file.rpartition("/")[2], None
        elif isinstance(file, int) and not isinstance(file, bool):
            yield f"shard_{file}", None  # only its number is told
        elif isinstance(file, dict):
            value = number(field(file, "size", "bytes", "size_bytes", "length"))
            name = str(field(file, "name", "path", "file", "key") or "")
            yield name.rpartition("/")[2], int(value) if value is not None else None


def _judged(checkpoints: list[Checkpoint]) -> Diagnosis:
    ordered = sorted(checkpoints, key=lambda c: -1 if c.step is None else c.step)
    marks = any(c.complete() for c in ordered)
    sizes: dict[str, int] = {}
    for checkpoint in ordered:
        for name, size in checkpoint.files.items():
            key = _family(name, checkpoint)
            sizes[key] = max(sizes.get(key, 0), size or 0)
    faults: dict[str, list[str]] = {}
    usual: set[str] | None = None  # shards that all complete ones so far have
    for one in ordered:
        faults[one.name] = _faults(one, marks, usual or set(), sizes)
        if one.complete():
            names = {_family(name, one) for name in _shards(one)}
            usual = names if usual is None else usual & names
    valid = [c.name for c in ordered if not faults[c.name]]
    rejected = [c.name for c in ordered if faults[c.name]]
    newest = ordered[-1]
    event: dict[str, Any] = {"latest_valid": valid[-1] if valid else None, "rejected": rejected}
    if not faults[newest.name]:
        return rule_says("checkpoint.complete", [f"{newest.name} is complete"], events=[event], event_count=0)
    event["why"] = faults[newest.name][:16]
    what = [f"{newest.name}: {'; '.join(faults[newest.name][:6])}"]
    what.append(f"{valid[-1]} is the newest complete one" if valid else "none of them is complete")
    return rule_says("checkpoint.incomplete" if valid else "checkpoint.none-complete", what, events=[event])


def _family(name: str, checkpoint: Checkpoint) -> str:
    """A file's name with the step in it left out, by which siblings of other steps are found."""
    return _DIGITS.sub(lambda m: "#" if int(m[0]) == checkpoint.step else m[0], name)


def _faults(one: Checkpoint, marks: bool, usual: set[str], sizes: dict[str, int]) -> list[str]:
    """Why a checkpoint must not be loaded; [] if nothing speaks against it."""
    found = []
    shards = {name: size for name, size in one.files.items() if _SHARD.search(name)}
    found += [f"zero length {name}" for name, size in sorted(shards.items()) if size == 0]
    found += [f"temporary {name}" for name in sorted(one.files) if _TEMPORARY.search(name)]
    for name, size in sorted(shards.items()):
        largest = sizes.get(_family(name, one), 0)
        if size and not _TEMPORARY.search(name) and size < largest * limits().checkpoint["size_share_min"]:
            found.append(f"short {name}: {size} of {largest} bytes")
    found += _holes(_shards(one))
    have = {_family(name, one) for name in one.files}
    found += [f"missing {name}" for name in sorted(usual - have)]
    if marks and not one.complete():
        found.append("no marker")
    if one.marked is False:
        found.append("described as not complete")
    if any(name.endswith(".distcp") for name in one.files) and ".metadata" not in one.files:
        found.append("missing .metadata")
    return found[:256]


def _shards(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.files if _SHARD.search(name) and not _TEMPORARY.search(name)]


def _holes(shards: Iterable[str]) -> list[str]:
    """Numbers that are missing from a series of shards: of "3-of-8", or between the first and the last."""
    series: dict[str, set[int]] = {}
    wanted: dict[str, int] = {}
    for name in shards:
        if match := _OF.search(name):
            key = f"{name[: match.start()]}*-of-{match['all']}"
            series.setdefault(key, set()).add(int(match["at"]))
            wanted[key] = int(match["all"])
        else:
            numbers = list(_DIGITS.finditer(name))
            if len(numbers) == 1:
                at = numbers[0]
                series.setdefault(f"{name[: at.start()]}*{name[at.end() :]}", set()).add(int(at[0]))
    found = []
    for key, numbers_of in series.items():
        if key in wanted:
            first = 0 if 0 in numbers_of else 1
            missing = set(range(first, min(wanted[key], 100_000) + first)) - numbers_of
        else:
            low, high = min(numbers_of), max(numbers_of)
            missing = set(range(low, high)) - numbers_of if high - low < 2 * len(numbers_of) else set()
        found += [f"missing {key.replace('*', str(n), 1)}" for n in sorted(missing)[:64]]
    return found


def _files_of_hosts(hosts: object) -> dict[str, set[str]]:
    """Host -> names of files, of {"host": [names]} or {"host": {"files": [...]}} or [{"host", "files"}]."""
    found: dict[str, set[str]] = {}
    if isinstance(hosts, list):
        hosts = {str(field(item, "host", "node", "name")): item for item in hosts if isinstance(item, dict)}
    for host, value in hosts.items() if isinstance(hosts, dict) else ():
        files = field(value, "files", "shards", "contents", "ranks") if isinstance(value, dict) else value
        names = {name for name, _ in _sizes(files)}
        if isinstance(value, dict) and field(value, "metadata", "has_metadata", "index") is True:
            names.add(".metadata")
        if names:
            found[str(host)] = names
    every = set().union(*found.values()) if found else set()
    return found if any(_SHARD.search(name) or name == ".metadata" for name in every) else {}


def _shared(document: Mapping[str, object], hosts: Mapping[str, set[str]]) -> Iterator[Diagnosis]:
    """Can every host read all of it? If not, shards that lie on one host must be copied before it leaves."""
    every = set().union(*hosts.values())
    missing = {host: len(every - files) for host, files in hosts.items() if every - files}
    shared = field(document, "shared_fs", "shared", "shared_storage", "is_shared")
    numbers = number(field(document, "world_size", "shards", "num_shards", "expected_shards", "ranks"))
    shards = {name for name in every if _SHARD.search(name)}
    lost = bool(_holes(sorted(shards))) or (numbers is not None and 0 < len(_ranks(shards)) < numbers)
    no_index = any(name.endswith(".distcp") for name in every) and ".metadata" not in every
    event: dict[str, Any] = {"step": field(document, "step", "iteration"), "missing": missing}
    if lost or no_index:
        what = f"{len(shards)} shards on {len(hosts)} hosts" + (
            "" if not no_index else ", .metadata on none of them"
        )
        yield rule_says("checkpoint.shards-lost", [what, "some are on no host"], events=[event])
    elif missing and shared is not True:
        what = ", ".join(f"{host} lacks {count}" for host, count in sorted(missing.items())[:8])
        yield rule_says("checkpoint.not-shared", [f"of {len(every)} files {what}"], events=[event])
    else:
        yield rule_says("checkpoint.complete", [f"all {len(hosts)} hosts see all files"], event_count=0)


def _ranks(names: Iterable[str]) -> set[str]:
    """The first number of each shard's name: DCP's "__4_0.distcp" is of rank 4."""
    return {match[0] for name in names if (match := _DIGITS.search(name))}
