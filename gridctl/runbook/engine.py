"""The engine of all runbooks: `advance(state, event) -> (state, effects)`, pure.

A run goes forward step by step: precheck, calls, verification. Before the step that commits, any
failure turns it back: the inverses of what was started run in reverse order. After it, or where
undoing fails, the run is held for a person. The journal records come out as effects of their own,
always before the effects that they announce, so a fold over any prefix of the journal is a state
from which `Started` goes on; operation ids derive from run and step, so nothing is done twice.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from gridctl.model.plans import NOT_TAKEN, Call, Plan, Step
from gridctl.runbook import checks, reset
from gridctl.runbook.checks import Context, Problem
from gridctl.runbook.events import (
    Arm,
    BackAsked,
    Deadline,
    Drop,
    Effect,
    Event,
    Halted,
    Observe,
    Observed,
    OpEnded,
    Record,
    Send,
    Started,
    Stop,
    Wanting,
    Watch,
    Watched,
)
from gridctl.runbook.progress import Progress, fold
from gridctl.runbook.watch import judge

CHECKS = {**checks.CHECKS, **reset.CHECKS}
SETTLED = {"hot-swap": checks.settled, "reset": reset.settled}
#: A run that ends with one of these left as it is has not reached what it was for.
MISSED = ("job-lost", "not-back")
RECHECK_S = 0.5
UNDO_DEADLINE_S = 60.0


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """A run in some driver's hand: what the journal says, and what is outstanding."""

    run: str
    plan: Plan
    progress: Progress = Progress()
    stage: str = "idle"  #: idle, precheck, calls, verify, settle, undo, stopped
    step: str = ""
    pending: frozenset[str] = frozenset()
    values: dict[str, Any] = {}
    failures: dict[str, OpEnded] = {}
    idle: frozenset[str] = frozenset()  #: operations that had no effect
    notes: tuple[str, ...] = ()  #: failures that the plan tolerates
    problem: Problem | None = None  #: why the verification does not hold yet
    back: BackAsked | None = None
    accepted: str = ""  #: who goes on although the outcome of the step that commits is not known


Advance = tuple[RunState, list[Effect]]


def advance(state: RunState, event: Event) -> Advance:
    """What follows from `event`. An event that does not fit the stage is late or a repeat: ignored."""
    match event:
        case Started():
            return _started(state, event)
        case Halted():
            return _put(state, stage="stopped", problem=Problem(event.code, event.text)), [Stop()]
        case BackAsked():
            return _back_asked(state, event)
        case OpEnded() if event.op in state.pending:
            return _op_ended(state, event)
        case Observed() if state.stage in ("precheck", "verify", "settle"):
            return _observed(state, event)
        case Watched() if state.stage == "calls":
            return _watched(state, event)
        case Wanting() if state.stage == "calls":
            return _wanting(state, event), []
        case Deadline() if event.token == _token(state):
            return _deadline(state)
    return state, []


def committed(state: RunState) -> bool:
    """The point of no return is behind this run."""
    return any(step.commits and step.name in state.progress.done for step in state.plan.steps)


def cutting(state: RunState) -> bool:
    """The step that commits was started and its outcome is not written down."""
    return (
        any(
            step.commits and step.name in state.progress.started and step.name not in state.progress.done
            for step in state.plan.steps
        )
        and not state.progress.undoing
    )


def operations(state: RunState, name: str) -> dict[str, Call]:
    """The operation ids of a step in its present direction, each with its call."""
    step = _step(state.plan, name)
    if state.progress.undoing:
        prefix, calls = f"{state.run}.{name}.undo{state.progress.attempt}", step.inverse
    else:
        prefix, calls = f"{state.run}.{name}", step.calls
        if (fails := state.progress.fails.get(name)) and committed(state):
            prefix = f"{prefix}.again{fails}"  # a person resumed it: the old id would only tell the old end
    needless = state.progress.needless
    return {f"{prefix}.{index}": call for index, call in enumerate(calls) if not needless(call)}


# --------------------------------------------------------------------------------------------------
# Events


def _started(state: RunState, event: Started) -> Advance:
    progress = state.progress
    if progress.ended:
        return _put(state, stage="stopped"), [Stop()]
    held = progress.state == "held"
    if held and event.accept and progress.code == "outcome-unknown":
        state = _put(state, accepted=event.who)
    state, effects = _record_run(state, "running", who=event.who)
    if progress.undoing:
        if held:
            return _then(effects, _turn_back(state, progress.code, progress.text, progress.end))
        return _then(effects, _undo_next(state))
    step = _next_step(state)
    if held and event.accept and step and step.watch_steps and progress.failed == step.name:
        text = f"accepted by {event.who}: {progress.text}"
        return _then(effects, _complete(_put(state, step=step.name), [], text))
    return _then(effects, _enter(state))


