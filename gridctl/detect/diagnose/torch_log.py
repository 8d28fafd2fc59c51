"""The watchdog of torch's ProcessGroupNCCL, and what NCCL's RAS service says beside it.

Every rank reports a timeout; the one that is behind the others, or says nothing at all, is where to look
first, and needs a second signal before anybody drains its node. A line counts only where torch's log
header stands at its beginning.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gridctl.detect.diagnose.reading import bare, log_lines
from gridctl.detect.diagnose.ruling import SHOWN_CHARS_MAX, rule_says
from gridctl.detect.diagnose.texts import all_lines, holds
from gridctl.model.diagnosis import Diagnosis, Material

_RANK_LABEL = re.compile(r"(?:^|\s)\[(?:rank|default)(\d{1,7})\]:")
_HEAD = re.compile(
    r"\[?[A-Z]\d{0,4}[ \d:.-]{0,40} ?ProcessGroup\w{0,40}\.(?:cpp|hpp):\d{1,6}\] "
    r"\[(?P<group>(?:[^\[\]]{0,200}?[ ,])?)[Rr]ank (?P<rank>\d{1,7})\] *(?P<text>.*)"
)
_GROUP_NAME = re.compile(r"PG (?:ID )?(\S{1,60})")
_WORK = re.compile(r"WorkNCCL\((?P<fields>[^)]{0,400}(?:\(ms\)[^)]{0,100})?)\)")
_WORK_FIELD = re.compile(r"(SeqNum|OpType|NumelIn|NumelOut)=(\w{1,40})")
_ENQUEUED = re.compile(r"[Ll]ast enqueued (?:NCCL )?work:? (-?\d{1,18})")
_COMPLETED = re.compile(r"[Ll]ast completed (?:NCCL )?work:? (-?\d{1,18})")
_TIMED_OUT = (
    "Watchdog caught collective operation timeout",
    "failure detected by watchdog",
    "Exception (either an error or timeout) detected by watchdog",
    "Timeout at NCCL work",
    "Timeout at collective",
    "Received a dump signal due to a collective timeout",
)
_STUCK = re.compile(
    r"(?:ProcessGroupNCCL's )?(?:watchdog (?:got|is) stuck|[Hh]eartbeat monitor timed out)"
    r"|Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang"
)
_MISMATCH = re.compile(r"(?:\w+Error: )?Detected mismatch between collectives on ranks\. Rank (\d{1,7}) ")
_WORDS = ("ProcessGroup", "Detected mismatch between collectives")
#: Operations in which all ranks give as many elements.
_EVEN = {"ALLREDUCE", "ALLREDUCE_COALESCED", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "BARRIER"}
_RANKS_MAX = 262_144
#: Of all groups together.
_MEMBERS_MAX = 1_000_000
_RAS_ROW = re.compile(
    r"\s*\d{1,6}(?:\s+[\d-]{1,12}){3,8}\s+(?P<status>[A-Z]{3,12})\s+(?P<errors>[A-Z]{2,16})\s*"
)
_RAS_DEAD = re.compile(
    r"\s*Process \d{1,10} on node (?P<node>[\w.:-]{1,100}) managing GPUs? [\d,-]{1,40}\s*(?:\(.{0,80}\))?\s*$"
)


class _Rank(msgspec.Struct):
    enqueued: int = -1
    completed: int = -1
    op: tuple[str, str, str] = ("", "", "")  #: sequence number, type, elements

    def counters(self) -> tuple[int, int, int]:
        """What tells who is behind, the surest first."""
        return self.enqueued, self.completed, int(self.op[0]) if self.op[0].isdecimal() else -1


class Watch(msgspec.Struct):
    """What the watchdogs of all ranks told."""

    groups: dict[str, dict[int, _Rank]] = {}  #: group -> rank -> its counters
    members: int = 0  #: of all groups
    timeout_lines: int = 0
    first: str = ""
    stuck: dict[int, str] = {}  #: rank -> line, of the first one only
    stuck_lines: int = 0
    mismatch: dict[int, str] = {}  #: rank -> line
    ras: dict[str, int] = {}  #: errors column of NCCL's RAS table -> communicators
    ras_dead: dict[str, str] = {}  #: node of a process that RAS does not reach -> line


def torch_log(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: torch's watchdog lines, with NCCL's RAS table."""
    watch = read(materials)
    if watch.mismatch:
        ranks = sorted(watch.mismatch)
        yield rule_says("torch.mismatch-detected", [watch.mismatch[ranks[0]]], events=_ranks(ranks))
    if watch.timeout_lines:
        yield _timeout(watch)
    if watch.stuck:
        others = (
            "earlier timeouts of other ranks come first" if watch.timeout_lines else "no timeout beside it"
        )
        line = next(iter(watch.stuck.values()))
        what = f"the watchdog of {_named(sorted(watch.stuck))} is stuck, {others}"
        events = _ranks(sorted(watch.stuck))
        yield rule_says("torch.watchdog-stuck", [what, line], events=events, raw_lines=watch.stuck_lines)
    yield from _ras(watch)


