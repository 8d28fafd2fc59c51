"""Shared by the tests with real processes: agents, and torch, are started once for all jobs of a session."""

from collections.abc import Iterator

import pytest
from crash_fleet import CrashFleet
from fleet import TrainingFleet


@pytest.fixture(scope="session")
def trained() -> Iterator[TrainingFleet]:
    """Five nodes whose agents allow damage. Ends everything, fails on a leftover."""
    fleet = TrainingFleet(nodes=5)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def crashing() -> Iterator[CrashFleet]:
    """Five nodes for jobs of which somebody dies, each under a controller of its own."""
    fleet = CrashFleet(nodes=5)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(autouse=True)
def _no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "trained" in request.fixturenames:
        request.getfixturevalue("trained").check_and_clear()
