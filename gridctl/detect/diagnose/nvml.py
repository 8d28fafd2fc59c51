"""Findings on GPUs from samples: recovery, links, memory, clocks, values that the driver could not give."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gridctl.detect.diagnose.gauges import HEAT, POWER_BRAKE, Gpu
from gridctl.detect.diagnose.saying import rule, say
from gridctl.detect.meaning import Meaning, by_rule
from gridctl.detect.policy import DetectPolicy, RecoveryRow
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis
from gridctl.model.findings import worse

_BAD = ("lost", "requires_reset", "unknown_error", "blank")


def findings(gpus: Sequence[Gpu], policy: DetectPolicy, advised: Iterable[str]) -> Iterator[Diagnosis]:
    """All findings. `advised`: names of GPUs whose recovery was taken as advice on what befell them."""
    gpus = sorted(gpus, key=lambda gpu: (gpu.host, gpu.index is None, gpu.index or 0))
    yield from _recovery([gpu for gpu in gpus if gpu.name not in set(advised)], policy)
    yield from _memory(gpus)
    yield from _links(gpus)
    yield from _rates(gpus)
    yield from _clocks(gpus)
    yield from _values(gpus)


def quiet(gpus: Sequence[Gpu]) -> Iterator[Diagnosis]:
    """What to say of samples without a finding."""
    yield rule("smi.healthy", [f"{len(gpus)} GPUs were read"], count=0)
    if unknown := sorted({why for gpu in gpus for why in gpu.unreadable.values()}):
        events = [_event(gpu) | {"unreadable": dict(gpu.unreadable)} for gpu in gpus if gpu.unreadable]
        seen = [f"values that are none: {', '.join(unknown)}"]
        yield rule("smi.values", seen, count=len(events), events=events)


def _event(gpu: Gpu) -> dict[str, object]:
    event: dict[str, object] = {"index": gpu.index, "pci": gpu.pci or None}
    return event | ({"node": gpu.host} if gpu.host else {})


def _said(name: str, gpus: list[Gpu], seen: list[str], more: list[dict[str, object]]) -> Diagnosis:
    events = [_event(gpu) | told for gpu, told in zip(gpus, more, strict=True)]
    return rule(name, seen, pci=gpus[0].pci, count=len(gpus), events=events)


def _recovery(gpus: list[Gpu], policy: DetectPolicy) -> Iterator[Diagnosis]:
    """The driver's own word: what it asks for, per GPU."""
    asked = [(gpu, gpu.recovery) for gpu in gpus if gpu.recovery]
    if not asked:
        return
    told = [(gpu, _recovery_means(value or 0, policy.recovery.get(value or 0))) for gpu, value in asked]
    seen = [f"{gpu.label}: {means.meaning}" for gpu, means in told]
    events = [_event(gpu) | {"action": means.action, "asks": means.meaning} for gpu, means in told]
    head = told[0][1]
    if len({means.action for _, means in told}) > 1:
        several = by_rule(hardware().rules["recovery.several"])
        preempts = any(means.preempt for _, means in told)
        head = msgspec.structs.replace(several, preempt=preempts, when="now" if preempts else "after_job")
    yield say(head, seen, pci=told[0][0].pci, count=len(told), events=events)


def _recovery_means(value: int, row: RecoveryRow | None) -> Meaning:
    base = by_rule(hardware().rules["recovery.several"])
    if row is None:
        unknown = f"the driver asks for a recovery action {value} that has no known meaning"
        return msgspec.structs.replace(
            base, action="manual_review", severity="warning", preempt=False, when="none", meaning=unknown
        )
    return msgspec.structs.replace(
        base,
        severity=row.severity,
        action=row.action,
        preempt=row.preempt == "yes",
        when=row.when,
        rule=f"recovery.{value}",
        meaning=f"the driver asks for: {row.name}",
        source=row.source,
    )


def _memory(gpus: list[Gpu]) -> Iterator[Diagnosis]:
    for metric, name in (("remap_failed", "smi.remap_failed"), ("remap_pending", "smi.remap_pending")):
        if hit := [gpu for gpu in gpus if gpu.flag(metric)]:
            yield _said(name, hit, [f"{gpu.label}: {metric} is set" for gpu in hit], [{} for _ in hit])
    if hit := [gpu for gpu in gpus if _retired(gpu) >= hardware().limit("memory", "retired_pages")]:
        seen = [f"{gpu.label}: {_retired(gpu):g} retired pages" for gpu in hit]
        yield _said("smi.retired_pages", hit, seen, [{"retired_pages": _retired(gpu)} for gpu in hit])
    if hit := [gpu for gpu in gpus if gpu.flag("retired_pending")]:
        seen = [f"{gpu.label}: a page is to be retired at the next reset" for gpu in hit]
        yield _said("smi.remap_pending", hit, seen, [{} for _ in hit])
    if hit := [gpu for gpu in gpus if gpu.flag("sram_threshold") or gpu.number("ecc_sram_ue_total")]:
        yield _said("smi.sram", hit, [f"{gpu.label}: errors of SRAM" for gpu in hit], [{} for _ in hit])
    counted = [gpu for gpu in gpus if gpu.number("ecc_dbe_total") and not gpu.recovery]
    for name, known in (("smi.uncorrected", False), ("smi.uncorrected_known", True)):
        if hit := [gpu for gpu in counted if (gpu.recovery is not None) == known]:
            counts = [gpu.number("ecc_dbe_total") for gpu in hit]
            seen = [
                f"{gpu.label}: {count:g} uncorrected errors" for gpu, count in zip(hit, counts, strict=True)
            ]
            more: list[dict[str, object]] = [{"uncorrected": count} for count in counts]
            yield _said(name, hit, seen, more)


