"""Nodes as Slurm describes them: scontrol, sinfo, sinfo -R, the REST service, slurmctld's log."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import msgspec

from gridctl.detect.diagnose.documents import documents, looks_like_json
from gridctl.detect.diagnose.reading import (
    bare,
    field,
    hosts_in,
    ranks_in,
    rows_of,
)
from gridctl.detect.diagnose.slurm_states import State, parse_state
from gridctl.detect.diagnose.texts import all_lines, holds, lines_with
from gridctl.model.diagnosis import Material

NODES_MAX = 100_000
_SINFO_CHARS_MAX = 4_000_000
_HEAD_LINES = 20
_STAMP = re.compile(r" ?\[(?P<user>[\w.@+-]{1,64})@(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\]\s*$")
_AFTER_REASON = re.compile(r" (?:Comment|AdminComment|Extra|InstanceId|InstanceType)=")
_INDICES = re.compile(r"gpu(?::[\w.-]{1,40})?:\d{1,4}\(IDX:(?P<indices>[\d,-]{1,200})\)")
_SINFO_HEAD = {"NODELIST", "HOSTNAMES", "STATE", "REASON", "NODE", "PARTITION", "NODES", "TIMESTAMP", "USER"}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|Unknown|None")
_NODE_NAME = re.compile(r"[A-Za-z][\w.-]{0,100}(?:\[[\d,-]{1,500}\])?[\w.-]{0,60}")
_DEVICE_KEYS = ("hca", "probe", "rank", "gpu", "endpoint", "port", "device", "nic", "step", "interface")
_CTLD_WORDS = ("gres/", "etting node", "reason set to")
_CTLD_COUNT = re.compile(
    r"(?:error: )?(?:\w{1,60}: )?gres/(?P<gres>gpu[\w:./-]{0,60}): Count changed on node "
    r"(?P<node>[\w.-]{1,100}) \((?P<want>\d{1,6}) != (?P<seen>\d{1,6})\)"
)
_CTLD_STATE = re.compile(
    r"(?:error: )?(?:\w{1,60}: )?[Ss]etting node (?P<node>[\w.-]{1,100}) state to (?P<state>\w{2,20}) "
    r"with reason: ?(?P<reason>.*)"
)
_CTLD_REASON = re.compile(
    r"(?:error: )?(?:\w{1,60}: )?[Nn]odes? (?P<node>[\w.,\[\]-]{1,500}) reason set to: ?(?P<reason>.*)"
)


class Node(msgspec.Struct, frozen=True):
    """One node, as one source has it."""

    name: str
    state: State | None = None
    reason: str = ""
    user: str = ""  #: who gave the reason
    gpus_used: tuple[int, ...] = ()
    gres: str = ""
    source: str = ""


class CountChanged(msgspec.Struct, frozen=True):
    """slurmctld's log: a node registered with another number of GPUs than configured."""

    node: str
    want: int
    seen: int


def read_nodes(materials: Sequence[Material]) -> Iterator[Node]:
    """All nodes that any of Slurm's forms describes; one node may come several times."""
    count = 0
    for material in materials:
        for source in (_scontrol, _json, _sinfo, _controller_log):
            for node in source(material):
                count += 1
                if count > NODES_MAX:
                    return
                yield node


def count_changes(materials: Sequence[Material]) -> dict[str, CountChanged]:
    """By node: what slurmctld's log says of a changed number of GPUs."""
    found: dict[str, CountChanged] = {}
    for material in materials:
        for line in lines_with(material, "Count changed on node"):
            if (match := _CTLD_COUNT.match(bare(line))) and len(found) < NODES_MAX:
                found[match["node"]] = CountChanged(match["node"], int(match["want"]), int(match["seen"]))
    return found


