"""One node under watch: its findings, its verdict, and what ought to be done about it."""

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import chain
from sys import intern
from typing import Any

import msgspec

from gridagent.signals.values import number
from gridagent.wire import StreamRecord
from gridctl.detect.blind import Blind
from gridctl.detect.device import Cleared, Device
from gridctl.detect.grounds import grounds
from gridctl.detect.heartbeat import Observers, Rhythm
from gridctl.detect.kernel import KernelLog, suppressed, told_late
from gridctl.detect.levels import Levels
from gridctl.detect.memory import Memory
from gridctl.detect.policy import DetectPolicy
from gridctl.detect.sources import Sources
from gridctl.detect.stale import Stale
from gridctl.detect.still import Shape, Still, Value, comparable
from gridctl.model.actions import stronger
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
#: What a note begins and ends, and what that means for decisions.
_HOLDING = {
    "drain": ("drain", "drained by a person"),
    "maintenance_begin": ("maintenance", "in maintenance"),
    "reboot": ("reboot", "a planned reboot"),
}
_RELEASING = {"undrain": "drain", "maintenance_end": "maintenance"}
_GONE = ("node", "peer_unreachable", "heartbeat")
#: The kernel's log, and what sources of GPUs say: NVML tells Xids in its form where no kernel log is read.
_KERNEL_LOGS = ("kmsg", "nvml", "amdsmi")
_DEVICES_MAX = 1024
_BOOTS_MAX = 256
_AGAIN_S = 3600.0

#: The rule and the reason why a decision on these grounds is not made; None: it is.
Gate = Callable[[float, WatchedNode, list[Finding], str], tuple[str, str] | None]


