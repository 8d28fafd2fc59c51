"""Where a run stands, as the journal tells it: a fold over its `run` and `step` records."""

from typing import Any

import msgspec

from gridctl.model.plans import Call, Plan, Step
from gridctl.model.runs import ENDS, Run, StepRun


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The durable half of a run's state. `fold` over the journal gives it back after any crash."""

    state: str = "running"  #: running, held, or one of ENDS
    undoing: bool = False
    end: str = ""  #: the end that undoing leads to: aborted or rolled-back
    attempt: int = 0  #: of undoing; every attempt has operation ids of its own
    code: str = ""
    text: str = ""
    started: tuple[str, ...] = ()
    done: dict[str, list[Any]] = {}  #: step -> the values of its calls
    undone: frozenset[str] = frozenset()
    #: step -> its calls, by index, that never had an effect: the agent refused them, or to undo them
    idle: dict[str, frozenset[int]] = {}
    leftover: dict[str, str] = {}  #: step -> why this attempt could not undo it
    failed: str = ""  #: the step at which the run was stopped
    fails: dict[str, int] = {}  #: step -> how often it has failed
    steps: dict[str, StepRun] = {}
    who: str = ""
    started_unix_s: float = 0.0
    ended_unix_s: float = 0.0

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    def needless(self, call: Call) -> bool:
        """Whether what this call would undo never took place."""
        return bool(call.undoes) and call.undoes[1] in self.idle.get(call.undoes[0], ())

    def stays(self, step: Step, plan: Plan) -> bool:
        """Whether a step is not undone, since the one after which it stays may have had an effect."""
        later = next((other for other in plan.steps if other.name == step.stays_after), None)
        if later is None or later.name not in self.started:
            return False
        return len(self.idle.get(later.name, ())) < len(later.calls)


def fold(progress: Progress, kind: str, data: dict[str, Any], t_unix_s: float) -> Progress:
    """The next progress after one journal record of this run."""
    if kind == "run":
        return _run(progress, data, t_unix_s)
    if kind == "step":
        return _step(progress, data, t_unix_s)
    return progress


def _run(progress: Progress, data: dict[str, Any], t_unix_s: float) -> Progress:
    state, code, text = data["state"], data.get("code", ""), data.get("text", "")
    if state == "turning-back":
        return msgspec.structs.replace(
            progress,
            state="running",
            undoing=True,
            end=data["end"],
            attempt=data["attempt"],
            leftover={},
            code=code,
            text=text,
        )
    if state == "running":
        begun = progress.started_unix_s or t_unix_s
        who = progress.who or data.get("who", "")
        return msgspec.structs.replace(progress, state="running", started_unix_s=begun, who=who)
    changes: dict[str, Any] = {"state": state, "code": code, "text": text}
    if state in ENDS:
        changes["ended_unix_s"] = t_unix_s
    return msgspec.structs.replace(progress, **changes)


def _step(progress: Progress, data: dict[str, Any], t_unix_s: float) -> Progress:
    name, state = data["step"], data["state"]
    changes: dict[str, Any] = {"steps": _view(progress.steps, data, t_unix_s)}
    if idle := data.get("idle"):
        changes["idle"] = {**progress.idle, name: progress.idle.get(name, frozenset()).union(idle)}
    if state == "started":
        if name not in progress.started:
            changes["started"] = (*progress.started, name)
    elif state == "done":
        changes["done"] = {**progress.done, name: data.get("values", [])}
        changes["failed"] = ""
    elif state == "failed":
        changes["failed"] = name
        changes["fails"] = {**progress.fails, name: progress.fails.get(name, 0) + 1}
    elif state == "undone":
        changes["undone"] = progress.undone | {name}
    elif state == "undo-failed":
        changes["leftover"] = {**progress.leftover, name: data.get("text", "")}
    return msgspec.structs.replace(progress, **changes)


def _view(steps: dict[str, StepRun], data: dict[str, Any], t_unix_s: float) -> dict[str, StepRun]:
    name, state = data["step"], data["state"]
    begins = state in ("started", "undoing")
    before = steps.get(name)
    view = StepRun(
        name=name,
        text="",
        state=state,
        code=data.get("code", ""),
        error=data.get("text", ""),
        started_unix_s=t_unix_s if begins or before is None else before.started_unix_s,
        ended_unix_s=0.0 if begins else t_unix_s,
        values=data.get("values", []) or (before.values if before else []),
    )
    return {**steps, name: view}


def view(run: str, plan: Plan, progress: Progress, *, driven: bool) -> Run:
    """The run as a face shows it."""
    interrupted = progress.state == "running" and not driven
    steps = []
    for step in plan.steps:
        seen = progress.steps.get(step.name) or StepRun(name=step.name, text="", state="planned")
        steps.append(msgspec.structs.replace(seen, text=step.text))
    return Run(
        id=run,
        plan=plan.id,
        incident=plan.incident,
        node=plan.node,
        job=plan.job,
        who=progress.who,
        state="interrupted" if interrupted else progress.state,
        code=progress.code,
        text=progress.text,
        started_unix_s=progress.started_unix_s,
        ended_unix_s=progress.ended_unix_s,
        steps=steps,
    )