def _back_asked(state: RunState, event: BackAsked) -> Advance:
    progress = state.progress
    if progress.ended or committed(state) or cutting(state):
        return state, []
    if state.stage in ("idle", "stopped"):
        state, effects = _record_run(state, "running", who=event.who)
        if progress.undoing:
            return _then(effects, _turn_back(state, progress.code, progress.text, progress.end))
        return _then(effects, _turn_back(state, "aborted", _asked(event), event.end))
    if progress.undoing:
        return state, []
    if state.stage == "precheck" or _step(state.plan, state.step).hasty:
        return _then([Drop()], _turn_back(state, "aborted", _asked(event), event.end))
    return _put(state, back=event), []  # the step in hand ends by its deadline; then back


def _op_ended(state: RunState, event: OpEnded) -> Advance:
    state = _put(state, pending=state.pending - {event.op})
    if event.code == NOT_TAKEN or not (event.began or state.progress.undoing):
        state = _put(state, idle=state.idle | {event.op})
    if event.ok:
        state = _put(state, values={**state.values, event.op: event.value})
    elif event.code in operations(state, state.step)[event.op].tolerate:
        state = _put(state, notes=(*state.notes, event.text))
    else:
        state = _put(state, failures={**state.failures, event.op: event})
        if state.stage == "calls" and _step(state.plan, state.step).hasty:
            return _then([Drop()], _all_ended(_put(state, pending=frozenset())))
    return (state, []) if state.pending else _all_ended(state)


def _all_ended(state: RunState) -> Advance:
    if state.stage == "undo":
        return _undone(state)
    step = _step(state.plan, state.step)
    if not state.failures:
        return _verify(state, step)
    if step.commits and any(failure.began for failure in state.failures.values()):
        return _settle(state, step)
    failure = next(iter(state.failures.values()))
    return _fail(state, Problem(failure.code or "step-failed", failure.text))


def _observed(state: RunState, event: Observed) -> Advance:
    step = _step(state.plan, state.step)
    context = Context(
        plan=state.plan,
        step=step,
        values=_values(state, step),
        nodes=event.nodes,
        samples=event.samples,
        incident=event.incident,
        done=state.progress.done,
        failure=next(iter(state.failures.values()), None),
    )
    if state.stage == "settle":
        return _settled(state, SETTLED[state.plan.runbook](context, final=state.problem is not None))
    problem = CHECKS[step.precheck if state.stage == "precheck" else step.verify](context)
    if problem is None:
        return _begin(state, step) if state.stage == "precheck" else _complete(state, context.values)
    if problem.final or state.stage == "precheck":
        return _fail(state, problem)
    return _put(state, problem=problem), [Observe(RECHECK_S)]


def _watched(state: RunState, event: Watched) -> Advance:
    if event.lost:
        ranks = ", ".join(map(str, event.lost))
        text = (
            f"rank {ranks} ended while the swap was watched. If the others stand in their step,"
            f" `gridctl jobs {state.plan.job}` names the node that has the dead process now, and"
            " `gridctl swap plan` for that node brings a new one in; else the job must be requeued"
        )
        return _fail(state, Problem("job-lost", text))
    verdict = judge(event.before, event.after)
    if verdict.problem:
        return _fail(state, Problem("out-of-band", verdict.problem))
    return _complete(state, [msgspec.to_builtins(verdict)])


def _wanting(state: RunState, event: Wanting) -> RunState:
    text = f"step {state.step}: not within {_step(state.plan, state.step).deadline_s:g} s: {event.text}"
    return _put(state, problem=Problem("rank-silent", text))


def _deadline(state: RunState) -> Advance:
    step = _step(state.plan, state.step)
    if state.stage == "settle":  # whatever still ran has ended by now: one last, final look
        return _put(state, problem=Problem("outcome-unknown", _unknown(state))), [Observe()]
    if state.stage in ("calls", "undo") and state.pending:
        silent = {
            op: OpEnded(op, False, code="rank-silent", text=_silent(call, step, state))
            for op, call in operations(state, state.step).items()
            if op in state.pending
        }
        return _all_ended(_put(state, pending=frozenset(), failures={**state.failures, **silent}))
    text = f"step {step.name}: not verified within {step.deadline_s:g} s"
    return _fail(state, state.problem or Problem("rank-silent", text))


# --------------------------------------------------------------------------------------------------
# Forward


