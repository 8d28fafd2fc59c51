"""Many nodes at once, a job's progress over time, and machines that come back under another name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridctl.detect.diagnose.fleet import fleet
from gridctl.detect.diagnose.progress import progress
from gridctl.detect.diagnose.spares import spares
from gridctl.model.diagnosis import Diagnosis, Material

FABRIC = ("shared_fabric_event", "evacuate_domain_check_switch", True)
SITE = ("site_event", "page_facility", False)
HANG = ("silent_hang", "collect_stacks_then_restart", False)
NAN = ("numerical_corruption", "run_ab_test", False)
REFUSED = ("spare_is_quarantined", "refuse_spare", False)
WELL = ("none", "none", False)


def brief(found: list[Diagnosis]) -> list[tuple[str, str, bool]]:
    return [(one.kind, one.action, one.preempt_job) for one in found]


def lines(*rows: dict[str, Any]) -> list[Material]:
    return [Material("input.jsonl", "\n".join(json.dumps(row) for row in rows))]


def of_fleet(*rows: dict[str, Any]) -> list[Diagnosis]:
    return list(fleet(lines(*rows)))


def error(t: float, host: str, text: str, **more: Any) -> dict[str, Any]:
    return {"ts": t, "host": host, "error": text, **more}


def domain(
    count: int = 6, t: float = 900.0, name: str = "nv-8", text: str = "CUDA error: contained"
) -> list[dict[str, Any]]:
    return [error(t + 0.05 * n, f"{name}-{n}", text, nvl_domain=name, rack="r8") for n in range(count)]


def test_nodes_of_one_domain_that_fail_together_share_a_switch() -> None:
    later = [
        error(905 + n, f"x{n}", "ncclRemoteError: remote process exited", nvl_domain=f"nv-{n}")
        for n in range(3)
    ]
    found = of_fleet(*domain(), *later)
    assert brief(found) == [FABRIC]
    assert (found[0].severity, found[0].when, found[0].event_count, found[0].raw_lines) == (
        "fatal",
        "now",
        1,
        9,
    )
    assert [e["role"] for e in found[0].events] == ["primary"] * 6 + ["secondary"] * 3
    assert brief(of_fleet(*reversed([*domain(), *later]))) == [FABRIC]


def test_spellings_of_the_same() -> None:
    for rename in (
        {"ts": "timestamp", "host": "node", "error": "fault", "nvl_domain": "nvlinkDomain"},
        {"ts": "time", "host": "hostname", "error": "exception", "nvl_domain": "rack_id"},
    ):
        rows = [
            {rename.get(key, key): value for key, value in row.items() if key != "rack"} for row in domain()
        ]
        assert brief(of_fleet(*rows)) == [FABRIC]
    rows = [{**row, "ts": f"2026-02-03T04:05:06.{n}00Z"} for n, row in enumerate(domain(3))]
    assert brief(of_fleet(*({**row, "ts": "2026-02-03T04:05:06Z"} for row in domain()))) == [FABRIC]
    assert brief(of_fleet(*rows)) == [FABRIC]
    with_rack = [{k: v for k, v in row.items() if k != "nvl_domain"} for row in domain()]
    assert brief(of_fleet(*with_rack)) == [FABRIC]
    assert brief(of_fleet(*({**row, "error": None, "xid": 145} for row in domain()))) == [FABRIC]


def test_noise_before_and_repeats_do_not_hide_it() -> None:
    noise = [error(100.0 * n, f"q{n}", "ECC error", nvl_domain=f"nv-{n}") for n in range(5)]
    storm = [row for row in domain() for _ in range(200)]
    found = of_fleet(*noise, error(899.5, "z", "ECC error", nvl_domain="nv-3"), *storm)
    assert brief(found) == [FABRIC]
    assert found[0].raw_lines == 1206


def test_two_nodes_or_many_domains_are_no_switch() -> None:
    assert brief(of_fleet(*domain(2))) == [("mixed", "per_node", False)]
    spread = [error(900.0, f"h{n}", "CUDA error", nvl_domain=f"d{n}", job="77") for n in range(9)]
    assert brief(of_fleet(*spread)) == [("collective_timeout", "collect_stacks", False)]
    slow = [error(900.0 + 60 * n, f"h{n}", "CUDA error", nvl_domain="d") for n in range(9)]
    assert brief(of_fleet(*slow)) == [("mixed", "per_node", False)]
    assert of_fleet(*domain(1)) == []


def test_xids_of_applications_drain_nobody_however_many() -> None:
    rows = [{"t": n / 9, "node": f"n{n}", "rack": f"r{n % 11}", "xid": 45, "job": "9"} for n in range(77)]
    found = of_fleet(*rows)
    assert brief(found) == [("channel_teardown", "none", False)]
    assert (found[0].xid, found[0].fault) == (45, "app")
    logs = [
        {"t": n, "node": f"n{n}", "line": f"NVRM: Xid (PCI:0000:1b:00): 43, pid={n}, name=a, Ch 0000000{n}"}
        for n in range(5)
    ]
    assert [one.fault for one in of_fleet(*logs)] == ["app"]


def test_many_kinds_in_several_racks_are_the_site() -> None:
    texts = ["PSU 2 input lost", "inlet temperature high", "IB link down", "node unreachable", "Xid 79"]
    rows = [error(50 + n, f"h{n}", text, rack=f"r{n % 3}") for n, text in enumerate(texts)]
    assert brief(of_fleet(*rows)) == [SITE]
    power = [error(50 + n, f"h{n}", "power brake", rack=f"r{n}") for n in range(5)]
    assert brief(of_fleet(*power)) == [SITE]
    one_rack = [{**row, "rack": "r1"} for row in rows]
    assert brief(of_fleet(*one_rack)) != [SITE]


def test_one_address_under_one_driver_is_the_driver() -> None:
    rows = [
        {"t": 500 * n, "node": f"n{n}", "xid": 119, "driver": "999.1", "fault_address": "0xbeef"}
        for n in range(4)
    ]
    found = of_fleet(*rows)
    assert [(one.action, one.fault, one.kind) for one in found] == [
        ("rollback_driver", "driver", "gsp_timeout")
    ]


def test_rows_without_host_or_time_are_nothing() -> None:
    assert (
        of_fleet({"error": "x"}, {"host": "a", "error": "y"}, {"ts": None, "host": "b", "error": "z"}) == []
    )


def run(
    *steps: int | None,
    power: float | None = 600.0,
    still: float | None = 220.0,
    every_s: float = 30,
    **more: Any,
) -> list[Diagnosis]:
    rows, last = [], -1
    for n, step in enumerate(steps):
        watts = power if step is None or step > last else still
        last = step if step is not None else last
        rows.append(
            {"t": n * every_s, "job": "j1", "step": step, "util_pct_mean": 99, "power_w_mean": watts, **more}
        )
    return list(progress(lines(*rows)))


GOING = (10, 20, 30, 40)


def test_a_step_that_stands_still_while_the_power_falls_is_a_hang() -> None:
    found = run(*GOING, *[40] * 6, xid_events=0, nic_errors=0, nccl="9.9.1")
    assert brief(found) == [HANG]
    assert found[0].events[0]["suspect"] == "nccl 9.9.1"
    assert brief(run(*GOING, *[40] * 6)) == [HANG]  # nothing known of errors: said so, not assumed
    assert "errors of hardware are not known" in run(*GOING, *[40] * 6)[0].why.evidence


def test_near_misses_of_a_hang() -> None:
    assert brief(run(*GOING, 40, 40)) == [WELL]  # too short
    assert brief(run(*GOING, *[40] * 6, 50)) == [WELL]  # it went on
    assert brief(run(*GOING, *[40] * 6, still=590)) == [WELL]  # evaluation: the power stays
    assert brief(run(*GOING, *[40] * 40, still=590)) == [HANG]  # not for that long
    assert brief(run(*GOING, *[40] * 40, power=None, still=None)) == [HANG]
    assert run(10, 10) == []


def test_a_restart_and_an_end_are_no_hang() -> None:
    assert brief(run(*GOING, 20, 25, 30, 35, 38, 39, 40)) == [WELL]
    assert brief(run(*GOING, *[40] * 6, util_pct_mean=0)) == [WELL]
    ranks = [{"t": 10 * n, "job": "a", "rank": n % 2, "step": 50 + n // 2 - n % 2} for n in range(40)]
    assert brief(list(progress(lines(*ranks)))) == [WELL]


def test_a_hang_with_errors_of_hardware_is_not_silent() -> None:
    rows = [
        {
            "t": 30 * n,
            "iteration": min(n, 4),
            "power_w": 600 if n < 5 else 200,
            "nic_errors": 7 if n < 6 else 9,
        }
        for n in range(12)
    ]
    assert brief(list(progress(lines(*rows)))) == [("collective_timeout", "collect_stacks", False)]


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"nan"', '"-inf"'])
def test_a_loss_that_is_no_number_asks_for_a_trial(value: str) -> None:
    text = "\n".join(f'{{"step": {n}, "loss": {2.5 if n < 4 else value}}}' for n in range(6))
    assert brief(list(progress([Material("x", text)]))) == [NAN]


def test_losses_in_logs_and_as_null() -> None:
    log = (
        " iteration      {n}/   900 | consumed samples: 8 | lm loss: {v} | grad norm: 1.2 | number of skipped"
    )
    text = "\n".join(log.format(n=n, v="2.1E+00" if n < 3 else "NAN") for n in range(5))
    assert brief(list(progress([Material("x", text)]))) == [NAN]
    rows = [{"t": n, "step": n, "loss": 2.0 if n < 3 else None} for n in range(8)]
    assert brief(list(progress(lines(*rows)))) == [NAN]
    assert brief(list(progress(lines(*rows[:4])))) == [WELL]
    assert brief(list(progress(lines(*({**row, "loss": None} for row in rows))))) == [WELL]
    assert list(progress([Material("x", "finance: the information is nan\nbanana loss of inference")])) == []


def of_spares(*documents: Any) -> list[Diagnosis]:
    return list(
        spares([Material(f"d{n}.json", json.dumps(document)) for n, document in enumerate(documents)])
    )


AWAY = {"serial": "1320077700001", "host": "old-3", "reason": "xid 79 twice"}


@pytest.mark.parametrize(
    "documents",
    [
        [{"quarantine": [AWAY], "candidate": {"host": "new-1", "gpus": [{"serial": "1320077700001"}]}}],
        [
            {
                "rma_list": [{"gpu_serial": 1320077700001}],
                "replacement": {"gpus": [{"serialNumber": "1320077700001 "}]},
            }
        ],
        [
            {
                "blocklist": {"1320077700001": {"why": "x"}},
                "spare": {"node": {"chassis": {"serial": "1320077700001"}}},
            }
        ],
        [{"denylist": ["1320077700001"]}, {"candidate": {"serials": ["9", "1320077700001"]}}],
        [{"role": "quarantined", **AWAY}, {"role": "spare", "host": "n", "serial": "1320077700001"}],
        [{"quarantined": True, **AWAY}, {"status": "candidate", "serial": "1320077700001"}],
    ],
)
def test_a_machine_that_was_sent_away_is_refused_under_any_name(documents: list[Any]) -> None:
    found = of_spares(*documents)
    assert brief(found) == [REFUSED]
    assert found[0].events[0]["serial"] == "1320077700001"


def test_uuids_and_files_tell_it_too() -> None:
    uuid = "GPU-0a1b2c3d-1111-2222-3333-444455556666"
    away = Material("/x/quarantine.jsonl", json.dumps({"uuid": uuid}))
    offered = Material(
        "/x/candidate.json", json.dumps({"gpus": [{"uuid": uuid.removeprefix("GPU-").upper()}]})
    )
    assert brief(list(spares([offered, away]))) == [REFUSED]


def test_other_serials_names_and_placeholders_do_not_match() -> None:
    ask = {"quarantine": [{"serial": "N/A", "host": "a"}, AWAY], "candidate": {"host": "a", "serial": "N/A"}}
    assert [one.kind for one in of_spares(ask)] == ["missing_data"]
    other = {"quarantine": [AWAY], "candidate": {"host": "old-3", "gpus": [{"serial": "1320077700002"}]}}
    assert brief(of_spares(other)) == [WELL]
    assert brief(of_spares({"quarantine": [], "candidate": {"serial": "1320077700001"}})) == [WELL]
    assert of_spares({"candidate": {"serial": "5"}}) == []
    assert of_spares({"quarantine": [AWAY]}) == []


KEYS = st.sampled_from(
    "t ts host node error xid rack nvl_domain job step loss power_w util quarantine candidate serial "
    "gpus uuid role line"
    " driver address grad_norm rank status".split()
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(KEYS, JSON, max_size=8), max_size=8))
def test_no_telemetry_makes_these_layers_raise(rows: list[dict[str, Any]]) -> None:
    for materials in (lines(*rows), [Material("quarantine.json", json.dumps(rows))]):
        for layer in (fleet, progress, spares):
            for one in layer(materials):
                assert one.why.evidence


HUNG = [{"t": 30 * n, "step": min(n, 5), "power_w": 600 if n < 6 else 200, "util": 99} for n in range(14)]


@given(st.permutations(HUNG))
def test_the_order_of_records_changes_nothing(rows: list[dict[str, Any]]) -> None:
    assert brief(list(progress(lines(*rows)))) == [HANG]


@given(st.permutations([*domain(4), *domain(1, 300.0, "b"), *domain(2, 500.0, "c")]))
def test_the_order_of_lines_changes_nothing(rows: list[dict[str, Any]]) -> None:
    assert of_fleet(*rows) == of_fleet(*domain(4), *domain(1, 300.0, "b"), *domain(2, 500.0, "c"))
