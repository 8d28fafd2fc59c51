"""How the watchdog is judged: each definition with a case on either side of it."""

from typing import Any

import pytest

from gridctl.detect.score import Judge, Score, quantile, total, upper_bound
from gridctl.model.truth import Fault, Noise, Truth


def fault(**members: Any) -> Fault:
    known = {"t": 10.0, "node": "a", "device": "gpu:1", "kind": "gpu_lost", "fault": "node"}
    return Fault(**{**known, "preempt_job": True, "decisive_t": 12.0, **members})


def line(**members: Any) -> dict[str, Any]:
    known = {"t": 20.0, "type": "decision", "node": "a", "device": "gpu:1", "kind": "gpu_lost"}
    return {**known, "preempt_job": True, "rule": "decisive", **members}


def judged(lines: list[dict[str, Any]], *faults: Fault) -> Score:
    judge = Judge(
        Truth(faults=list(faults), must_not_preempt=["b"], noise=[Noise(t=5.0, node="b", cause="x")])
    )
    for one in lines:
        judge.feed(one)
    return judge.score("r", 10, 86400.0)


def test_a_delay_counts_from_when_it_could_be_known() -> None:
    assert judged([line()], fault()).delays_s() == [8.0]
    assert judged([line(t=11.0)], fault()).delays_s() == [0.0]


@pytest.mark.parametrize(
    "members",
    [
        {"device": "gpu:0"},
        {"kind": "mmu_fault"},
        {"type": "suppressed"},
        {"preempt_job": False},
        {"node": "b"},
        {"node": None},
        {"t": 5.0},
    ],
)
def test_what_does_not_count_as_found(members: dict[str, Any]) -> None:
    assert judged([line(**members)], fault()).missed() == [fault()]


def test_other_kinds_and_faults_of_many_nodes() -> None:
    assert judged([line(kind="x")], fault(also=["x"])).missed() == []
    many = fault(nodes=["a", "b"], device="node", preempt_job=False)
    assert judged([line(node=None, preempt_job=False)], many).missed() == []


def test_the_same_again_is_a_fault_of_its_own() -> None:
    later = fault(t=100.0, decisive_t=100.0)
    assert judged([line()], fault(), later).missed() == [later]
    assert judged([line(), line(t=101.0)], fault(), later).delays_s() == [1.0, 8.0]


def test_false_premature_and_unnecessary() -> None:
    score = judged([line(), line(node="b")], fault())
    assert (score.false_nodes, score.premature_nodes, score.preemptions) == (["b"], [], 2)
    assert score.unnecessary == ["b at 20 s: gpu_lost [decisive], after x at 5 s"]
    assert judged([line(t=5.0)], fault()).premature_nodes == ["a"]


def test_a_preemption_after_the_repair_is_unnecessary_though_the_node_had_a_fault() -> None:
    score = judged([line(), line(t=500.0)], fault(until_t=400.0))
    assert (score.false_nodes, score.preemptions, len(score.unnecessary)) == ([], 2, 1)


def test_blind_time_lasts_from_verdict_to_verdict_or_the_end() -> None:
    verdicts = [
        ("a", 100.0, "blind", ""),
        ("a", 160.0, "healthy", ""),
        ("b", 86_000.0, "suspect", "blind.node"),
    ]
    lines = [
        line(type="verdict", node=n, t=t, kind=k, rule=r, preempt_job=False, device="node")
        for n, t, k, r in verdicts
    ]
    score = judged(lines)
    assert (score.blind_node_s, score.node_s) == (60.0 + 400.0, 864_000.0)


def test_together_they_are_added_up() -> None:
    both = total([judged([line()], fault()), judged([line(node="b")], fault())])
    assert (both.preemptions, len(both.unnecessary), len(both.missed())) == (2, 1, 1)
    assert both.false_nodes == ["r/b"]
    assert both.node_months == pytest.approx(2 * 10 / 30)


def test_quantiles_are_nearest_ranks() -> None:
    values = [float(v) for v in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert quantile([], 0.5) is None


@pytest.mark.parametrize("trials", [1, 20, 300, 5000])
def test_the_bound_with_no_event_has_a_closed_form(trials: int) -> None:
    assert upper_bound(0, trials) == pytest.approx(1 - 0.05 ** (1 / trials), rel=1e-9)


def test_the_bound_of_a_share() -> None:
    assert upper_bound(3, 300) == pytest.approx(7.754 / 300, rel=0.01)  # 7.754: Poisson's bound for 3 events
    assert upper_bound(0, 0) is None
    assert upper_bound(5, 5) == 1.0