def _enter(state: RunState) -> Advance:
    if state.back:
        return _turn_back(state, "aborted", _asked(state.back), state.back.end)
    step = _next_step(state)
    if step is None:
        code = next((its.code for its in state.progress.steps.values() if its.code in MISSED), "")
        state, effects = _record_run(state, "failed" if code else "done", code=code, text=_left(state))
        return _put(state, stage="stopped"), [*effects, Stop()]
    state = _fresh(state, step.name)
    if step.precheck and step.name not in state.progress.started:
        state = _put(state, stage="precheck")
        return state, [Arm(_token(state), step.deadline_s), Observe()]
    return _begin(state, step)


def _begin(state: RunState, step: Step) -> Advance:
    effects: list[Effect] = []
    if step.name not in state.progress.started:
        state, effects = _record_step(state, "started")
    state = _put(state, stage="calls", pending=frozenset(operations(state, step.name)))
    arm = Arm(_token(state), step.deadline_s)
    if step.calls:
        sends = [Send(op, call) for op, call in operations(state, step.name).items()]
        return state, [*effects, arm, *sends]
    if step.watch_steps:
        return state, [*effects, arm, Watch(step.watch_steps)]
    return _then(effects, _verify(state, step))


def _verify(state: RunState, step: Step) -> Advance:
    if not step.verify:
        return _complete(state, _values(state, step))
    state = _put(state, stage="verify")
    return state, [Arm(_token(state), step.deadline_s), Observe()]


def _complete(state: RunState, values: Sequence[Any], text: str = "", code: str = "") -> Advance:
    text = text or "; ".join(state.notes)
    state, effects = _record_step(state, "done", values=list(values), code=code, text=text)
    return _then(effects, _enter(state))


def _settle(state: RunState, step: Step) -> Advance:
    """The call that commits brought no report: its outcome is read off the ranks themselves."""
    state = _put(state, stage="settle")
    return state, [Arm(_token(state), step.deadline_s), Observe()]


def _settled(state: RunState, verdict: Problem | None) -> Advance:
    if verdict is None:
        return _hold(state, state.problem) if state.problem else (state, [Observe(2 * RECHECK_S)])
    if verdict.code == "committed":
        return _complete(state, [None], verdict.text)
    if verdict.code == "outcome-unknown" and state.accepted:  # what is seen from here on decides
        return _complete(state, [None], f"accepted by {state.accepted}: {verdict.text}")
    if verdict.code in ("outcome-unknown", "node-unreachable"):
        return _hold(state, verdict)
    return _fail(state, verdict)


def _fail(state: RunState, problem: Problem) -> Advance:
    values = [value for value in _values(state, _step(state.plan, state.step)) if value is not None]
    failed = {"code": problem.code, "text": problem.text, "values": values, "idle": _idle(state)}
    state, effects = _record_step(state, "failed", **failed)
    if committed(state) and problem.code == "job-lost":
        return _then(effects, _let_go(state, problem))
    if committed(state) and state.progress.fails[state.step] > 1:  # it will not get better: go on without
        return _then(effects, _complete(state, [], f"left as it is: {problem.text}", problem.code))
    if committed(state):
        return _then(effects, _hold(state, problem))
    if state.back:  # the step's own failure stands at the step; why the run ends is that a person said so
        return _then(effects, _turn_back(state, "aborted", _asked(state.back), state.back.end))
    return _then(effects, _turn_back(state, problem.code, problem.text, "aborted"))


def _let_go(state: RunState, problem: Problem) -> Advance:
    """What this run has moved is dead. It touches no old process, which a recovery may need, and lets go."""
    effects: list[Effect] = []
    for step in state.plan.steps[:-1]:
        if step.name not in state.progress.done:
            fresh, text = _fresh(state, step.name), f"left as it is: {problem.text}"
            state, more = _record_step(fresh, "done", code=problem.code, text=text)
            effects += more
    return _then(effects, _enter(state))


def _hold(state: RunState, problem: Problem) -> Advance:
    state, effects = _record_run(state, "held", code=problem.code, text=problem.text)
    return _put(state, stage="stopped"), [*effects, Stop()]


# --------------------------------------------------------------------------------------------------
# Back


def _turn_back(state: RunState, code: str, text: str, end: str) -> Advance:
    attempt = state.progress.attempt + 1
    state, effects = _record_run(state, "turning-back", code=code, text=text, end=end, attempt=attempt)
    return _then(effects, _undo_next(_put(state, back=None)))


