"""Base rates, forecasts and the risk index: closed forms against numeric ones, and what must never be."""

import itertools
import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gridctl.assess import rates
from gridctl.assess.costs import BASE_RATE, priors
from gridctl.assess.forecast import PRESENT, Forecast, Hazard, NodeHistory, forecast
from gridctl.assess.rates import FleetHistory, Gamma, Repeated, Seen, base_of, gamma_cdf, prior_of, tables
from gridctl.assess.risk import Known, indices, weights
from gridctl.errors import ConfigError
from gridctl.model.findings import SEVERITIES, Finding

KNOWN = tables()
BASE = base_of(KNOWN, FleetHistory())
WEIGHTS = weights()


def finding(kind: str, **more: Any) -> Finding:
    base: dict[str, Any] = {
        "t_unix_s": 0.0,
        "node": "n1",
        "device": "gpu:3",
        "kind": kind,
        "severity": "warning",
        "why": [f"{kind} was seen"],
        "rule": kind,
        "layer": "device",
        "fault": "node",
    }
    return Finding(**{**base, **more})


KINDS = [*KNOWN.signals, "gpu_lost", "mmu_fault", "row_remap_failure", "something_else"]
FINDINGS = st.lists(
    st.builds(
        finding,
        st.sampled_from(KINDS),
        device=st.sampled_from(["node", "gpu:0", "gpu:3", "nic:mlx5_0/1"]),
        severity=st.sampled_from(SEVERITIES),
        preempt_job=st.booleans(),
        fault=st.sampled_from(
            ["node", "app", "fabric", "driver", "config", "environment", "monitor", "unknown"]
        ),
        when=st.sampled_from(["none", "now", "after_job", "window"]),
        action=st.sampled_from(["observe", "evacuate_and_reset_gpu", "evacuate_and_reboot"]),
    ),
    max_size=6,
)
HISTORIES = st.builds(
    NodeHistory,
    watched_h=st.floats(0, 20_000),
    faults=st.integers(0, 20),
    repaired_h_ago=st.none() | st.floats(0, 2000),
)
FLEETS = st.builds(
    FleetHistory,
    gpu_years=st.floats(0, 5000),
    faults=st.dictionaries(st.sampled_from(list(KNOWN.classes)), st.integers(0, 300)),
    signals=st.dictionaries(
        st.sampled_from(list(KNOWN.signals)),
        st.tuples(st.integers(0, 100), st.integers(0, 100)).map(
            lambda pair: Seen(seen=max(pair), followed=min(pair))
        ),
    ),
)


# --------------------------------------------------------------------------------------------------
# Base rates


def test_the_classes_add_up_to_the_published_rate_of_all_faults() -> None:
    per_1000_node_days = 1000 * BASE.expected(8, 24)
    assert per_1000_node_days == pytest.approx(priors().fault.per_1000_node_days, rel=0.02)
    assert all(row.source for row in (*KNOWN.classes.values(), *KNOWN.signals.values()))


def test_every_kind_belongs_to_one_class() -> None:
    kinds = [kind for row in KNOWN.classes.values() for kind in row.kinds.split()]
    assert len(kinds) == len(set(kinds))
    assert KNOWN.class_of("gpu_lost") == "gpu_lost"
    assert KNOWN.class_of("never heard of") == "unattributed"


def test_a_signal_for_what_nothing_precedes_is_a_defect_of_the_table() -> None:
    signal = msgspec.structs.replace(KNOWN.signals["link_flap"], class_name="gpu_lost")
    with pytest.raises(ConfigError, match="no precursor is known"):
        rates.checked(msgspec.structs.replace(KNOWN, signals={"link_flap": signal}))


@given(st.floats(0.05, 1.5), st.floats(0, 20))
def test_the_gamma_distribution_against_numeric_integration(shape: float, x: float) -> None:
    """Substituting t = u ** (1 / shape) takes the pole at nought out of the density."""
    steps = 4000
    width = x**shape / steps
    area = math.fsum(math.exp(-(((i + 0.5) * width) ** (1 / shape))) for i in range(steps)) * width
    assert gamma_cdf(shape, x) == pytest.approx(area / math.gamma(shape + 1), abs=1e-4)
    assert 0 <= gamma_cdf(shape, x) <= gamma_cdf(shape, x + 1) <= 1


