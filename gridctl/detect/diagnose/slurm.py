"""What Slurm says of its nodes: states as a table, and what stands in the reasons.

A reason grows as a chain, "purpose : reboot issued : reboot timed out": the last part is the state of
the matter, the first is its purpose. What Slurm wrote itself stands at the beginning of a part.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from gridctl.detect.diagnose.ruling import limits, rule_says
from gridctl.detect.diagnose.slurm_nodes import CountChanged, Node, count_changes, read_nodes
from gridctl.model.diagnosis import Diagnosis, Material

_GPU_COUNT = re.compile(
    r"gres/gpu\S{0,60} count (?:reported lower|repor\w*|too low)(?: than configured)? ?"
    r"(?:\((?P<seen>\d{1,6}) < (?P<want>\d{1,6})\))?"
)
_MEMORY = re.compile(
    r"Low RealMemory(?: \(reported:(?P<seen>\d{1,12}) < [\d.]{1,8}% of configured:(?P<want>\d{1,12})\))?"
)
_MIG = re.compile(r"\b\dg\.\d{1,3}gb\b|\bmig\b", re.IGNORECASE)
_STAGES = {
    "reboot timed out": "timed_out",
    "reboot issued": "issued",
    "reboot requested": "requested",
    "reboot complete": "complete",
    "resumetimeout reached": "resume_timed_out",
}
_HARDWARE_LOW = ("Low socket", "Low CPUs", "Low TmpDisk", "Low Cores")


class _Seen(msgspec.Struct):
    """Nodes by what their reason says."""

    gpus: dict[str, dict[str, Any]] = {}
    memory: dict[str, dict[str, Any]] = {}
    reboots: dict[tuple[str, str], list[str]] = {}  #: (purpose, stage) -> nodes
    kill: dict[str, str] = {}
    low: dict[str, str] = {}
    prolog: dict[str, str] = {}
    lines: dict[str, str] = {}  #: node -> its reason, whole


def slurm(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: Slurm's nodes, states and reasons."""
    changed = count_changes(materials)
    seen = _Seen()
    states: dict[str, Node] = {}
    tokens: list[Node] = []
    for node in read_nodes(materials):
        if node.state is not None and node.source != "log":
            if node.name:
                states[node.name] = node
            elif len(tokens) < 1024:
                tokens.append(node)
        invalid = node.source == "log" and node.state is not None and "INVALID_REG" in node.state.flags
        _reason(seen, node, invalid=invalid)
        if invalid and node.name not in changed and (count := seen.gpus.get(node.name)):
            changed[node.name] = CountChanged(node.name, count["want"] or 0, count["seen"] or 0)
    yield from _config(seen, changed)
    yield from _gpus(seen)
    yield from _reboots(seen)
    yield from _others(seen)
    if states or tokens:
        yield _table([*states.values(), *tokens])


def _reason(seen: _Seen, node: Node, *, invalid: bool) -> None:
    if not node.reason:
        return
    parts = [part.strip() for part in re.split(r" : |, (?=[Ll]ow |gres/)", node.reason)]
    seen.lines[node.name] = node.reason
    stage = _STAGES.get(parts[-1].lower())
    if stage is not None:
        purpose = parts[0] if len(parts) > 1 else ""
        seen.reboots.setdefault((purpose, stage), []).append(node.name)
        return
    for part in parts:
        if match := _GPU_COUNT.match(part):
            known = {"seen": _int(match["seen"]), "want": _int(match["want"])}
            mig = bool(_MIG.search(part) or _MIG.search(node.gres))
            seen.gpus[node.name] = {"node": node.name, **known, "partitioned": mig or invalid}
        elif match := _MEMORY.match(part):
            seen.memory[node.name] = {
                "node": node.name,
                "kind": "memory_missing",
                "reported_mb": _int(match["seen"]),
                "configured_mb": _int(match["want"]),
            }
        elif part.startswith("Kill task failed"):
            seen.kill[node.name] = part
        elif part.startswith(_HARDWARE_LOW):
            seen.low[node.name] = part
        elif part.startswith(("Prolog error", "Epilog error", "prolog error", "epilog error")):
            seen.prolog[node.name] = part


def _int(text: str | None) -> int | None:
    return int(text) if text else None