def _undo_next(state: RunState) -> Advance:
    progress = state.progress
    for name in reversed(progress.started):
        step = _step(state.plan, name)
        inverse = step.inverse
        if name in progress.undone or name in progress.leftover or not inverse:
            continue
        if progress.stays(step, state.plan):
            continue
        if any(call.undoes and call.undoes[0] in progress.leftover for call in inverse):
            continue  # whether there is anything to be undone is not known yet
        state = _put(_fresh(state, name), stage="undo")
        state, effects = _record_step(state, "undoing", attempt=progress.attempt)
        sends = [Send(op, call) for op, call in operations(state, name).items()]
        state = _put(state, pending=frozenset(send.op for send in sends))
        if not sends:
            return _then(effects, _undone(state))
        return state, [*effects, Arm(_token(state), UNDO_DEADLINE_S), *sends]
    return _undoing_ended(state)


def _undone(state: RunState) -> Advance:
    idle = _idle(state)
    if state.failures:
        failure = next(iter(state.failures.values()))
        state, effects = _record_step(state, "undo-failed", code=failure.code, text=failure.text, idle=idle)
    else:
        state, effects = _record_step(state, "undone", text="; ".join(state.notes), idle=idle)
    return _then(effects, _undo_next(state))


def _undoing_ended(state: RunState) -> Advance:
    progress = state.progress
    code, text = progress.code, progress.text
    if not progress.leftover:
        state, effects = _record_run(state, progress.end, code=code, text=text)
        return _put(state, stage="stopped"), [*effects, Stop()]
    left = "; ".join(f"{step}: {why}" for step, why in progress.leftover.items())
    if progress.attempt == 1:
        text = f"{text}. Could not be undone: {left}. `gridctl run rollback {state.run}` tries once more"
        return _hold(state, Problem(code, text))
    state, effects = _record_run(state, "failed", code=code, text=f"{text}. Left as it is: {left}")
    return _put(state, stage="stopped"), [*effects, Stop()]


# --------------------------------------------------------------------------------------------------


def _record_run(state: RunState, what: str, **more: Any) -> tuple[RunState, list[Effect]]:
    plan = state.plan
    data = {"incident": plan.incident, "run": state.run, "plan": plan.id, "node": plan.node, "job": plan.job}
    return _record(state, "run", {**data, "state": what, **more})


def _record_step(state: RunState, what: str, **more: Any) -> tuple[RunState, list[Effect]]:
    index = [step.name for step in state.plan.steps].index(state.step)
    data = {"incident": state.plan.incident, "run": state.run, "step": state.step, "index": index}
    return _record(state, "step", {**data, "state": what, **more})


def _record(state: RunState, kind: str, data: dict[str, Any]) -> tuple[RunState, list[Effect]]:
    # The clock is not asked here: the times of a run are those of its records (`progress.view`).
    progress = fold(state.progress, kind, data, 0.0)
    return _put(state, progress=progress), [Record(kind, data)]


def _fresh(state: RunState, step: str) -> RunState:
    return _put(
        state,
        step=step,
        pending=frozenset(),
        values={},
        failures={},
        idle=frozenset(),
        notes=(),
        problem=None,
    )


def _put(state: RunState, **changes: Any) -> RunState:
    return msgspec.structs.replace(state, **changes)


def _then(effects: list[Effect], rest: Advance) -> Advance:
    return rest[0], [*effects, *rest[1]]


def _step(plan: Plan, name: str) -> Step:
    return next(step for step in plan.steps if step.name == name)


def _next_step(state: RunState) -> Step | None:
    return next((step for step in state.plan.steps if step.name not in state.progress.done), None)


def _values(state: RunState, step: Step) -> list[Any]:
    return [state.values.get(op) for op in operations(state, step.name)]


def _idle(state: RunState) -> list[int]:
    """The calls of the step in hand that are known to have had no effect, by index."""
    return sorted(int(op.rpartition(".")[2]) for op in state.idle)


def _token(state: RunState) -> str:
    return f"{state.step}:{state.stage}:{state.progress.attempt}"


def _asked(event: BackAsked) -> str:
    what = f"{event.end.replace('-', ' ')} by {event.who}"  # aborted, or rolled back
    return f"{what}: {event.reason}" if event.reason else what


def _left(state: RunState) -> str:
    """What is to be said of a run that was done although something had failed."""
    steps = state.progress.steps.values()
    return "; ".join(f"{step.name}: {step.error}" for step in steps if state.progress.fails.get(step.name))


def _unknown(state: RunState) -> str:
    of_ranks = f"how the cut of hand-over {state.plan.handover} ended could not be learned from its ranks"
    what = of_ranks if state.plan.handover else f"whether {state.plan.purpose} by now could not be learned"
    return f"{what}; `gridctl run resume {state.run}` looks again"


def _silent(call: Call, step: Step, state: RunState) -> str:
    limit_s = UNDO_DEADLINE_S if state.progress.undoing else step.deadline_s
    return f"{call.kind} on {call.node} brought no answer within {limit_s:g} s"
