"""Small recordings through the engine of `gridctl replay`: the whole trace of each, for people to read."""

from pathlib import Path
from typing import Any

import pytest
from fleets import JOBS, SCENARIOS, facts, records

from gridctl.detect.playback import Playback
from gridctl.detect.policy import builtin

TRACES = Path(__file__).with_name("traces")


def lines(name: str) -> list[dict[str, Any]]:
    playback = Playback(builtin(), facts(), JOBS)
    return [line for record in records(*SCENARIOS[name]) for line in playback.feed(record)]


def as_text(line: dict[str, Any]) -> str:
    what = f"[{line['severity']}, {line['action']}, {'preempt' if line['preempt_job'] else 'stay'}]"
    head = (
        f"{line['t']:8.2f}  {line['node'] or '-':3} {line['device']:12} {line['type']}: {line['kind']} {what}"
    )
    return "\n".join([f"{head} by {line['rule'] or '-'}", *(f"          - {why}" for why in line["why"])])


def trace(name: str) -> str:
    """All that was said, but for the verdict "healthy" that everybody begins with."""
    told = [line for line in lines(name) if line["t"] % 7200 >= 1 or line["kind"] != "healthy"]
    return "\n".join(map(as_text, told)) + "\n" * bool(told)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_whole_trace(name: str) -> None:
    assert trace(name) == (TRACES / f"{name}.txt").read_text()


def test_every_trace_belongs_to_a_scenario() -> None:
    assert {path.stem for path in TRACES.iterdir()} == set(SCENARIOS)


@pytest.mark.parametrize(
    ("name", "preempted"),
    [
        ("sound", set()),
        ("clock-ahead", set()),
        ("bus-loss", {"v2"}),
        ("bus-loss-of-a-spare", set()),
        ("node-gone", {"v2"}),
        ("rack-silent", set()),
        ("planned-reboot", set()),
        ("human-drain", set()),
        ("application-crash", set()),
        ("silent-hang", set()),
        ("agent-blind", set()),
        ("mass-fault", {"u1", "u2", "v1", "v2"}),
    ],
)
def test_who_is_preempted(name: str, preempted: set[str]) -> None:
    decided = {x["node"] for x in lines(name) if x["type"] == "decision" and x["preempt_job"]}
    assert decided == preempted