def read(materials: Sequence[Material]) -> Watch:
    """Takes up all lines of watchdogs and RAS tables."""
    watch = Watch()
    for material in materials:
        for line in log_lines(material, *_WORDS):
            _line(watch, line)
        if holds(material, "Communicators...") and holds(material, "Job summary"):
            _ras_table(watch, all_lines(material))
    return watch


def _line(watch: Watch, line: str) -> None:
    label = _RANK_LABEL.search(line[: max(0, line[:200].find("ProcessGroup"))])
    message = bare(line)
    if match := _MISMATCH.match(message):
        if len(watch.mismatch) < _RANKS_MAX:
            watch.mismatch.setdefault(int(match[1]), message[:SHOWN_CHARS_MAX])
        return
    head = _HEAD.match(message)
    if head is None:
        return
    text = head["text"]
    rank = int(label[1]) if label else int(head["rank"])
    if text.startswith(_TIMED_OUT):
        watch.timeout_lines += 1
        watch.first = watch.first or message
        name = _GROUP_NAME.match(head["group"])
        _counters(watch, name[1] if name else "", rank, text)
    elif _STUCK.match(text):
        watch.stuck_lines += 1
        if len(watch.stuck) < _RANKS_MAX:
            watch.stuck.setdefault(rank, "" if watch.stuck else message)


def _counters(watch: Watch, group: str, rank: int, text: str) -> None:
    if len(watch.groups) > 4096 and group not in watch.groups:
        return
    ranks = watch.groups.setdefault(group, {})
    if rank not in ranks:
        if watch.members >= _MEMBERS_MAX:
            return
        watch.members += 1
        ranks[rank] = _Rank()
    known = ranks[rank]
    if match := _ENQUEUED.search(text):
        known.enqueued = max(known.enqueued, int(match[1]))
    if match := _COMPLETED.search(text):
        known.completed = max(known.completed, int(match[1]))
    if work := _WORK.search(text):
        fields = dict(_WORK_FIELD.findall(work["fields"]))
        known.op = (fields.get("SeqNum", ""), fields.get("OpType", ""), fields.get("NumelIn", ""))


def _timeout(watch: Watch) -> Diagnosis:
    count = watch.timeout_lines
    named = [group for group in watch.groups if group]
    for group, ranks in watch.groups.items():
        odd = (
            _odd_operation(ranks) if group or len(named) < 2 else []
        )  # a line may not say of which group it is
        if odd:
            what = (
                f"group {group or 'default'}: {_named(odd)} called another operation or size than the others"
            )
            return rule_says(
                "torch.mismatch-in-log", [what, watch.first], events=_ranks(odd), raw_lines=count
            )
    everybody = sorted({rank for ranks in watch.groups.values() for rank in ranks})
    if set(watch.ras) == {"OK"} and not watch.ras_dead:
        what = f"{_named(everybody)} timed out while RAS calls all {watch.ras['OK']} communicators OK"
        return rule_says(
            "torch.timeout-ras-well", [what, watch.first], events=_ranks(everybody), raw_lines=count
        )
    if behind := _behind(watch):
        what = f"{_named([event['rank'] for event in behind])} enqueued less than the others of the group"
        more = [f"{len(everybody) - len(behind)} other ranks are victims", watch.first]
        return rule_says("torch.rank-behind", [what, *more], events=behind, raw_lines=count)
    if silent := missing_of(set(everybody)):
        what = f"{len(everybody)} ranks timed out, {_named(silent)} said nothing"
        events = [{"rank": rank, "said_nothing": True} for rank in silent]
        return rule_says("torch.rank-silent", [what, watch.first], events=events, raw_lines=count)
    what = f"{_named(everybody)} timed out and none is behind"
    return rule_says("torch.timeout", [what, watch.first], events=_ranks(everybody), raw_lines=count)


