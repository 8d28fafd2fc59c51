"""How often the controller asks a node."""

from hypothesis import given
from hypothesis import strategies as st

from gridctl.control.poll import PAUSE_S_MAX, POLL_S, SPREAD, pause_s

CHANCES = st.floats(0, 1, exclude_max=True)
SILENCES = st.integers(0, 10**6)


def test_pauses_grow_with_every_silence_to_a_bound() -> None:
    assert [pause_s(silences, 0.0) for silences in (0, 1, 2, 3, 4, 5, 6)] == [2, 2, 4, 8, 16, 30, 30]


@given(SILENCES, CHANCES)
def test_chance_takes_away_a_quarter_at_most(silences: int, chance: float) -> None:
    longest = pause_s(silences, 0.0)
    assert POLL_S <= longest <= PAUSE_S_MAX
    assert longest * (1 - SPREAD) <= pause_s(silences, chance) <= longest


@given(SILENCES, CHANCES)
def test_another_silence_never_shortens_the_pause(silences: int, chance: float) -> None:
    assert pause_s(silences, chance) <= pause_s(silences + 1, chance)
