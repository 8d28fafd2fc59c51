"""A job that stands is told of once, with what to do about it."""

from collections.abc import Set
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from runbook_world import fleet, rank

from gridctl.detect.standing import ENDED, GOES_ON, REPLACED, Standing
from gridctl.model.findings import Decision, Finding
from gridctl.model.fleet import Job, Rank, jobs


def test_a_death_is_told_once_and_the_next_one_again() -> None:
    standing = {
        name: {"ranks": [rank(i, state="standing", ward=(i - 1) % 3)]} for name, i in (("n1", 0), ("n3", 2))
    }
    dead = fleet(**standing, n2={"ranks": [rank(1, state="lost")]})
    look = Standing().look
    found, decided = look(jobs(dead.values()), 1.0)
    assert (decided.node, decided.decision) == ("n2", "swap_now")
    assert (found.node, found.kind, found.severity) == ("n2", "rank_died", "critical")
    assert "ranks 0, 2 stand in step 50" in found.why[0]
    assert "gridctl swap plan n2" in found.why[1]
    assert not list(look(jobs(dead.values()), 2.0))
    later = {name: {"ranks": [rank(i, state="standing", step=70)]} for name, i in (("n1", 0), ("n3", 2))}
    new = {"ranks": [rank(1, state="lost", session="new")]}
    assert len(list(look(jobs(fleet(**later, n2=new).values()), 3.0))) == 2


def test_a_step_that_kills_twice_is_the_jobs_own_matter() -> None:
    look = Standing().look
    for epoch, told in ((0, 2), (1, 1)):
        others = {
            name: {"ranks": [rank(i, state="standing", epoch=epoch)]} for name, i in (("n1", 0), ("n3", 2))
        }
        dead = fleet(**others, n2={"ranks": [rank(1, state="lost", epoch=epoch, session=f"s1.{epoch}")]})
        outputs = list(look(jobs(dead.values()), 1.0 + epoch))
        assert len(outputs) == told
    assert outputs[0].fault == "app"
    assert "has killed a process before" in outputs[0].why[2]


def test_a_job_that_trains_or_is_not_known_is_not_told_of() -> None:
    assert not list(Standing().look(jobs(fleet().values()), 1.0))
    assert not list(Standing().look(jobs(fleet(n2={"ranks": [rank(1, state="lost")]}).values()), 1.0))


def job(state: str, step: int = 9, dead: Set[int] = frozenset(), run: str = "a", **more: Any) -> Job:
    """Four ranks on n0..n3; a rank that was replaced has its epoch in the name of its session."""
    epoch, moved = more.pop("epoch", 0), more.pop("moved", {})
    ranks = [
        Rank(
            job=more.get("name", "lm"),
            rank=r,
            node=f"n{r}",
            session=f"{run}{r}.{moved.get(r, 0)}",
            pid=1,
            epoch=epoch,
            step=step,
            state="lost" if r in dead else state,
        )
        for r in range(4)
    ]
    return Job(name=more.get("name", "lm"), world_size=4, epoch=epoch, step=step, ranks=ranks, state=state)


def told(outputs: list[Finding | Decision]) -> list[tuple[str, str, str]]:
    return [(type(out).__name__, out.node, out.job) for out in outputs]


DIED_1 = [("Finding", "n1", "lm"), ("Decision", "n1", "lm")]


def test_the_next_run_of_a_name_that_dies_in_the_same_step_is_told_of() -> None:
    for between in ([], [job("training", 3)], [job("training", 3, run="b")]):
        standing = Standing()
        assert told(standing.look([job("standing", dead={1})], 1.0)) == DIED_1
        standing.look([], 2.0)
        standing.look(between, 3.0)
        assert told(standing.look([job("standing", dead={1}, run="b")], 4.0)) == DIED_1
    standing = Standing()
    standing.look([job("standing", dead={1})], 1.0)
    assert told(standing.look([job("standing", dead={1}, run="b")], 2.0)) == DIED_1
    assert standing.fate("lm", "n1") == ENDED, "of the run before"


def test_a_second_rank_that_dies_while_the_first_is_replaced_is_told_of() -> None:
    standing = Standing()
    standing.look([job("standing", dead={1})], 1.0)
    assert told(standing.look([job("standing", dead={1, 3})], 2.0)) == [
        ("Finding", "n3", "lm"),
        ("Decision", "n3", "lm"),
    ]
    assert [found.node for found in standing.findings("n1") + standing.findings("n3")] == ["n1", "n3"]
    back = job("standing", 9, {3}, epoch=1, moved={1: 1})
    assert standing.look([back], 3.0) == []
    assert standing.findings("n1") == []
    assert [standing.fate("lm", node) for node in ("n1", "n3")] == [REPLACED, ""]