class NodeWatch:
    """What all sources say of one node. `gate` asks the fleet's rules before a decision."""

    def __init__(self, policy: DetectPolicy, facts: WatchedNode, gate: Gate) -> None:
        self.facts = facts
        self.holds: dict[str, str] = {}  #: owner -> in words; each owner ends its own hold only
        self.verdict = "blind"
        self.observers = Observers()
        self.findings: dict[tuple[str, str, str], Finding] = {}  #: by device, kind and layer
        self._policy = policy
        self._gate = gate
        self._boot = ""
        self._boot_unix_s = float("-inf")
        self._earlier_boots: dict[str, None] = {}
        self.heard_unix_s = float("-inf")  #: by the reader's clock
        self.busy_unix_s = float("-inf")  #: when a GPU was last seen in use, by the reader's clock
        self._busy_from_unix_s: dict[str, float] = {}  #: GPU -> since when each of its samples was busy
        self.explained_unix_s = float("-inf")  #: when something was last said that may end a job, likewise
        self._rhythm = Rhythm()
        self._stale = Stale()
        self._beats = False
        self._forget()

    def _forget(self) -> None:
        """A reboot, or a person's word that it is repaired: what was known of the devices is over."""
        self._calm = False  #: no decision waits: what tells nothing new has no consequence
        self.findings.clear()
        self._devices: dict[str, Device] = {}
        self._device_names: dict[str, str] = {}
        self._levels: dict[str, Levels] = {}
        self._still: dict[str, Still] = {}
        self._blind = Blind(self.facts.name, self._policy.thresholds.blind)
        self._memory = Memory(self._policy.thresholds.memory_trend, self.facts.name)
        self._log = KernelLog(self._policy, self.facts.name, self._device_of)
        self._late_log = KernelLog(self._policy, self.facts.name, self._device_of)
        self._sources = Sources(self._policy.sources, self.facts.name)
        self._decided = False
        self._said: dict[tuple[str, str, str], float] = {}

    def update(self, facts: WatchedNode) -> None:
        if self.facts.spare and not facts.spare:
            self._decided = self._calm = False  # a rank has come: what was right for a spare is not enough
        self.facts = facts

    def follow(self, policy: DetectPolicy) -> None:
        """What Xids mean from now on."""
        self._policy = policy
        self._log.follow(policy)
        self._late_log.follow(policy)

    def feed(self, record: StreamRecord, now_unix_s: float) -> Iterator[Output]:
        self.heard_unix_s = max(self.heard_unix_s, now_unix_s)
        if record.boot in self._earlier_boots:
            return  # told late: it was true before the reboot
        if record.boot != self._boot:
            self._booted(record)
        calm = self._calm
        if record.t_unix_s - self._boot_unix_s >= self._policy.thresholds.boot.grace_s:
            self.holds.pop("settling", None)
        if record.kind == "beat":
            self._beats = True
            self._rhythm.beat(now_unix_s, self._policy.thresholds.heartbeat)
        if _GONE in self.findings and (record.kind == "beat" or not self._beats):
            del self.findings[_GONE]
            calm = False
            if not self._grounds()[0]:
                self._decided = False  # it is back: the next silence is another one
        for found in self._observe(record):
            calm = False
            if isinstance(found, Cleared):
                device = found.device or str(record.v.get("device"))
                self.findings.pop((device, found.kind, found.layer), None)
            elif isinstance(found, Suppressed):
                self.explained_unix_s = self.heard_unix_s
                yield from self._once(found)
            else:
                yield from self._take(found)
        others = self.findings.keys() - {_GONE}
        if self.verdict == "blind" and self._beats and record.kind != "beat" and not others:
            return  # its heart is not back yet: a log line or a step says nothing about the whole
        if calm and self._calm and self.verdict != "blind":
            return  # all is as it was when it was judged before
        yield from self._judge(record.t_unix_s)

    def _booted(self, record: StreamRecord) -> None:
        if self._boot:
            self._earlier_boots[self._boot] = None
            if len(self._earlier_boots) > _BOOTS_MAX:
                del self._earlier_boots[next(iter(self._earlier_boots))]
            self._forget()
            self._busy_from_unix_s.clear()
            self._boot_unix_s = record.t_unix_s
            self._stale.booted(record.t_unix_s)
            if self.holds.pop("reboot", None):
                self.holds["settling"] = "coming up after a planned reboot"
        self._boot = record.boot

    @property
    def heard(self) -> bool:
        return self.heard_unix_s > float("-inf")

    def silent_s(self, now_unix_s: float) -> float:
        """For how long nothing was heard; 0 where that is not too long, or the node was never heard of."""
        silent_s = now_unix_s - self.heard_unix_s
        if silent_s == float("inf"):
            return 0.0
        return silent_s if self._rhythm.silent(silent_s, self._policy.thresholds.heartbeat) else 0.0

    def busy(self, since_unix_s: float) -> bool:
        """Was a GPU in use at that time, in every sample since, and is that known of a sample after it?"""
        if self.busy_unix_s < since_unix_s:
            return False
        return any(begin_unix_s <= since_unix_s for begin_unix_s in self._busy_from_unix_s.values())

    def tick(self, now_unix_s: float) -> Iterator[Output]:
        """Lets time pass. `now_unix_s` is the reader's clock."""
        silent_s = self.silent_s(now_unix_s)
        if not silent_s:
            return
        limits = self._policy.thresholds.heartbeat
        if self.verdict != "blind":
            phi = self._rhythm.phi(silent_s, limits)
            silence = f"nothing was heard for {silent_s:.0f} s (phi {phi:.1f})"
            why = f"{silence}: unknown, which is not the same as faulty"
            yield self._verdict(now_unix_s, "blind", [why], "heartbeat.silent")
        others = self.observers.failing(limits.misses)
        if (
            len(others) >= limits.observers
            and self.observers.answered_s <= self.heard_unix_s + limits.silent_s
        ):
            yield from self._unreachable(now_unix_s, self._gone(now_unix_s, silent_s, others))

    def _unreachable(self, now_unix_s: float, found: Finding) -> Iterator[Output]:
        """It asks for a swap only if that may be decided: a silence of many, or a planned one, is not."""
        if self.holds:
            why = f"the node is held: {', '.join(self.holds.values())}"
            yield from self._once(suppressed(found, why, rule="held"))
            return
        known = self.findings.setdefault(_GONE, found)
        decided = [] if self._decided else list(self._decide(now_unix_s, [known], found.rule))
        if known is found:
            moves = any(out.preempt_job for out in decided)
            yield found if moves else msgspec.structs.replace(found, preempt_job=False)
        yield from decided

    def _gone(self, now_unix_s: float, silent_s: float, others: list[str]) -> Finding:
        return Finding(
            t_unix_s=now_unix_s,
            node=self.facts.name,
            device="node",
            kind="peer_unreachable",
            severity="critical",
            action="isolate_suspect_peer",
            preempt_job=True,
            when="now",
            why=[f"nothing was heard for {silent_s:.0f} s, and {', '.join(others[:8])} cannot reach it"],
            rule="heartbeat.two-observers",
            layer="heartbeat",
            fault="node",
        )

    def _observe(self, record: StreamRecord) -> Iterable[Finding | Suppressed | Cleared]:
        v = record.v
        if record.kind == "log" and isinstance(line := v.get("line"), str):
            return self._line(record.t_unix_s, v.get("source"), line, number(v.get("late_s")) or 0.0)
        if record.kind == "sample" and isinstance(name := v.get("device"), str):
            return self._sample(record.t_unix_s, intern(name), v)  # a fleet has the same few names
        if record.kind == "note":
            self._noted(record.t_unix_s, str(v.get("action")))
            return self._sources.note(record.t_unix_s, v)
        if record.kind == "gap":
            return (self._missing(record),)
        return ()

    def _line(
        self, t_unix_s: float, source: object, line: str, late_s: float
    ) -> Iterator[Finding | Suppressed | Cleared]:
        if source not in _KERNEL_LOGS:
            return
        for found in self._sources.line(t_unix_s, str(source), line):
            settling = t_unix_s - self._boot_unix_s < self._policy.thresholds.boot.grace_s
            if settling and isinstance(found, Finding):
                yield suppressed(found, "the node comes up", rule="boot.grace")
            else:
                yield found
        yield from self._kernel(t_unix_s, line, late_s)

    def _kernel(self, t_unix_s: float, line: str, late_s: float) -> Iterator[Finding | Suppressed]:
        if not (because := self._stale.before(t_unix_s, line)):
            late = late_s > self._policy.thresholds.late.decisive_max_s
            for found in (self._late_log if late else self._log).feed(t_unix_s, line):
                yield told_late(found, late_s, decisive=not late) if late_s > 0 else found
            return
        for found in KernelLog(self._policy, self.facts.name, self._device_of).feed(t_unix_s, line):
            yield found if isinstance(found, Suppressed) else suppressed(found, because, rule="stale")

    def _noted(self, t_unix_s: float, action: str) -> None:
        """A person's hold lasts until its own end; whoever ends it says that the node is sound."""
        if action in _HOLDING:
            owner, words = _HOLDING[action]
            self.holds[owner] = words
        elif self.holds.pop(_RELEASING.get(action, ""), None) is not None:
            self._forget()
            self._stale.repaired(t_unix_s)

    def _sample(self, t_unix_s: float, name: str, v: dict[str, Any]) -> Iterable[Finding | Cleared]:
        values = v.get("v")
        if not isinstance(values, dict):
            return ()
        self._in_full(name)
        settling = t_unix_s - self._boot_unix_s < self._policy.thresholds.boot.grace_s
        levels = () if settling else self._level(t_unix_s, name, values)
        if name == "node" and not settling:
            return chain(levels, self._memory.feed(t_unix_s, values))
        if not name.startswith("gpu:"):
            return levels
        load_pct = number(values.get("util_pct"))
        if name not in self._devices:
            if len(self._devices) >= _DEVICES_MAX:
                return ()
            self._devices[name] = Device(self._policy, self.facts.name, name)
        if isinstance(pci := v.get("pci"), str) and len(self._device_names) < _DEVICES_MAX:
            self._named(intern(pci), name)
        if load_pct is not None:
            self._loaded(name, load_pct >= self._policy.thresholds.progress.busy_util_pct)
        found = self._devices[name].feed(t_unix_s, values)
        if settling:
            return found
        answers = self._sources.sample(name, values)
        return chain(found, levels, answers, self._blind.feed(t_unix_s, name, values))

    def _loaded(self, name: str, busy: bool) -> None:
        """A GPU says whether it is in use."""
        if busy:
            self.busy_unix_s = self.heard_unix_s
            self._busy_from_unix_s.setdefault(name, self.heard_unix_s)
        else:
            self._busy_from_unix_s.pop(name, None)

    def _in_full(self, name: str) -> None:
        """A sample is not passed over: what those before it said of the time is caught up on."""
        if still := self._still.get(name):
            for form, at_unix_s in zip(still.forms, still.times_unix_s, strict=True):
                if at_unix_s and name in self._devices and number(form.ecc_sbe_total) is not None:
                    self._devices[name].rate.passed_over(at_unix_s)
                if at_unix_s and name in self._levels:
                    self._levels[name].passed_over(at_unix_s, form)
            still.full()

    def _named(self, pci: str, name: str) -> None:
        if self._device_names.get(pci) != name:
            for still in self._still.values():
                still.fresh = False
        self._device_names[pci] = name

    def _level(self, t_unix_s: float, name: str, values: dict[str, Any]) -> Iterable[Finding | Cleared]:
        levels = self._levels.get(name)
        if levels is None:
            rows = self._policy.levels.get(name.partition(":")[0])
            if not rows or len(self._levels) >= _DEVICES_MAX:
                return ()
            levels = self._levels[name] = Levels(rows, self.facts.name, name)
        return levels.feed(t_unix_s, values)

    def tell(self, found: Finding | Cleared, t_unix_s: float) -> Iterator[Output]:
        """Takes what others than this node's own records say of it. A silent node keeps its verdict."""
        if isinstance(found, Cleared):
            self.findings.pop((found.device, found.kind, found.layer), None)
        else:
            yield from self._take(found)
        if self.verdict != "blind":
            yield from self._judge(t_unix_s)

    def calm(self, boot: str) -> bool:
        """Has what tells nothing new in this boot no consequence?"""
        return self._calm and boot == self._boot and self.verdict != "blind" and _GONE not in self.findings

    def passes(self, line: Any, now_unix_s: float, shape: Shape) -> bool:
        """Does this sample change nothing? Then it is taken herewith. Brings `line` to its plain form.

        `line` is of the type `shape.line`. Otherwise its record is to be fed, and then `learn` to be called.
        """
        free_mib = shape.plain(line.v.v)
        calm = self._calm and line.boot == self._boot and self.verdict != "blind"
        return calm and self.passes_plain(line.v, free_mib, line.t_unix_s, now_unix_s, shape.busy)

    def passes_plain(self, body: Any, free_mib: Value, t_unix_s: float, now_unix_s: float, busy: int) -> bool:
        """The same for the body of a calm node's line, in plain form; `busy`, `free_mib`: see `Shape`."""
        still = self._still.get(body.device)
        if still is None or not still.equals(body):
            return False
        if body.device == "node" and not self._memory.passes(t_unix_s, free_mib):
            return False
        still.times_unix_s[still.forms.index(body.v)] = t_unix_s
        self.heard_unix_s = max(self.heard_unix_s, now_unix_s)
        load = body.v.util_pct
        if type(load) is int and body.device.startswith("gpu:"):
            self._loaded(body.device, load >= busy)
        return True

    def beats(self, boot: str, now_unix_s: float, every_s: float = 0.0, times: int = 1) -> bool:
        """Do beats change nothing but the rhythm? Then they are taken herewith. By the reader's clock."""
        if not self.hears(boot, now_unix_s + (times - 1) * every_s):
            return False
        self._beats = True
        self._rhythm.beats(now_unix_s, every_s, times, self._policy.thresholds.heartbeat)
        return True

    def hears(self, boot: str, now_unix_s: float) -> bool:
        """Takes that the node has told something that is not about itself; False: it is to be fed."""
        if not self.calm(boot):
            return False
        self.heard_unix_s = max(self.heard_unix_s, now_unix_s)
        return True

    def learn(self, line: Any, shape: Shape) -> None:
        """The record of `line` was fed: an equal sample may be passed over, if this one changed nothing."""
        name, pci, t_unix_s = intern(line.v.device), line.v.pci, line.t_unix_s
        settling = t_unix_s - self._boot_unix_s < self._policy.thresholds.boot.grace_s
        if settling or line.boot != self._boot or not comparable(shape, line.v.v):
            return
        levels = self._levels.get(name)
        changed = levels is not None and levels.changed
        if name.startswith("gpu:"):
            if name not in self._devices:
                return
            changed = changed or self._devices[name].changed or self._blind.changed
        if name not in self._still:
            if len(self._still) >= _DEVICES_MAX:
                return
            self._still[name] = Still()
        self._still[name].learn(None if pci is None else intern(pci), line.v.v, changed)

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
        """Says why something counts for nothing: the first time, and then once an hour."""
        key = (out.device, out.kind, out.rule)
        if abs(out.t_unix_s - self._said.get(key, float("-inf"))) < _AGAIN_S:
            return
        if len(self._said) >= _DEVICES_MAX:
            self._said.clear()
        self._said[key] = out.t_unix_s
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
            yield self._as_told(found)
        elif found.layer == "kernel" and found.t_unix_s - known.t_unix_s >= _AGAIN_S:
            # A line tells of an event: after a quiet hour the same is another one.
            self.findings[key] = msgspec.structs.replace(known, t_unix_s=found.t_unix_s, why=found.why)
            yield self._as_told(self.findings[key])
        else:
            self.findings[key] = msgspec.structs.replace(known, t_unix_s=found.t_unix_s)  # seen again

    def _as_told(self, found: Finding) -> Finding:
        """A finding as others hear of it: nobody is moved where no rank runs or people are at work."""
        idle = found.preempt_job and (self.facts.spare or bool(self.holds))
        return msgspec.structs.replace(found, preempt_job=False) if idle else found

    def _judge(self, t_unix_s: float) -> Iterator[Output]:
        found, rule = self._grounds()
        if found:
            state, why = "faulty", [line for finding in found for line in finding.why]
        elif weighing := [f for f in self.findings.values() if SEVERITIES.index(f.severity) >= _WEIGHS]:
            state, why, rule = "suspect", [line for f in weighing for line in f.why], weighing[0].rule
        else:
            state, why, rule = "healthy", ["nothing that weighs is known"], ""
        if state != self.verdict:
            yield self._verdict(t_unix_s, state, why, rule)
        if found and not self._decided:
            yield from self._decide(t_unix_s, found, "decisive" if rule != "two-layers" else rule)
        self._calm = (not found or self._decided) and "settling" not in self.holds

    def _grounds(self) -> tuple[list[Finding], str]:
        """See `grounds`. Not that it is gone: only a lasting silence decides that, and who speaks is not."""
        present = [finding for key, finding in self.findings.items() if key != _GONE]
        return grounds(present, self._policy.thresholds.two_layers.window_s)

    def _decide(self, t_unix_s: float, found: list[Finding], rule: str) -> Iterator[Output]:
        cause = found[0]
        if self.holds:
            why = f"the node is held: {', '.join(self.holds.values())}"
            yield from self._once(suppressed(cause, why, rule="held"))
            return
        if refusal := self._gate(t_unix_s, self.facts, found, rule):
            held_back = suppressed(cause, refusal[1], rule=refusal[0])
            yield from self._once(msgspec.structs.replace(held_back, t_unix_s=t_unix_s))
            return
        self._decided = True
        actions = [f.action for f in found if f.preempt_job and f.device == cause.device]
        others = [f for f in self.findings.values() if f not in found and f.device == cause.device]
        yield Decision(
            t_unix_s=t_unix_s,
            node=self.facts.name,
            device=cause.device,
            kind=cause.kind,
            severity=max((f.severity for f in found), key=SEVERITIES.index),
            action=reduce(stronger, actions, cause.action),
            preempt_job=not self.facts.spare,
            when="before_admission" if self.facts.spare else "now",
            why=[line for finding in [*found, *others] for line in finding.why],
            rule=rule,
            decision="quarantine" if self.facts.spare else "swap_now",
            rules=[finding.rule for finding in [*found, *others]],
        )

    def _verdict(self, t_unix_s: float, state: str, why: list[str], rule: str) -> Verdict:
        self.verdict = state
        return Verdict(t_unix_s=t_unix_s, node=self.facts.name, device="node", kind=state, why=why, rule=rule)


def _weight(finding: Finding) -> tuple[bool, int]:
    return (finding.preempt_job, SEVERITIES.index(finding.severity))
