"""torch's collective flight recorder: what its analyser printed, the dumps themselves, and which are missing.

Ranks that called the same collective differently are a fault of the program. A rank that could not even
write its dump is the one that ran no code any more.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gridctl.detect.diagnose.reading import field, hosts_in, objects_of, ranks_in
from gridctl.detect.diagnose.ruling import rule_says
from gridctl.detect.diagnose.texts import all_lines, holds, lines_with
from gridctl.detect.diagnose.torch_log import behind_of, missing_of
from gridctl.model.diagnosis import Diagnosis, Material

_CULPRIT = re.compile(
    r"\s*(?:\[\d+\] )?[Cc]ulprit ranks?:? ?(?P<ranks>[\[{(]?\d[\d, .-]{0,400})[\]})]?[;,]? *"
    r"(?:and )?(?:[Ee]rror [Tt]ype:? ?(?:MatchState\.)?(?P<error>[A-Z_]{4,60}))?"
)
_ERROR = re.compile(r"\s*[Ee]rror [Tt]ype:? ?(?:MatchState\.)?(?P<error>[A-Z_]{4,60})")
_MISSING = re.compile(r"\s*(?:and )?[Mm]issing ranks?(?: are)?:? ?(?P<ranks>[\[{(]?\d[\d, .-]{0,400})")
_COLLECTIVE = re.compile(r"\s*[Cc]ollective (?:id|[Ss]equence [Nn]umber|seq id):? ?(?P<id>\d{1,18})")
_PROGRAM_ERRORS = {"COLLECTIVE_TYPE_MISMATCH", "SIZE_OR_SYNTAX_MISMATCH", "COLLECTIVE_DTYPE_MISMATCH"}
_DUMP_NAME = re.compile(r"(?:.*[/\s])?[\w.-]{0,80}?rank[_.-]?(?P<rank>\d{1,7})(?:\.\w{1,12}){0,3}")
_TRACE_NAME = re.compile(r"nccl|trace|flight|fr_|dump", re.IGNORECASE)
_LISTED = re.compile(r"\s*(?:(?P<size>\d{1,18})\s+)?(?P<path>\S{1,500})\s*")
_LS_LINE = re.compile(r"[-l][rwxsStT-]{9}\S? +\d+ +\S+ +\S+ +(?P<size>\d+) .{5,30} (?P<path>\S{1,500})\s*")
_RANKS_MAX = 262_144
#: Entries of one dump that are compared; a dump's ring holds 2000 by default.
_ENTRIES_MAX = 20_000


class Dump(msgspec.Struct):
    """What one rank's dump tells, by group."""

    enqueued: dict[str, int] = {}
    completed: dict[str, int] = {}
    calls: dict[tuple[str, int], tuple[str, str]] = {}  #: (group, sequence number) -> operation, sizes
    members: dict[str, set[int]] = {}


