"""A job that stands is told of once, with what to do about it."""

from runbook_world import fleet, rank

from gridctl.detect.standing import Standing
from gridctl.model.fleet import jobs


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
    assert len(list(look(jobs(fleet(**later, n2={"ranks": [rank(1, state="lost")]}).values()), 3.0))) == 2


def test_a_step_that_kills_twice_is_the_jobs_own_matter() -> None:
    look = Standing().look
    for epoch, told in ((0, 2), (1, 1)):
        others = {
            name: {"ranks": [rank(i, state="standing", epoch=epoch)]} for name, i in (("n1", 0), ("n3", 2))
        }
        dead = fleet(**others, n2={"ranks": [rank(1, state="lost", epoch=epoch)]})
        outputs = list(look(jobs(dead.values()), 1.0 + epoch))
        assert len(outputs) == told
    assert outputs[0].fault == "app"
    assert "has killed a process before" in outputs[0].why[2]


def test_a_job_that_trains_or_is_not_known_is_not_told_of() -> None:
    assert not list(Standing().look(jobs(fleet().values()), 1.0))
    assert not list(Standing().look(jobs(fleet(n2={"ranks": [rank(1, state="lost")]}).values()), 1.0))
