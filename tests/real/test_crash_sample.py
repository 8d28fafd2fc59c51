"""A sample of the crash matrix; `make matrix` runs all of it (tests/matrix)."""

from collections.abc import Iterator

import pytest
from crash import POINTS, Cell, CrashFleet

CELLS = [
    ("COMMITTED-target1", "target"),
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[CrashFleet]:
    made = CrashFleet()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("point", "victim"), CELLS)
def test_somebody_is_killed(fleet: CrashFleet, point: str, victim: str) -> None:
    Cell(fleet, next(p for p in POINTS if p.id == point), victim).check()