def _scontrol(material: Material) -> Iterator[Node]:
    """`scontrol show node`, also with -o: a record begins where a line begins with NodeName=."""
    if not holds(material, "NodeName="):
        return
    record: list[str] = []
    for line in all_lines(material):
        if line.lstrip().startswith("NodeName="):
            yield from _record(record)
            record = [line]
        elif not line.strip():
            yield from _record(record)
            record = []
        elif record and len(record) < 64:
            record.append(line)
    yield from _record(record)


def _record(lines: list[str]) -> Iterator[Node]:
    name = _value(lines, "NodeName")
    if not name:
        return
    used = _INDICES.search(_value(lines, "GresUsed"))
    reason, user = _reason(next((line for line in lines if _has_reason(line)), ""))
    for host in hosts_in(name):
        yield Node(
            name=host,
            state=parse_state(_value(lines, "State")),
            reason=reason,
            user=user,
            gpus_used=tuple(sorted(ranks_in(used["indices"]))) if used else (),
            gres=_value(lines, "Gres"),
            source="scontrol",
        )


def _value(lines: list[str], key: str) -> str:
    """The first value of a key: what stands later may be a person's text."""
    for line in lines:
        if match := re.search(rf"(?:^|\s){key}=(\S*)", line):
            return match[1]
    return ""


def _has_reason(line: str) -> bool:
    return line.lstrip().startswith("Reason=") or " Reason=" in line


def _reason(line: str) -> tuple[str, str]:
    """The reason and who gave it, of "... Reason=free text [user@time]"."""
    text = (" " + line.lstrip()).partition(" Reason=")[2]
    if match := _AFTER_REASON.search(text):
        text = text[: match.start()]
    return without_stamp(text)


def without_stamp(text: str) -> tuple[str, str]:
    """A reason without Slurm's " [user@time]" at its end, and that user."""
    match = _STAMP.search(text)
    return (text[: match.start()].strip(), match["user"]) if match else (text.strip(), "")


def _json(material: Material) -> Iterator[Node]:
    described = False
    for document in documents(material, "state"):
        nodes = field(document, "nodes", "sinfo") if isinstance(document, dict) else None
        if isinstance(nodes, dict):
            nodes = [{"name": name, **node} for name, node in nodes.items() if isinstance(node, dict)]
        for node in nodes if isinstance(nodes, list) else ():
            if isinstance(node, dict):
                described = True
                yield from _rest(node)
    if not described and looks_like_json(material):
        yield from _json_rows(material)


def _json_rows(material: Material) -> Iterator[Node]:
    for row in rows_of(material, "state"):
        if any(row.get(key) is not None for key in _DEVICE_KEYS):
            continue
        value = row.get("state", "node_state")
        state = parse_state(value, row.get("state_flags", "flags")) if value is not None else None
        name = row.text("host") or row.text("name")
        if state is not None and (name or (isinstance(value, str) and "+" in value)):
            reason, user = without_stamp(row.text("reason"))
            yield Node(name=name, state=state, reason=reason, user=row.text("by") or user, source="rows")


def _rest(node: dict[str, object]) -> Iterator[Node]:
    """A node of slurmrestd or `sinfo --json`: the state is a word with flags beside it, or a list."""
    state = field(node, "state", "node_state")
    flags = field(node, "state_flags", "flags")
    if isinstance(state, dict):
        state = field(state, "state", "current")
    name = field(node, "name", "hostname", "node", "nodes")
    parsed = parse_state(state if state is not None else [], flags)
    if not isinstance(name, str) or (parsed is None and state is None):
        return
    reason, user = without_stamp(str(field(node, "reason") or ""))
    used = _INDICES.search(str(field(node, "gres_used") or "")[:2000])
    yield Node(
        name=name,
        state=parsed,
        reason=reason,
        user=str(field(node, "reason_set_by_user", "reason_user") or user),
        gpus_used=tuple(sorted(ranks_in(used["indices"]))) if used else (),
        gres=str(field(node, "gres") or "")[:200],
        source="rest",
    )


