"""What a plan costs, before anybody confirms it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from gridagent.wire import SessionReport
from gridctl.assess.costs import Situation, compare, priors
from gridctl.assess.forecast import DAY_H, Forecast
from gridctl.model.plans import Cost
from gridctl.model.policy import Policy
from gridctl.runbook import preflight
from gridctl.runbook.selection import Selection

LEAD_STEPS = 3
WARMUP_STEPS = 3


def price(
    selection: Selection,
    reports: Sequence[SessionReport],
    policy: Policy,
    rates: Sequence[tuple[int, float]],
    forecasts: Mapping[str, Forecast],
) -> Cost:
    """Pause, preparation, and acting now against waiting. `forecasts`: by node; one that is missing gets the
    base rate. `rates`: (bytes, milliseconds) of earlier cuts."""
    state_bytes = sum(sum(report.state_bytes.values()) for report in reports)
    pause_s, why = preflight.pause_s(state_bytes, rates)
    step_s = max((report.step_s_median for report in reports), default=0.0)
    ranks = selection.job.ranks
    gpus = sum(len(rank.gpus) for rank in ranks)
    usd = None
    if policy.price_usd_per_gpu_h and gpus:
        usd = pause_s / 3600 * gpus * policy.price_usd_per_gpu_h
    weighed = compare(
        Situation(
            job_gpus=gpus or len(ranks),  # on CPU a rank counts as one device
            spare_gpus=0,  # a parked spare costs the same whether it is used today or tomorrow
            pause_s=pause_s,
            defer_h=policy.window_h,
            recovery_h=policy.recovery_h or None,
            usd_per_gpu_h=policy.price_usd_per_gpu_h or None,
            **_chances(selection, policy.window_h, forecasts),
        ),
        priors(),
    )
    sides = (("now", weighed.now), (f"in {policy.window_h:g} h", weighed.deferred))
    return Cost(
        steps_lost=0,
        pause_s=pause_s,
        preparation_s=15.0 + (WARMUP_STEPS + LEAD_STEPS + policy.watch_steps) * step_s,
        state_bytes=state_bytes,
        usd=usd,
        basis=why,
        now_gpu_h=weighed.now.gpu_h,
        deferred_gpu_h=weighed.deferred.gpu_h,
        defer_h=policy.window_h,
        p_fault=weighed.p_fault,
        p_fault_basis=weighed.p_fault_basis,
        comparison=[
            *(
                f"{when}: {part.name} {part.gpu_h:.3g} GPU-h ({part.how}; {part.basis})"
                for when, cost in sides
                for part in cost.parts
            ),
            *(
                ["a close call: within the range of P(fault) either could be cheaper"]
                if weighed.uncertain
                else []
            ),
        ],
    )


def _chances(selection: Selection, hours: float, forecasts: Mapping[str, Forecast]) -> dict[str, Any]:
    """What the forecasts of the node that is left and of the first target say, as far as there are any."""
    chances: dict[str, Any] = {}
    if leaves := forecasts.get(selection.request.node):
        chances |= {"p_fault": leaves.p(hours), "p_fault_basis": leaves.basis}
        if hours == DAY_H:
            chances["p_fault_range"] = leaves.p_24h_range
    if takes := forecasts.get(selection.moves[0].target.node):
        chances |= {"p_after": takes.p(hours), "p_after_basis": takes.basis}
    return chances
