"""Plans for a job whose others stand because a rank's process has died."""

from typing import Any

import msgspec
import pytest
from runbook_world import World, fleet, plan_for, rank, report, spare

from gridagent.wire import CutReport
from gridctl.errors import Refused
from gridctl.model.fleet import Node, jobs
from gridctl.model.plans import Plan
from gridctl.runbook.checks import CHECKS, Context, settled


def standing(number: int, **more: Any) -> Any:
    return rank(number, **{"state": "standing", "ward": (number - 1) % 3, **more})


def nodes(**changes: dict[str, Any]) -> dict[str, Node]:
    """Rank 1 on n2 has died; ranks 0 and 2 stand, and rank 2 can speak for it."""
    base = {
        "n1": {"ranks": [standing(0)]},
        "n2": {"ranks": [rank(1, state="lost")]},
        "n3": {"ranks": [standing(2)]},
    }
    return fleet(**{**base, **changes})


def test_a_job_stands_while_its_survivors_hold_the_step() -> None:
    assert jobs(nodes().values())[0].state == "standing"
    silent = nodes()["n2"]
    unknown = {**nodes(), "n2": msgspec.structs.replace(silent, reachable=False)}
    assert jobs(unknown.values())[0].state == "incomplete"


def test_the_keeper_of_its_memory_speaks_for_the_dead_rank() -> None:
    plan = plan_for(nodes())
    move = plan.moves[0]
    assert (move.rank, move.dead, move.origin) == (1, True, "n2")
    assert (move.source.role, move.source.rank, move.source.node, move.source.session) == (
        "source",
        1,
        "n3",
        "s2",
    )
    assert [(m.role, m.rank) for m in plan.members] == [
        ("survivor", 0),
        ("source", 1),
        ("survivor", 2),
        ("target", 1),
    ]
    steps = {step.name: step for step in plan.steps}
    assert [call.args["me"]["role"] for call in steps["join"].calls] == ["survivor", "survivor", "target"]
    assert "release" not in steps
    launch = steps["specialise"].calls[0].args["launch"]["$launch"]
    assert launch["node"] == "n2"
    assert "n2" in {call.node for call in steps["end"].calls}
    assert any("has died" in note and "rank 2, a replica" in note for note in plan.notes)
    assert plan.cost.steps_lost == 0


def test_a_new_owner_that_died_at_once_is_replaced_while_the_old_one_is_frozen() -> None:
    plan = plan_for(nodes(n2={"ranks": [rank(1, state="frozen")]}))
    assert plan.moves[0].source.session == "s2"
    release = next(step for step in plan.steps if step.name == "release")
    assert [(call.node, call.args["session"]) for call in release.calls] == [("n2", "s1")]


def test_all_dead_ranks_come_back_at_one_boundary() -> None:
    both = nodes(n3={"ranks": [rank(2, state="lost")]}, n4={"spares": [spare(), spare("b")]})
    with pytest.raises(Refused, match="no living rank keeps") as refused:  # rank 2 kept rank 1's memory
        plan_for(both)
    assert refused.value.code == "state-lost"
    four = [
        {"ranks": [standing(0, ward=3, world_size=4)]},
        {"ranks": [rank(1, state="lost", world_size=4), rank(3, state="lost", session="s3", world_size=4)]},
        {"ranks": [standing(2, ward=1, world_size=4)]},
    ]
    others = dict(zip(("n1", "n2", "n3"), four, strict=True))
    plan = plan_for(nodes(**others, n4={"spares": [spare(), spare("b")]}))
    assert [(move.rank, move.source.session) for move in plan.moves] == [(1, "s2"), (3, "s0")]


def test_another_node_of_a_standing_job_cannot_be_left_first() -> None:
    with pytest.raises(Refused, match="gridctl swap plan n2") as refused:
        plan_for(nodes(), node="n3")
    assert refused.value.code == "job-stands"


