import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridctl.assess.costs import BASE_RATE, Situation, base_rate, compare, priors
from gridctl.assess.spares import Candidate, rank

PRIOR = priors()
SOURCE = Candidate(
    node="n2",
    driver="580",
    rack="r1",
    nvlink_domain="d1",
    cooling_zone="z1",
)


def spare(name: str, **changes: object) -> Candidate:
    base = msgspec.structs.replace(SOURCE, node=name)
    return msgspec.structs.replace(base, **changes)


def test_costs_by_hand() -> None:
    """64 GPUs, half a second, a window in 10 h: the sums done with pencil and paper."""
    found = compare(
        Situation(
            job_gpus=64,
            spare_gpus=8,
            pause_s=0.5,
            defer_h=10,
            p_fault=0.5,
            p_fault_basis="Xid 48",
            recovery_h=2,
            usd_per_gpu_h=3,
        ),
        PRIOR,
    )
    pause_gpu_h = 64 * 0.5 / 3600
    assert found.now.gpu_h == pytest.approx(pause_gpu_h + 80)
    assert found.deferred.gpu_h == pytest.approx(0.5 * 2 * 64 + 0.5 * pause_gpu_h)
    assert found.now.usd == pytest.approx(3 * found.now.gpu_h)
    assert [part.basis for part in found.deferred.parts] == ["Xid 48", "estimate of the pause"]
    assert (found.cheaper, found.uncertain) == ("deferred", False)
    assert (
        compare(
            Situation(job_gpus=512, spare_gpus=8, pause_s=0.5, defer_h=10, p_fault=0.5, recovery_h=2), PRIOR
        ).cheaper
        == "now"
    )


def test_where_nothing_is_known_it_says_base_rate() -> None:
    found = compare(Situation(job_gpus=1024, spare_gpus=8, pause_s=0.5, defer_h=24), PRIOR)
    assert found.p_fault == pytest.approx(0.0039, rel=0.01)
    assert found.p_fault_basis.startswith(BASE_RATE)
    assert found.deferred.parts[0].basis.count(BASE_RATE) == 2
    assert found.now.usd is None
    repaired = compare(
        Situation(job_gpus=1024, spare_gpus=8, pause_s=0.5, defer_h=24, repaired_days_ago=2), PRIOR
    )
    assert repaired.p_fault == pytest.approx(10.7 * found.p_fault, rel=0.05)
    assert "after a repair" in repaired.p_fault_basis


def test_a_close_call_is_called_uncertain() -> None:
    """The range of the base rate spans both answers."""
    size = 192 / (base_rate(PRIOR, 24) * PRIOR.recovery.hours)
    found = compare(Situation(job_gpus=round(size), spare_gpus=8, pause_s=0, defer_h=24), PRIOR)
    assert found.uncertain


@pytest.mark.parametrize(
    "bad", [{"p_fault": 1.5}, {"pause_s": -1.0}, {"defer_h": math.nan}, {"job_gpus": -3}]
)
def test_impossible_numbers_are_refused(bad: dict[str, float]) -> None:
    good = Situation(job_gpus=8, spare_gpus=8, pause_s=1, defer_h=1)
    with pytest.raises(ValueError, match=r"probability|cannot be made"):
        compare(msgspec.structs.replace(good, **bad), PRIOR)


SITUATIONS = st.builds(
    Situation,
    job_gpus=st.integers(0, 100_000),
    spare_gpus=st.integers(0, 64),
    pause_s=st.floats(0, 3600),
    defer_h=st.floats(0, 1000),
    nodes=st.integers(1, 100),
    p_fault=st.none() | st.floats(0, 1),
    recovery_h=st.none() | st.floats(0, 100),
    repaired_days_ago=st.none() | st.floats(0, 100),
    usd_per_gpu_h=st.none() | st.floats(0, 100),
)


@given(SITUATIONS)
def test_costs_against_a_slow_twin(s: Situation) -> None:
    found = compare(s, PRIOR)
    p = s.p_fault
    if p is None:
        rate = 3.9 * (10.7 if s.repaired_days_ago is not None and s.repaired_days_ago <= 7 else 1)
        p = 1 - math.exp(-rate / 1000 / 24 * s.defer_h * s.nodes)
    recovery_h = 1.13 if s.recovery_h is None else s.recovery_h
    now = s.job_gpus * s.pause_s / 3600 + s.spare_gpus * s.defer_h
    later = p * recovery_h * s.job_gpus + (1 - p) * s.job_gpus * s.pause_s / 3600
    assert found.p_fault == pytest.approx(p, abs=1e-12)
    assert found.now.gpu_h == pytest.approx(now)
    assert found.deferred.gpu_h == pytest.approx(later, abs=1e-6)
    for cost in (found.now, found.deferred):
        assert cost.gpu_h == pytest.approx(math.fsum(part.gpu_h for part in cost.parts))
        assert (cost.usd is None) == (s.usd_per_gpu_h is None)


def test_the_better_spare_is_first_and_says_why() -> None:
    choice = rank(
        SOURCE,
        [
            spare("n4", rack="r9", nvlink_domain="d9", cooling_zone="z9"),
            spare("n5"),
            spare("n6", repaired_days_ago=3.0),
            spare("n7", verdict="suspect"),
            spare("n8", faults_30d=2),
        ],
    )
    assert [found.node for found in choice] == ["n5", "n4", "n8", "n6", "n7"]
    assert "same rack" in choice[0].reasons
    assert "repaired within 7 days" in choice[3].reasons


CANDIDATES = st.lists(
    st.builds(
        spare,
        st.integers(0, 30).map("n{}".format),
        rack=st.sampled_from(["", "r1", "r2"]),
        driver=st.sampled_from(["", "580", "570"]),
        nvlink_domain=st.sampled_from(["", "d1", "d2"]),
        cooling_zone=st.sampled_from(["z1", "z2"]),
        verdict=st.sampled_from(["healthy", "suspect", "faulty", "blind"]),
        faults_30d=st.integers(0, 2),
        repaired_days_ago=st.none() | st.floats(0, 20),
    ),
    unique_by=lambda candidate: candidate.node,
)


@given(CANDIDATES, st.randoms(use_true_random=False))
def test_order_of_candidates_never_matters(candidates: list[Candidate], chance: object) -> None:
    shuffled = list(candidates)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    choice = rank(SOURCE, candidates)
    assert rank(SOURCE, shuffled) == choice
    assert sorted(found.node for found in choice) == sorted(c.node for c in candidates)
    named = {c.node: c for c in candidates}
    keys = [slow_key(named[found.node]) for found in choice]
    assert keys == sorted(keys)


def slow_key(c: Candidate) -> tuple[object, ...]:
    """The same order, said as a comparison from the weightiest reason to the least."""
    return (
        c.verdict != "healthy",
        c.repaired_days_ago is not None and c.repaired_days_ago <= 7,
        c.faults_30d > 0,
        c.driver != "580",
        c.nvlink_domain != "d1",
        c.rack != "r1",
        c.cooling_zone == "z1",
        c.node,
    )
