"""What many have in common is its cause: cooling, power, a switch, a driver; main memory by its trend."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.wire import StreamRecord
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Decision, Finding, Output, Suppressed, WatchedNode

POLICY = builtin()
GPUS = 4
HOT, BRAKE = {"throttle": 0x40}, {"throttle": 0x80}


class Fleet:
    """Twelve nodes of four GPUs in three cooling zones of two racks each; a sample each 10 s."""

    def __init__(self, drivers: tuple[str, ...] = ("570.1",)) -> None:
        self.names = [f"n{number:02d}" for number in range(12)]
        facts = [
            WatchedNode(
                name=name,
                rack=f"r{i // 2}",
                cooling_zone=f"z{i // 4}",
                gpus=GPUS,
                driver=drivers[i % len(drivers)],
            )
            for i, name in enumerate(self.names)
        ]
        self.watch = Watch(POLICY, facts)
        self.at_s = 1000.0
        self.outputs: list[Output] = []
        self.order = list(self.names)

    def feed(self, node: str, kind: str, **v: Any) -> None:
        record = StreamRecord(seq=1, boot="b", t_unix_s=self.at_s, node=node, kind=kind, v=v)
        self.outputs += self.watch.feed(record)

    def run(self, seconds: int, changes: dict[tuple[str, int], dict[str, int]] | None = None) -> "Fleet":
        for _ in range(0, seconds, 10):
            self.at_s += 10.0
            for name in self.order:
                self.feed(name, "beat")
                for gpu in range(GPUS):
                    values = {"util_pct": 99, "throttle": 4, **(changes or {}).get((name, gpu), {})}
                    self.feed(name, "sample", device=f"gpu:{gpu}", v=values)
            self.outputs += self.watch.tick(self.at_s)
        return self

    def ports(self, names: list[str], state: int, port: str = "mlx5_3/1") -> None:
        for name in names:
            self.feed(name, "sample", device=f"nic:{port}", v={"state": state})

    def told(self, prefix: str) -> list[tuple[str, str, str]]:
        assert not any(isinstance(out, Decision) or out.preempt_job for out in self.outputs)
        findings = [out for out in self.outputs if isinstance(out, Finding) and out.rule.startswith(prefix)]
        return [(out.node, out.device, out.rule) for out in findings]


def test_heat_of_one_gpu_alone_is_its_own_after_a_while() -> None:
    fleet = Fleet().run(120).run(300, {("n05", 2): HOT})
    assert fleet.told("level.") == [("n05", "gpu:2", "level.thermal")]
    assert fleet.told("cause.") == []
    fleet.run(600, {("n05", 2): HOT})
    assert fleet.told("cause.") == [("n05", "gpu:2", "cause.device")]
    fleet.run(200)
    assert fleet.watch.findings("n05") == []
    assert fleet.watch.verdict("n05") == "healthy"


def test_heat_of_most_gpus_of_a_node_is_the_nodes_air() -> None:
    fleet = Fleet().run(120).run(900, {("n05", gpu): HOT for gpu in (1, 2)})
    assert fleet.told("cause.") == [("n05", "node", "cause.node")]
    fleet.run(200)
    assert fleet.watch.findings("n05") == []


@pytest.mark.parametrize(("values", "kind"), [(HOT, "thermal_throttle"), (BRAKE, "hw_power_brake")])
def test_nodes_of_a_place_together_are_the_place(values: dict[str, int], kind: str) -> None:
    names = ("n04", "n05", "n06", "n07") if kind == "thermal_throttle" else ("n04", "n05")
    fleet = Fleet().run(120).run(900, {(name, 2): values for name in names})
    told = [out for out in fleet.outputs if isinstance(out, Finding) and out.rule == "cause.place"]
    if kind == "hw_power_brake":
        assert told == [], "a rack has two nodes only"
    else:
        assert [(out.node, out.kind, out.fault) for out in told] == [("", kind, "environment")]
    assert not any(out.rule == "cause.device" for out in fleet.outputs)


def test_heat_here_and_there_has_no_common_cause() -> None:
    fleet = Fleet().run(120).run(900, {(name, 2): HOT for name in ("n00", "n04", "n08")})
    assert fleet.told("cause.") == [(name, "gpu:2", "cause.device") for name in ("n00", "n04", "n08")]


def test_the_same_port_of_several_nodes_is_their_switch() -> None:
    fleet = Fleet().run(20)
    fleet.ports(fleet.names, 1)
    for _ in range(4):
        fleet.at_s += 1.0
        fleet.ports(["n00", "n04", "n08"], 0)
    assert fleet.told("shared-fate.rail") == [("", "nic:mlx5_3", "shared-fate.rail")]
    for name in ("n00", "n04"):
        fleet.feed(name, "sample", device="node", v={"edac_ue_total": 0})
        fleet.feed(name, "sample", device="node", v={"edac_ue_total": 1})
    held = [out for out in fleet.outputs if isinstance(out, Suppressed) and out.rule == "shared-fate"]
    assert {out.node for out in held} == {"n00", "n04"}, "a second layer does not make it the node's"
    assert fleet.told("nothing") == []


def test_different_ports_are_no_switch() -> None:
    fleet = Fleet().run(20)
    for port, name in (("mlx5_0/1", "n00"), ("mlx5_1/1", "n04"), ("mlx5_2/1", "n08")):
        fleet.ports([name], 1, port)
        for _ in range(4):
            fleet.at_s += 1.0
            fleet.ports([name], 0, port)
    assert fleet.told("shared-fate.rail") == []


def log_of(fleet: Fleet, names: list[str], xid: int) -> list[Output]:
    for name in names:
        fleet.at_s += 3000.0
        fleet.feed(name, "log", source="kmsg", line=f"NVRM: Xid (PCI:0000:1b:00): {xid}, pid=3, name=a, text")
    return [out for out in fleet.outputs if out.rule == "shared-fate.driver"]


def test_what_only_one_driver_version_has_is_the_drivers() -> None:
    fleet = Fleet(("570.1", "570.1", "580.2"))
    newer = [f"n{number:02d}" for number in (2, 5, 8, 11)]
    assert log_of(fleet, newer[:3], 120) == []
    (told,) = log_of(fleet, newer, 120)
    assert (told.node, told.kind, told.action) == ("", "gsp_error", "rollback_driver")
    assert len(log_of(fleet, newer, 120)) == 1


def test_what_all_versions_or_a_fleet_of_one_version_have_is_not() -> None:
    assert log_of(Fleet(("570.1", "580.2")), ["n00", "n01", "n02", "n04", "n06", "n08"], 120) == []
    assert log_of(Fleet(), [f"n{number:02d}" for number in range(8)], 120) == []
    assert log_of(Fleet(("570.1", "570.1", "580.2")), ["n02"] * 9, 120) == [], "one node again and again"


def memory(*free_mib: float | None, every_s: float = 30.0, **more: float) -> list[str]:
    watch = Watch(POLICY, [WatchedNode(name="n1")])
    rules = []
    for at, free in enumerate(free_mib):
        values = {"mem_avail_mib": free, **more}
        record = StreamRecord(
            seq=1,
            boot="b",
            t_unix_s=at * every_s,
            node="n1",
            kind="sample",
            v={"device": "node", "v": values},
        )
        rules += [out.rule for out in watch.feed(record) if isinstance(out, Finding)]
    if watch.findings("n1") == []:
        rules.append("none left")
    return rules


def test_memory_that_runs_out_is_told_before_it_is_gone() -> None:
    leak = [1_000_000.0 - 20_000 * turn for turn in range(46)]
    assert memory(*leak) == ["memory.trend"]
    assert memory(*leak, *[500_000.0] * 12) == ["memory.trend", "none left"]
    assert memory(*[m for m in leak for _ in range(6)], every_s=5.0) == ["memory.trend"]


def test_memory_that_is_low_or_falls_without_running_out_is_nothing() -> None:
    assert memory(*[900_000.0 - 1_000 * turn for turn in range(200)]) == ["none left"], "much is left"
    assert memory(900_000.0, *[50_000.0] * 100) == ["none left"], "low, and stays so"
    assert memory(900_000.0, *[50_000.0 - turn for turn in range(100)]) == ["none left"], "in weeks"
    assert memory(*[None] * 100) == ["none left"]


def test_a_process_that_the_kernel_killed_is_told_and_the_total_since_boot_is_not() -> None:
    assert memory(9e5, 9e5, 9e5, oom_kill_total=7) == ["none left"]
    watch = Watch(POLICY, [WatchedNode(name="n1")])
    rules = []
    for at, killed in enumerate((7, 7, 8)):
        v = {"device": "node", "v": {"oom_kill_total": killed}}
        record = StreamRecord(seq=1, boot="b", t_unix_s=float(at), node="n1", kind="sample", v=v)
        rules += [out.rule for out in watch.feed(record) if isinstance(out, Finding)]
    assert rules == ["level.oom-kill"]


def test_a_full_gpu_is_normal() -> None:
    full = {"mem_used_mib": 81_500, "mem_total_mib": 81_559}
    fleet = Fleet().run(600, {(name, gpu): full for name in ("n00", "n01") for gpu in range(GPUS)})
    assert fleet.told("") == []


@settings(max_examples=25, deadline=None)
@given(st.permutations([f"n{number:02d}" for number in range(12)]), st.data())
def test_the_order_of_nodes_changes_nothing(order: list[str], data: st.DataObject) -> None:
    gpus = st.tuples(st.sampled_from(order), st.integers(0, GPUS - 1))
    changes = {key: data.draw(st.sampled_from([HOT, BRAKE])) for key in data.draw(st.sets(gpus, max_size=12))}
    usual, other = Fleet(), Fleet()
    other.order = order

    def told(fleet: Fleet) -> list[Any]:
        return sorted((out.t_unix_s, out.node, out.device, out.rule, *out.why) for out in fleet.outputs)

    for fleet in (usual, other):
        fleet.run(120).run(800, changes).run(300)
        assert all(fleet.watch.verdict(name) == "healthy" for name in order), "all has an end"
    assert told(usual) == told(other)
