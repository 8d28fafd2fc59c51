"""How a cut ended whose report was lost, read off what the agents say of the processes."""

from typing import Any

import pytest
from runbook_world import fleet, plan_for, rank, spare

from gridctl.model.fleet import Node
from gridctl.runbook.checks import Context, settled

NEW = {"epoch": 1}
LOST = {"state": "lost", "connected": False}
FROZEN = {"state": "frozen"}


def nodes(source: dict[str, Any], target: dict[str, Any] | None, others: dict[str, Any]) -> dict[str, Node]:
    there: dict[str, Any] = {"spares": [spare()]}
    if target is not None:
        there = {"spares": [], "ranks": [rank(1, **{"session": "spare", **target})]}
    survivors = {name: {"ranks": [rank(number, **others)]} for name, number in (("n1", 0), ("n3", 2))}
    return fleet(n2={"ranks": [rank(1, **source)]}, n4=there, **survivors)


CASES: list[tuple[str, dict[str, Any], dict[str, Any] | None, dict[str, Any], str, str]] = [
    ("nothing has happened yet", {}, None, {}, "", "cut-aborted"),
    ("the target trains", FROZEN, NEW, NEW, "committed", "committed"),
    ("the target has finished", FROZEN, {**NEW, "state": "finished"}, NEW, "committed", "committed"),
    ("the target trained and died", FROZEN, {**NEW, **LOST}, NEW, "", "committed"),
    ("the old members train in epoch 2", {"epoch": 2}, None, {"epoch": 2}, "target-lost", "target-lost"),
    ("frozen, nobody was told to run", FROZEN, None, {}, "", ""),
    ("one is lost", {}, None, LOST, "", "cut-aborted"),
    ("all who trained are lost", LOST, None, LOST, "job-lost", "job-lost"),
    ("all are lost, also the target", LOST, {**NEW, **LOST}, LOST, "job-lost", "job-lost"),
]


@pytest.mark.parametrize(
    "source, target, others, at_once, in_the_end".split(", "), [pytest.param(*c[1:], id=c[0]) for c in CASES]
)
def test_verdict(
    source: dict[str, Any],
    target: dict[str, Any] | None,
    others: dict[str, Any],
    at_once: str,
    in_the_end: str,
) -> None:
    plan = plan_for(fleet())
    cut = next(step for step in plan.steps if step.commits)
    context = Context(plan=plan, step=cut, values=[None], nodes=nodes(source, target, others))
    for final, expected in ((False, at_once), (True, in_the_end)):
        verdict = settled(context, final=final)
        assert (verdict.code if verdict else "") == expected


def test_processes_that_nobody_knows_any_more_are_lost_only_in_the_end() -> None:
    plan = plan_for(fleet())
    cut = next(step for step in plan.steps if step.commits)
    empty = fleet(n1={"ranks": []}, n2={"ranks": []}, n3={"ranks": []}, n4={"spares": []})
    assert settled(Context(plan=plan, step=cut, values=[None], nodes=empty), final=False) is None
    verdict = settled(Context(plan=plan, step=cut, values=[None], nodes=empty), final=True)
    assert verdict is not None
    assert verdict.code == "job-lost"
