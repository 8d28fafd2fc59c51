"""Findings on GPUs: incidents of this boot, judged by their repeats, merged where they say the same."""

from collections.abc import Iterator, Mapping

import msgspec

from gridctl.detect.diagnose.clocks import clusters
from gridctl.detect.diagnose.history import ANY, Past
from gridctl.detect.diagnose.incident import MEMORY_XIDS, Group, History
from gridctl.detect.diagnose.incidents import Incidents
from gridctl.detect.diagnose.saying import address, rule, say
from gridctl.detect.meaning import NVLINK5, Meaning, base_rule, by_rule
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis
from gridctl.model.findings import SEVERITIES, worse

_JOB_GAP_S = 60.0
#: Of several NVLink errors those of the link itself are the origin, those of what it carries are not.
_ORIGINS = (149, 150, 144, 74)


class Judged(msgspec.Struct):
    """Incidents of one GPU with the same meaning."""

    group: Group
    told: Meaning
    count: int


def findings(incidents: Incidents, past: Mapping[str, Past], window_s: float) -> Iterator[Diagnosis]:
    """All findings of the incidents; `past`: what else is known of a GPU's history, by address or UUID."""
    judged = [one for group in incidents.groups() for one in _judge(group, incidents, past)]
    merged: dict[tuple[str, ...], list[Judged]] = {}
    for one in judged:
        merged.setdefault(_together(one), []).append(one)
    for several in merged.values():
        yield _finding(several, window_s)
    if mixed := _mixed(judged, window_s):
        yield mixed


def _judge(group: Group, incidents: Incidents, past: Mapping[str, Past]) -> Iterator[Judged]:
    """What a group means in the light of the GPU's history."""
    history = incidents.histories(group.host).get(group.pci) or History()
    before = past.get(group.pci) or past.get(history.uuid) or Past()
    if ANY in past and len(incidents.histories(group.host)) == 1:
        before = past[ANY]
    told = group.head.cause
    limit = hardware().limit
    if told.kind == "gpu_lost" and history.losses + before.losses >= limit("repeat", "losses"):
        repeat = by_rule(hardware().rules["gpu_lost.repeat"], told.xid)
        yield Judged(group, repeat, max(history.losses, group.count))
    elif MEMORY_XIDS.intersection(group.head.chain) and _failing_memory(history, before):
        yield Judged(group, _replacement(told), group.count)
    elif told.xid == 13 and (unit := _suspect_unit(group, history)):
        count = history.unit_counts[unit]
        more = f"GPC {unit[0]}, TPC {unit[1]}, {len(history.unit_jobs[unit])} jobs"
        yield Judged(group, by_rule(hardware().rules["xid.13.same_unit"], 13, more), count)
        if group.count > count:
            yield Judged(group, told, group.count - count)
    elif told.xid == 31 and _suspect_gpu(group, history, incidents):
        yield Judged(group, by_rule(hardware().rules["xid.31.same_gpu"], 31), group.count)
    elif told.xid == 74 and max(history.link_failures.values(), default=0) > limit("repeat", "link_failures"):
        harmless = base_rule(told) in ("xid.74.harmless", "xid.74.secondary")
        yield Judged(
            group, told if harmless else by_rule(hardware().rules["xid.74.repeated"], 74), group.count
        )
    else:
        yield Judged(group, told, group.count)


def _failing_memory(history: History, before: Past) -> bool:
    limit = hardware().limit
    if len(history.memory_boots) >= limit("repeat", "memory_boots"):
        return True
    return 1 + before.memory_incidents + before.fresh_row >= limit("repeat", "memory_incidents")


def _replacement(told: Meaning) -> Meaning:
    row = hardware().rules["memory.repeat"]
    if "replace" in told.action:
        return told
    return msgspec.structs.replace(
        told,
        severity=worse(told.severity, row.severity),
        action=row.action,
        when=told.when if told.preempt else row.when,
        rule=f"{told.rule}+{row.rule}",
        meaning=f"{told.meaning}; {row.meaning}",
        source=row.source,
    )


def _suspect_unit(group: Group, history: History) -> tuple[int, int] | None:
    """The compute unit on which several jobs failed within a day."""
    limit = hardware().limit
    for unit, jobs in history.unit_jobs.items():
        newest = list(jobs.values())[-1]
        near = [when for when in jobs.values() if newest.within(limit("repeat", "window_jobs_s"), when)]
        if len(near) >= limit("repeat", "unit_jobs"):
            return unit
    return None


