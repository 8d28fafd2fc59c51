"""A sample of the crash matrix, one cell of every kind; `make matrix` runs all of it (tests/matrix)."""

from collections.abc import Iterator

import pytest
from crash import POINTS, Cell
from crash_fleet import CrashFleet

CELLS = [
    ("open-survivor0", "chair's agent"),  # old
    ("join-survivor2", "controller, rolled back"),  # old
    ("ARMED-survivor2", "survivor's agent"),  # new
    ("PREPARED-source1", "source"),  # recovered
    ("PREPARED-target1", "controller"),  # new
    ("DECIDED-chair", "target"),  # returned
    ("ENDING-chair", "source's agent"),  # new
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[CrashFleet]:
    made = CrashFleet()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("point", "victim"), CELLS, ids=lambda word: word.replace(" ", "-"))
def test_somebody_is_killed_in_a_swap(fleet: CrashFleet, point: str, victim: str) -> None:
    Cell(fleet, next(p for p in POINTS if p.id == point), victim).check()