def _sinfo(material: Material) -> Iterator[Node]:
    """sinfo with a heading, in any order of columns; or two columns without one, names and states."""
    if looks_like_json(material):
        return
    rows = (line for line in _first_lines(material) if line.strip())
    first = list(islice(rows, _HEAD_LINES))
    heads = [at for at, line in enumerate(first) if _heading(line)]
    if heads:
        head = _heading(first[heads[0]])
        for line in chain(first[heads[0] + 1 :], rows):
            yield from _columns(head, line)
        return
    listed = (line for line in islice(chain(first, rows), NODES_MAX) if not line.startswith("#"))
    some = list(islice(listed, 50))
    for more in (some, listed):  # most texts are no such list: the first lines tell
        some = some if more is some else [*some, *more]
        found = [pair for pair in map(_pair, some) if pair is not None]
        if not found or len(found) < 0.8 * len(some):
            return
    yield from found


def _first_lines(material: Material) -> Iterator[str]:
    chars = 0
    for line in all_lines(material):
        chars += len(line) + 1
        if chars > _SINFO_CHARS_MAX:
            return
        yield line


def _heading(line: str) -> list[str]:
    cells = [cell.strip().upper() for cell in (line.split("|") if "|" in line else line.split())]
    places = {"NODELIST", "HOSTNAMES", "NODE", "NODES", "HOSTNAME"} & set(cells)
    return cells if places and {"STATE", "REASON"} & set(cells) and len(set(cells) & _SINFO_HEAD) > 1 else []


def _columns(head: list[str], line: str) -> Iterator[Node]:
    """One line below a heading. Only the reason may hold blanks: cells are counted from both sides of it."""
    if "|" in line:
        cells = [cell.strip() for cell in line.split("|")]
    else:
        words = line.split()
        spare = len(words) - len(head)
        if spare < 0:
            return
        at = head.index("REASON") if "REASON" in head else len(head) - 1
        cells = [*words[:at], " ".join(words[at : at + spare + 1]), *words[at + spare + 1 :]]
    if len(cells) != len(head):
        return
    row = dict(zip(head, cells, strict=True))
    names = next(
        (row[key] for key in ("NODELIST", "HOSTNAMES", "HOSTNAME", "NODE", "NODES") if key in row), ""
    )
    state = parse_state(row.get("STATE", ""))
    if not _NODE_NAME.match(names) or (state is None and "REASON" not in row):
        return
    if "TIMESTAMP" in row and not _TIME.fullmatch(row["TIMESTAMP"]):
        return
    reason = row.get("REASON", "")
    reason, user = without_stamp("" if reason in ("none", "None") else reason)
    for host in hosts_in(names):
        yield Node(name=host, state=state, reason=reason, user=row.get("USER", user), source="sinfo")


def _pair(line: str) -> Node | None:
    """A name and a state in either order, separated by a bar, a comma or blanks."""
    bars = [cell.strip() for cell in line.split("|")]
    cells = bars if len(bars) > 1 else [cell for cell in re.split(r"\s*[,;]\s*|\s+", line.strip()) if cell]
    if len(cells) != 2 and len(bars) < 2:
        return None
    reason, user = without_stamp(cells[2] if len(cells) > 2 else "")
    for name, text in ((cells[0], cells[1]), (cells[1], cells[0])):
        state = parse_state(text)
        if state is not None and _NODE_NAME.fullmatch(name) and parse_state(name) is None:
            return Node(name=name, state=state, reason=reason, user=user, source="sinfo")
    return None


def _controller_log(material: Material) -> Iterator[Node]:
    """slurmctld's log: a state that it sets, with the reason."""
    for line in lines_with(material, *_CTLD_WORDS):
        message = bare(line)
        if match := _CTLD_STATE.match(message):
            state = parse_state(match["state"])
            yield Node(
                name=match["node"], state=state, reason=match["reason"].strip(), user="slurm", source="log"
            )
        elif match := _CTLD_REASON.match(message):
            for host in hosts_in(match["node"]):
                yield Node(name=host, reason=match["reason"].strip(), source="log")