def _suspect_gpu(group: Group, history: History, incidents: Incidents) -> bool:
    """Several jobs faulted here within a day, and none on another GPU of the node."""
    histories = incidents.histories(group.host)
    others = [pci for pci, other in histories.items() if pci != group.pci and other.fault_jobs]
    limit = hardware().limit
    if others or len(history.fault_jobs) < limit("repeat", "gpu_jobs"):
        return False
    newest = list(history.fault_jobs.values())[-1]
    near = [w for w in history.fault_jobs.values() if newest.within(limit("repeat", "window_jobs_s"), w)]
    return len(near) >= limit("repeat", "gpu_jobs")


def _together(one: Judged) -> tuple[str, ...]:
    """What is said in one finding: the same answer on one node; of programs also on several nodes."""
    told = one.told
    if told.kind == "nvlink_error":
        return (one.group.host, told.kind)
    return ("" if told.fault == "app" else one.group.host, told.kind, told.action)


def _finding(several: list[Judged], window_s: float) -> Diagnosis:
    head = max(
        several, key=lambda one: (one.told.weight[:2], _origin(one), address(one.group.pci) is not None)
    )
    events = [event for one in several for event in one.group.events]
    hosts = {one.group.host for one in several}
    times = [begin for one in several for begin in one.group.begins]
    count = sum(one.count for one in several)
    if all(base_rule(one.told).endswith("caused_by") for one in several):
        count = clusters(times, window_s)
    elif len(hosts) > 1 and head.told.fault == "app":
        count = clusters(times, _JOB_GAP_S)  # the same at the same time on many nodes is one job that ended
    return say(
        head.told,
        head.group.head.evidence,
        pci=head.group.pci,
        count=count,
        lines=sum(one.group.lines for one in several),
        events=events,
    )


def _origin(one: Judged) -> int:
    number = one.told.xid
    return int(one.told.kind != "nvlink_error" or number not in NVLINK5 or number in _ORIGINS)


def _mixed(judged: list[Judged], window_s: float) -> Diagnosis | None:
    """One finding for GPUs that need different answers; None where all need the same."""
    eligible = [one for one in judged if one.told.action != "none" and not _echo(one, judged, window_s)]
    devices = {
        (one.group.host, "nvlink" if one.told.kind == "nvlink_error" else one.group.pci) for one in eligible
    }
    if len(devices) < 2 or len({one.told.action for one in eligible}) < 2:
        return None
    head = max(eligible, key=lambda one: one.told.weight)
    severity = max((one.told.severity for one in eligible), key=SEVERITIES.index)
    name = "xid.mixed" if len({host for host, _ in devices}) == 1 else "xid.mixed_nodes"
    told = msgspec.structs.replace(by_rule(hardware().rules[name], head.told.xid), severity=severity)
    return say(
        told,
        [one.group.head.evidence[0] for one in eligible if one.group.head.evidence],
        pci=head.group.pci,
        count=sum(one.count for one in eligible),
        lines=sum(one.group.lines for one in eligible),
        events=[_answer(one) for one in eligible],
    )


def _echo(one: Judged, judged: list[Judged], window_s: float) -> bool:
    """A program that failed just after a GPU of the node did: it needs no answer of its own."""
    if one.told.fault != "app":
        return False
    begins = [
        begin
        for other in judged
        if other.told.fault != "app" and other.group.host == one.group.host
        for begin in other.group.begins
    ]
    return any(
        mine.after_s(begin) is not None and mine.within(window_s, begin) and begin.after_s(mine) == 0.0
        for mine in one.group.begins[:1]
        for begin in begins
    )


def _answer(one: Judged) -> dict[str, object]:
    told = one.told
    answer: dict[str, object] = {"pci": address(one.group.pci), "xid": told.xid, "kind": told.kind}
    answer |= {"action": told.action, "fault": told.fault, "preempt_job": told.preempt, "when": told.when}
    return answer | ({"node": one.group.host} if one.group.host else {})


def quiet(incidents: Incidents, lines: int) -> Diagnosis:
    """What to say of kernel logs without a finding."""
    if incidents.historic:
        return rule("log.historic", incidents.historic_evidence, count=0)
    return rule("log.clean", [f"{lines} lines of the kernel were read"], count=0)
