"""Findings from a node's kernel log.

Rules, each from public reports: repeats are one event; the first cause of a chain wins and the driver's
recovery advice (Xid 154) sets the action; an error of an application moves nobody; a teardown (45) says
nothing by itself unless it names what caused it.
"""

from collections.abc import Callable, Hashable, Iterator

import msgspec

from gridagent.signals.amd import AmdEvent, amd_event
from gridagent.signals.bursts import Bursts
from gridagent.signals.lines import unwrap
from gridagent.signals.nvidia import Event, KernelParser, Xid, burst_key
from gridctl.detect.meaning import mean
from gridctl.detect.policy import DetectPolicy
from gridctl.model.findings import SEVERITIES, Finding, Suppressed, worse

#: GPUs whose last finding is remembered, far above what a node can have: addresses come from text.
_HEADS_MAX = 256
_TEXT_CHARS_MAX = 200


class KernelLog:
    """The kernel log of one node. `device_of` turns a PCI address into a device's name."""

    def __init__(self, policy: DetectPolicy, node: str, device_of: Callable[[str], str]) -> None:
        self._policy = policy
        self._node = node
        self._device_of = device_of
        self._parser = KernelParser()
        self._bursts = Bursts(policy.thresholds.chain.burst_gap_s)
        self._heads: dict[str, tuple[float, Finding]] = {}  #: by PCI address: begin of the chain, first cause

    def follow(self, policy: DetectPolicy) -> None:
        """What Xids mean from now on; repeats and chains stay known."""
        self._policy = policy

    def feed(self, t_unix_s: float, line: str) -> Iterator[Finding | Suppressed]:
        """Takes one line. A repeat within a burst gives nothing."""
        for event in (*self._parser.feed(line), *_of_amd(line)):
            if self._bursts.add(_key(event), t_unix_s):
                found = self._finding(t_unix_s, event)
                if found is not None:
                    yield self._in_chain(found)

    def _finding(self, t_unix_s: float, event: Event | AmdEvent) -> Finding | None:
        """What one event means by itself; None where the driver says that nothing is needed."""
        told = mean(self._policy, event)
        if told is None or told.advice == 0:
            return None
        text = f": {event.text[:_TEXT_CHARS_MAX]!r}" if isinstance(event, Xid) and told.advice is None else ""
        number = f"Xid {event.xid}: " if isinstance(event, Xid) else ""
        return Finding(
            t_unix_s=t_unix_s,
            node=self._node,
            device=self._device_of(event.pci),
            kind=told.kind,
            severity=told.severity,
            action=told.action,
            preempt_job=told.preempt,
            when=told.when,
            why=[f"{number}{told.meaning}{text}"],
            rule=told.rule,
            layer="kernel",
            fault=told.fault,
            xid=told.xid,
            pci=event.pci,
        )

    def _in_chain(self, found: Finding) -> Finding | Suppressed:
        """The finding, an update of the chain's first cause, or the reason why it counts for nothing."""
        if found.fault == "app" or found.severity == "info":
            return suppressed(found, "an event of an application or without weight moves nobody")
        if not found.pci:
            return found
        begin_unix_s, head = self._heads.get(found.pci, (float("-inf"), found))
        if found.t_unix_s - begin_unix_s <= self._policy.thresholds.chain.window_s:
            if found.xid == 154:
                found = _advised(head, found)
                self._heads[found.pci] = (begin_unix_s, found)
                return found
            if _weight(found) <= _weight(head):
                cause = f"follows {head.rule} on the same GPU: the first cause counts"
                return suppressed(found, cause, rule=f"chain.{head.rule}")
        self._heads.pop(found.pci, None)  # the newest stands last
        self._heads[found.pci] = (found.t_unix_s, found)
        if len(self._heads) > _HEADS_MAX:
            del self._heads[next(iter(self._heads))]
        return found


def _of_amd(line: str) -> Iterator[AmdEvent]:
    """What AMD's driver says in a line of the kernel's. Most lines are no concern of it."""
    if ("amdgpu" in line or "[drm]" in line) and (record := unwrap(line)).kernel:
        yield from filter(None, map(amd_event, record.message.split("\n")))


def _key(event: Event | AmdEvent) -> Hashable:
    """What makes two events repeats of one."""
    return (event.says, event.pci) if isinstance(event, AmdEvent) else burst_key(event)


def _weight(found: Finding) -> tuple[bool, int]:
    """Decisive before severe: a cause that waits must not hide a consequence that cannot."""
    return (found.preempt_job, SEVERITIES.index(found.severity))


def suppressed(found: Finding, because: str, rule: str = "") -> Suppressed:
    """The finding as one that is not acted on."""
    return Suppressed(
        t_unix_s=found.t_unix_s,
        node=found.node,
        device=found.device,
        kind=found.kind,
        severity=found.severity,
        why=[*found.why, because],
        rule=rule or found.rule,
    )


def told_late(found: Finding | Suppressed, late_s: float, *, decisive: bool) -> Finding | Suppressed:
    """What a line means told `late_s` after it was printed; not `decisive`: alone it moves nobody."""
    why = [*found.why, f"told {late_s:.0f} s after it was printed"]
    if decisive or isinstance(found, Suppressed) or not found.preempt_job:
        return msgspec.structs.replace(found, why=why)
    why[-1] += ": too late to act on it alone"
    return msgspec.structs.replace(found, why=why, preempt_job=False, when="after_job")


def _advised(head: Finding, advice: Finding) -> Finding:
    """The first cause with the driver's advice: more evidence never lowers anything."""
    takes_action = advice.preempt_job and "replace" not in head.action
    return msgspec.structs.replace(
        head,
        t_unix_s=advice.t_unix_s,
        severity=worse(head.severity, advice.severity),
        action=advice.action if takes_action else head.action,
        preempt_job=head.preempt_job or advice.preempt_job,
        when="now" if advice.preempt_job else head.when,
        why=[*head.why, *advice.why],
        rule=f"{head.rule}+{advice.rule}",
    )
