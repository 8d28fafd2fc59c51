"""What ought to be done about a node: one rung of a ladder, why, and what every other one would cost.

The evidence decides what is wanted; costs decide between what the evidence leaves open. A forecast alone
never moves a job: where only the costs speak for a swap, a person is asked. Nothing is automatic unless the
site has armed it, and then only what rests on decisive evidence and breaks no cap.
"""

from collections.abc import Callable

import msgspec

from gridctl.assess.costs import BASE_RATE, Cost, Part, priced, total
from gridctl.assess.forecast import DAY_H, NOT_THE_NODE, Forecast
from gridctl.model.actions import RECOVER
from gridctl.model.findings import SEVERITIES, Finding

#: From the least to the most that it takes from job and node; the order is total.
LADDER = (
    "none",
    "watch",
    "ask",
    "reset_after_job",
    "swap_in_window",
    "evacuate_device",
    "swap_now",
    "quarantine",
)
#: These leave a node or a part of it: they are capped, and need a spare where ranks run.
LEAVING = ("swap_in_window", "evacuate_device", "swap_now")
AUTOMATIC = ("evacuate_device", "swap_now")
#: Costs are compared over so long from now.
HORIZON_H = 24.0
_LATER = ("after_job", "after_restart", "window", "before_admission")
#: What no other machine would be better off with.
_NOT_LEFT = (*NOT_THE_NODE, "environment", "fabric")
#: Actions that need no more than the device itself.
_OF_A_DEVICE = ("evacuate_and_reset_gpu", "evacuate_and_replace_gpu", "drain_and_reset_gpu")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A node, what is seen of it, and what a move would mean."""

    node: str
    verdict: str  #: of detection
    findings: list[Finding]
    forecast: Forecast
    spare: Forecast  #: of the node that would take over
    ranks: int = 0  #: on the node; of a job that stands, all that have no process, wherever they were
    device_ranks: int = 0  #: of them on the device of the first decisive finding
    spares: int = 0  #: ranks that could move to a spare now
    job_gpus: int = 0
    spare_gpus: int = 0  #: GPUs that cost more because the spare is used earlier
    pause_s: float = 0.0
    step_s: float = 0.0  #: 0: not known
    window_h: float = HORIZON_H
    recovery_h: float = 0.0
    recovery_basis: str = ""
    usd_per_gpu_h: float | None = None
    run: str = ""  #: that is on its way with a job that stands
    held: str = ""  #: who holds the node, in words
    caps: list[str] = []  #: limits that one more hand-over would break
    armed: bool = False
    person: str = ""  #: why nobody but a person applies the plan that there is; "" where none says so


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A rung and its expected cost within `HORIZON_H`. `refused`: why it is not open."""

    action: str
    cost: Cost
    refused: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """`wanted` is what evidence and costs ask for; `action` what is done about it."""

    action: str
    wanted: str
    why: list[str]
    automatic: bool
    cheapest: str  #: of the alternatives that are open
    uncertain: bool  #: within the range of the forecast another one could be the cheapest
    alternatives: list[Alternative]


def decide(case: Case) -> Choice:
    """The choice for a node. Equal cases give equal choices."""
    if dead := [finding for finding in case.findings if finding.action == RECOVER]:
        return _recover(case, dead)
    evidence, why = _by_evidence(case)
    options = alternatives(case)
    cheapest = _cheapest(case, case.forecast.p)
    by_cost = _by_cost(case, cheapest)
    wanted = max(evidence, by_cost, key=LADDER.index)
    if wanted != evidence:
        why = [
            f"{wanted} costs least: P(fault in {HORIZON_H:g} h) is {case.forecast.p_24h:.2g},"
            f" {case.forecast.basis}",
            *why,
        ]
    action, because = _allowed(case, wanted)
    return Choice(
        action=action,
        wanted=wanted,
        why=[*_by_person(case, action), *because, *why],
        automatic=_automatic(case, action),
        cheapest=cheapest,
        uncertain=_uncertain(case, cheapest),
        alternatives=options,
    )


def decisive(case: Case) -> bool:
    """Whether detection is sure: a decisive finding, or its verdict."""
    return case.verdict == "faulty" or any(
        f.preempt_job and f.fault not in NOT_THE_NODE for f in case.findings
    )


# --------------------------------------------------------------------------------------------------


