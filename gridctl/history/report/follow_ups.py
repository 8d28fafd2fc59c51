"""What the journal says is not done yet. It knows no more: elsewhere it may have been done."""

from collections.abc import Iterator, Sequence

from gridagent.journal import Record
from gridctl.history.report.facts import FollowUp
from gridctl.model.runs import ENDS, Incident, Run
from gridctl.runbook.evidence import LOST_BY, newest


def follow_ups(incident: Incident, runs: Sequence[Run], records: Sequence[Record]) -> Iterator[FollowUp]:
    """In the order in which they matter. `records`: of the incident and of its node."""
    yield from _unended(incident, runs)
    yield from _cordons(records)
    yield from _evidence(incident)
    for run in runs:
        for step in run.steps:
            problems = [str(v["problem"]) for v in step.values if isinstance(v, dict) and v.get("problem")]
            yield from (FollowUp(what=f"after run {run.id}: {problem}") for problem in problems)
    if not incident.verdict and not incident.merged_into:
        verdict = f"gridctl incident close {incident.id} --verdict true-fault|false-alarm|unknown"
        yield FollowUp(what="nobody has said yet what it was", command=verdict)


def _unended(incident: Incident, runs: Sequence[Run]) -> Iterator[FollowUp]:
    for run in runs:
        if run.state not in ENDS:
            what = f"run {run.id} has not ended: {run.state}{f', {run.text}' if run.text else ''}"
            yield FollowUp(what=what, command=f"gridctl run show {run.id}")
        elif run.state == "failed":
            yield FollowUp(what=f"run {run.id} failed: {run.text}", command=f"gridctl run show {run.id}")
    leaves = incident.decision.get("decision") == "swap_now"
    if leaves and not any(run.state == "done" for run in runs) and incident.state == "open":
        yield FollowUp(
            what=f"{incident.node} was to be left, and no run has done that",
            command=f"gridctl swap plan {incident.node} --incident {incident.id}",
        )
    if incident.state == "open":
        whose = (
            f"; {incident.assigned_to or incident.acked_by} has it"
            if incident.assigned_to or incident.acked_by
            else ""
        )
        yield FollowUp(what=f"the incident is open{whose}")


def _cordons(records: Sequence[Record]) -> Iterator[FollowUp]:
    """Nodes that a run has cordoned and nobody has opened again."""
    cordoned, left = dict[str, str](), dict[str, str]()  # node -> run, run -> the node that it leaves
    for record in sorted(records, key=lambda record: record.seq):
        data = record.data
        run = str(data.get("run", ""))
        if record.kind == "run" and data.get("node"):
            left[run] = str(data["node"])
        elif record.kind == "step" and data.get("step") == "cordon" and run in left:
            if data.get("state") == "done":
                cordoned[left[run]] = run
            elif data.get("state") == "undone":
                cordoned.pop(left[run], None)
        elif record.kind == "audit" and data.get("what") == "uncordon":
            cordoned.pop(str(data.get("node", "")), None)
    for node, run in cordoned.items():
        yield FollowUp(
            what=f"{node} is cordoned since run {run}, and nobody has confirmed its repair",
            command=f"gridctl uncordon {node}",
        )


def _evidence(incident: Incident) -> Iterator[FollowUp]:
    if newest(incident) is not None:
        return
    asked = (str(found.get("action")) for found in (incident.decision, *incident.findings))
    losing = next((action for action in asked if action in LOST_BY), "")
    loses = f"; {losing} takes away {LOST_BY[losing]}" if losing else ""
    yield FollowUp(what=f"no evidence was taken{loses}", command=f"gridctl collect {incident.id}")
