"""The arithmetic of counters that are reset or go round, by property and against slow twins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent.telemetry.counters import WATTS_MAX, Total, rise, watts

COUNTS = st.integers(0, 2**64)


@given(COUNTS, COUNTS)
def test_a_rise_is_never_negative(before: int, after: int) -> None:
    assert rise(before, after) == (after - before if after >= before else after) >= 0


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1000), st.sampled_from(["", "reset", "gone"])))
)
def test_a_total_counts_every_event_once(steps: list[tuple[str, int, str]]) -> None:
    """The slow twin counts the events. A reset shows where the counter is below its last value then."""
    total, truth, counters = Total(), 0, {"a": 0, "b": 0}
    for key, events, what in steps:
        if what == "reset" and events < counters[key]:
            counters[key] = 0
        counters[key] += events
        truth += events
        seen = {name: None if what == "gone" and name != key else count for name, count in counters.items()}
        assert total.add(seen) == truth


@given(st.floats(0, WATTS_MAX), st.floats(0.1, 60), st.integers(0, 2**40), st.integers(2**38, 2**40))
def test_power_is_right_or_unknown(power_w: float, elapsed_s: float, start_uj: int, range_uj: int) -> None:
    before_uj = start_uj % range_uj
    energy_uj = int(power_w * elapsed_s * 1e6)
    known = watts(before_uj, (before_uj + energy_uj) % range_uj, range_uj, elapsed_s)
    if elapsed_s * WATTS_MAX * 1e6 < range_uj:
        assert known == pytest.approx(power_w, abs=1e-4)
    else:
        assert known is None


@given(st.floats(0, 2**50), st.floats(0, 2**50), st.none() | st.floats(-1, 2**50), st.floats(-1, 1e6))
def test_power_is_never_absurd(before: float, after: float, range_uj: float | None, elapsed_s: float) -> None:
    power_w = watts(before, after, range_uj, elapsed_s)
    assert power_w is None or 0 <= power_w <= WATTS_MAX