def _by_evidence(case: Case) -> tuple[str, list[str]]:
    """The rung that the findings ask for, and their words."""
    rungs = [(_rung(finding), finding) for finding in case.findings]
    worst = max((rung for rung, _ in rungs), key=LADDER.index, default="none")
    why = [line for rung, finding in rungs if rung == worst for line in finding.why] or [
        "nothing that weighs is known"
    ]
    if decisive(case):
        why = [line for f in case.findings if f.preempt_job for line in f.why] or why
        return ("swap_now" if case.ranks else "quarantine"), why
    if case.verdict == "blind":
        return max(worst, "watch", key=LADDER.index), [
            "nothing is heard of it: unknown, which is not faulty",
            *(why if case.findings else []),
        ]
    return worst, why


def _rung(finding: Finding) -> str:
    """What one finding that is not decisive asks for."""
    weight = SEVERITIES.index(finding.severity)
    if finding.fault in NOT_THE_NODE or weight < SEVERITIES.index("warning"):
        return "none"
    grave = weight >= SEVERITIES.index("critical")
    if finding.fault in _NOT_LEFT:
        return "ask" if grave else "watch"
    if finding.when in _LATER:
        return "reset_after_job"
    return "ask" if grave else "watch"


def _by_cost(case: Case, cheapest: str) -> str:
    """What the costs ask for; without a finding that weighs they ask for nothing."""
    seen = any(_rung(finding) != "none" and finding.fault not in _NOT_LEFT for finding in case.findings)
    if case.ranks and seen and case.forecast.p_24h > case.forecast.base_24h:
        return cheapest
    return "none"


def _allowed(case: Case, wanted: str) -> tuple[str, list[str]]:
    """What becomes of what is wanted, and the reasons if it is another one."""
    if case.held and wanted not in ("none", "watch"):
        return "watch", [f"{case.held}: whoever holds the node decides, not gridctl"]
    if wanted not in LEAVING:
        return wanted, []
    if wanted == "swap_now" and 0 < case.device_ranks <= case.spares < case.ranks and _one_device(case):
        few = [f"the spares do not take all {case.ranks} ranks, and one device is all that is wrong"]
        return ("ask", case.caps) if case.caps else ("evacuate_device", few)
    if refused := _refused(case, wanted):
        return "ask", [f"{wanted} is held back: {refused}"]
    if wanted in AUTOMATIC and not decisive(case):
        return "ask", ["a forecast moves no job by itself: a person decides"]
    return wanted, []


def _automatic(case: Case, action: str) -> bool:
    return case.armed and action in AUTOMATIC and not case.person


def _by_person(case: Case, action: str) -> list[str]:
    """That what would be done by itself waits for a person, and why."""
    waits = case.armed and action in AUTOMATIC and case.person
    return [f"a person applies the plan: {case.person}"] if waits else []


def _one_device(case: Case) -> bool:
    """Whether all decisive findings are of one GPU and are dealt with at that GPU alone."""
    causes = [finding for finding in case.findings if finding.preempt_job]
    devices = {finding.device for finding in causes}
    return (
        len(devices) == 1
        and devices.pop().startswith("gpu:")
        and all(finding.action in _OF_A_DEVICE for finding in causes)
    )


def _refused(case: Case, action: str) -> str:
    """Why a rung is not open; "" where it is."""
    if action not in LEAVING:
        return ""
    needed = case.device_ranks if action == "evacuate_device" else case.ranks
    if not needed:
        return "no rank runs there"
    if case.spares < needed:
        return f"{needed} ranks would move, and spares take {case.spares}"
    return "; ".join(case.caps)


# --------------------------------------------------------------------------------------------------


def _recover(case: Case, dead: list[Finding]) -> Choice:
    """A job stands for want of these ranks: no cap and no forecast has a say in bringing it on."""
    wanted = "swap_now"
    action, because = wanted, list[str]()
    if case.run:
        because = [f"run {case.run} is at it"]
    elif case.held:
        action, because = "watch", [f"{case.held}: whoever holds the node decides, not gridctl"]
    elif any(finding.fault in NOT_THE_NODE for finding in dead):
        action = "ask"
    elif case.spares < case.ranks:
        ranks = f"{case.ranks} rank{'s have' if case.ranks > 1 else ' has'} no process"
        park = "park one (`gridagent park` on a free node), the job waits"
        action, because = "ask", [f"{ranks}, and spares take {case.spares}: {park}"]
    pause = f"{case.job_gpus} GPUs x {case.pause_s:g} s"
    again = f"{case.recovery_h:g} h x {case.job_gpus} GPUs"
    recovery = _line(
        case, "restart once the ranks stop waiting", case.recovery_h * case.job_gpus, again,
        case.recovery_basis or BASE_RATE,
    )  # fmt: skip
    moved = _line(case, "pause", case.pause_s / 3600 * case.job_gpus, pause, "estimate of the pause")
    return Choice(
        action=action,
        wanted=wanted,
        why=[*_by_person(case, action), *because, *(line for finding in dead for line in finding.why)],
        automatic=_automatic(case, action),
        cheapest=wanted,
        uncertain=False,
        alternatives=[
            Alternative(action="watch", cost=total([recovery])),
            Alternative(
                action=wanted, cost=total([moved]), refused="" if action == wanted else "; ".join(because)
            ),
        ],
    )