def test_where_a_connection_broke_and_nobody_died_the_rank_speaks_for_itself() -> None:
    plan = plan_for(nodes(n2={"ranks": [standing(1)]}))
    move = plan.moves[0]
    assert (move.dead, move.source.session, move.holder, plan.standing) == (False, "s1", "s1", True)
    joins = next(step for step in plan.steps if step.name == "join").calls
    assert [call.args["me"]["role"] for call in joins] == ["survivor", "source", "survivor", "target"]
    assert all(call.args["standing"] for call in joins)
    assert any(step.name == "release" for step in plan.steps)
    assert any("no process has died" in note for note in plan.notes)


def test_a_job_that_is_over_is_not_in_the_way() -> None:
    """Its dead rank is still remembered on the node."""
    over = rank(0, job="old", state="lost", session="o", world_size=1)
    assert plan_for(nodes(n2={"ranks": [over, rank(1, state="lost")]})).job == "lm"


def context(plan: Plan, seen: dict[str, Node], step: str = "cut") -> Context:
    found = next(s for s in plan.steps if s.name == step)
    return Context(plan=plan, step=found, values=[msgspec.to_builtins(report(2))], nodes=seen)


def test_the_checks_of_a_recovery_want_the_others_standing() -> None:
    plan = plan_for(nodes())
    assert CHECKS["all-training"](context(plan, nodes())) is None
    gone = nodes(n3={"ranks": [rank(2, state="lost")]})
    assert CHECKS["all-training"](context(plan, gone)).code == "rank-silent"  # type: ignore[union-attr]
    assert CHECKS["reports-hold"](context(plan, nodes(), "preflight")) is None


def test_how_a_recovery_ended_is_read_off_its_ranks() -> None:
    plan = plan_for(nodes())
    assert settled(context(plan, nodes()), final=False) is None
    assert settled(context(plan, nodes()), final=True).code == "cut-aborted"  # type: ignore[union-attr]
    new = {"n1": {"ranks": [rank(0, epoch=1)]}, "n3": {"ranks": [rank(2, epoch=1)]}}
    moved = nodes(**new, n4={"ranks": [rank(1, session="spare", epoch=1)]})
    assert settled(context(plan, moved), final=False).code == "committed"  # type: ignore[union-attr]


def test_after_a_return_the_others_still_stand_and_nobody_says_that_they_train() -> None:
    plan = plan_for(nodes())
    step = next(s for s in plan.steps if s.name == "cut")
    cut = CutReport(handover="h1", outcome="returned", epoch=2, boundary_step=60, reason="target:1 is gone")
    said = CHECKS["committed"](
        Context(plan=plan, step=step, values=[msgspec.to_builtins(cut)], nodes=nodes())
    )
    assert said is not None
    assert said.text == "target:1 is gone; the others still stand, now in epoch 2"
    for state in ("standing", "training"):  # they try the step once, and stand again
        back = {"n1": {"ranks": [standing(0, epoch=2)]}, "n3": {"ranks": [standing(2, epoch=2, state=state)]}}
        seen = settled(context(plan, nodes(**back)), final=False)
        assert seen is not None
        assert (seen.code, seen.text.endswith("the others still stand, now in epoch 2")) == (
            "target-lost",
            True,
        )


@pytest.mark.parametrize(
    ("silent", "stopped", "told"),
    [
        ("n1", "", "rank 0 of lm is on n1, which does not answer"),
        ("", "n1", "rank 0 of lm on n1 (process 100) has not come to stand"),
    ],
)
def test_who_is_missing_among_those_that_stand_is_named(silent: str, stopped: str, told: str) -> None:
    found = nodes(**({stopped: {"ranks": [rank(0)]}} if stopped else {}))
    if silent:
        found[silent] = msgspec.structs.replace(found[silent], reachable=False, error="no answer")
    with pytest.raises(Refused) as refused:
        plan_for(found)
    texts = [blocker.text for blocker in refused.value.blockers]
    assert told in texts[0]
    assert not any("is standing" in text for text in texts)


def test_a_rank_that_ended_in_the_watch_is_where_jobs_says_it_is() -> None:
    world = World(plan_for(fleet()), lost_after=[1])
    world.to_the_end()
    text = next(data["text"] for _, data in world.journal if data.get("code") == "job-lost")
    assert "`gridctl jobs lm` names the node" in text
    assert "swap plan n2" not in text