def _behind(watch: Watch) -> list[dict[str, Any]]:
    """The ranks that are behind in most of the groups, with how far they are."""
    found: dict[int, list[dict[str, Any]]] = {}
    for ranks in watch.groups.values():
        for rank in behind_of({rank: known.counters() for rank, known in ranks.items()}):
            at = {"last_enqueued": ranks[rank].enqueued, "last_completed": ranks[rank].completed}
            found.setdefault(rank, []).append({"rank": rank, **at})
    most = max((len(groups) for groups in found.values()), default=0)
    return [groups[0] for _, groups in sorted(found.items()) if len(groups) == most]


def behind_of(counters: Mapping[int, Sequence[int]]) -> list[int]:
    """The ranks that are behind in the first counter in which ranks differ; -1 is unknown.

    More than half of them behind is no answer.
    """
    for values in zip(*counters.values(), strict=True):
        known = {rank: value for rank, value in zip(counters, values, strict=True) if value >= 0}
        behind = [rank for rank, value in known.items() if value < max(known.values())]
        if behind:
            return sorted(behind) if 2 * len(behind) <= len(known) else []
    return []


def missing_of(ranks: set[int]) -> list[int]:
    """Ranks that are missing between 0 and the highest: a few of many, else it is only a part of a log."""
    if len(ranks) < 4 or max(ranks) >= 4 * len(ranks):
        return []
    missing = sorted(set(range(max(ranks) + 1)) - ranks)
    return missing if 4 * len(missing) <= len(ranks) else []


def _odd_operation(ranks: dict[int, _Rank]) -> list[int]:
    """Ranks of a minority that waits in another operation, at the same sequence number."""
    calls: dict[str, dict[tuple[str, str], list[int]]] = {}
    for rank, known in ranks.items():
        number, kind, elements = known.op
        if number and kind:
            even = elements if kind in _EVEN else ""
            calls.setdefault(number, {}).setdefault((kind, even), []).append(rank)
    for same in calls.values():
        if len(same) > 1:
            fewest: list[int] = min(same.values(), key=lambda members: (len(members), members))
            return sorted(fewest)
    return []


def _ras_table(watch: Watch, table: Iterable[str]) -> None:
    for line in table:
        if row := _RAS_ROW.fullmatch(line):
            watch.ras[row["errors"]] = watch.ras.get(row["errors"], 0) + 1
        elif (dead := _RAS_DEAD.match(line)) and len(watch.ras_dead) < 4096:
            watch.ras_dead.setdefault(dead["node"], line.strip())


def _ras(watch: Watch) -> Iterator[Diagnosis]:
    """What RAS finds itself: processes that it does not reach, ranks whose operation counts differ."""
    if watch.ras_dead:
        events = [{"suspect": node} for node in watch.ras_dead]
        what = f"RAS does not reach processes on {', '.join(sorted(watch.ras_dead)[:8])}"
        yield rule_says("nccl.ras-dead", [what, *list(watch.ras_dead.values())[:2]], events=events)
    bad = {errors: count for errors, count in watch.ras.items() if errors != "OK"}
    if bad and not watch.ras_dead and not watch.timeout_lines:
        what = ", ".join(f"{count} communicators {errors}" for errors, count in sorted(bad.items()))
        yield rule_says("nccl.ras-mismatch", [f"RAS: {what}"])
    if watch.ras and not bad and not watch.timeout_lines and not watch.ras_dead:
        yield rule_says("nccl.ras-well", [f"RAS: {watch.ras['OK']} communicators OK"], event_count=0)


def _ranks(ranks: Sequence[int]) -> list[dict[str, Any]]:
    return [{"rank": rank} for rank in sorted(ranks)[:1024]]


def _named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 3, 4", "ranks 3, 4, ... (17)"."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f", ... ({len(ranks)})" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"
