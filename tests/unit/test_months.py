"""A month in which quiet nodes are passed over says what it says record by record."""

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gridctl.detect.heartbeat import Rhythm
from gridctl.detect.policy import builtin
from gridctl.simulate.emit import Quiet, play
from gridctl.simulate.layout import Fleet, fleet
from gridctl.simulate.plan import life

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "detect_months.py"


@pytest.fixture(scope="module")
def months() -> ModuleType:
    spec = importlib.util.spec_from_file_location("detect_months", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told(months: ModuleType, who: Fleet, hours: float, times: float, *, whole: bool) -> tuple[list[str], Any]:
    """What the watchdog says, and what it knows of all nodes at the end."""
    month = months.Month(life(who, hours, times))
    lines = [str(line) for line in month.lines(hours, whole=whole)]
    nodes = [month.watch.node(node.name) for node in who.nodes]
    return lines, [
        (n.verdict, n.findings, n.holds, n.heard_unix_s, n.busy_unix_s, n.observers.answered_s) for n in nodes
    ]


@pytest.mark.parametrize(
    ("nodes", "hours", "times", "seed"),
    [(16, 4.0, 800.0, seed) for seed in (1, 2, 3, 5)] + [(24, 20.0, 60.0, seed) for seed in (6,)],
    ids=lambda value: f"{value:g}",
)
def test_what_is_passed_over_changes_no_word_of_the_watchdog(
    months: ModuleType, nodes: int, hours: float, times: float, seed: int
) -> None:
    """Many events within hours, and fewer within a day: then nodes are quiet for long."""
    who = fleet(nodes, str(seed), gpus=2)
    passed = told(months, who, hours, times, whole=False)
    assert passed == told(months, who, hours, times, whole=True)
    assert times < 800.0 or any("'preempt_job': True" in line for line in passed[0])


def test_most_records_are_passed_over() -> None:
    """Those of nodes that are looked at each second, and of nodes with a fault that stays, too."""
    story = life(fleet(24, "6", gpus=2), 20.0, 60.0)
    offered: list[Quiet] = []

    def passes(quiet: Quiet) -> bool:
        offered.append(quiet)
        return True

    kinds = Counter(record.kind for record in play(story, 20.0, passes))
    assert kinds["sample"] < 0.4 * sum(len(quiet.seconds) * quiet.devices for quiet in offered)
    assert any(quiet.seconds.step == 1 for quiet in offered)
    assert any(len(quiet.like) > 2 for quiet in offered)  # type: ignore[arg-type]
    assert any(len(quiet.seconds) > 30 and quiet.seconds.step > 1 for quiet in offered)


def test_a_row_of_beats_leaves_the_rhythm_that_single_ones_leave() -> None:
    limits = builtin().thresholds.heartbeat
    for lag_s in (0.5, 0.0703, 0.1406):
        single, row = Rhythm(), Rhythm()
        for first, times in ((100, 30), (251, 3), (512, 700), (8192, 3000), (300_000, 500)):
            first_s = round(first + lag_s, 4)
            row.beats(first_s, 5.0, times, limits)
            for turn in range(times):
                single.beat(first_s + turn * 5.0, limits)
            for silent_s in (5.0, 7.0, 11.0, 60.0):
                assert row.phi(silent_s, limits) == single.phi(silent_s, limits)
            assert (row._mean_s, row._spread_s, row._last_s) == (
                single._mean_s,
                single._spread_s,
                single._last_s,
            )