@pytest.mark.parametrize("shape", [1, 2, 5, 40, 300])
def test_the_gamma_distribution_is_the_poisson_one_for_whole_shapes(shape: int) -> None:
    for x in (0.01, 0.5, shape / 2, shape, shape + 1, 2 * shape, 5 * shape):
        fewer = math.fsum(math.exp(k * math.log(x) - x - math.lgamma(k + 1)) for k in range(shape))
        assert gamma_cdf(shape, x) == pytest.approx(1 - fewer, abs=1e-12)


@given(st.floats(0.2, 500), st.floats(0.1, 100), st.floats(0.01, 0.99))
def test_a_quantile_is_where_the_distribution_reaches_it(shape: float, rate: float, p: float) -> None:
    assert gamma_cdf(shape, Gamma(shape=shape, rate=rate).quantile(p) * rate) == pytest.approx(p, abs=1e-6)


def test_a_prior_has_its_mean_and_about_the_range_it_was_made_of() -> None:
    made = prior_of(15, 35, 70)
    assert made.mean == pytest.approx(35)
    assert made.quantile(0.05) == pytest.approx(15, rel=0.25)
    assert made.quantile(0.95) == pytest.approx(70, rel=0.25)


@given(
    st.sampled_from(sorted(KNOWN.classes)),
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 500)), max_size=6),
)
def test_the_update_does_not_care_in_what_portions_the_record_comes(
    name: str, portions: list[tuple[int, float]]
) -> None:
    row = KNOWN.classes[name]
    prior = prior_of(row.low, row.central, row.high)
    one_by_one = prior
    for events, exposure in portions:
        one_by_one = one_by_one.updated(events, exposure)
    events, exposure = sum(n for n, _ in portions), math.fsum(x for _, x in portions)
    assert prior.updated(events, exposure).mean == pytest.approx(one_by_one.mean)
    if exposure:
        bounds = sorted([prior.mean, events / exposure])
        assert bounds[0] * (1 - 1e-9) <= one_by_one.mean <= bounds[1] * (1 + 1e-9)


def test_the_update_against_bayes_on_a_grid() -> None:
    """Prior times Poisson likelihood, summed up over a grid of rates."""
    prior = prior_of(10, 25, 90)
    grid = [0.05 * i for i in range(1, 12_000)]
    logs = [(prior.shape - 1) * math.log(r) - prior.rate * r + 7 * math.log(r * 0.2) - r * 0.2 for r in grid]
    top = max(logs)
    density = [math.exp(value - top) for value in logs]
    slow = math.fsum(r * d for r, d in zip(grid, density, strict=True)) / math.fsum(density)
    assert prior.updated(7, 0.2).mean == pytest.approx(slow, rel=1e-4)


def test_a_fleet_with_a_long_record_believes_its_record() -> None:
    own = FleetHistory(gpu_years=10_000, faults={"gpu_lost": 2000})
    row = KNOWN.classes["gpu_lost"]
    assert rates.class_rate(row, own).mean == pytest.approx(200, rel=0.02)
    wide, narrow = BASE.band, base_of(KNOWN, own).band
    assert wide[0] < narrow[0] < 1 < narrow[1] < wide[1]


