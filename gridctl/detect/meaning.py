"""What one event of a GPU's kernel driver means by itself: the same for the watchdog and for `diagnose`."""

from typing import Any

import msgspec

from gridagent.signals import nvlink
from gridagent.signals.amd import AmdEvent
from gridagent.signals.nvidia import Event, GpuLost, InitFailed, Silenced, Xid
from gridctl.detect.policy import DetectPolicy, RecoveryRow, said, site_source, xid_row
from gridctl.detect.policy.hardware import Rule, hardware
from gridctl.model.findings import SEVERITIES

#: From the driver's point of view the worst class of bits decides.
_CLASSES = ("internal", "possible_hw", "marginal", "watch", "secondary", "harmless")
NVLINK5 = range(144, 151)
_SITE = "+site"
#: What AMD's driver says -> rule, from the worst on: what comes later follows from what stands before it.
#: A reset that succeeds, and memory lost in it, mean nothing by themselves.
AMD_RULES = {
    "lost": "amd.lost",
    "ras": "amd.ras",
    "init_failed": "amd.init_failed",
    "reset_failed": "amd.reset_failed",
    "hang": "amd.hang",
    "corrected": "amd.corrected",
}
#: What the driver says without a number, and the number that means the same.
EVENT_NUMBERS = {"kernel.gpu_lost": 79, "kernel.init_failed": 143, "kernel.gsp_silenced": 119}


class Meaning(msgspec.Struct, frozen=True, kw_only=True):
    """One event, judged by the policy."""

    kind: str
    fault: str
    severity: str
    action: str
    preempt: bool
    when: str
    rule: str
    meaning: str
    source: str
    xid: int | None = None
    advice: int | None = None  #: this is the driver's word what to do: the value of NVML field 230

    @property
    def weight(self) -> tuple[bool, int, bool]:
        """What makes one event outweigh another: decisive, severe, asks for something."""
        return self.preempt, SEVERITIES.index(self.severity), self.action not in ("none", "observe")


def mean(policy: DetectPolicy, event: Event | AmdEvent) -> Meaning | None:
    """What the event means; None where it says nothing of the GPU's state."""
    if isinstance(event, AmdEvent):
        rule = AMD_RULES.get(event.says)
        return by_rule(hardware().rules[rule]) if rule else None
    if isinstance(event, Xid):
        if event.recovery_action is not None:
            return _advice(policy, event.recovery_action)
        if event.xid == 45 and event.caused_by is not None:
            return _caused(policy, event.caused_by)
        return _xid(policy, event)
    if isinstance(event, GpuLost):
        return _by_words(policy, "kernel.gpu_lost")
    if isinstance(event, InitFailed):
        told = _by_words(policy, "kernel.init_failed")
        return msgspec.structs.replace(
            told, severity="fatal", action="evacuate_and_reboot", preempt=True, when="now"
        )
    if isinstance(event, Silenced):
        return _by_words(policy, "kernel.gsp_silenced")
    return None


def with_advice(policy: DetectPolicy, cause: Meaning, value: int) -> Meaning:
    """The cause with the driver's advice: it sets the action, and more evidence never lowers anything."""
    row = policy.recovery.get(value)
    if row is None or value == 0:
        return cause
    preempts = row.preempt == "yes"
    takes_action = preempts and "replace" not in cause.action
    return msgspec.structs.replace(
        cause,
        severity=max(cause.severity, row.severity, key=SEVERITIES.index),
        action=row.action if takes_action else cause.action,
        preempt=cause.preempt or preempts,
        when="now" if preempts else cause.when,
        rule=f"{cause.rule}+recovery.{value}",
    )


def by_rule(rule: Rule, xid: int | None = None, more: str = "") -> Meaning:
    """What a row of hardware.tsv says, as the meaning of an event."""
    return Meaning(
        kind=rule.kind,
        fault=rule.fault,
        severity=rule.severity,
        action=rule.action,
        preempt=rule.preempt == "yes",
        when=rule.when,
        rule=rule.rule,
        meaning=f"{rule.meaning} ({more})" if more else rule.meaning,
        source=rule.source,
        xid=xid,
    )


def _xid(policy: DetectPolicy, event: Xid) -> Meaning:
    told = _by_number(policy, event.xid, f"xid.{event.xid}", xid=event.xid)
    if event.xid == 74:
        return by_site(policy, event.xid, _link_registers(event) or told)
    if event.xid in NVLINK5:
        return by_site(policy, event.xid, _link_fault(event, told))
    if event.reset_advice and not told.preempt:
        return with_advice(policy, told, event.reset_advice)
    return told