def _retired(gpu: Gpu) -> float:
    parts = (gpu.number("retired_sbe"), gpu.number("retired_dbe"))
    return max(gpu.number("retired_pages") or 0.0, sum(part or 0.0 for part in parts))


def _links(gpus: list[Gpu]) -> Iterator[Diagnosis]:
    if hit := [gpu for gpu in gpus if _fabric_ill(gpu)]:
        seen = [f"{gpu.label}: {', '.join(_fabric_ill(gpu))}" for gpu in hit]
        yield _said("fabric.degraded", hit, seen, [{} for _ in hit])
    yield from _pcie(gpus)


def _fabric_ill(gpu: Gpu) -> list[str]:
    """What the fabric's own health of a GPU tells against it."""
    told = []
    if "degraded" in str(gpu.last.get("fabric_bandwidth", "")).lower():
        told.append("bandwidth degraded")
    told += [name for name in ("route_unhealthy", "incorrect_configuration") if gpu.flag(f"fabric_{name}")]
    return told


def _pcie(gpus: list[Gpu]) -> Iterator[Diagnosis]:
    if hit := [gpu for gpu in gpus if gpu.narrow]:
        seen: list[str] = []
        more: list[dict[str, object]] = []
        for gpu in hit:
            gen, width = gpu.narrow or (None, None)
            most = f"of at most {gpu.number('pcie_gen_max') or 0:g} x{gpu.number('pcie_width_max') or 0:g}"
            seen.append(f"{gpu.label}: PCIe {gen or 0:g} x{width or 0:g} {most}")
            more.append({"gen": gen, "width": width})
        yield _said("smi.pcie_downgrade", hit, seen, more)


def _rates(gpus: list[Gpu]) -> Iterator[Diagnosis]:
    for level, name in (("critical", "smi.ecc_rate"), ("watch", "smi.ecc_rate_watch")):
        if hit := [gpu for gpu in gpus if gpu.level == level]:
            seen = [f"{gpu.label}: {gpu.rate_per_s:.0f} corrected errors a second under load" for gpu in hit]
            yield _said(name, hit, seen, [{"rate_per_s": round(gpu.rate_per_s)} for gpu in hit])


def _clocks(gpus: list[Gpu]) -> Iterator[Diagnosis]:
    polls = hardware().limit("clocks", "polls")
    for reason, name in ((POWER_BRAKE, "smi.power_brake"), (HEAT, "smi.thermal")):
        lasting = [gpu for gpu in gpus if gpu.most_polls[reason] >= polls]
        once = [gpu for gpu in gpus if gpu.most_polls[reason]]
        if hit := lasting or once:
            seen = [f"{gpu.label}: {gpu.most_polls[reason]} polls in a row" for gpu in hit]
            more: list[dict[str, object]] = [{"consecutive_polls": gpu.most_polls[reason]} for gpu in hit]
            yield _said(name if lasting else f"{name}_once", hit, seen, more)


def _values(gpus: list[Gpu]) -> Iterator[Diagnosis]:
    """GPUs whose values the driver could not give, by what that means."""
    why_of = {gpu.name: _worst(gpu) for gpu in gpus}
    if hit := [gpu for gpu in gpus if why_of[gpu.name] == "lost"]:
        yield _said("smi.lost", hit, [f"{gpu.label}: GPU is lost" for gpu in hit], [{} for _ in hit])
    if hit := [gpu for gpu in gpus if why_of[gpu.name] == "unknown_error"]:
        seen = [f"{gpu.label}: {_names(gpu, 'unknown_error')}" for gpu in hit]
        yield _said("smi.values_bad", hit, seen, [{"unreadable": dict(gpu.unreadable)} for gpu in hit])
    if hit := [gpu for gpu in gpus if why_of[gpu.name] == "blank"]:
        seen = [f"{gpu.label}: {_names(gpu, 'blank')}" for gpu in hit]
        yield _said("dcgm.blank", hit, seen, [{"unreadable": dict(gpu.unreadable)} for gpu in hit])
    answers = {why for why in why_of.values() if why in ("lost", "requires_reset", "unknown_error")}
    if len(answers) > 1:
        yield _values_mixed([gpu for gpu in gpus if why_of[gpu.name] in answers])


def _values_mixed(gpus: list[Gpu]) -> Diagnosis:
    actions = {
        "lost": hardware().rules["smi.lost"].action,
        "requires_reset": "evacuate_and_reset_gpu",
        "unknown_error": hardware().rules["smi.values_bad"].action,
    }
    events = [_event(gpu) | {"why": _worst(gpu), "action": actions.get(_worst(gpu) or "")} for gpu in gpus]
    told = by_rule(hardware().rules["smi.values_mixed"])
    told = msgspec.structs.replace(told, preempt=True, severity=worse(told.severity, "critical"))
    return say(
        told,
        [f"{gpu.label}: {_worst(gpu)}" for gpu in gpus],
        pci=gpus[0].pci,
        count=len(gpus),
        events=events,
    )


def _worst(gpu: Gpu) -> str | None:
    return next((why for why in _BAD if why in gpu.unreadable.values()), None)


def _names(gpu: Gpu, why: str) -> str:
    return f"{why.replace('_', ' ')} in {', '.join(m for m, w in gpu.unreadable.items() if w == why)}"