@pytest.mark.parametrize(("events", "exposure"), [(-1, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_impossible_records_are_refused(events: int, exposure: float) -> None:
    with pytest.raises(ValueError, match="is no record"):
        prior_of(1, 2, 4).updated(events, exposure)


# --------------------------------------------------------------------------------------------------
# Forecasts

HAZARDS = st.builds(
    lambda widths, rest, tail: Hazard(
        tail=tail,
        pieces=[
            (math.fsum(widths[: i + 1]), rate) for i, (_, rate) in enumerate(zip(widths, rest, strict=False))
        ],
    ),
    st.lists(st.floats(0.1, 200), max_size=4),
    st.lists(st.floats(0, 0.5), min_size=4, max_size=4),
    st.floats(1e-3, 0.5),
)


def rate_at(hazard: Hazard, t: float) -> float:
    return next((rate for until, rate in hazard.pieces if t < until), hazard.tail)


@given(HAZARDS, st.floats(0, 300))
def test_a_hazard_against_numeric_integration(hazard: Hazard, hours: float) -> None:
    steps = 3000
    width = hours / steps
    slow = math.fsum(rate_at(hazard, (i + 0.5) * width) for i in range(steps)) * width
    assert hazard.cumulative(hours) == pytest.approx(slow, abs=3 * width)


@given(HAZARDS)
def test_useful_hours_are_the_area_below_survival(hazard: Hazard) -> None:
    """Simpson's rule within each stretch, and the tail far out."""

    def survival(t: float) -> float:
        return math.exp(-hazard.cumulative(t))

    edges = [0.0, *(until for until, _ in hazard.pieces)]
    edges.append(edges[-1] + 40 / hazard.tail)
    slow = 0.0
    for begin, end in itertools.pairwise(edges):
        n = 400
        h = (end - begin) / n
        inner = math.fsum((4 if i % 2 else 2) * survival(begin + i * h) for i in range(1, n))
        slow += h / 3 * (survival(begin) + survival(end) + inner)
    assert hazard.mean_h() == pytest.approx(slow, rel=1e-4)


def test_a_new_node_gets_the_base_rate_and_is_told_so() -> None:
    found = forecast(BASE)
    assert found.basis == BASE_RATE
    assert found.p_24h == pytest.approx(0.0039, rel=0.02) == found.base_24h
    assert found.p_1h == pytest.approx(found.p_24h / 24, rel=0.01)
    assert found.remaining_h == pytest.approx(24 / 0.0039, rel=0.02)
    assert found.p_24h_range[0] < found.p_24h < found.p_24h_range[1]
    assert all(its.basis == BASE_RATE for its in found.classes)


def test_after_a_repair_the_public_repeat_rates_come_out() -> None:
    """22 % within a day, 31 % within 7, 43 % within 30, against 2.9 % in 7 days: ten times."""
    fresh = forecast(BASE, node=NodeHistory(repaired_h_ago=0.0))
    assert fresh.p(24) == pytest.approx(0.22, abs=0.02)
    assert fresh.p(168) == pytest.approx(0.31, abs=0.02)
    assert fresh.p(720) == pytest.approx(0.43, abs=0.03)
    ten = math.log1p(-fresh.p(168)) / math.log1p(-forecast(BASE).p(168))
    assert 10 <= ten <= 15
    assert fresh.basis == f"{BASE_RATE} and history: repaired 0 h ago"
    assert forecast(BASE, node=NodeHistory(repaired_h_ago=800.0)).basis == BASE_RATE


def test_a_fleet_whose_repairs_hold_unlearns_the_public_repeat_rate() -> None:
    def first_day(gpu_h: float, faults: int) -> float:
        own = FleetHistory(repeats=[Repeated(gpu_h=gpu_h, faults=faults), Repeated(), Repeated()])
        return forecast(base_of(KNOWN, own), node=NodeHistory(repaired_h_ago=0.0)).p(24)

    assert first_day(0, 0) == pytest.approx(0.206, abs=0.01)
    assert first_day(500 * 24 * 8, 0) < 0.02  # 500 repairs, and every node held for a day
    assert first_day(500 * 24 * 8, 200) == pytest.approx(1 - math.exp(-200 / 500), rel=0.05)


def test_a_lemon_is_worse_than_its_fleet_and_a_long_quiet_node_better() -> None:
    year_h = 8766.0
    lemon = forecast(BASE, node=NodeHistory(watched_h=year_h, faults=8))
    quiet = forecast(BASE, node=NodeHistory(watched_h=year_h))
    assert quiet.p_24h < forecast(BASE).p_24h < lemon.p_24h
    shape = KNOWN.priors.frailty.shape
    assert lemon.hazard.tail / forecast(BASE).hazard.tail == pytest.approx(
        (shape + 8) / (shape + BASE.expected(8, year_h))
    )
    assert "8 faults in 365 days" in lemon.basis
    assert quiet.basis == BASE_RATE


@given(FINDINGS, FLEETS)
def test_bus_loss_is_a_base_rate_whatever_is_seen(findings: list[Finding], fleet: FleetHistory) -> None:
    base = base_of(KNOWN, fleet)
    for name in ("gpu_lost", "silent_corruption", "software"):
        its = next(c for c in forecast(base, findings).classes if c.name == name)
        assert its.basis == BASE_RATE
        assert its.p_24h == pytest.approx(its.base_24h, rel=1e-12)


@given(st.sampled_from(sorted(KNOWN.signals)), st.integers(1, 8))
def test_a_signal_against_bayes_by_counting(kind: str, gpus: int) -> None:
    """Of a million node-days count those with the signal, and which of them have the fault."""
    signal = KNOWN.signals[kind]
    row = KNOWN.classes[signal.class_name]
    faults = 1e6 * -math.expm1(-BASE.per_node_h(row.name, gpus) * 24)
    with_both, with_signal = faults * row.coverage, (1e6 - faults) * signal.false_per_node_day
    its = next(c for c in forecast(BASE, [finding(kind)], gpus=gpus).classes if c.name == row.name)
    assert its.p_24h == pytest.approx(with_both / (with_both + with_signal), rel=1e-9)
    assert kind in its.basis
    assert ("guess" in its.basis) == ("guess" in (signal.basis, row.coverage_basis))


def test_the_fleet_s_own_record_of_a_signal_replaces_the_delivered_figures() -> None:
    def p(seen: int, followed: int) -> float:
        own = FleetHistory(signals={"row_remap_pending": Seen(seen=seen, followed=followed)})
        return forecast(base_of(KNOWN, own), [finding("row_remap_pending")]).p_24h

    assert p(0, 0) < p(1000, 300) == pytest.approx(0.3, abs=0.02)
    assert p(1000, 0) < p(0, 0)
    assert p(100_000, 0) >= forecast(BASE).p_24h


@given(FINDINGS, HISTORIES, FLEETS, st.integers(0, 16))
@example([], NodeHistory(repaired_h_ago=24.0), FleetHistory(), 8)
def test_what_holds_of_every_forecast(
    findings: list[Finding], node: NodeHistory, fleet: FleetHistory, gpus: int
) -> None:
    found = forecast(base_of(KNOWN, fleet), findings, gpus=gpus, node=node)
    assert 0 <= found.p_1h <= found.p_6h <= found.p_24h <= 1
    assert found.p_24h_range[0] - 1e-9 <= found.p_24h <= found.p_24h_range[1] + 1e-9
    assert math.isfinite(found.remaining_h)
    assert found.present == any(
        f.preempt_job and f.fault not in ("app", "config", "monitor") for f in findings
    )
    assert found.present == (found.remaining_h == 0) == found.basis.startswith(PRESENT)
    survive = math.prod(1 - its.p_24h for its in found.classes)
    assert found.hazard.p(24) == pytest.approx(1 - survive, abs=1e-9)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Forecast) == found


@given(FINDINGS, FINDINGS, HISTORIES, FLEETS)
def test_more_evidence_never_lowers_a_forecast(
    some: list[Finding], more: list[Finding], node: NodeHistory, fleet: FleetHistory
) -> None:
    base = base_of(KNOWN, fleet)
    fewer, all_of_it = forecast(base, some, node=node), forecast(base, [*some, *more], node=node)
    assert fewer.p_24h <= all_of_it.p_24h + 1e-12
    assert fewer.remaining_h >= all_of_it.remaining_h - 1e-9


# --------------------------------------------------------------------------------------------------
# The index


KNOWNS = st.builds(
    Known,
    verdict=st.sampled_from(["healthy", "suspect", "faulty", "blind"]),
    faults_30d=st.integers(0, 10),
    repaired_h_ago=st.none() | st.floats(0, 500),
)


def test_an_index_by_hand() -> None:
    found = indices(
        [finding("ecc_corrected_rate", severity="critical"), finding("link_flap", device="nic:a/1")],
        Known(faults_30d=2, repaired_h_ago=30.0),
        WEIGHTS,
    )
    assert [(its.device, its.index) for its in found] == [
        ("node", round(100 * (1 - 0.5 * 0.85 * 0.85**2 * 0.75))),
        ("gpu:3", 50),
        ("nic:a/1", 15),
    ]
    assert [part.what for part in found[0].parts][:2] == [
        "ecc_corrected_rate (critical)",
        "2 faults in 30 days",
    ]
    assert indices([], Known(), WEIGHTS)[0].index == 0


@given(FINDINGS, FINDINGS, KNOWNS, st.randoms(use_true_random=False))
def test_what_holds_of_every_index(
    some: list[Finding], more: list[Finding], known: Known, chance: Any
) -> None:
    fewer = {its.device: its for its in indices(some, known, WEIGHTS)}
    found = {its.device: its for its in indices([*some, *more], known, WEIGHTS)}
    for device, its in found.items():
        assert 0 <= its.index <= 100
        assert its.index <= found["node"].index
        assert its.index >= (fewer[device].index if device in fewer else 0)
        assert its.index == round(100 * (1 - math.exp(math.fsum(math.log1p(-p.weight) for p in its.parts))))
    shuffled = [*some, *more]
    chance.shuffle(shuffled)
    assert {its.device: its for its in indices(shuffled, known, WEIGHTS)} == found


def test_what_is_no_defect_of_the_node_is_listed_and_weighs_nothing() -> None:
    node, _ = indices([finding("mmu_fault", fault="app", severity="fatal")], Known(), WEIGHTS)
    assert node.index == 0
    assert node.parts[0].what == "mmu_fault: no defect of the node (app)"
