"""Findings from a node's kernel log.

Rules, each from public reports: repeats are one event; the first cause of a chain wins and the driver's
recovery advice (Xid 154) sets the action; an error of an application moves nobody; a teardown (45) says
nothing by itself unless it names what caused it.
"""

import re
from collections.abc import Callable, Iterator

import msgspec

from gridagent.signals.bursts import Bursts
from gridagent.signals.nvidia import Event, GpuLost, KernelParser, Xid, burst_key
from gridctl.detect.policy import DetectPolicy, XidRow, xid_row
from gridctl.model.findings import SEVERITIES, Finding, Suppressed, worse

_FATAL = re.compile(r"\bFatal\b")
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

    def feed(self, t_unix_s: float, line: str) -> Iterator[Finding | Suppressed]:
        """Takes one line. A repeat within a burst gives nothing."""
        for event in self._parser.feed(line):
            if self._bursts.add(burst_key(event), t_unix_s):
                found = self._finding(t_unix_s, event)
                if found is not None:
                    yield self._in_chain(found)

    def _finding(self, t_unix_s: float, event: Event) -> Finding | None:
        """What one event means by itself; None where the driver says that nothing is needed."""
        if not isinstance(event, Xid):
            return self._without_number(t_unix_s, event)
        if event.recovery_action is not None:
            return self._advice(t_unix_s, event, event.recovery_action)
        number, rule = event.xid, f"xid.{event.xid}"
        if event.xid == 45 and event.caused_by is not None:
            number, rule = event.caused_by, f"xid.{event.caused_by}.caused_by"
        row = xid_row(self._policy, number)
        harmless = row.preempt == "if-fatal" and not _FATAL.search(event.text)
        if harmless:
            row = msgspec.structs.replace(row, severity="warning", action="observe", when="none")
        preempt = row.preempt == "yes" or (row.preempt == "if-fatal" and not harmless)
        why = f"Xid {event.xid}: {row.meaning}: {event.text[:_TEXT_CHARS_MAX]!r}"
        return self._make(t_unix_s, row, event.pci, rule, why, preempt=preempt, xid=number)

    def _without_number(self, t_unix_s: float, event: Event) -> Finding:
        if isinstance(event, GpuLost):
            row = self._policy.xids[79]
            return self._make(
                t_unix_s, row, event.pci, "kernel.gpu_lost", row.meaning, preempt=True, xid=None
            )
        row = msgspec.structs.replace(self._policy.xids[143], action="evacuate_and_reboot", when="now")
        return self._make(t_unix_s, row, event.pci, "kernel.init_failed", row.meaning, preempt=True, xid=None)

    def _advice(self, t_unix_s: float, event: Xid, value: int) -> Finding | None:
        if value == 0:
            return None
        row = self._policy.recovery.get(value)
        known = xid_row(self._policy, 154)
        if row is None:
            why = f"Xid 154: the driver asks for a recovery action {value} that has no known meaning"
            return self._make(t_unix_s, known, event.pci, "recovery.unknown", why, preempt=False, xid=154)
        known = msgspec.structs.replace(known, severity=row.severity, action=row.action, when=row.when)
        why = f"Xid 154: the driver asks for: {row.name}"
        preempt = row.preempt == "yes"
        return self._make(t_unix_s, known, event.pci, f"recovery.{value}", why, preempt=preempt, xid=154)

    def _make(
        self, t_unix_s: float, row: XidRow, pci: str, rule: str, why: str, *, preempt: bool, xid: int | None
    ) -> Finding:
        return Finding(
            t_unix_s=t_unix_s,
            node=self._node,
            device=self._device_of(pci),
            kind=row.kind,
            severity=row.severity,
            action=row.action,
            preempt_job=preempt,
            when=row.when,
            why=[why],
            rule=rule,
            layer="kernel",
            fault=row.fault,
            xid=xid,
            pci=pci,
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
            if SEVERITIES.index(found.severity) <= SEVERITIES.index(head.severity):
                cause = f"follows {head.rule} on the same GPU: the first cause counts"
                return suppressed(found, cause, rule=f"chain.{head.rule}")
        self._heads.pop(found.pci, None)  # the newest stands last
        self._heads[found.pci] = (found.t_unix_s, found)
        if len(self._heads) > _HEADS_MAX:
            del self._heads[next(iter(self._heads))]
        return found


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
