"""Plans for a job whose others stand because a rank's process has died."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runbook_world import NOW, World, fleet, node, plan_for, rank, report, spare, status

from gridagent.wire import CutReport, LaunchSpec, RankStatus
from gridctl.errors import Refused
from gridctl.model.fleet import Node, jobs, missed
from gridctl.model.plans import Plan, Request
from gridctl.model.policy import Policy
from gridctl.runbook import gates
from gridctl.runbook.checks import CHECKS, Context, settled
from gridctl.runbook.dry import dry_run
from gridctl.runbook.hot_swap import build
from gridctl.runbook.references import launches_in, resolve
from gridctl.runbook.selection import select


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
    assert jobs(unknown.values())[0].state == "standing", "for want of a rank of which nobody knows more"
    nobody = nodes(n2={"ranks": []})
    assert jobs(nobody.values())[0].state == "incomplete", "where rank 1 was, nobody has seen"


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


def began_anew(complete: bool = True, **more: Any) -> dict[str, Node]:
    """The agent of n2 has begun anew and knows of no rank; before, it had rank 1."""
    found = nodes(n2={"ranks": [], "complete": complete})
    return {**found, "n2": msgspec.structs.replace(found["n2"], missed=[rank(1, state="lost", **more)])}


def test_what_a_new_agent_does_not_know_any_more_has_died_where_the_others_stand() -> None:
    plan = plan_for(began_anew())
    assert [(m.rank, m.dead, m.origin, m.source.session, m.holder) for m in plan.moves] == [
        (1, True, "n2", "s2", "")
    ]
    found = jobs(began_anew(complete=False).values())[0]
    assert (found.state, found.ranks[1].state) == ("standing", "unknown")
    with pytest.raises(Refused, match="has just begun to") as refused:
        plan_for(began_anew(complete=False))
    assert refused.value.code == "node-unreachable"
    elsewhere = nodes(n2={"ranks": []}, n4={"ranks": [standing(1, epoch=1, session="new")]})
    elsewhere["n2"] = msgspec.structs.replace(elsewhere["n2"], missed=[rank(1)])
    assert jobs(elsewhere.values())[0].ranks[1].node == "n4"


def test_what_a_dead_process_wrote_down_is_known_though_its_agent_died_with_it() -> None:
    before = nodes(n2={"ranks": [rank(1)]})
    others = list(before.values())
    mark = f"50 {'ab' * 32}"
    unmarked = node(status("n2"))
    found = msgspec.structs.replace(unmarked, missed=missed(before["n2"], unmarked, others))
    plan = plan_for({**nodes(), "n2": found})
    assert ([b.code for b in plan.blockers], plan.moves[0].source.mark) == (["not-proven"], "")
    marked = node(status("n2", marks={"s1": mark, "other": mark}))
    found = msgspec.structs.replace(marked, missed=missed(found, marked, others))
    plan = plan_for({**nodes(), "n2": found})
    assert (plan.blockers, plan.moves[0].source.mark) == ([], mark)


def silent(**changes: dict[str, Any]) -> dict[str, Node]:
    """n2 does not answer; rank 1 trained there when it was heard last, and the others stand."""
    found = nodes(**{"n2": {"ranks": [rank(1)]}, **changes})
    return {**found, "n2": msgspec.structs.replace(found["n2"], reachable=False, error="timed out")}


def test_a_silent_node_is_taken_for_dead_on_a_persons_word_only() -> None:
    with pytest.raises(Refused) as refused:
        plan_for(silent())
    assert refused.value.code == "node-unreachable"
    assert "`gridctl swap plan n2 --assume-dead`" in refused.value.blockers[1].text
    plan = plan_for(silent(), assume_dead=True)
    assert plan.assume_dead
    assert [(m.rank, m.dead, m.origin, m.source.session, m.holder) for m in plan.moves] == [
        (1, True, "n2", "s2", "")
    ]
    assert "taken for dead on your word" in plan.notes[0]
    assert "GRIDAGENT_HOLD_S" in plan.notes[0]
    assert any("is taken for dead, and the others stand" in note for note in plan.notes)
    calls = [call for step in plan.steps for call in (*step.calls, *step.inverse)]
    assert "n2" not in {call.node for call in calls}, "whoever does not answer is asked nothing"


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (nodes(), "bad-request", "n2 answers"),
        (
            {**nodes(), "n2": msgspec.structs.replace(nodes()["n2"], reachable=False, status=None)},
            "bad-request",
            "n2 has told this controller nothing yet",
        ),
        (silent(n1={"ranks": [rank(0)]}), "not-now", "no job stands for want of a rank on n2"),
        (silent(n1={"ranks": [rank(0)]}, n3={"ranks": [rank(2)]}), "not-now", "as long as the others train"),
    ],
)
def test_nothing_is_taken_for_dead_that_speaks_or_may_train(
    found: dict[str, Node], code: str, words: str
) -> None:
    with pytest.raises(Refused, match=words) as refused:
        plan_for(found, assume_dead=True)
    assert refused.value.code == code


def test_a_node_that_answers_again_makes_such_a_plan_stale() -> None:
    plan = plan_for(silent(), assume_dead=True)
    gates.check_silent(plan, silent())
    gates.check_silent(plan_for(nodes()), nodes())
    with pytest.raises(Refused, match="answers again") as refused:
        gates.check_silent(plan, nodes())
    assert refused.value.code == "stale-plan"


def test_a_rank_whose_start_nobody_knows_is_started_as_its_deputy_with_its_own_number() -> None:
    found = silent()
    selection = select(Request(node="n2", who="ann", assume_dead=True), found, Policy())
    base = LaunchSpec(
        job="lm",
        rank=2,
        world_size=3,
        argv=["python", "train.py"],
        cwd="/x",
        env={"RANK": "2", "LOCAL_RANK": "5", "NCCL_DEBUG": "INFO"},
        local_rank=5,
        gpus=[5],
    )
    ids = ("p1", "h1", "i1")
    plan = build(selection, [report(2)], [base], found, Policy(), ids=ids, now_unix_s=NOW)
    assert any("started as rank 2 was, with its own number" in note for note in plan.notes)
    call = next(step for step in plan.steps if step.name == "specialise").calls[0]
    (wanted,) = launches_in(call.args)
    assert (wanted["node"], wanted["rank"]) == ("n3", 2)
    told = resolve(call.args, {}, {wanted["sha256"]: msgspec.to_builtins(base)})["launch"]
    assert msgspec.convert(told, LaunchSpec) == msgspec.structs.replace(
        base,
        rank=1,
        local_rank=0,
        gpus=[],
        env={"RANK": "1", "LOCAL_RANK": "0", "NCCL_DEBUG": "INFO"},
    )
    assert "launch of rank 2 from n3, as rank 1" in str(dry_run(plan, {}))


STATES = st.sampled_from(["training", "standing", "frozen", "finished", "lost"])
TOLD = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 1), STATES), max_size=4, unique_by=lambda its: its[:2]
)


@given(st.lists(TOLD, max_size=6), TOLD)
def test_what_is_missed_is_what_was_there_and_is_of_the_others_epoch(
    answers: list[list[tuple[int, int, str]]], others: list[tuple[int, int, str]]
) -> None:
    """Against a twin that keeps every answer of the node and looks through them all."""

    def ranks(told: list[tuple[int, int, str]], at: str) -> list[RankStatus]:
        return [rank(r, epoch=epoch, state=state, session=f"{at}{r}.{epoch}") for r, epoch, state in told]

    other = node(status("n9", ranks=ranks(others, "o")))
    now = node(status("n2"))
    for told in answers:
        before, now = now, node(status("n2", ranks=ranks(told, "s")))
        now = msgspec.structs.replace(now, missed=missed(before, now, [other, now]))
        reported = {r.session for r in now.status.ranks} if now.status else set()
        live = {(epoch, state in ("training", "standing")) for _, epoch, state in (*others, *told)}
        assert {r.session for r in now.missed}.isdisjoint(reported)
        assert all((r.epoch, True) in live for r in now.missed)
    last: dict[str, str] = {}  #: session -> its last state, as long as it was missed or reported since
    for told in answers:
        here = {f"s{r}.{epoch}": (epoch, state) for r, epoch, state in told}
        live_epochs = {e for _, e, state in (*others, *told) if state in ("training", "standing")}
        last = {
            session: state
            for session, state in last.items()
            if session in here
            or (state in ("training", "standing", "lost") and int(session[-1]) in live_epochs)
        }
        last |= {session: state for session, (_, state) in here.items()}
        gone = last.keys() - here.keys()
    assert {r.session for r in now.missed} == (gone if answers else set())
