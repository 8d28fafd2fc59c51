"""What a report says, out of its records. Pure; a record that says something else than written is counted."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from gridagent.journal import Record
from gridctl.control.incidents import Incidents
from gridctl.history.report import facts
from gridctl.history.report.follow_ups import follow_ups
from gridctl.history.report.plots import plots
from gridctl.history.report.source import Source
from gridctl.model.plans import Plan
from gridctl.model.runs import Incident, Run
from gridctl.runbook import progress
from gridctl.runbook.progress import Progress

T = TypeVar("T")

HOUR_S = 3600.0
#: What a record that says something else than written leads to.
_MISREAD = (LookupError, TypeError, ValueError, AttributeError, msgspec.MsgspecError)


def report(source: Source) -> facts.Report:
    """Equal sources give equal reports."""
    folded = _Folded(source)
    incident = folded.incident
    cuts = list(_cuts(folded))
    evidence = folded.each("finding", _evidence, "finding")
    choices = folded.each("decision", _choice, "choice")
    decisions = folded.each("decision", _decision, "decision")
    suppressed = folded.each("decision", _suppressed, "suppressed")
    for record in source.around:
        make = {"suppressed": _suppressed, "finding": _weightless}.get(str(record.data.get("type")))
        if make and (found := folded.one(record, make)):
            suppressed.append(found)
    times = _times(folded, evidence, cuts)
    marks = list(_marks(folded, cuts))
    return facts.Report(
        incident=msgspec.structs.replace(
            incident, merged=source.merged, timeline=[], findings=[], evidence=[]
        ),
        node=_node(source.facts),
        summary=list(_summary(folded, evidence, cuts, times)),
        times=times,
        cost=_cost(cuts, choices, times.stood_s),
        evidence=evidence,
        archives=[_archive(found) for found in incident.evidence],
        suppressed=sorted(suppressed, key=lambda found: (found.t_unix_s, found.seq)),
        decisions=decisions,
        choices=choices,
        plans=list(_plans(folded)),
        gates=folded.each("gate", _gate),
        runs=folded.runs,
        phases=_phases(source.records),
        cuts=cuts,
        losses=[_loss(row, cuts) for row in source.boundary if cuts],
        earlier=[msgspec.convert(row, facts.Earlier) for row in source.earlier],
        follow_ups=list(follow_ups(incident, folded.runs, [*source.records, *source.around])),
        timeline=[m for m in incident.timeline if m.seq not in folded.phases],
        marks=marks,
        plots=plots(source),
        unread=folded.unread,
        first_seq=source.records[0].seq,
        last_seq=source.records[-1].seq,
        last_hash=source.records[-1].hash,
    )


class _Folded:
    """The records as the controller folds them."""

    def __init__(self, source: Source) -> None:
        self.records = source.records
        self.unread = source.unread
        self.phases = {record.seq for record in source.records if "phase" in record.data}
        self.plans: dict[str, tuple[Record, Plan]] = {}
        incidents, found = Incidents(), dict[str, tuple[str, Progress]]()
        for record in source.records:
            try:
                incidents.take(record)
                self._take(record, found)
            except _MISREAD:
                self.unread += 1
        known = incidents.get(source.incident)
        self.incident = known or Incident(id=source.incident, kind="", state="", title="", node="")
        self.runs: list[Run] = [
            progress.view(run, self.plans[plan][1], state, driven=True)
            for run, (plan, state) in found.items()
            if plan in self.plans
        ]

    def _take(self, record: Record, runs: dict[str, tuple[str, Progress]]) -> None:
        if record.kind == "plan":
            plan = msgspec.convert(record.data["plan"], Plan)
            self.plans[plan.id] = (record, plan)
        elif record.kind in ("run", "step"):
            name = record.data["run"]
            plan_id, state = runs.get(name, (record.data.get("plan", ""), Progress()))
            runs[name] = (plan_id, progress.fold(state, record.kind, record.data, record.t_unix_s))

    def each(self, kind: str, make: Callable[[Record], T], of_type: str = "") -> list[T]:
        """One for each record of a kind that says what it must."""
        its = (r for r in self.records if r.kind == kind and (not of_type or r.data.get("type") == of_type))
        return [made for record in its if (made := self.one(record, make)) is not None]

    def one(self, record: Record, make: Callable[[Record], T]) -> T | None:
        """None where the record says something else than written."""
        try:
            made = make(record)
            msgspec.convert(msgspec.to_builtins(made), type(made))
            return made
        except _MISREAD:
            self.unread += 1
            return None


def _when(record: Record) -> float:
    told = record.data.get("t_unix_s")
    return float(told) if isinstance(told, int | float) else record.t_unix_s


def _evidence(record: Record) -> facts.Evidence:
    data = record.data
    named = {
        name: str(data.get(name, "")) for name in ("device", "kind", "severity", "action", "layer", "rule")
    }
    return facts.Evidence(
        t_unix_s=_when(record),
        seq=record.seq,
        lines=[*map(str, data["why"])],
        **named,
    )


def _suppressed(record: Record) -> facts.Suppressed:
    data = record.data
    named = {name: str(data.get(name, "")) for name in ("device", "kind", "rule")}
    return facts.Suppressed(t_unix_s=_when(record), seq=record.seq, lines=[*map(str, data["why"])], **named)


def _weightless(record: Record) -> facts.Suppressed:
    """A finding of no incident: it did not weigh enough to open one."""
    found = _suppressed(record)
    return msgspec.structs.replace(found, lines=[*found.lines, "it does not weigh enough for an incident"])


def _decision(record: Record) -> facts.Decision:
    data = record.data
    return facts.Decision(
        t_unix_s=_when(record),
        seq=record.seq,
        decision=str(data["decision"]),
        kind=str(data["kind"]),
        rules=[*map(str, data.get("rules") or [data.get("rule", "")])],
        why=[*map(str, data["why"])],
    )


def _choice(record: Record) -> facts.Choice:
    data = record.data
    return facts.Choice(
        t_unix_s=_when(record),
        seq=record.seq,
        action=str(data["action"]),
        wanted=str(data["wanted"]),
        automatic=bool(data["automatic"]),
        uncertain=bool(data["uncertain"]),
        p_24h=float(data["p_24h"]),
        basis=str(data["basis"]),
        why=[*map(str, data["why"])],
        options=[_option(data, option) for option in data["alternatives"]],
    )


def _option(choice: dict[str, Any], option: dict[str, Any]) -> facts.Option:
    """An alternative that was not taken was refused, or another one was chosen."""
    cost, action = option["cost"], option["action"]
    rejected = str(option.get("refused", ""))
    if not rejected and action != choice["action"]:
        least = ", although it is the cheapest" if action == choice["cheapest"] else ""
        rejected = f"{choice['action']} was chosen{least}"
    parts = [f"{p['name']} {p['gpu_h']:.3g} GPU-h ({p['how']}; {p['basis']})" for p in cost["parts"]]
    return facts.Option(
        action=action, gpu_h=float(cost["gpu_h"]), usd=cost.get("usd"), rejected=rejected, parts=parts
    )


def _archive(found: dict[str, Any]) -> facts.Archive:
    named = {n: str(found.get(n, "")) for n in ("node", "state", "who", "file", "sha256", "text")}
    return facts.Archive(t_unix_s=found.get("taken_unix_s") or found["t_unix_s"], **named)


def _gate(record: Record) -> facts.Gate:
    data = record.data
    how = "--yes" if data.get("yes") else f"typed {data['typed']}"
    named = {name: str(data.get(name, "")) for name in ("who", "reason", "plan", "run")}
    return facts.Gate(t_unix_s=record.t_unix_s, how=how, **named)


def _plans(folded: _Folded) -> Iterator[facts.Planned]:
    applied = {run.plan: run.id for run in folded.runs}
    for record, plan in folded.plans.values():
        moves = [f"rank {m.rank} from {m.origin or m.source.node} to {m.target.node}" for m in plan.moves]
        yield facts.Planned(
            id=plan.id,
            t_unix_s=record.t_unix_s,
            who=plan.who,
            what=", ".join(moves) or plan.purpose,
            run=applied.get(plan.id, ""),
            pause_s=plan.cost.pause_s,
            comparison=plan.cost.comparison,
            accepted=[f"{blocker.code}: {blocker.text}" for blocker in plan.blockers],
            notes=plan.notes,
        )


def _cuts(folded: _Folded) -> Iterator[facts.Cut]:
    for run in folded.runs:
        told = [value for step in run.steps for value in step.values if isinstance(value, dict)]
        watched = next((value for value in told if "step_s_before" in value), {})
        for value in (value for value in told if "cut_ms" in value):
            try:
                yield _cut(run, value, watched, folded.plans[run.plan][1])
            except _MISREAD:
                folded.unread += 1


def _cut(run: Run, value: dict[str, Any], watched: dict[str, Any], plan: Plan) -> facts.Cut:
    said = {
        "run": run.id,
        "outcome": value.get("outcome", ""),
        "boundary_step": value.get("boundary_step", -1),
        "epoch": value.get("epoch", plan.epoch_to),
        "pause_s": value["cut_ms"] / 1000.0,
        "from_unix_s": value.get("t_boundary_unix_s", 0.0),
        "to_unix_s": value.get("t_resume_unix_s", 0.0),
        "state_bytes": value.get("state_bytes", 0),
        "parts_ms": value.get("parts_ms", {}),
        "digests": value.get("digests", {}),
        "step_s_before": watched.get("step_s_before"),
        "step_s_after": watched.get("step_s_after"),
        "ranks": len({member.rank for member in plan.members}),
    }
    return msgspec.convert(said, facts.Cut)


def _phases(records: Iterable[Record]) -> list[facts.Phase]:
    """In the order in which each was told of first."""
    told: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.kind == "note" and "phase" in record.data:
            key = (str(record.data.get("run", "")), str(record.data["phase"]))
            told.setdefault(key, []).append(_when(record))
    found = [
        facts.Phase(run=run, phase=phase, first_unix_s=min(at), last_unix_s=max(at), told=len(at))
        for (run, phase), at in told.items()
    ]
    return sorted(found, key=lambda its: (its.first_unix_s, its.last_unix_s, its.phase))


def _times(folded: _Folded, evidence: list[facts.Evidence], cuts: list[facts.Cut]) -> facts.Times:
    begin = min((found.t_unix_s for found in evidence), default=None)
    if begin is None:
        return facts.Times(pause_s=sum(cut.pause_s for cut in cuts) if cuts else None)
    seen = next(r.t_unix_s for r in folded.records if r.data.get("type") == "finding")
    decided = next((r.t_unix_s for r in folded.records if r.kind == "decision" and _decides(r)), None)
    started = min((run.started_unix_s for run in folded.runs if run.started_unix_s), default=None)
    done = [run.ended_unix_s for run in folded.runs if run.state == "done"]
    stood = [
        cut.to_unix_s
        for cut in cuts
        if folded.plans[_run(folded, cut.run).plan][1].standing and cut.to_unix_s
    ]
    return facts.Times(
        detect_s=max(0.0, seen - begin),
        decide_s=None if decided is None else max(0.0, decided - seen),
        act_s=None if decided is None or started is None else started - decided,
        resolve_s=max(done) - begin if done else None,
        pause_s=sum(cut.pause_s for cut in cuts) if cuts else None,
        stood_s=max(stood) - begin if stood else None,
    )


def _decides(record: Record) -> bool:
    return record.data.get("type") == "decision"


def _run(folded: _Folded, name: str) -> Run:
    return next(run for run in folded.runs if run.id == name)


def _cost(cuts: list[facts.Cut], choices: list[facts.Choice], stood_s: float | None) -> facts.Cost | None:
    if not cuts:
        return None
    waited = [(cuts[-1].ranks, stood_s)] if stood_s is not None else [(c.ranks, c.pause_s) for c in cuts]
    gpu_h = sum(ranks * seconds for ranks, seconds in waited) / HOUR_S
    priced = [(o.usd, o.gpu_h) for c in choices for o in c.options if o.usd and o.gpu_h]
    price = priced[-1][0] / priced[-1][1] if priced else None
    return facts.Cost(
        gpu_h=gpu_h,
        how=" + ".join(f"{ranks} ranks x {seconds:.3f} s" for ranks, seconds in waited) + ", a GPU a rank",
        usd=None if price is None else gpu_h * price,
        usd_per_gpu_h=price,
    )


def _loss(row: dict[str, Any], cuts: list[facts.Cut]) -> facts.Loss:
    """Beside the cut that is nearest."""
    near = min(cuts, key=lambda cut: abs(cut.boundary_step - row["step"]))
    side = "before" if row["step"] < near.boundary_step else "after"
    return facts.Loss(step=row["step"], side=side, loss=row["loss"], step_s=row["step_s"])


def _node(told: dict[str, Any]) -> facts.Facts:
    names = facts.Facts.__struct_fields__
    return facts.Facts(**{name: str(told[name]) for name in names if told.get(name)})


def _summary(
    folded: _Folded, evidence: list[facts.Evidence], cuts: list[facts.Cut], times: facts.Times
) -> Iterator[str]:
    """In short, for whoever reads no further."""
    incident = folded.incident
    yield f"{incident.title}" + (f"; job {incident.job}" if incident.job else "")
    weighs = next((found for found in evidence if found.lines), None)
    if weighs:
        yield f"first seen: {weighs.lines[0]}"
    for run in folded.runs:
        why = f" ({run.text})" if run.text else ""
        yield f"run {run.id} of {run.who or 'somebody'}: {run.state}{why}"
    for cut in cuts:
        digests = sum(map(len, cut.digests.values()))
        yield (
            f"hand-over before step {cut.boundary_step}: {cut.outcome}, {cut.pause_s * 1000:.1f} ms pause,"
            f" {digests} digests of the state that moved"
        )
    if times.stood_s is not None:
        yield f"the job stood for {times.stood_s:.1f} s"
    if not folded.runs:
        yield "nothing was run for it"
    yield f"it is {incident.state}" + (f", a part of {incident.merged_into}" if incident.merged_into else "")


def _marks(folded: _Folded, cuts: list[facts.Cut]) -> Iterator[tuple[float, str]]:
    yield folded.incident.opened_unix_s, "opened"
    for cut in cuts:
        if cut.to_unix_s:
            yield cut.to_unix_s, "hand-over"
    if folded.incident.closed_unix_s:
        yield folded.incident.closed_unix_s, "closed"
