"""64 nodes for a day, with sixty times the usual faults and noise: all that is decisive is found in time."""

from functools import cache

from gridctl.detect.playback import Playback
from gridctl.detect.policy import builtin
from gridctl.detect.score import Judge, Score, quantile
from gridctl.ports.recording import Job, job_members
from gridctl.simulate.emit import play
from gridctl.simulate.layout import fleet
from gridctl.simulate.plan import life

NODES, GPUS, HOURS, SEED, TIMES = 64, 2, 24.0, "25", 60.0


@cache
def day() -> Score:
    who = fleet(NODES, SEED, GPUS)
    story = life(who, HOURS, TIMES)
    jobs = [Job(job, {str(rank): node for rank, node in enumerate(m)}) for job, m in who.jobs.items()]
    playback = Playback(builtin(), who.nodes, job_members(jobs))
    judge = Judge(story.truth())
    for record in play(story, HOURS):
        for line in playback.feed(record):
            judge.feed(line)
    return judge.score("day", NODES, HOURS * 3600.0)


def test_nobody_is_moved_for_nothing() -> None:
    score = day()
    assert score.preemptions >= 5
    assert (score.unnecessary, score.false_nodes, score.premature_nodes) == ([], [], [])


def test_every_fault_is_found_and_the_decisive_ones_in_time() -> None:
    score = day()
    assert score.missed() == []
    streamed = score.delays_s(preempt_job=True, signal="streamed")
    polled = score.delays_s(preempt_job=True, signal="polled")
    assert streamed
    assert (quantile(streamed, 1.0) or 0.0) <= 1.0
    assert (quantile(polled, 1.0) or 0.0) <= 30.0
