"""The runbook engine against a scripted world: order, turning back, resuming, never twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runbook_world import World, fleet, plan_for, rank, spare

from gridagent.wire import Blocker
from gridctl.model.runs import ENDS
from gridctl.runbook import progress
from gridctl.runbook.engine import RunState, advance
from gridctl.runbook.events import BackAsked, Halted, OpEnded, Started

PLAN = plan_for(fleet())
DO = [f"r1.{step.name}.{i}" for step in PLAN.steps for i in range(len(step.calls))]
UNDO = [f"r1.{step.name}.undo1.{i}" for step in PLAN.steps for i in range(len(step.inverse))]
START = Started("ann")


def states(world: World, step: str) -> list[str]:
    return [data["state"] for kind, data in world.journal if kind == "step" and data["step"] == step]


def test_a_swap_goes_through_all_steps_in_order() -> None:
    world = World(PLAN)
    state = world.drive(START)
    assert state is not None
    assert world.progress().state == "done"
    assert [op for op in world.effects if "join" not in op] == [op for op in DO if "join" not in op]
    assert list(world.progress().done) == [step.name for step in PLAN.steps]
    names = [step.name for step in PLAN.steps]
    assert names == [
        "preflight",
        "engage",
        "cordon",
        "reserve",
        "specialise",
        "open",
        "join",
        "cut",
        "watch",
        "release",
        "end",
    ]


@pytest.mark.parametrize("step", ["preflight", "cordon", "specialise", "open", "join"])
@pytest.mark.parametrize("how", ["fail", "refuse", "silent"])
def test_a_failure_before_the_cut_undoes_everything_in_reverse_order(step: str, how: str) -> None:
    world = World(PLAN, {f"r1.{step}.0": how})
    world.drive(START)
    found = world.progress()
    assert found.state == "aborted"
    assert found.failed == step
    assert not world.cordoned
    assert not world.committed
    undone = [op for op in world.effects if ".undo" in op]
    order = [s.name for s in PLAN.steps]
    positions = [order.index(op.split(".")[1]) for op in undone]
    assert positions == sorted(positions, reverse=True)
    begun = {s.name for s in PLAN.steps if s.name in found.started and s.inverse}
    if step == "specialise" and how != "fail":
        begun -= {"specialise", "reserve"}  # the spare is parked as it was: none takes its place
    assert {op.split(".")[1] for op in undone} == begun


def test_a_spare_that_somebody_else_has_is_left_alone_and_no_other_is_parked_in_its_place() -> None:
    nodes = fleet(n2={"ranks": [rank(1), rank(2)]}, n3={"ranks": []}, n4={"spares": [spare("a"), spare("b")]})
    world = World(plan_for(nodes), {"r1.specialise.0": "fail", "r1.specialise.1": "refuse"})
    world.drive(START)
    assert world.progress().state == "aborted"
    undone = [op for op in world.effects if "specialise.undo" in op or "reserve.undo" in op]
    assert undone == ["r1.specialise.undo1.0", "r1.reserve.undo1.0"]


def test_while_nobody_knows_whether_a_spare_was_taken_no_other_is_parked_in_its_place() -> None:
    world = World(PLAN, {"r1.specialise.0": "silent", "r1.specialise.undo1.0": "refuse"})
    world.drive(Started("ann"))
    assert world.progress().state == "held"
    assert not [op for op in world.effects if op.startswith("r1.reserve.undo")]
    assert world.to_the_end() == "aborted"
    assert not [op for op in world.effects if op.startswith("r1.reserve.undo")], "it was never taken"


def test_in_the_place_of_a_spare_that_has_died_in_the_run_another_is_parked() -> None:
    world = World(PLAN, {"r1.join.0": "fail", "r1.specialise.undo1.0": "gone"})
    world.drive(START)
    assert world.progress().state == "aborted"
    assert "r1.reserve.undo1.0" in world.effects


@pytest.mark.parametrize(("outcome", "code"), [("abort", "cut-aborted"), ("returned", "target-lost")])
def test_a_cut_that_did_not_commit_turns_back_and_says_why(outcome: str, code: str) -> None:
    world = World(PLAN, {"r1.cut.0": outcome})
    world.drive(START)
    found = world.progress()
    assert (found.state, found.code) == ("aborted", code)
    assert "because" in found.text
    assert not world.cordoned


def test_a_cut_whose_report_was_lost_is_read_off_the_ranks() -> None:
    world = World(PLAN, {"r1.cut.0": "lost"})
    world.drive(START)
    assert world.progress().state == "done"
    assert world.effects.count("r1.cut.0") == 1


def test_a_cut_that_never_began_anything_ends_as_an_abort_once_its_deadlines_have_passed() -> None:
    world = World(PLAN, {"r1.cut.0": "silent"})
    world.drive(START)
    found = world.progress()
    assert (found.state, found.code) == ("aborted", "cut-aborted")
    assert "old members train on" in found.text


def test_a_cut_refused_at_the_door_turns_back_at_once() -> None:
    world = World(PLAN, {"r1.cut.0": "refuse"})
    world.drive(START)
    assert (world.progress().state, world.progress().code) == ("aborted", "busy")


def test_a_run_whose_rank_ends_while_it_is_watched_lets_go_and_keeps_the_old_process() -> None:
    world = World(PLAN, lost_after=[1])
    world.drive(START)
    assert (world.progress().state, world.progress().code) == ("failed", "job-lost")
    assert "rank 1 ended" in world.progress().text
    assert not world.released
    assert {"r1.end.0", "r1.end.1", "r1.end.2"} <= set(world.effects)


def test_out_of_band_holds_the_run_and_a_person_may_accept_it() -> None:
    world = World(PLAN, losses_after=float("nan"))
    world.drive(START)
    assert (world.progress().state, world.progress().code) == ("held", "out-of-band")
    assert not world.released
    world.drive(Started("bob", accept=True))
    assert world.progress().state == "done"
    assert any("accepted by bob" in data.get("text", "") for _, data in world.journal)


def test_release_of_a_dead_node_does_not_hold_the_run() -> None:
    world = World(PLAN, {"r1.release.0": "lost", "r1.end.1": "silent"})
    world.drive(START)
    assert world.progress().state == "done"
    notes = [data["text"] for kind, data in world.journal if kind == "step" and data["state"] == "done"]
    assert "silent" in notes


def test_a_release_that_fails_is_tried_again_under_a_new_id_and_then_left() -> None:
    world = World(PLAN, {"r1.release.0": "refuse"})
    world.drive(START)
    assert (world.progress().state, world.progress().code) == ("held", "busy")
    world.drive(Started("ann", accept=True))
    assert "r1.release.again1.0" in world.effects
    world = World(PLAN, {"r1.release.0": "refuse", "r1.release.again1.0": "refuse"})
    world.drive(START)
    world.drive(Started("ann", accept=True))
    assert world.progress().state == "done"
    assert world.progress().text == "release: left as it is: refused"


def test_a_spare_that_warmed_up_with_other_numerics_turns_the_run_back() -> None:
    world = World(PLAN, facts={"threads": "2"})
    world.drive(START)
    found = world.progress()
    assert (found.state, found.failed, found.code) == ("aborted", "specialise", "not-possible")
    assert "rank 1 fact threads: was 1, is 2" in found.text


def test_a_spare_whose_loader_does_not_go_on_alike_turns_the_run_back() -> None:
    world = World(
        PLAN, late=[Blocker(code="loader-reopened", text="loader gives another batch", fatal=False)]
    )
    world.drive(START)
    found = world.progress()
    assert (found.state, found.failed, found.code) == ("aborted", "specialise", "not-possible")
    assert found.text.endswith("as the plan says: loader gives another batch")


def test_a_spare_that_ran_another_script_turns_the_run_back_and_says_so() -> None:
    world = World(PLAN, facts={"script": "0ther", "threads": "2"})
    world.drive(START)
    found = world.progress()
    assert (found.state, found.failed, found.code) == ("aborted", "specialise", "not-possible")
    assert "the script on n4, or a module that it imports, is another one than rank 1 runs" in found.text


def test_what_cannot_be_undone_is_held_then_failed_with_what_is_left() -> None:
    script = {"r1.open.0": "fail", "r1.cordon.undo1.0": "silent", "r1.cordon.undo2.0": "silent"}
    world = World(PLAN, script)
    world.drive(START)
    assert world.progress().state == "held"
    assert "Could not be undone: cordon: silent" in world.progress().text
    world.drive(BackAsked("ann", "try again", "rolled-back"))
    assert world.progress().state == "failed"
    assert world.effects.count("r1.specialise.undo1.0") == 1
    assert "r1.specialise.undo2.0" not in world.effects


def test_what_could_be_undone_at_the_second_try_ends_aborted() -> None:
    world = World(PLAN, {"r1.open.0": "fail", "r1.cordon.undo1.0": "silent"})
    world.drive(START)
    world.drive(Started("ann"))
    assert world.progress().state == "aborted"
    assert not world.cordoned


@pytest.mark.parametrize("at", range(1, 40))
def test_an_abort_at_any_moment_undoes_all_or_comes_too_late(at: int) -> None:
    world = World(PLAN)
    world.drive(START, late=BackAsked("bob", "wrong node", "aborted"), late_at=at)
    found = world.progress()
    assert found.state in ("aborted", "done")
    assert (found.state == "done") == world.committed
    if found.state == "aborted":
        assert found.text.startswith("aborted by bob: wrong node")
        assert not world.cordoned


@pytest.mark.parametrize(
    ("end", "says"), [("aborted", "aborted by bob: x"), ("rolled-back", "rolled back by bob: x")]
)
def test_a_step_that_fails_after_a_person_has_aborted_is_not_why_the_run_ends(end: str, says: str) -> None:
    """The step in hand is waited for; it may fail because of the very abort."""
    state, _ = advance(RunState(run="r1", plan=PLAN), START)
    assert (state.step, state.stage) == ("preflight", "calls")
    state, _ = advance(state, BackAsked("bob", "x", end))
    state, _ = advance(state, OpEnded("r1.preflight.0", False, code="op-failed", text="no boundary came"))
    found = state.progress
    assert (found.state, found.code, found.text) == (end, "aborted", says)
    assert found.steps["preflight"].error == "no boundary came"


def test_after_the_commit_going_back_is_ignored() -> None:
    world = World(PLAN, losses_after=float("nan"))
    world.drive(START)
    before = len(world.journal)
    assert world.progress().state == "held"
    state = world.drive(BackAsked("ann", "", "rolled-back"), late=Halted("x", "y"), late_at=1)
    assert state is not None
    assert len(world.journal) == before


def test_a_driver_that_is_halted_leaves_a_run_that_can_be_resumed() -> None:
    world = World(PLAN)
    world.drive(START, late=Halted("fenced", "another one"), late_at=9)
    assert world.progress().state == "running"
    shown = progress.view("r1", PLAN, world.progress(), driven=False)
    assert shown.state == "interrupted"
    world.drive(Started("ann"))
    assert world.progress().state == "done"
    assert len(world.effects) == len(set(world.effects))


HOW = st.sampled_from(["ok", "ok", "ok", "fail", "refuse", "lost", "silent"])
SCRIPTS = st.fixed_dictionaries(
    {"r1.cut.0": st.sampled_from(["ok", "ok", "abort", "returned", "lost", "silent", "refuse"])},
    optional={op: HOW for op in DO + UNDO if op != "r1.cut.0"},
)


@given(script=SCRIPTS, crashes=st.lists(st.integers(0, 60), max_size=4))
def test_after_any_crash_the_journal_leads_to_an_end_and_nothing_is_done_twice(
    script: dict[str, str], crashes: list[int]
) -> None:
    """Any prefix of the journal, any outcome of any call: an end is reached, and it is the right one."""
    world = World(PLAN, script)
    for crash in sorted(crashes):
        world.crash_after = crash
        world.drive(Started("ann", accept=True))
    world.crash_after = 10**9
    assert world.to_the_end() in ENDS
    found = world.progress()
    assert len(world.effects) == len(set(world.effects))
    if world.committed and not world.returned:
        assert found.state == "done"
    else:
        assert found.state != "done"
    if any(op.startswith("r1.reserve.undo") for op in world.effects):
        assert "r1.specialise.0" in world.effects  # else no spare is missing
    if found.state == "aborted":
        assert not world.cordoned or "r1.cordon.0" not in world.effects
    last = [data["state"] for kind, data in world.journal if kind == "run"][-1]
    assert last == found.state
    for step in found.started:
        assert states(world, step)[-1] not in ("started", "undoing")