def flight_recorder(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: analyser output, JSON dumps, and listings of dumps."""
    for material in materials:
        yield from _analysis(material)
    dumps: dict[int, Dump] = {}
    for material, document in objects_of(materials, "rank world_size worldsize"):
        if isinstance(document.get("entries"), list) and ("pg_config" in document or "pg_status" in document):
            rank = _rank_of(document, material.name, len(dumps))
            if len(dumps) < _RANKS_MAX:
                dumps[rank] = _dump(document)
        else:
            yield from _described(document)
    if dumps:
        yield _compared(dumps)
    elif listed := _listing(materials):
        present, empty, hosts = listed
        yield from _absent(present - empty, set(missing_of(present)) | empty, hosts, "listing")


def _analysis(material: Material) -> Iterator[Diagnosis]:
    """What the analyser printed: per collective, a culprit and an error type, or missing ranks."""
    if not holds(material, "ulprit rank", "issing ranks"):
        return
    collective = ""
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for line in all_lines(material):
        if match := _COLLECTIVE.match(line):
            collective = line.strip()
        elif (match := _CULPRIT.match(line)) or (match := _MISSING.match(line)):
            error = match.groupdict().get("error") or ("MISSING" if _MISSING.match(line) else "")
            key = (error, tuple(sorted(ranks_in(match["ranks"]))))
            if len(found) < 1024:
                found.setdefault(key, [collective, line.strip()])
        elif (match := _ERROR.match(line)) and found and not next(reversed(found))[0]:
            (_, ranks), lines = found.popitem()
            found[match["error"], ranks] = [*lines, line.strip()]
    for (error, culprits), lines in found.items():
        yield _verdict(error, culprits, [line for line in lines if line])


def _verdict(error: str, culprits: Sequence[int], lines: list[str]) -> Diagnosis:
    error = error.rpartition(".")[2].upper()
    if error in _PROGRAM_ERRORS:
        rule = "recorder.program-mismatch"
    elif error in ("MISSING", "COLLECTIVE_STATE_MISMATCH"):
        rule = "recorder.rank-missing"
    else:
        rule = "recorder.unclear"
    return rule_says(rule, lines, events=[{"rank": rank, "error_type": error} for rank in culprits])


def _rank_of(document: Mapping[str, object], name: str, default: int) -> int:
    named = _DUMP_NAME.fullmatch(name)
    told = field(document, "rank", "global_rank")
    if isinstance(told, int) and not isinstance(told, bool):
        return told
    return int(named["rank"]) if named else default


def _dump(document: Mapping[str, object]) -> Dump:
    dump = Dump()
    for attribute, part in (("pg_status", "status"), ("pg_config", "config")):
        groups = document.get(attribute)
        for group, values in groups.items() if isinstance(groups, dict) else ():
            if isinstance(values, dict) and part == "status":
                dump.enqueued[str(group)] = _whole(field(values, "last_enqueued_collective"))
                dump.completed[str(group)] = _whole(field(values, "last_completed_collective"))
            elif isinstance(values, dict):
                dump.members[str(group)] = ranks_in(field(values, "ranks"))
    entries = document["entries"]
    assert isinstance(entries, list)
    for entry in entries[-_ENTRIES_MAX:]:
        if isinstance(entry, dict) and not entry.get("is_p2p"):
            names = entry.get("pg_name")
            group = str(names[0] if isinstance(names, list) and names else entry.get("pg_id", names))
            number = _whole(field(entry, "collective_seq_id", "seq_id"))
            sizes = f"{entry.get('input_sizes')} {entry.get('input_dtypes')}"
            dump.calls[group, number] = (str(entry.get("profiling_name")), sizes)
    return dump


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _compared(dumps: dict[int, Dump]) -> Diagnosis:
    """Other calls first (a fault of the program), then who is missing, then who is behind."""
    if odd := _odd_call(dumps):
        return odd
    expected: set[int] = set()
    for dump in dumps.values():
        expected |= set().union(*dump.members.values())
    missing = sorted(expected - set(dumps)) or missing_of(set(dumps))
    if missing and 2 * len(missing) <= len(expected | set(dumps)):
        return next(iter(_absent(set(dumps), set(missing), {}, "dumps")))
    groups = {group for dump in dumps.values() for group in dump.enqueued}
    behind: set[int] = set()
    for group in sorted(groups):
        counters = {
            rank: (dump.enqueued[group], dump.completed.get(group, -1))
            for rank, dump in dumps.items()
            if group in dump.enqueued
        }
        behind |= set(behind_of(counters))
    if behind:
        events = [{"rank": rank} for rank in sorted(behind)]
        return rule_says(
            "recorder.rank-behind", [f"ranks {sorted(behind)[:16]} are behind the others"], events=events
        )
    return rule_says("recorder.no-suspect", [f"{len(dumps)} dumps, no rank is behind, missing or differs"])


def _odd_call(dumps: dict[int, Dump]) -> Diagnosis | None:
    calls: dict[tuple[str, int], dict[tuple[str, str], list[int]]] = {}
    for rank, dump in dumps.items():
        for at, call in dump.calls.items():
            even = call if "all_reduce" in call[0] or "_base" in call[0] else (call[0], "")
            calls.setdefault(at, {}).setdefault(even, []).append(rank)
    for (group, number), kinds in sorted(calls.items()):
        if len(kinds) > 1:
            (name, sizes), ranks = min(kinds.items(), key=lambda item: (len(item[1]), item[1]))
            what = (
                f"group {group}, collective {number}: ranks {ranks[:16]} called {name} {sizes}, others differ"
            )
            return rule_says(
                "recorder.program-mismatch", [what], events=[{"rank": rank} for rank in ranks[:1024]]
            )
    return None


def _described(document: Mapping[str, object]) -> Iterator[Diagnosis]:
    """A description of what dumps exist: the ranks there should be, and the files there are."""
    culprits = ranks_in(field(document, "culprit_rank", "culprit_ranks", "missing_ranks"))
    if culprits:
        error = str(field(document, "error_type", "error", "mismatch") or "MISSING")
        yield _verdict(error, sorted(culprits), [f"{error}: ranks {sorted(culprits)[:16]}"])
        return
    size = field(
        document, "world_size", "nranks", "num_ranks", "ranks_expected", "expected_ranks", "ranks_total"
    )
    files = field(
        document, "files", "dumps", "traces", "dump_files", "trace_files", "present", "ranks_present"
    )
    if files is None or size is None or not _TRACE_NAME.search(f"{list(document)} {str(files)[:400]}"):
        return
    names = list(files) if isinstance(files, list | dict) else []
    present = {rank for rank in (_rank_named(name) for name in names[:_RANKS_MAX]) if rank is not None}
    sizes = files if isinstance(files, dict) else {}
    empty = {rank for name, value in sizes.items() if value == 0 and (rank := _rank_named(name)) is not None}
    whole = isinstance(size, int) and not isinstance(size, bool)
    expected = set(range(min(int(str(size)), _RANKS_MAX))) if whole else ranks_in(size)
    if expected and present:
        hosts = _hosts(field(document, "rank_to_host", "hosts", "rank_hosts", "placement"))
        yield from _absent(present - empty, expected - (present - empty), hosts, "dumps")


def _rank_named(name: object) -> int | None:
    if isinstance(name, dict):
        name = field(name, "rank", "name", "file", "path")
    if isinstance(name, int) and not isinstance(name, bool):
        return name
    match = _DUMP_NAME.fullmatch(str(name)[:1000])
    if match:
        return int(match["rank"])
    return int(str(name)) if str(name).isdigit() and len(str(name)) < 8 else None


def _hosts(value: object) -> dict[int, str]:
    """Rank -> host, of {"3": "a"} or {"a": [0, 1]} or {"a": "0-7"}."""
    found: dict[int, str] = {}
    for key, other in value.items() if isinstance(value, dict) else ():
        if str(key).isdigit() and len(str(key)) < 8 and isinstance(other, str):
            found[int(str(key))] = other
        else:
            found |= dict.fromkeys(ranks_in(other), (hosts_in(str(key)) or [str(key)])[0])
    return found


def _absent(present: set[int], missing: set[int], hosts: dict[int, str], of: str) -> Iterator[Diagnosis]:
    if not missing:
        if of == "dumps":
            yield rule_says("recorder.no-suspect", [f"all {len(present)} ranks wrote their dump"])
        return
    rule = "recorder.rank-missing" if 2 * len(missing) <= len(present | missing) else "recorder.many-missing"
    where = {hosts[rank] for rank in missing if rank in hosts}
    events: list[dict[str, Any]] = [{"rank": rank, "host": hosts.get(rank)} for rank in sorted(missing)]
    what = f"{len(present)} ranks wrote their dump, {sorted(missing)[:16]} did not"
    yield rule_says(rule, [what, *(f"on {host}" for host in sorted(where)[:4])], events=events)


def _listing(materials: Sequence[Material]) -> tuple[set[int], set[int], dict[int, str]] | None:
    """Ranks whose dumps are listed, and those whose dump is empty; None if nothing lists dumps."""
    present: set[int] = set()
    empty: set[int] = set()
    for material in materials:
        for line in lines_with(material, "rank"):
            match = _LS_LINE.fullmatch(line) or _LISTED.fullmatch(line)
            named = _DUMP_NAME.fullmatch(match["path"]) if match else None
            if match and named and _TRACE_NAME.search(match["path"]) and len(present) < _RANKS_MAX:
                present.add(int(named["rank"]))
                if match["size"] is not None and int(match["size"]) == 0:
                    empty.add(int(named["rank"]))
    return (present, empty, {}) if len(present) > 3 else None
