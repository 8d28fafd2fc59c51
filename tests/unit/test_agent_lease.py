"""The lease: at most one holder at a time, fences only rise, whatever the clocks do."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.errors import ConfigError, Refused
from gridagent.lease import TTL_S_MAX, Lease
from gridagent.wire import LeaseReply, LeaseRequest


class Clock:
    def __init__(self) -> None:
        self.monotonic_s = 50.0
        self.wall_s = 1_000_000.0

    def pass_(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds

    def lease(self, path: Path) -> Lease:
        return Lease(path, lambda: self.monotonic_s, lambda: self.wall_s)


def ask(lease: Lease, holder: str, fence: int, ttl_s: float = 15.0) -> LeaseReply:
    return lease.ask(LeaseRequest(holder=holder, fence=fence, ttl_s=ttl_s))


def may_act(lease: Lease, holder: str, fence: int) -> bool:
    try:
        lease.check(holder, fence)
    except Refused:
        return False
    return True


def test_a_lease_ends_by_itself_and_the_next_needs_a_higher_fence(tmp_path: Path) -> None:
    clock = Clock()
    lease = clock.lease(tmp_path / "lease")
    assert ask(lease, "a", 3) == LeaseReply(granted=True, fence=3, holder="a", left_s=15.0)
    assert not ask(lease, "b", 4).granted
    clock.pass_(14)
    assert ask(lease, "a", 3).left_s == 15.0
    clock.pass_(15)
    assert not may_act(lease, "a", 3)
    assert not ask(lease, "b", 3).granted
    assert ask(lease, "b", 4).granted
    assert not may_act(lease, "a", 3)
    assert may_act(lease, "b", 4)


def test_a_holders_own_newer_fence_is_asked_for_first_and_another_holder_is_fenced(tmp_path: Path) -> None:
    lease = Clock().lease(tmp_path / "lease")
    ask(lease, "a", 3)
    codes = []
    for holder, fence in (("a", 4), ("b", 4), ("a", 2)):
        with pytest.raises(Refused) as refused:
            lease.check(holder, fence)
        codes.append(refused.value.code)
    assert codes == ["no-lease", "fenced", "fenced"]


@pytest.mark.parametrize("text", ["{}", '{"fence": -9}', "[]", ""])
def test_a_file_that_does_not_tell_the_fence_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "lease").write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        Clock().lease(tmp_path / "lease")


def test_a_stepped_clock_neither_ends_nor_prolongs_it(tmp_path: Path) -> None:
    clock = Clock()
    lease = clock.lease(tmp_path / "lease")
    ask(lease, "a", 1)
    clock.wall_s += 1e6
    assert may_act(lease, "a", 1)
    clock.wall_s -= 2e6
    clock.pass_(15)
    assert not may_act(lease, "a", 1)


def test_after_a_restart_it_lasts_no_longer_than_it_was_granted(tmp_path: Path) -> None:
    clock = Clock()
    ask(clock.lease(tmp_path / "lease"), "a", 1)
    clock.pass_(5)
    assert clock.lease(tmp_path / "lease").left_s == pytest.approx(10.0)
    clock.wall_s -= 1e6
    assert clock.lease(tmp_path / "lease").left_s == 15.0


def test_what_cannot_be_written_is_renewed_and_given_to_nobody_new(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "lease"
    lease = clock.lease(path)
    ask(lease, "a", 1)
    path.unlink()
    (path / "in the way").mkdir(parents=True)
    clock.pass_(14)
    assert ask(lease, "a", 1).left_s == 15.0
    with pytest.raises(OSError, match="lease"):
        ask(lease, "a", 2)
    assert may_act(lease, "a", 1)
    ask(lease, "a", 1, 0.0)
    with pytest.raises(OSError, match="lease"):
        ask(lease, "b", 2)
    assert lease.fence == 1


def test_a_damaged_file_is_not_forgotten(tmp_path: Path) -> None:
    (tmp_path / "lease").write_text('{"fence": ')
    with pytest.raises(ConfigError, match="damaged"):
        Clock().lease(tmp_path / "lease")


EVENTS = st.one_of(
    st.tuples(
        st.just("ask"), st.sampled_from("ab"), st.integers(0, 5), st.sampled_from([0.0, 5.0, 1e9, -1.0])
    ),
    st.tuples(st.just("pass"), st.floats(0, 10)),
    st.just(("restart",)),
)


@settings(max_examples=150, deadline=None)
@given(events=st.lists(EVENTS, max_size=25))
def test_it_behaves_like_a_table_on_paper(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[object, ...]]
) -> None:
    path = tmp_path_factory.mktemp("lease") / "lease"
    clock = Clock()
    lease = clock.lease(path)
    fence, holder, until_s = 0, "", 0.0
    for event in events:
        if event[0] == "pass":
            clock.pass_(float(str(event[1])))
        elif event[0] == "restart":
            lease = clock.lease(path)
        else:
            _, who, number, ttl_s = event
            live = holder != "" and clock.wall_s < until_s - 1e-6
            mine = who == holder
            granted = (mine and number == fence) or (int(str(number)) > fence and (mine or not live))
            assert ask(lease, str(who), int(str(number)), float(str(ttl_s))).granted == granted
            if granted:
                fence, holder = int(str(number)), str(who)
                until_s = clock.wall_s + min(max(float(str(ttl_s)), 0.0), TTL_S_MAX)
        for who in "ab":
            for number in range(6):
                live = clock.wall_s < until_s - 1e-6
                assert may_act(lease, who, number) == (live and who == holder and number == fence)