def alternatives(case: Case) -> list[Alternative]:
    """All rungs that could be taken, from the least to the most, each with its expected cost."""
    if not case.ranks:
        idle = total([priced(case.usd_per_gpu_h, "no rank runs there", 0.0, "nothing waits", "given")])
        return [Alternative(action=rung, cost=idle) for rung in ("none", "watch", "quarantine")]
    rungs = ["watch", "reset_after_job", "swap_in_window", "swap_now"]
    if case.device_ranks:
        rungs.insert(3, "evacuate_device")
    return [
        Alternative(action=rung, cost=_cost(case, rung, case.forecast.p), refused=_refused(case, rung))
        for rung in rungs
    ]


def _cost(case: Case, rung: str, p: Callable[[float], float]) -> Cost:
    """Within the horizon, P(fault within hours) of the node being `p`."""
    window_h = min(case.window_h, HORIZON_H)
    pause_gpu_h = case.pause_s / 3600 * case.job_gpus
    pause = f"{case.job_gpus} GPUs x {case.pause_s:g} s"
    if rung in ("watch", "reset_after_job"):
        return total([_recovery(case, "recovery if it fails", p(HORIZON_H), HORIZON_H, case.forecast)])
    if rung == "swap_in_window":
        first, later_h = p(window_h), HORIZON_H - window_h
        left, spare = 1 - first, case.spare.p(later_h)
        how = f"{left:.2g} x {pause}"
        return total(
            [
                _recovery(case, "recovery if it fails first", first, window_h, case.forecast),
                _line(case, "pause in the window", left * pause_gpu_h, how, "estimate of the pause"),
                _recovery(case, "recovery if the spare fails", left * spare, later_h, case.spare),
            ]
        )
    earlier = f"{case.spare_gpus} GPUs x {window_h:g} h"
    return total(
        [
            _line(case, "pause", pause_gpu_h, pause, "estimate of the pause"),
            _line(case, "spare in use earlier", case.spare_gpus * window_h, earlier, "given"),
            _recovery(case, "recovery if the spare fails", case.spare.p(HORIZON_H), HORIZON_H, case.spare),
        ]
    )


def _recovery(case: Case, name: str, p: float, hours: float, about: Forecast) -> Part:
    lost = f", about {case.recovery_h * 3600 / case.step_s:.0f} steps" if case.step_s else ""
    how = f"P {p:.2g} in {hours:g} h x {case.recovery_h:g} h{lost} x {case.job_gpus} GPUs"
    basis = f"{about.basis}; recovery: {case.recovery_basis or BASE_RATE}"
    return _line(case, name, p * case.recovery_h * case.job_gpus, how, basis)


def _line(case: Case, name: str, gpu_h: float, how: str, basis: str) -> Part:
    return priced(case.usd_per_gpu_h, name, gpu_h, how, basis)


def _cheapest(case: Case, p: Callable[[float], float]) -> str:
    """The rung with the least expected cost; among equals the one that does less."""
    if not case.ranks:
        return "none"
    rungs = ("watch", "swap_in_window", "swap_now")
    return min(rungs, key=lambda rung: (_cost(case, rung, p).gpu_h, LADDER.index(rung)))


def _uncertain(case: Case, cheapest: str) -> bool:
    """Whether the ends of the forecast's range give another rung; such a hazard taken as constant."""

    def constant(p_24h: float) -> Callable[[float], float]:
        return lambda hours: 1 - (1 - p_24h) ** (hours / DAY_H)

    return any(_cheapest(case, constant(edge)) != cheapest for edge in case.forecast.p_24h_range)
