"""The watchdog: what all nodes tell, in; what it means and what ought to be done, out.

A node is `blind` while nothing is heard of it, `faulty` after a decisive signal or two independent
layers, `suspect` with anything else that weighs, and else `healthy`. Only `faulty` asks for a swap.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import msgspec

from gridagent.wire import StreamRecord
from gridctl.detect.device import Cleared, Device
from gridctl.detect.kernel import KernelLog, suppressed
from gridctl.detect.policy import DetectPolicy
from gridctl.model.findings import (
    SEVERITIES,
    Decision,
    Finding,
    Output,
    Suppressed,
    Verdict,
    WatchedNode,
)

_WEIGHS = SEVERITIES.index("warning")
_CRITICAL = SEVERITIES.index("critical")
_HOLDING = {"drain": "drained by a person", "maintenance_begin": "in maintenance"}
_RELEASING = ("undrain", "maintenance_end")
_DEVICES_MAX = 1024


class Watch:
    """Feeds on stream records. Equal inputs give equal outputs, and no node influences another one."""

    def __init__(
        self,
        policy: DetectPolicy,
        fleet: Iterable[WatchedNode] = (),
        jobs: Mapping[str, set[str]] | None = None,
    ) -> None:
        """`jobs`: node -> the jobs that have a rank on it, where that is known."""
        self._policy = policy
        self._jobs = jobs or {}
        self._nodes: dict[str, _Node] = {}
        for node in fleet:
            self.update(node)

    def feed(self, record: StreamRecord, now_unix_s: float | None = None) -> list[Output]:
        """Takes one record. `now_unix_s`: the reader's clock (default: the record's own time).

        The reader's clock decides who is silent, the record's own time everything else.
        """
        node = self._node(record.node)
        now_unix_s = record.t_unix_s if now_unix_s is None else now_unix_s
        return list(node.feed(record, now_unix_s))

    def tick(self, now_unix_s: float) -> list[Output]:
        """Lets time pass: nodes that have been silent for too long become blind."""
        return [out for name in sorted(self._nodes) for out in self._nodes[name].tick(now_unix_s)]

    def update(self, node: WatchedNode) -> None:
        """A node is new, or something about it has changed (a spare took a rank)."""
        self._node(node.name).update(node)

    def hold(self, node: str, reason: str) -> None:
        """No decision about this node until `release`: it is drained, or was decided on before."""
        self._node(node).held = reason

    def release(self, node: str) -> None:
        """Ends a `hold`."""
        self._node(node).held = ""

    def verdict(self, node: str) -> str:
        """healthy, suspect, faulty or blind; a node that was never heard of is blind."""
        return self._nodes[node].verdict if node in self._nodes else "blind"

    def findings(self, node: str) -> list[Finding]:
        """What holds for a node at present, the first cause first."""
        return list(self._nodes[node].findings.values()) if node in self._nodes else []

    def _node(self, name: str) -> "_Node":
        if name not in self._nodes:
            self._nodes[name] = _Node(self._policy, WatchedNode(name=name))
        return self._nodes[name]


class _Node:
    def __init__(self, policy: DetectPolicy, facts: WatchedNode) -> None:
        self.facts = facts
        self.held = ""
        self.verdict = "blind"
        self.findings: dict[tuple[str, str, str], Finding] = {}  #: by device, kind and layer
        self._policy = policy
        self._boot = ""
        self._earlier_boots: set[str] = set()
        self._heard_unix_s = float("-inf")
        self._forget()

    def _forget(self) -> None:
        """A reboot: what was known of the devices belongs to the boot before."""
        self.findings.clear()
        self._devices: dict[str, Device] = {}
        self._device_names: dict[str, str] = {}
        self._log = KernelLog(self._policy, self.facts.name, self._device_of)
        self._decided = False
        self._said: set[tuple[str, str, str]] = set()

    def update(self, facts: WatchedNode) -> None:
        if self.facts.spare and not facts.spare:
            self._decided = False  # a rank has come: what was right for a spare is not enough
        self.facts = facts

    def feed(self, record: StreamRecord, now_unix_s: float) -> Iterator[Output]:
        self._heard_unix_s = max(self._heard_unix_s, now_unix_s)
        if record.boot in self._earlier_boots:
            return  # told late: it was true before the reboot
        if record.boot != self._boot:
            if self._boot:
                self._earlier_boots.add(self._boot)
                self._forget()
            self._boot = record.boot
        for found in self._observe(record):
            if isinstance(found, Cleared):
                self.findings.pop((str(record.v.get("device")), found.kind, "device"), None)
            elif isinstance(found, Suppressed):
                yield from self._once(found)
            else:
                yield from self._take(found)
        yield from self._judge(record.t_unix_s)

    def tick(self, now_unix_s: float) -> Iterator[Output]:
        silent_s = now_unix_s - self._heard_unix_s
        if self.verdict != "blind" and silent_s > self._policy.thresholds.heartbeat.silent_s:
            why = f"nothing was heard for {silent_s:.0f} s: unknown, which is not the same as faulty"
            yield self._verdict(now_unix_s, "blind", [why], "heartbeat.silent")

    def _observe(self, record: StreamRecord) -> Iterable[Finding | Suppressed | Cleared]:
        v = record.v
        if record.kind == "log" and isinstance(line := v.get("line"), str):
            return self._log.feed(record.t_unix_s, line) if v.get("source") == "kmsg" else ()
        if record.kind == "sample" and isinstance(name := v.get("device"), str):
            return self._sample(record.t_unix_s, name, v)
        if record.kind == "note":
            action = str(v.get("action"))
            if action in _HOLDING:
                self.held = _HOLDING[action]
            elif action in _RELEASING:
                self.held = ""
        if record.kind == "gap":
            return (self._missing(record),)
        return ()

    def _sample(self, t_unix_s: float, name: str, v: dict[str, Any]) -> Iterable[Finding | Cleared]:
        values = v.get("v")
        if not name.startswith("gpu:") or not isinstance(values, dict):
            return ()
        if name not in self._devices:
            if len(self._devices) >= _DEVICES_MAX:
                return ()
            self._devices[name] = Device(self._policy, self.facts.name, name)
        if isinstance(pci := v.get("pci"), str) and len(self._device_names) < _DEVICES_MAX:
            self._device_names[pci] = name
        return self._devices[name].feed(t_unix_s, values)

    def _device_of(self, pci: str) -> str:
        return self._device_names.get(pci) or (f"pci:{pci}" if pci else "node")

    def _missing(self, record: StreamRecord) -> Suppressed:
        return Suppressed(
            t_unix_s=record.t_unix_s,
            node=self.facts.name,
            device="node",
            kind="missing_data",
            why=[f"{record.v.get('records')} records were lost: what they said is unknown"],
            rule="stream.gap",
        )

    def _once(self, out: Suppressed) -> Iterator[Output]:
        """Says why something counts for nothing, the first time."""
        key = (out.device, out.kind, out.rule)
        if key not in self._said:
            if len(self._said) >= _DEVICES_MAX:
                self._said.clear()
            self._said.add(key)
            yield out

    def _take(self, found: Finding) -> Iterator[Output]:
        """Keeps a finding; says so if it is new, or weighs more than before."""
        key = (found.device, found.kind, found.layer)
        known = self.findings.get(key)
        if known is None and len(self.findings) >= _DEVICES_MAX:
            return
        advised = known is not None and found.rule != known.rule and found.rule.startswith(known.rule)
        if known is None or advised or _weight(found) > _weight(known):
            self.findings[key] = found
            yield found
        else:
            self.findings[key] = msgspec.structs.replace(known, t_unix_s=found.t_unix_s)  # seen again

    def _judge(self, t_unix_s: float) -> Iterator[Output]:
        grounds, rule = self._grounds()
        if grounds:
            state, why = "faulty", [line for finding in grounds for line in finding.why]
        elif weighing := [f for f in self.findings.values() if SEVERITIES.index(f.severity) >= _WEIGHS]:
            state, why, rule = "suspect", [line for f in weighing for line in f.why], weighing[0].rule
        else:
            state, why, rule = "healthy", ["nothing that weighs is known"], ""
        if state != self.verdict:
            yield self._verdict(t_unix_s, state, why, rule)
        if grounds and not self._decided:
            yield from self._decide(t_unix_s, grounds)

    def _grounds(self) -> tuple[list[Finding], str]:
        """The findings that make the node faulty, the first cause first, and the rule; [] if none."""
        decisive = [finding for finding in self.findings.values() if finding.preempt_job]
        if decisive:
            return decisive, decisive[0].rule
        grave = [
            finding
            for finding in self.findings.values()
            if SEVERITIES.index(finding.severity) >= _CRITICAL and finding.fault not in ("app", "config")
        ]
        window_s = self._policy.thresholds.two_layers.window_s
        for one, other in combinations(grave, 2):
            together = one.device == other.device or "node" in (one.device, other.device)
            near = abs(one.t_unix_s - other.t_unix_s) <= window_s
            if one.layer != other.layer and together and near:
                return [one, other], "two-layers"
        return [], ""

    def _decide(self, t_unix_s: float, grounds: list[Finding]) -> Iterator[Output]:
        cause = grounds[0]
        if self.held:
            why = f"the node is held: {self.held}"
            yield from self._once(suppressed(cause, why, rule="held"))
            return
        self._decided = True
        others = [f for f in self.findings.values() if f not in grounds and f.device == cause.device]
        yield Decision(
            t_unix_s=t_unix_s,
            node=self.facts.name,
            device=cause.device,
            kind=cause.kind,
            severity=max((f.severity for f in grounds), key=SEVERITIES.index),
            action=cause.action,
            preempt_job=not self.facts.spare,
            when="before_admission" if self.facts.spare else "now",
            why=[line for finding in [*grounds, *others] for line in finding.why],
            rule="decisive" if cause.preempt_job else "two-layers",
            decision="quarantine" if self.facts.spare else "swap_now",
            rules=[finding.rule for finding in [*grounds, *others]],
        )

    def _verdict(self, t_unix_s: float, state: str, why: list[str], rule: str) -> Verdict:
        self.verdict = state
        return Verdict(t_unix_s=t_unix_s, node=self.facts.name, device="node", kind=state, why=why, rule=rule)


def _weight(finding: Finding) -> tuple[bool, int]:
    return (finding.preempt_job, SEVERITIES.index(finding.severity))