def _config(seen: _Seen, changed: dict[str, CountChanged]) -> Iterator[Diagnosis]:
    """A registration that Slurm calls invalid, or partitioned GPUs: the configuration must follow."""
    for name, count in seen.gpus.items():
        if count["partitioned"] and count["seen"] and name not in changed:
            changed[name] = CountChanged(name, count["want"], count["seen"])
    found = {name: count for name, count in changed.items() if count.seen}
    for name in found:
        seen.gpus.pop(name, None)
    if found:
        what = [
            f"{c.node}: {c.seen} seen, {c.want} configured; ask NVML for its slices" for c in found.values()
        ]
        events = [{"node": c.node, "seen": c.seen, "want": c.want} for c in found.values()]
        yield rule_says("slurm.config-mismatch", what, events=events, event_count=len(found))


def _gpus(seen: _Seen) -> Iterator[Diagnosis]:
    if not seen.gpus:
        return
    events: list[dict[str, Any]] = []
    rules = set()
    for name, count in seen.gpus.items():
        rule, first, fault = "slurm.gpus-unknown", "ask the node", "unknown"
        if count["seen"] is not None:
            none = count["seen"] == 0
            rule = "slurm.gpus-none" if none else "slurm.gpus-some"
            first = "restart_slurmd_after_driver_check" if none else "look_for_lost_gpu"
            fault = "config" if none else "node"
        rules.add(rule)
        counts = {"seen": count["seen"], "want": count["want"]}
        events.append({"node": name, **counts, "first_try": first, "fault": fault})
    what = [f"{event['node']}: {seen.lines[event['node']]}" for event in events]
    rule = rules.pop() if len(rules) == 1 else "slurm.gpus-differ"
    yield rule_says(rule, what, events=events, event_count=len(events))


def _reboots(seen: _Seen) -> Iterator[Diagnosis]:
    failed = {key: names for key, names in seen.reboots.items() if key[1].endswith("timed_out")}
    running = {key: names for key, names in seen.reboots.items() if key[1] in ("issued", "requested")}
    for rule, found in (("slurm.reboot-failed", failed), ("slurm.reboot-running", running)):
        if not found:
            continue
        events: list[dict[str, Any]] = [
            {"nodes": names, "purpose": purpose, "stage": stage} for (purpose, stage), names in found.items()
        ]
        events += seen.memory.values() if rule == "slurm.reboot-failed" else ()
        what = [f"{', '.join(names[:8])}: {purpose}: {stage}" for (purpose, stage), names in found.items()]
        count = sum(len(names) for names in found.values())
        yield rule_says(rule, what, events=events, event_count=count)


def _others(seen: _Seen) -> Iterator[Diagnosis]:
    little = limits().fleet["memory_share_config_min"]
    for name, event in seen.memory.items():
        got, want = event["reported_mb"], event["configured_mb"]
        small = bool(got and want and got >= little * want)
        rule = "slurm.memory-config" if small else "slurm.memory-missing"
        yield rule_says(rule, [f"{name}: {seen.lines[name]}"], events=[event])
    for rule, nodes in (
        ("slurm.kill-failed", seen.kill),
        ("slurm.hardware-low", seen.low),
        ("slurm.prolog-error", seen.prolog),
    ):
        if nodes:
            what = [f"{name}: {text}" for name, text in nodes.items()]
            events = [{"node": name, "reason": text} for name, text in nodes.items()]
            yield rule_says(rule, what, events=events, event_count=len(nodes))


def _table(nodes: Sequence[Node]) -> Diagnosis:
    """All nodes with their states taken apart."""
    events = [_entry(node) for node in nodes]
    named = any(node.name for node in nodes)
    count: Callable[[Iterable[bool]], int] = sum
    facts = [node.state for node in nodes if node.state is not None]
    what = (
        f"{len(nodes)} {'nodes' if named else 'states'}: {count(s.available for s in facts)} available, "
        f"{count(s.drained for s in facts)} drained, {count(s.draining for s in facts)} draining, "
        f"{count('NOT_RESPONDING' in s.flags for s in facts)} not responding"
    )
    return rule_says(
        "slurm.states" if named else "slurm.state-words", [what], events=events, event_count=None
    )


def _entry(node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {"node": node.name, **(node.state.facts() if node.state else {})}
    if node.reason:
        entry |= {"reason": node.reason, "reason_user": node.user}
    if node.gpus_used:
        entry["gpu_idx_used"] = list(node.gpus_used)
    return entry
