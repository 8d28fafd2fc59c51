"""Ports: increments in time and not totals, resets, saturation, states, and every tool's spelling."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridctl.detect.diagnose.nic import nic
from gridctl.model.diagnosis import Diagnosis, Material

OBSERVE = ("link_flap", "observe", False)
CABLE = ("link_flap", "drain_and_check_cable", False)
CONGESTION = ("congestion", "none", False)
WELL = ("none", "none", False)
ONE_READING = ("missing_data", "observe", False)


def brief(found: list[Diagnosis]) -> list[tuple[str, str, bool]]:
    return [(one.kind, one.action, one.preempt_job) for one in found]


def of_text(*texts: str) -> list[Diagnosis]:
    return list(nic([Material(f"m{n}", text) for n, text in enumerate(texts)]))


def of_rows(*rows: dict[str, Any]) -> list[Diagnosis]:
    return of_text("\n".join(json.dumps(row) for row in rows))


def counted(*values: float | None, every_s: float = 30, **more: Any) -> list[Diagnosis]:
    base = {"node": "n7", "ib_device": "mlx5_9", "port": 1, **more}
    return of_rows(
        *({**base, "time": n * every_s, "link_downed": value} for n, value in enumerate(values)),
    )


def test_a_few_drops_are_remembered_and_many_are_a_cable() -> None:
    found = counted(7, 7, 8, 8, 9, 9)
    assert brief(found) == [OBSERVE]
    assert found[0].events[0] | {"flaps": 2, "sticky_for_s": 600.0} == found[0].events[0]
    assert brief(counted(0, 1, 2, 3, 4, 5)) == [CABLE]
    assert brief(counted(0, 9)) == [CABLE]
    assert brief(counted(*range(7), every_s=7200)) == [CABLE]  # six in a day
    assert brief(counted(*range(5), every_s=7200)) == [OBSERVE]


def test_totals_since_boot_say_nothing_and_a_reset_is_no_negative_number() -> None:
    assert brief(counted(40, 40, 40, 40)) == [WELL]
    found = counted(90, 90, 0, 0, 0)
    assert brief(found) == [WELL]
    found = counted(90, 0, 7)
    assert brief(found) == [CABLE]
    assert (found[0].events[0]["flaps"], found[0].events[0]["resets"]) == (7, 1)


def test_the_mark_of_a_flap_clears_by_itself() -> None:
    found = counted(1, 2, *([2] * 60))
    assert (brief(found), found[0].severity) == ([OBSERVE], "info")


def test_what_is_unknown_is_no_zero() -> None:
    assert brief(counted(None, 5, None, 5)) == [WELL]
    assert brief(
        of_rows(*({"hca": "a", "t": t, "link_downed": v} for t, v in enumerate(["N/A", 5, "[N/A]", 5])))
    ) == [WELL]
    assert of_rows({"hca": "mlx5_1", "t": 1}) == []


def test_without_times_nothing_is_rated() -> None:
    assert brief(of_rows(*({"hca": "mlx5_1", "link_downed": n} for n in range(9)))) == [OBSERVE]


@pytest.mark.parametrize(
    "row",
    [
        {"ts": 0, "hostname": "a", "device": "mlx5_0/1", "LinkDownedCounter": 0},
        {
            "timestamp": "2026-02-03T04:05:00Z",
            "nodeName": "a",
            "interface": "eth4",
            "link_down_events_phy": 0,
        },
        {
            "t": 0,
            "node": "a",
            "kind": "sample",
            "device": "nic:mlx5_0/1",
            "v": {"link_downed_total": 0, "state": 1},
        },
        {"at": 0, "labels": {"node": "a", "hca": "mlx5_0"}, "metric": "link_downed", "value": 0},
        {"time_s": 0, "host": "a", "nic": "x", "counters": {"linkDowned": 0}},
    ],
)
def test_fields_are_read_by_meaning(row: dict[str, Any]) -> None:
    def at(record: Any, n: int) -> Any:
        if isinstance(record, dict):
            return {key: at(value, n) for key, value in record.items()}
        if isinstance(record, str):
            return record.replace("04:05:00", f"04:05:{10 * n:02}")
        return n * (10 if record == 0 else 1) if record == 0 else record

    rows = [at(row, n) for n in range(6)]
    assert [one.kind for one in of_rows(*rows)] == ["link_flap"]
    assert [one.kind for one in of_text(json.dumps(rows))] == ["link_flap"]
    assert [one.kind for one in of_text(json.dumps({"samples": rows}, indent=2))] == ["link_flap"]


def test_csv_with_columns_in_any_order() -> None:
    assert brief(of_text("link_downed,hca,t\n0,mlx5_0,0\n2,mlx5_0,60\n")) == [OBSERVE]
    assert brief(of_text("t,hca,link_downed\n0,mlx5_0,0\n60,mlx5_0,9\n")) == [CABLE]


def test_ports_are_judged_each_for_itself() -> None:
    rows = [
        {"t": t, "host": h, "hca": "x", "link_downed": t // 10 if h == "b" else 50}
        for t in (0, 30, 90)
        for h in "ab"
    ]
    found = of_rows(*rows)
    assert brief(found) == [CABLE]
    assert found[0].events[0]["host"] == "b"


def states(*words: str, every_s: float = 15) -> list[Diagnosis]:
    return of_rows(*({"t": n * every_s, "hca": "mlx5_2", "state": word} for n, word in enumerate(words)))


def test_states_tell_drops_where_no_counter_does() -> None:
    assert brief(states("Active", "Down", "Active")) == [OBSERVE]
    assert [one.kind for one in states("Active", "Down", "Down")] == ["ib_port_down", "link_flap"]
    assert brief(
        states("ACTIVE", "Polling", "ACTIVE", "Down", "Active", "Down", "Active", "Down", "Active")
    ) == [CABLE]
    assert [one.kind for one in states("Down", "Down", "Polling")] == ["not_applicable"]
    assert states("starting", "odd") == []


def perfquery(**values: int) -> str:
    head = "# Port extended counters: Lid 44 port 1 (CapMask: 0x1234)\nPortSelect:......................1\n"
    names = {
        "SymbolErrorCounter": 0,
        "LinkDownedCounter": 0,
        "PortXmitDiscards": 0,
        "PortXmitWait": 0,
        **values,
    }
    return head + "".join(f"{name}:{'.' * (33 - len(name))}{value}\n" for name, value in names.items())


def test_waiting_for_credits_is_congestion_and_no_fault() -> None:
    found = of_text(perfquery(PortXmitWait=4294967295, VL15Dropped=3))
    assert brief(found) == [CONGESTION]
    assert (found[0].event_count, found[0].events[0]["saturated"]) == (0, ["PortXmitWait"])
    assert brief(of_text(perfquery(PortXmitWait=981273))) == [CONGESTION]
    assert brief(of_text(perfquery())) == [WELL]
    assert brief(of_rows(*({"t": t, "hca": "x", "port_xmit_wait": 9 * t} for t in range(3)))) == [CONGESTION]


def test_one_reading_of_errors_needs_a_second_one() -> None:
    assert brief(of_text(perfquery(SymbolErrorCounter=12, LinkDownedCounter=3))) == [ONE_READING]
    assert brief(of_text(perfquery(PortXmitWait=5, LinkDownedCounter=3))) == [CONGESTION, ONE_READING]
    assert brief(of_text(perfquery(LinkDownedCounter=3), perfquery(LinkDownedCounter=5))) == [OBSERVE]


@pytest.mark.parametrize(
    ("name", "per_h", "expected"),
    [
        ("symbol_error", 100, WELL),
        ("symbol_error", 130, CABLE),
        ("local_link_integrity_errors", 1, CABLE),
        ("port_rcv_errors", 30_000, WELL),
        ("port_rcv_errors", 40_000, OBSERVE),
        ("port_xmit_discards", 500_000, OBSERVE),
        ("req_cqe_error", 1, ("rdma_cqe_errors", "observe", False)),
    ],
)
def test_errors_are_rated_by_the_hour(name: str, per_h: int, expected: tuple[str, str, bool]) -> None:
    rows = [{"t": 1800 * n, "hca": "mlx5_0", name: 7 + per_h * n // 2} for n in range(3)]
    assert brief(of_rows(*rows)) == [expected]


def test_only_flushed_completions_are_the_end_of_a_process() -> None:
    rows = [{"t": n, "hca": "x", "req_cqe_error": 5 * n, "req_cqe_flush_error": 5 * n} for n in range(3)]
    assert [one.fault for one in of_rows(*rows)] == ["app"]


IBSTAT = (
    "CA '{ca}'\n\tCA type: MT4129\n\tPort 1:\n\t\tState: {state}\n\t\tPhysical state: {phys}\n\t\tRate: 400\n"
)


def test_ibstat_and_its_like() -> None:
    up = [IBSTAT.format(ca=f"mlx5_{n}", state="Active", phys="LinkUp") for n in range(4)]
    down = IBSTAT.format(ca="mlx5_9", state="Down", phys="Polling")
    assert brief(of_text("".join(up))) == [WELL]
    assert [one.kind for one in of_text("".join([*up, down]))] == ["ib_port_down"]
    assert [one.kind for one in of_text(up[0] + down)] == ["not_applicable"]
    rdma = "link mlx5_{n}/1 state {state} physical_state {phys} netdev ib{n}\n"
    text = "".join(rdma.format(n=n, state="ACTIVE", phys="LINK_UP") for n in range(4))
    assert [one.kind for one in of_text(text + rdma.format(n=7, state="DOWN", phys="POLLING"))] == [
        "ib_port_down"
    ]
    status = "Infiniband device 'mlx5_0' port 1 status:\n\tdefault gid:\t fe80::1\n\tstate:\t\t 4: ACTIVE\n"
    assert brief(of_text(status)) == [WELL]


def test_sysfs_and_ethtool() -> None:
    path = "/sys/class/infiniband/mlx5_3/ports/1/counters/"
    first = f"{path}link_downed:2\n{path}symbol_error:0\n{path}port_xmit_wait:0\n"
    assert brief(of_text(first, first.replace(":2", ":4"))) == [OBSERVE]
    assert brief(of_text(f"n4: {path}link_downed:0\n")) == [WELL]
    ethtool = "NIC statistics:\n     rx_packets: 5\n     link_down_events_phy: {n}\n     tx_discards_phy: 0\n"
    assert brief(of_text(ethtool.format(n=1), ethtool.format(n=1))) == [WELL]
    assert brief(of_text(ethtool.format(n=1), ethtool.format(n=2))) == [OBSERVE]


def test_exporters_and_ibqueryerrors() -> None:
    metric = 'node_infiniband_link_downed_total{{device="mlx5_0",port="1"}} {n}\n'
    assert brief(of_text(metric.format(n=4), metric.format(n=4))) == [WELL]
    assert brief(of_text(metric.format(n=4), metric.format(n=5))) == [OBSERVE]
    waits = 'node_infiniband_port_transmit_wait_total{device="mlx5_0",port="1"} 4.294967295e+09\n'
    assert brief(of_text(waits)) == [CONGESTION]
    query = (
        'Errors for 0x1070fd0300a1 "n4 HCA-1"\n   GUID 0x1070fd0300a1 port 1: [PortXmitWait == 4294967295]'
    )
    assert brief(of_text(query)) == [CONGESTION]
    assert brief(of_text(query + " [SymbolErrorCounter == 9]")) == [CONGESTION, ONE_READING]


def test_a_reading_that_comes_late_is_no_reset() -> None:
    rows = [{"t": t, "hca": "x", "link_downed": n} for t, n in ((0, 5), (30, 6), (10, 5), (60, 6))]
    found = of_rows(*rows)
    assert (brief(found), found[0].events[0]["flaps"]) == ([OBSERVE], 1)


def test_links_of_gpus_and_jobs_are_no_ports() -> None:
    assert of_rows({"t": 0, "gpu": 3, "symbol_errors": 5}, {"t": 9, "gpu": 3, "symbol_errors": 900}) == []
    assert of_rows({"t": 0, "job": "7", "state": "down"}) == []


@given(st.permutations([{"t": 20 * n, "hca": "x", "link_downed": n // 3} for n in range(9)]))
def test_the_order_of_readings_changes_nothing(rows: list[dict[str, Any]]) -> None:
    found = of_rows(*rows)
    assert (brief(found), found[0].events[0]["flaps"]) == ([OBSERVE], 2)


def test_a_storm_of_readings_keeps_little() -> None:
    rows = [{"t": n, "hca": "mlx5_0", "link_downed": n} for n in range(5000)]
    found = of_rows(*rows)
    assert brief(found) == [CABLE]
    assert found[0].event_count == 1


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "t": st.one_of(st.floats(), st.integers(), st.text(max_size=5), st.none()),
                "hca": st.text(max_size=5),
                "state": st.one_of(
                    st.text(max_size=6), st.sampled_from(["Active", "Down"]), st.integers(0, 2)
                ),
                "link_downed": st.one_of(st.integers(), st.floats(), st.text(max_size=4), st.none()),
                "PortXmitWait": st.integers(),
                "symbol_error": st.floats(),
                "v": st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
            },
        ),
        max_size=12,
    )
)
def test_no_telemetry_makes_it_raise(rows: list[dict[str, Any]]) -> None:
    of_text("\n".join(json.dumps(row) for row in rows))


PIECES = st.sampled_from(
    (
        "# Port counters: Lid 1 port 1\n|LinkDownedCounter:....9\n|CA 'x'\n|\tPort 1:\n|State: Down\n|"
        "/sys/class/net/eth0/carrier_changes:4\n|NIC statistics:\n|  a_b: 4\n|link a/1 state DOWN x\n"
    ).split("|")
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=15)), max_size=30).map("".join))
def test_no_text_makes_it_raise(text: str) -> None:
    of_text(text, text)
