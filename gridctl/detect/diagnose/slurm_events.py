"""What happened to nodes over time: who holds a node drained, and which comes back bad again and again.

Holds have owners. A monitor that finds a node well may release its own hold and no other, and a bulk
resume does not take a node out of quarantine. A return to service that ends in trouble again is what
makes a lemon; one failed job does not.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gridctl.detect.diagnose.reading import Row, rows_in_order, words_of
from gridctl.detect.diagnose.ruling import limits, rule_says
from gridctl.model.diagnosis import Diagnosis, Material

_VERBS: dict[str, set[str]] = {
    "fail": {"failed", "fail", "crash", "crashed", "segfault", "segv", "nodefail", "killed"},
    "drain": {
        "drain",
        "drained",
        "draining",
        "down",
        "offline",
        "offlined",
        "hold",
        "held",
        "cordon",
        "cordoned",
    }
    | {"quarantine", "quarantined", "isolated", "disabled"},
    "resume": {
        "resume",
        "resumed",
        "undrain",
        "undrained",
        "online",
        "uncordon",
        "uncordoned",
        "release",
        "released",
    }
    | {"returned", "return", "idle", "enabled", "readmitted", "cleared"},
    "ok": {"ok", "healthy", "passed", "pass", "recovered", "good", "well", "success"},
}
_ROOTS = "drain down offline hold held cordon quarantine isolate disable resume return release online"
_ROOTS += " job_fail crash"
_MONITORS = {
    *(
        "nhc",
        "npd",
        "monitor",
        "health",
        "healthcheck",
        "healthchecker",
        "checker",
        "watchdog",
        "gpud",
        "dcgm",
    ),
    *(
        "nvsentinel",
        "autopilot",
        "slurm",
        "slurmctld",
        "slurmd",
        "gridctl",
        "gridagent",
        "daemon",
        "bot",
        "cron",
    ),
}
_PLANNED = {"maintenance", "upgrade", "patch", "patching", "firmware", "planned", "reservation", "scheduled"}
#: What ends a job by somebody's will or by its own limits.
_OWN_SIGNALS = {2, 9, 15}
_NODES_MAX = 65_536
_HOLDS_MAX = 64


class _Node(msgspec.Struct):
    name: str
    holds: dict[str, tuple[str, bool]] = {}  #: owner -> reason, and whether a monitor owns it
    stack: list[str] = []  #: the reasons of all holds since the node was last free
    released_others: str = ""  #: a monitor that resumed the node over a person's hold
    looked: bool = False  #: a monitor acted while a person held the node
    returned: bool = False
    cycles: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=64))
    bulk: int = 0
    failures: int = 0
    drains: int = 0
    last: str = ""


def slurm_events(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: histories of drains, resumes, checks and failed jobs."""
    nodes: dict[str, _Node] = {}
    for row in rows_in_order(materials, _ROOTS):
        name, verb = row.text("host"), _verb(row)
        if name and verb and (name in nodes or len(nodes) < _NODES_MAX):
            _feed(nodes.setdefault(name, _Node(name)), row, verb)
    yield from _lemons(nodes)
    for node in nodes.values():
        people = [owner for owner, (_, monitor) in node.holds.items() if not monitor]
        if node.released_others or (people and node.looked):
            yield _ownership(node, people)


def _verb(row: Row) -> str:
    """What a record says was done, by the words of its event; "" where it says nothing of the kind."""
    for name in ("event", "action", "verb", "transition", "new_state", "what"):
        value = row.values.get(name.replace("_", ""))
        words = set(words_of(value)) if isinstance(value, str) else set()
        for verb, known in _VERBS.items():
            if words & known:
                return verb
    return ""


def _actor(row: Row, verb: str) -> tuple[str, bool]:
    """Who did it, and is it a program that watches nodes?"""
    by, reason = row.text("by"), row.text("reason")
    words = set(words_of(by))
    if not by:
        prefix = reason.partition(":")[0] if ":" in reason else ""
        words = set(words_of(row.text("event")))
        words |= set(words_of(prefix)) if len(prefix) < 24 else set()
        by = next(iter(sorted(words & _MONITORS)), "")
    elif reason.startswith("NHC:"):
        return "nhc", True  # it runs as root, and signs with that name
    return by, bool(words & _MONITORS)


def _feed(node: _Node, row: Row, verb: str) -> None:
    owner, monitor = _actor(row, verb)
    reason = row.text("reason")
    held = any(not theirs for _, theirs in node.holds.values())
    node.looked = node.looked or (monitor and held)
    node.last = verb
    if verb == "drain":
        node.drains += 1
        if node.returned and not set(words_of(reason)) & _PLANNED:
            _trouble(node, row)
        if len(node.holds) < _HOLDS_MAX:
            node.stack = node.stack if node.holds else []
            node.holds[owner] = (reason, monitor)
            node.stack.append(reason) if len(node.stack) < _HOLDS_MAX else None
    elif verb == "resume":
        node.returned = True
        node.bulk += row.get("bulk") is True
        if monitor and held:
            node.released_others = owner
        node.holds = {who: hold for who, hold in node.holds.items() if monitor and who != owner}
    elif verb == "ok" and monitor:
        node.holds.pop(owner, None)
    elif verb == "fail" and row.number("sig", "signal") not in _OWN_SIGNALS:
        node.failures += 1
        if node.returned:
            _trouble(node, row)


def _trouble(node: _Node, row: Row) -> None:
    node.returned = False
    node.cycles.append(row.time_s() or 0.0)


def _lemons(nodes: dict[str, _Node]) -> Iterator[Diagnosis]:
    limit = limits().lemon
    watched = {n.name: n.failures for n in nodes.values() if n.failures}
    found = False
    for node in nodes.values():
        last_s = node.cycles[-1] if node.cycles else 0.0
        recent = [t_s for t_s in node.cycles if last_s - t_s <= limit["window_days"] * 86400]
        if len(recent) < limit["cycles_min"]:
            continue
        found = True
        what = f"{node.name} came back into service {len(recent)} times and failed each time"
        more = f"{node.bulk} of the returns were bulk operations" if node.bulk else f"{node.drains} drains"
        watch = {name: "watch" for name in sorted(watched)[:256] if name != node.name}
        event: dict[str, Any] = {"node": node.name, "cycles": len(recent), "failures": node.failures}
        yield rule_says("slurm.lemon", [what, more], events=[{**event, "other": watch}])
    if watched and not found:
        what = ", ".join(f"{name} {count}" for name, count in sorted(watched.items())[:8])
        events = [{"node": name, "failures": count} for name, count in sorted(watched.items())]
        yield rule_says("slurm.failures-watched", [f"failed jobs: {what}"], events=events)


def _ownership(node: _Node, people: list[str]) -> Diagnosis:
    stack = node.stack
    owner = ", ".join(people) or "a person"
    what = f"{owner} holds {node.name}: {'; '.join(stack)}"
    if node.released_others:
        what = f"{node.released_others} resumed {node.name} over the hold of {owner}"
    event: dict[str, Any] = {
        "node": node.name,
        "owner": owner,
        "reasons_stack": stack,
        "final_state": "drained",
    }
    return rule_says("slurm.drain-owner", [what], events=[event])
