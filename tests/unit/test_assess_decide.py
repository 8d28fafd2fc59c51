"""What ought to be done, its caps, and the skill of the forecasts it rests on."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_assess_rates import BASE, FINDINGS, HISTORIES, KNOWN, finding

from gridctl.assess.caps import Act, fleet_limit, full
from gridctl.assess.decide import AUTOMATIC, LADDER, LEAVING, Case, Choice, decide
from gridctl.assess.forecast import NodeHistory, forecast
from gridctl.assess.record import DAY_S, Entry, FleetRecord, hindcast
from gridctl.assess.skill import Outcome, skills
from gridctl.model.findings import Finding
from gridctl.model.policy import Caps

SPARE = forecast(BASE)


def case(*findings: Finding, node: NodeHistory | None = None, **more: Any) -> Case:
    verdict = more.pop("verdict", "suspect" if findings else "healthy")
    base: dict[str, Any] = {
        "node": "n1",
        "verdict": verdict,
        "findings": list(findings),
        "forecast": forecast(BASE, findings, node=node or NodeHistory(), faulty=verdict == "faulty"),
        "spare": SPARE,
        "ranks": 8,
        "spares": 8,
        "job_gpus": 512,
        "pause_s": 0.5,
        "step_s": 10.0,
        "recovery_h": 1.13,
        "armed": True,
    }
    return Case(**{**base, **more})


LOST = finding("gpu_lost", severity="fatal", preempt_job=True, when="now", action="evacuate_and_reboot")
SRAM = finding(
    "ecc_uncontained", severity="fatal", preempt_job=True, when="now", action="evacuate_and_reset_gpu"
)
PENDING = finding("row_remap_pending", when="window")


@pytest.mark.parametrize(
    ("given_case", "wanted", "action", "automatic"),
    [
        (case(), "none", "none", False),
        (case(finding("mmu_fault", fault="app", severity="critical")), "none", "none", False),
        (case(finding("thing", severity="warning")), "watch", "watch", False),
        (case(finding("thing", severity="critical", when="now")), "ask", "ask", False),
        (case(finding("hw_power_brake", severity="critical", fault="environment")), "ask", "ask", False),
        (case(finding("thing", when="after_job")), "reset_after_job", "reset_after_job", False),
        (case(LOST, verdict="faulty"), "swap_now", "swap_now", True),
        (case(LOST, verdict="faulty", armed=False), "swap_now", "swap_now", False),
        (case(LOST, verdict="faulty", ranks=0), "quarantine", "quarantine", False),
        (case(LOST, verdict="faulty", held="drained by bob"), "swap_now", "watch", False),
        (case(LOST, verdict="faulty", caps=["rack r1: 2"]), "swap_now", "ask", False),
        (case(LOST, verdict="faulty", spares=1, device_ranks=1), "swap_now", "ask", False),
        (case(SRAM, verdict="faulty", spares=1, device_ranks=1), "swap_now", "evacuate_device", True),
        (case(SRAM, verdict="faulty", spares=8, device_ranks=1), "swap_now", "swap_now", True),
        (case(verdict="blind"), "watch", "watch", False),
        (case(PENDING), "swap_now", "ask", False),  # 5 % of a day's recovery is dear; a person decides
        (case(PENDING, job_gpus=512, pause_s=600.0), "reset_after_job", "reset_after_job", False),
        (case(PENDING, spare_gpus=64, window_h=2.0), "swap_in_window", "swap_in_window", False),
        (case(node=NodeHistory(repaired_h_ago=1.0)), "none", "none", False),
    ],
)
def test_cases_by_hand(given_case: Case, wanted: str, action: str, automatic: bool) -> None:
    found = decide(given_case)
    assert (found.wanted, found.action, found.automatic) == (wanted, action, automatic)
    assert found.why


DIED = finding(
    "rank_died",
    severity="critical",
    action="recover_rank",
    fault="unknown",
    job="lm",
    why=["rank 1 has ended", "gridctl swap plan n1"],
)
AGAIN = msgspec.structs.replace(DIED, fault="app", why=[*DIED.why, "step 9 has killed a process before"])


@pytest.mark.parametrize(
    ("more", "action", "automatic", "first"),
    [
        ({}, "swap_now", True, "rank 1 has ended"),
        ({"armed": False}, "swap_now", False, "rank 1 has ended"),
        ({"caps": ["rack r1: 2"], "spares": 1}, "swap_now", True, "rank 1 has ended"),
        ({"spares": 0}, "ask", False, "1 rank has no process, and spares take 0: park one"),
        ({"spares": 1, "ranks": 2}, "ask", False, "2 ranks have no process, and spares take 1"),
        ({"spares": 0, "run": "r1"}, "swap_now", True, "run r1 is at it"),
        ({"held": "cordoned by bob: dimm"}, "watch", False, "cordoned by bob: dimm: whoever"),
    ],
)
@pytest.mark.parametrize("also", [(), (LOST,), (PENDING,)])
def test_a_job_that_stands_is_brought_on_whatever_caps_and_forecast_say(
    also: tuple[Finding, ...], more: dict[str, Any], action: str, automatic: bool, first: str
) -> None:
    found = decide(case(DIED, *also, **{"ranks": 1, **more}))
    assert (found.wanted, found.action, found.automatic) == ("swap_now", action, automatic)
    assert found.why[0].startswith(first)
    assert found.why[-2:] == DIED.why
    assert [(a.action, bool(a.refused)) for a in found.alternatives] == [
        ("watch", False),
        ("swap_now", action != "swap_now"),
    ]
    assert found.alternatives[0].cost.gpu_h == pytest.approx(1.13 * 512)


def test_a_step_that_killed_twice_is_for_a_person_with_all_that_is_known() -> None:
    found = decide(case(AGAIN, ranks=1))
    assert (found.wanted, found.action, found.automatic) == ("swap_now", "ask", False)
    assert found.why == AGAIN.why


def test_costs_by_hand() -> None:
    """512 GPUs, half a second, a window in 6 h, one pending remap: the sums done with pencil and paper."""
    its = case(PENDING, window_h=6.0, spare_gpus=8, usd_per_gpu_h=2.0)
    p, q = its.forecast.p, SPARE.p
    lost, pause = 1.13 * 512, 0.5 / 3600 * 512
    costs = {a.action: a.cost for a in decide(its).alternatives}
    assert costs["watch"].gpu_h == pytest.approx(p(24) * lost)
    assert costs["swap_in_window"].gpu_h == pytest.approx(p(6) * lost + (1 - p(6)) * (pause + q(18) * lost))
    assert costs["swap_now"].gpu_h == pytest.approx(pause + 8 * 6 + q(24) * lost)
    assert costs["swap_now"].usd == pytest.approx(2 * costs["swap_now"].gpu_h)
    assert "about 407 steps" in costs["watch"].parts[0].how


def test_a_move_from_one_sound_node_to_another_gains_nothing() -> None:
    found = decide(case(finding("thing")))
    assert found.cheapest == "watch"
    assert found.wanted == "watch"


CASES = st.builds(
    lambda findings, node, more: case(*findings, node=node, **more),
    FINDINGS,
    HISTORIES,
    st.fixed_dictionaries(
        {
            "verdict": st.sampled_from(["healthy", "suspect", "faulty"]),
            "ranks": st.integers(0, 8),
            "device_ranks": st.integers(0, 1),
            "spares": st.integers(0, 8),
            "job_gpus": st.integers(0, 4096),
            "spare_gpus": st.integers(0, 64),
            "pause_s": st.floats(0.01, 600),
            "window_h": st.floats(0, 48),
            "recovery_h": st.floats(0, 10),
            "held": st.sampled_from(["", "drained by ann"]),
            "caps": st.sampled_from([[], ["the fleet: 4"]]),
            "armed": st.booleans(),
        }
    ),
)


@given(CASES)
def test_what_holds_of_every_choice(its: Case) -> None:
    found = decide(its)
    assert decide(its) == found
    assert msgspec.json.decode(msgspec.json.encode(found), type=Choice) == found
    assert LADDER.index(found.action) <= LADDER.index(found.wanted) or found.action == "ask"
    if found.automatic:
        sure = its.verdict == "faulty" or any(f.preempt_job and f.fault != "app" for f in its.findings)
        assert sure
        assert its.armed
        assert found.action in AUTOMATIC
        assert not its.held
        assert not its.caps
    if found.action in LEAVING:
        assert not its.held
        assert not its.caps
        assert next(a for a in found.alternatives if a.action == found.action).refused == ""
    if not its.findings and its.verdict == "healthy":
        assert found.wanted == "none"
    for option in found.alternatives:
        assert option.cost.gpu_h == pytest.approx(math.fsum(part.gpu_h for part in option.cost.parts))
        assert option.cost.gpu_h >= 0
    shown = [LADDER.index(option.action) for option in found.alternatives]
    assert shown == sorted(set(shown))


def test_the_ladder_is_a_total_order() -> None:
    assert len(set(LADDER)) == len(LADDER)
    for one, other in itertools.combinations(LADDER, 2):
        assert LADDER.index(one) < LADDER.index(other)


@given(CASES, FINDINGS)
def test_more_evidence_never_asks_for_less(its: Case, more: list[Finding]) -> None:
    findings = [*its.findings, *more]
    node = NodeHistory()
    less = msgspec.structs.replace(
        its, forecast=forecast(BASE, its.findings, node=node, faulty=its.verdict == "faulty")
    )
    all_of_it = msgspec.structs.replace(
        its, findings=findings, forecast=forecast(BASE, findings, node=node, faulty=its.verdict == "faulty")
    )
    assert LADDER.index(decide(less).wanted) <= LADDER.index(decide(all_of_it).wanted)


@given(CASES, st.randoms(use_true_random=False))
def test_the_order_of_findings_changes_no_choice(its: Case, chance: Any) -> None:
    shuffled = list(its.findings)
    chance.shuffle(shuffled)
    one, other = decide(its), decide(msgspec.structs.replace(its, findings=shuffled))
    assert (one.wanted, one.action, one.automatic, one.cheapest) == (
        other.wanted,
        other.action,
        other.automatic,
        other.cheapest,
    )


# --------------------------------------------------------------------------------------------------
# Caps


ACTS = st.builds(
    Act,
    t_unix_s=st.floats(0, 200_000),
    node=st.sampled_from(["n1", "n2", "n3"]),
    job=st.sampled_from(["", "a", "b"]),
    rack=st.sampled_from(["", "r1", "r2"]),
    nvlink_domain=st.sampled_from(["", "d1"]),
    recovery=st.booleans(),
)
CAPS = st.builds(
    Caps,
    node_day=st.integers(0, 3),
    rack_hour=st.integers(0, 3),
    nvlink_domain_hour=st.integers(0, 3),
    job_hour=st.integers(0, 3),
    fleet_hour_share=st.floats(0, 1),
    fleet_hour_min=st.integers(0, 4),
    fleet_hour_max=st.integers(4, 40),
)


@given(CAPS, st.lists(ACTS, max_size=12), ACTS, st.integers(1, 600))
def test_caps_against_a_slow_twin(caps: Caps, acts: list[Act], wanted: Act, nodes: int) -> None:
    broken = 0
    domain = wanted.nvlink_domain
    for limit, same, within_s in (
        (caps.node_day, lambda a: a.node == wanted.node, 86400),
        (caps.rack_hour, lambda a: wanted.rack != "" and a.rack == wanted.rack, 3600),
        (caps.nvlink_domain_hour, lambda a: domain != "" and a.nvlink_domain == domain, 3600),
        (caps.job_hour, lambda a: wanted.job != "" and a.job == wanted.job, 3600),
        (fleet_limit(caps, nodes), lambda a: True, 3600),
    ):  # fmt: skip
        count = 0
        for act in acts:
            if not act.recovery and abs(act.t_unix_s - wanted.t_unix_s) < within_s and same(act):
                count += 1
        applies = within_s == 86400 or same(wanted)
        broken += applies and count >= limit
    assert len(full(caps, acts, wanted, nodes)) == (0 if wanted.recovery else broken)
    assert full(caps, [*acts, *acts], msgspec.structs.replace(wanted, recovery=True), nodes) == []


def test_the_fleet_s_limit_is_both_a_share_and_a_number() -> None:
    caps = Caps()
    assert [fleet_limit(caps, nodes) for nodes in (2, 64, 200, 10_000)] == [4, 6, 20, 32]
    with pytest.raises(ValueError, match="fleet_hour_max"):
        Caps(fleet_hour_min=9, fleet_hour_max=3)
    acts = [Act(t_unix_s=float(i), node=f"n{i}", rack=f"r{i}") for i in range(4)]
    over = full(caps, acts, Act(t_unix_s=9.0, node="n9"), 8)
    assert over == ["the fleet: 4 hand-overs within an hour, the limit is 4"]


# --------------------------------------------------------------------------------------------------
# Skill and the record


OUTCOMES = st.lists(
    st.builds(
        Outcome,
        name=st.sampled_from(["a", "b"]),
        p=st.sampled_from([0.0, 0.004, 0.02, 0.3, 1.0]),
        base=st.just(0.004),
        happened=st.booleans(),
    ),
    min_size=1,
    max_size=60,
)


@given(OUTCOMES)
def test_scores_against_a_slow_twin_and_murphy_s_sum(outcomes: list[Outcome]) -> None:
    for found in skills(outcomes):
        its = [o for o in outcomes if o.name == found.name]
        brier = sum((o.p - (1 if o.happened else 0)) ** 2 for o in its) / len(its)
        assert found.brier == pytest.approx(brier)
        assert found.brier == pytest.approx(
            found.reliability - found.resolution + found.uncertainty, abs=1e-9
        )
        assert sum(b.forecasts for b in found.calibration) == found.forecasts == len(its)
        assert found.gain_low <= found.brier_base - found.brier + 1e-12


def test_the_verdicts() -> None:
    def verdict(p_if_fault: float, p_else: float, faults: int = 40, sound: int = 2000) -> str:
        (found,) = skills(
            [Outcome(name="x", p=p_if_fault, base=0.02, happened=True)] * faults
            + [Outcome(name="x", p=p_else, base=0.02, happened=False)] * sound
        )
        return found.verdict

    assert verdict(0.02, 0.02) == "base rate"
    assert verdict(0.5, 0.01) == "better than the base rate"
    assert verdict(0.02, 0.4) == "worse than the base rate"
    assert verdict(0.5, 0.01, faults=3).startswith("not known: 3 faults")
    with pytest.raises(ValueError, match="no probability"):
        skills([Outcome(name="x", p=1.5, base=0.1, happened=True)])


def entry(t_h: float, record: str, **data: Any) -> Entry:
    return Entry(t_unix_s=t_h * 3600, kind=record, data={**data, "t_unix_s": t_h * 3600})


def told(t_h: float, node: str, kind: str) -> Entry:
    its = msgspec.to_builtins(finding(kind, node=node))
    return entry(t_h, "finding", **{**its, "key": ["x"], "incident": ""})


def test_the_record_counts_faults_repairs_and_what_followed_a_signal() -> None:
    journal = [
        entry(0, "finding", type="verdict", node="n1", kind="healthy"),
        entry(0, "finding", type="verdict", node="n2", kind="healthy"),
        told(10, "n1", "row_remap_pending"),
        told(12, "n1", "row_remap_pending"),  # the same signal still
        entry(20, "decision", type="decision", node="n1", kind="row_remap_failure"),
        entry(20.5, "decision", type="decision", node="n1", kind="gpu_lost"),  # of the same fault
        entry(22, "decision", type="suppressed", node="n2", kind="gpu_lost"),
        entry(40, "audit", what="uncordon", node="n1"),
        told(50, "n2", "row_remap_pending"),
        entry(60, "decision", type="decision", node="n1", kind="gpu_lost"),
        entry(61, "finding", node=7, type="finding"),
        entry(62, "finding", node="n2", type="finding", severity=3),
    ]
    record = FleetRecord(KNOWN)
    for its in journal:
        record.take(its.kind, its.data, its.t_unix_s)
    now = 100 * 3600.0
    own = record.node("n1", now)
    assert (own.watched_h, own.faults, own.repaired_h_ago) == (100, 2, 60)
    assert record.node("n9", now) == NodeHistory()
    fleet = record.fleet(now, {"n1": 8, "n2": 4})
    assert fleet.faults == {"gpu_memory": 1, "gpu_lost": 1}
    assert (fleet.signals["row_remap_pending"].seen, fleet.signals["row_remap_pending"].followed) == (2, 1)
    assert fleet.gpu_years == pytest.approx(100 * 12 / 8766)
    assert record.fleet(60 * 3600.0, {}).signals["row_remap_pending"].seen == 1  # the second is not over yet
    assert [f.kind for f in record.live("n2")] == ["row_remap_pending"]
    # n1 was opened at 40 h and failed 20 h later: at risk for 20 h of its first day, with 8 GPUs
    assert [(its.gpu_h, its.faults) for its in fleet.repeats] == [(160, 1), (0, 0), (0, 0)]
    assert record.fleet(50 * 3600.0, {}).repeats[0].gpu_h == 80


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
WORDS = st.sampled_from(
    ["finding", "verdict", "decision", "uncordon", "healthy", "row_remap_pending", "n1", ""]
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["finding", "decision", "audit", "note"]),
            st.dictionaries(
                st.sampled_from([*Finding.__struct_fields__, "type", "what", "decision"]), WORDS | JSON
            ),
        ),
        max_size=8,
    )
)
def test_a_record_that_says_something_else_stops_nothing(said: list[tuple[str, dict[str, Any]]]) -> None:
    record = FleetRecord(KNOWN)
    for kind, data in said:
        record.take(kind, data, 1000.0)
    assert record.fleet(2000.0, {}).gpu_years >= 0
    for name in record.nodes():
        assert record.node(name, 2000.0).watched_h >= 0
        record.live(name)


def lives(seed: int, nodes: int, days: int) -> Iterator[Entry]:
    """A journal of a fleet that fails 30 times as often as published ones, its nodes unlike each other. A
    quarter of the memory faults is announced by a pending remap; nothing announces a lost GPU."""
    chance = random.Random(seed)
    yield from (entry(0, "finding", type="verdict", node=f"n{i}", kind="healthy") for i in range(nodes))
    for i in range(nodes):
        frail = chance.gammavariate(0.95, 1 / 0.95)
        for day in range(1, days):
            for kind, rate in (("row_remap_failure", 0.0165), ("gpu_lost", 0.023)):
                if chance.random() >= rate * frail:
                    continue
                t_h = 24 * day + chance.uniform(0, 22)
                if kind == "row_remap_failure" and chance.random() < 0.25:
                    yield told(t_h - chance.uniform(1, 23), f"n{i}", "row_remap_pending")
                yield entry(t_h, "decision", type="decision", node=f"n{i}", kind=kind)
                yield entry(t_h + 1, "audit", what="uncordon", node=f"n{i}")
            if chance.random() < 0.002:
                yield told(24 * day + 1, f"n{i}", "row_remap_pending")
                yield entry(24 * day + 23, "finding", type="verdict", node=f"n{i}", kind="healthy")
    yield entry(24 * days, "finding", type="verdict", node="n0", kind="suspect")


@pytest.mark.parametrize("seed", [1, 2])
def test_forecasts_of_a_made_up_fleet_have_skill_where_there_is_something_to_see(seed: int) -> None:
    outcomes = list(hindcast(lives(seed, 60, 90), KNOWN, {}))
    found = {its.name: its for its in skills(outcomes)}
    assert found["gpu_memory"].events > 50
    assert found["gpu_memory"].verdict == "better than the base rate"
    assert found["gpu_lost"].skill is not None
    assert found["gpu_lost"].skill < found["gpu_memory"].skill  # history alone
    assert found["cable"].verdict.startswith("not known")
    for name in ("gpu_memory", "gpu_lost"):
        expected = math.fsum(o.p for o in outcomes if o.name == name)
        assert expected == pytest.approx(found[name].events, rel=0.4)


def test_a_hindcast_knows_no_future_and_scores_each_class() -> None:
    journal = [entry(0, "finding", type="verdict", node=f"n{i}", kind="healthy") for i in range(20)]
    journal += [told(30, "n3", "row_remap_pending")]
    journal += [entry(55, "decision", type="decision", node="n3", kind="ecc_uncorrectable_dram")]
    journal += [entry(24 * 10, "finding", type="verdict", node="n1", kind="suspect")]
    outcomes = list(hindcast(journal, KNOWN, {}))
    came = [o for o in outcomes if o.happened]
    assert [o.name for o in came] == ["gpu_memory"]
    assert came[0].p > 10 * came[0].base
    assert all(
        o.p == pytest.approx(o.base, rel=0.2) for o in outcomes if o.name == "gpu_lost" and not o.happened
    )
    assert len(outcomes) == (20 * 9 - 7) * len(KNOWN.classes)  # n3 is given up from the third day on
    before = outcomes[: 20 * len(KNOWN.classes)]
    again = list(hindcast([e for e in journal if e.t_unix_s <= 2 * DAY_S] + journal[-1:], KNOWN, {}))
    assert [o.p for o in again[: 20 * len(KNOWN.classes)]] == [o.p for o in before]
    assert list(hindcast([], KNOWN, {})) == []