def by_site(policy: DetectPolicy, xid: int | None, told: Meaning) -> Meaning:
    """What is told of an Xid, with the site's own word on top, if there is one."""
    override = policy.overrides.get(xid) if xid is not None else None
    if override is None:
        return told
    fields: dict[str, Any] = said(override, told.when)
    if "preempt" in fields:
        fields["preempt"] = fields["preempt"] == "yes"
    return msgspec.structs.replace(
        told, **fields, rule=f"{base_rule(told)}{_SITE}", source=site_source(override)
    )


def base_rule(told: Meaning) -> str:
    """The rule of an event, whether or not the site has changed what follows from it."""
    return told.rule.removesuffix(_SITE)


def _by_words(policy: DetectPolicy, rule: str) -> Meaning:
    return _by_number(policy, EVENT_NUMBERS[rule], rule, xid=None)


def _by_number(policy: DetectPolicy, number: int, rule: str, xid: int | None) -> Meaning:
    row = xid_row(policy, number)
    return Meaning(
        kind=row.kind,
        fault=row.fault,
        severity=row.severity,
        action=row.action,
        preempt=row.preempt == "yes",
        when=row.when,
        rule=f"{rule}{_SITE}" if number in policy.overrides else rule,
        meaning=row.meaning,
        source=row.source,
        xid=xid,
    )


def _caused(policy: DetectPolicy, number: int) -> Meaning:
    if number in NVLINK5:
        return by_site(policy, number, by_rule(hardware().rules["xid.nvlink5.caused_by"], xid=number))
    return _by_number(policy, number, f"xid.{number}.caused_by", xid=number)


def _advice(policy: DetectPolicy, value: int) -> Meaning:
    told = _by_number(policy, 154, f"recovery.{value}", xid=154)
    row: RecoveryRow | None = policy.recovery.get(value)
    if row is None:
        why = f"the driver asks for a recovery action {value} that has no known meaning"
        return msgspec.structs.replace(told, rule="recovery.unknown", meaning=why, advice=value)
    return msgspec.structs.replace(
        told,
        severity=row.severity,
        action=row.action,
        preempt=row.preempt == "yes",
        when=row.when,
        meaning=f"the driver asks for: {row.name}",
        source=row.source,
        advice=value,
    )


def _link_registers(event: Xid) -> Meaning | None:
    told = nvlink.registers(event.text)
    if told is None or not any(told.registers):
        return None
    classes: set[str] = set()
    for register, value in enumerate(told.registers, start=1):
        bits = [bit for bit in range(value.bit_length()) if value >> bit & 1]
        classes.update(hardware().registers.get((register, bit), "unknown") for bit in bits)
    worst = next((name for name in _CLASSES if name in classes), "unknown")
    if worst in ("secondary", "harmless") and "unknown" in classes:
        worst = "unknown"
    return by_rule(hardware().rules[f"xid.74.{worst}"], xid=74, more=f"link {told.link}")


def _link_fault(event: Xid, told: Meaning) -> Meaning:
    fault = nvlink.link_fault(event.text)
    if fault is None:
        return by_rule(hardware().rules["xid.nvlink5.unworded"], xid=event.xid)
    bucket, look = _decoded(event.xid, fault)
    place = f"{fault.unit}, " + ("the whole device" if fault.link is None else f"link {fault.link}")
    more = f"{place}; {look}" if look else place
    if fault.fatal:
        return msgspec.structs.replace(told, preempt=True, meaning=f"{told.meaning} ({more})")
    rule = "xid.nvlink5.follow_154" if bucket == "follow_154" else "xid.nvlink5.nonfatal"
    return by_rule(hardware().rules[rule], xid=event.xid, more=more)


def _decoded(xid: int, fault: nvlink.LinkFault) -> tuple[str, str]:
    """What the vendor's sheet says of the sub-code: bucket and where to look; ("", "") if it has no row."""
    units = fault.unit.upper().split("/")
    for row in hardware().faults:
        if row.xid != xid or not any(unit.upper() in units for unit in row.unit.split("/")):
            continue
        if row.reasons and str(fault.reason) not in row.reasons.split():
            continue
        if row.statuses and not any(fault.status & int(bit, 16) for bit in row.statuses.split()):
            continue
        return row.bucket, row.look
    return "", ""
