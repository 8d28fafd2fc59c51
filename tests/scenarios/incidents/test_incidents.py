"""Fourteen public incidents, generated, replayed and compared: whole traces, and what must hold of each."""

import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gridctl.detect.playback import Playback
from gridctl.detect.policy import builtin
from gridctl.detect.score import Judge, Score
from gridctl.ports.recording import Job, job_members
from gridctl.simulate.emit import play
from gridctl.simulate.incidents import INCIDENTS, incident_story

TRACES = Path(__file__).with_name("traces")
SEED = 1


@cache
def replayed(name: str) -> tuple[list[dict[str, Any]], Score]:
    story, hours, counts = incident_story(name, SEED)
    fleet = story.fleet
    jobs = [Job(job, {str(rank): node for rank, node in enumerate(m)}) for job, m in fleet.jobs.items()]
    playback = Playback(builtin(), fleet.nodes, job_members(jobs))
    judge = Judge(story.truth(**counts))
    lines = []
    for record in play(story, hours):
        for line in playback.feed(record):
            judge.feed(line)
            lines.append(line)
    return lines, judge.score(name, len(fleet.nodes), hours * 3600.0)


def trace(lines: list[dict[str, Any]]) -> Iterator[str]:
    """What was said but for the verdict that everybody begins with; of what was suppressed, how often."""
    for line in lines:
        if line["type"] == "suppressed" or (line["t"] < 1 and line["kind"] == "healthy"):
            continue
        what = f"[{line['severity']}, {line['action']}, {'preempt' if line['preempt_job'] else 'stay'}]"
        yield (
            f"{line['t']:9.2f}  {line['node'] or '-':7} {line['device']:12} {line['type']}: {line['kind']} "
            f"{what} by {line['rule'] or '-'}"
        )
    held = Counter((line["kind"], line["rule"]) for line in lines if line["type"] == "suppressed")
    for (kind, rule), count in sorted(held.items()):
        yield f"suppressed {count} x {kind} by {rule}"


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_whole_trace(name: str) -> None:
    text = "".join(f"{line}\n" for line in trace(replayed(name)[0]))
    path = TRACES / f"{name}.txt"
    if os.environ.get("GRIDCTL_WRITE_TRACES"):
        path.write_text(text)
    assert text == path.read_text()


def test_every_trace_belongs_to_an_incident() -> None:
    assert {path.stem for path in TRACES.iterdir()} == set(INCIDENTS)


@pytest.mark.parametrize("name", INCIDENTS)
def test_nothing_is_missed_and_nobody_is_moved_for_nothing(name: str) -> None:
    score = replayed(name)[1]
    assert score.missed() == []
    assert (score.false_nodes, score.premature_nodes, score.unnecessary) == ([], [], [])
    for found in score.faults:
        if found.fault.preempt_job and found.delay_s is not None:
            assert found.delay_s <= (1.0 if found.fault.signal == "streamed" else 30.0)


@pytest.mark.parametrize(
    ("name", "evicted", "incidents_max"),
    [
        ("crash-churn", 0, 3),
        ("job-crash", 0, 1),
        ("rack-reboots", 0, 0),
        ("uncontained-storm", 1, 1),
        ("slow-death", 0, 2),
        ("power-brake", 0, 9),
        ("thermal-swing", 0, 0),
        ("recovery-action", 1, 1),
        ("controller-restart", 1, 1),
        ("lost-reply", 0, 0),
        ("control-link", 0, 0),
        ("mass-fault", 4, 12),
        ("human-drain", 0, 1),
        ("off-the-bus", 1, 1),
    ],
)
def test_how_many_are_moved(name: str, evicted: int, incidents_max: int) -> None:
    score = replayed(name)[1]
    assert (score.evicted, score.preemptions) == (evicted, evicted)
    assert score.incidents <= incidents_max


def test_the_power_brake_is_seen_on_nine_nodes_and_the_cap_on_none() -> None:
    lines, _ = replayed("power-brake")
    assert len({line["node"] for line in lines if line["kind"] == "hw_power_brake" and line["node"]}) == 9


def test_a_node_that_gives_no_values_is_called_so_while_its_memory_fails() -> None:
    kinds = {line["kind"] for line in replayed("slow-death")[0] if line["type"] == "finding"}
    assert kinds == {"ecc_corrected_rate", "missing_data"}


def test_a_person_s_drain_is_respected() -> None:
    rules = {line["rule"] for line in replayed("human-drain")[0] if line["type"] == "suppressed"}
    assert "held" in rules