def test_whoever_dies_in_the_step_that_killed_twice_is_for_a_person() -> None:
    standing = Standing()
    standing.look([job("standing", dead={1})], 1.0)
    standing.look([job("training", epoch=1, moved={1: 1})], 2.0)
    both = [
        *standing.look([job("standing", dead={1}, epoch=1, moved={1: 1})], 3.0),
        *standing.look([job("standing", dead={1, 2}, epoch=1, moved={1: 1})], 4.0),
    ]
    assert [(type(out), out.node) for out in both] == [(Finding, "n1"), (Finding, "n2")]
    assert all("has killed a process before" in out.why[-1] for out in both)
    assert standing.warnings("lm") == [both[0].why[-1]]
    assert standing.warnings("other") == []
    standing.look([job("training", 12, epoch=2, moved={1: 2, 2: 2})], 5.0)
    assert told(standing.look([job("standing", 12, {1}, epoch=2, moved={1: 2, 2: 2})], 6.0)) == DIED_1
    assert standing.warnings("lm") == []


def test_two_jobs_on_one_node_are_told_apart() -> None:
    standing = Standing()
    other = job("standing", dead={1}, run="x", name="other")
    decisions = [
        out for out in standing.look([job("standing", dead={1}), other], 1.0) if isinstance(out, Decision)
    ]
    assert {decision.job for decision in decisions} == {"lm", "other"}
    standing.look([job("training", epoch=1, moved={1: 1}), other], 2.0)
    assert [standing.stands(decision) for decision in decisions] == [False, True]
    assert (standing.fate("lm", "n1"), standing.fate("other", "n1")) == (GOES_ON, "")


def test_what_becomes_of_a_job_that_stood() -> None:
    for now, fate in (
        ([job("standing", dead={1})], ""),
        ([job("unknown", dead={1})], ""),
        ([job("training", epoch=1, moved={1: 1})], GOES_ON),
        ([job("lost", dead={1})], ENDED),
        ([job("finished", epoch=1, moved={1: 1})], ENDED),
        ([job("incomplete", run="b", dead={0, 1, 2, 3})], ENDED),
        ([], ENDED),
    ):
        standing = Standing()
        standing.look([job("standing", dead={1})], 1.0)
        standing.look(now, 2.0, heard=False)  # a node that never answers is in nobody's way
        assert standing.fate("lm", "n1") == fate, now
    for now in ([], [job("lost", dead={1})]):
        standing = Standing()
        standing.look(now, 1.0, heard=False)
        assert standing.fate("lm", "n1") == "", "a controller that has just begun does not know yet"


def test_a_process_that_was_given_up_and_is_back_can_die_again() -> None:
    standing = Standing()
    standing.look([job("standing", dead={1})], 1.0)
    standing.look([job("standing")], 2.0)
    assert told(standing.look([job("standing", dead={1})], 3.0)) == DIED_1


@given(st.lists(st.tuples(st.sampled_from(["dies", "back", "ends"]), st.integers(0, 3)), max_size=20))
def test_no_death_is_missed_and_none_is_told_twice(moves: list[tuple[str, int]]) -> None:
    """Against a twin that counts: whoever dies is told of once, as long as somebody of the run lives."""
    standing, dead, holders, run, epoch, step = Standing(), set[int](), dict[int, int](), 0, 0, 1
    for what, number in moves:
        fresh: set[int] = set()
        if what == "dies" and len(dead | {number}) < 4:
            fresh, dead = {number} - dead, dead | {number}
        elif what == "back" and dead:
            epoch, step = epoch + 1, step + 1
            holders, dead = holders | dict.fromkeys(dead, epoch), set()
        elif what == "ends":
            run, epoch, dead, holders = run + 1, 0, set(), {}
        now = job("standing" if dead else "training", step, dead, f"r{run}.", epoch=epoch, moved=holders)
        outputs = standing.look([now], 1.0)
        assert told(outputs) == [(kind, f"n{r}", "lm") for kind in ("Finding", "Decision") for r in fresh]
        assert {found.node for r in range(4) for found in standing.findings(f"n{r}")} == {
            f"n{r}" for r in dead
        }


def test_a_rank_whose_node_is_silent_is_told_of_and_nothing_is_decided() -> None:
    def silent(state: str) -> Job:
        found = job("standing")
        ranks = [msgspec.structs.replace(r, state=state) if r.rank == 1 else r for r in found.ranks]
        return msgspec.structs.replace(found, ranks=ranks)

    standing = Standing()
    (found,) = standing.look([silent("unknown")], 1.0)
    assert isinstance(found, Finding)
    assert (found.kind, found.node, found.fault) == ("rank_silent", "n1", "monitor")
    assert "--assume-dead" in found.why[1]
    assert standing.look([silent("unknown")], 2.0) == []
    assert standing.findings("n1") == [found]
    died = standing.look([silent("lost")], 3.0)
    assert [(type(out), out.kind) for out in died] == [(Finding, "rank_died"), (Decision, "rank_died")]
    assert standing.look([silent("unknown")], 4.0) == [], "its agent begins anew"
    assert [its.kind for its in standing.findings("n1")] == ["rank_silent"]
    assert standing.look([silent("lost")], 5.0) == []
    assert [its.kind for its in standing.findings("n1")] == ["rank_died"]
