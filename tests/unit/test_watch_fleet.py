"""What several nodes tell together: silence, shared fate, people, blindness and the breaker."""

from typing import Any

import pytest

from gridagent.wire import StreamRecord
from gridctl.detect.breaker import Breaker
from gridctl.detect.heartbeat import Observers, Rhythm
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Decision, Finding, Output, Suppressed, WatchedNode

POLICY = builtin()
LIMITS = POLICY.thresholds
LOST = "NVRM: Xid (PCI:0000:4e:00): 79, pid=3, name=a, GPU has fallen off the bus."


class Fleet:
    """Nodes that beat each 5 s and look after their two neighbours each 10 s."""

    def __init__(self, count: int, racks: int = 4, spread: int = 0) -> None:
        self.names = [f"n{number:02d}" for number in range(count)]
        facts = [WatchedNode(name=n, rack=f"r{i % racks}", gpus=2) for i, n in enumerate(self.names)]
        jobs = {name: {"j1"} for name in self.names[: count // 2]}
        self.watch = Watch(POLICY, facts, jobs)
        self.at_s = 1000.0
        self.dead: set[str] = set()
        self.mute: set[str] = set()  #: no beats, but steps and answers to probes
        self.outputs: list[Output] = []

    def feed(self, node: str, kind: str, boot: str = "b1", **v: Any) -> list[Output]:
        record = StreamRecord(seq=1, boot=boot, t_unix_s=self.at_s, node=node, kind=kind, v=v)
        outputs = self.watch.feed(record)
        self.outputs += outputs
        return outputs

    def run(self, seconds: int) -> None:
        for _ in range(0, seconds, 5):
            self.at_s += 5.0
            for index, name in enumerate(self.names):
                if name in self.dead:
                    continue
                if name not in self.mute:
                    self.feed(name, "beat")
                if self.at_s % 10 == 0:
                    for step in (1, 2):
                        target = self.names[(index + step) % len(self.names)]
                        self.feed(name, "probe", target=target, rtt_us=None if target in self.dead else 9.0)
            self.outputs += self.watch.tick(self.at_s)

    def of(self, *kinds: type) -> list[Any]:
        return [out for out in self.outputs if isinstance(out, kinds)]

    def kmsg(self, node: str, line: str = LOST) -> list[Output]:
        return self.feed(node, "log", source="kmsg", line=line)


def test_a_node_that_two_others_cannot_reach_is_gone_within_30_s() -> None:
    fleet = Fleet(12)
    fleet.run(100)
    died_s, fleet.dead = fleet.at_s, {"n05"}
    fleet.run(120)
    (decision,) = fleet.of(Decision)
    assert (decision.node, decision.kind, decision.rule) == (
        "n05",
        "peer_unreachable",
        "heartbeat.two-observers",
    )
    assert decision.t_unix_s - died_s <= 30.0
    assert fleet.watch.verdict("n05") == "blind"


def test_silence_alone_or_one_observer_alone_is_no_failure() -> None:
    fleet = Fleet(12)
    fleet.run(100)
    fleet.mute = {"n05"}
    fleet.run(300)
    assert fleet.watch.verdict("n05") == "healthy", "it still looks after its neighbours"
    for _ in range(40):
        fleet.feed("n04", "probe", target="n05", rtt_us=None)
        fleet.feed("n04", "probe", target="n06", rtt_us=None)
        fleet.run(10)
    assert fleet.of(Decision, Finding) == []


def test_a_whole_rack_that_falls_silent_is_not_given_up_node_by_node() -> None:
    fleet = Fleet(24, racks=6)
    fleet.run(100)
    fleet.dead = {name for name in fleet.names if int(name[1:]) % 6 == 2}
    fleet.run(200)
    assert fleet.of(Decision) == []
    held = {out.node for out in fleet.of(Suppressed) if out.rule == "shared-fate.silent"}
    assert held == fleet.dead
    fleet.dead = set()
    fleet.run(20)
    assert all(fleet.watch.verdict(name) == "healthy" for name in fleet.names)


def test_the_last_of_a_rack_to_come_back_is_not_given_up_because_the_others_are_back() -> None:
    fleet = Fleet(24, racks=6)
    fleet.run(100)
    rack = sorted(name for name in fleet.names if int(name[1:]) % 6 == 2)
    fleet.dead = set(rack)
    fleet.run(100)
    fleet.dead = {rack[-1]}
    fleet.run(200)
    assert fleet.of(Decision) == []
    assert any("may follow" in out.why[-1] for out in fleet.of(Suppressed))
    fleet.run(200)
    (decision,) = fleet.of(Decision)
    assert (decision.node, decision.rule) == (rack[-1], "heartbeat.two-observers"), "it does not follow"


@pytest.mark.parametrize("beats", [True, False])
def test_whoever_has_just_said_something_is_not_gone(beats: bool) -> None:
    """A simulated month: the first word of a rack that was cut off was a sample, and moved its node."""
    fleet = Fleet(24, racks=6)
    fleet.mute = set() if beats else set(fleet.names)
    fleet.run(100)
    fleet.dead = {name for name in fleet.names if int(name[1:]) % 6 == 2}
    fleet.run(100)
    assert fleet.of(Finding)
    name = sorted(fleet.dead)[0]
    fleet.feed(name, "sample", device="gpu:0", pci="0000:4e:00.0", v={"util_pct": 90, "temp_c": 60})
    fleet.feed(name, "log", source="kmsg", line="something usual")
    assert fleet.of(Decision) == []
    if beats:
        assert fleet.watch.verdict(name) == "blind", "its heart is not back yet"
        fleet.feed(name, "beat")
    assert fleet.watch.verdict(name) == "healthy"
    assert fleet.of(Decision) == []


@pytest.mark.parametrize(("begin", "end"), [("drain", "undrain"), ("maintenance_begin", "maintenance_end")])
def test_people_at_work_are_not_disturbed(begin: str, end: str) -> None:
    fleet = Fleet(12)
    fleet.run(100)
    fleet.feed("n05", "note", action=begin, text="by hand")
    fleet.kmsg("n05")
    fleet.dead = {"n05"}
    fleet.run(200)
    assert not any(out.preempt_job for out in fleet.outputs)
    fleet.dead = set()
    fleet.feed("n05", "note", action="undrain" if end != "undrain" else "maintenance_end")
    fleet.run(10)
    assert fleet.of(Decision) == [], "nobody ends the hold of another"
    fleet.feed("n05", "note", action=end)
    fleet.run(10)
    assert (fleet.of(Decision), fleet.watch.verdict("n05")) == ([], "healthy")
    fleet.kmsg("n05")
    assert len(fleet.of(Decision)) == 1


def test_a_planned_reboot_is_excused_until_it_has_settled_and_a_later_fault_is_not() -> None:
    fleet = Fleet(12)
    fleet.run(100)
    fleet.feed("n05", "note", action="reboot", text="new kernel")
    fleet.dead = {"n05"}
    fleet.run(200)
    fleet.feed("n05", "beat", boot="b2")
    assert fleet.of(Decision) == []
    fleet.at_s += LIMITS.boot.grace_s
    fleet.feed("n05", "log", boot="b2", source="kmsg", line=LOST)
    assert [out.node for out in fleet.of(Decision)] == ["n05"]


def gpu(fleet: Fleet, device: str, value: float | None) -> list[Output]:
    return fleet.feed("n01", "sample", device=device, v={"temp_c": value, "power_w": value})


def test_gpus_that_give_no_values_any_more_are_unknown_and_nobody_moves() -> None:
    fleet = Fleet(4)
    for value in (50.0, None, None, None, 51.0):
        fleet.at_s += 1.0
        gpu(fleet, "gpu:0", value)
        gpu(fleet, "gpu:1", value)
    (found,) = fleet.of(Finding)
    assert (found.kind, found.device, found.fault, found.preempt_job) == (
        "missing_data",
        "node",
        "monitor",
        False,
    )
    assert fleet.watch.verdict("n01") == "healthy", "it has come back"


def test_one_gpu_without_values_is_named() -> None:
    fleet = Fleet(4)
    for value in (50.0, None, None, None, None):
        gpu(fleet, "gpu:0", 50.0)
        gpu(fleet, "gpu:1", value)
        gpu(fleet, "gpu:2", None)
    found = {found.device: found for found in fleet.of(Finding)}
    assert {device: one.rule for device, one in found.items()} == dict.fromkeys(
        ("gpu:1", "gpu:2"), "blind.device"
    )
    assert "since its agent began" in found["gpu:2"].why[0]
    assert "since its agent began" not in found["gpu:1"].why[0]


def test_a_mass_fault_trips_the_breaker_which_stays_until_a_person_comes() -> None:
    fleet = Fleet(40, racks=40)
    fleet.run(20)
    for name in fleet.names[:16]:
        fleet.kmsg(name)
    limit = max(LIMITS.breaker.fleet_nodes, int(LIMITS.breaker.fleet_share * 40))
    assert len(fleet.of(Decision)) == limit
    assert {out.rule for out in fleet.of(Suppressed)} == {"cap.fleet"}
    fleet.at_s += LIMITS.breaker.fleet_window_s + 1.0
    fleet.run(20)
    assert len(fleet.of(Decision)) == limit, "so many at once have one cause"


def test_the_breaker_counts_nodes_and_frees_them_with_time() -> None:
    breaker = Breaker(LIMITS.breaker)
    rack = [WatchedNode(name=f"n{number}", rack="r1") for number in range(4)]
    assert [breaker.refuses(10.0, node, 100) is None for node in rack] == [True, True, False, False]
    assert breaker.refuses(20.0, rack[0], 100) is None, "the same node again is no further one"
    assert breaker.refuses(10.0 + LIMITS.breaker.group_window_s + 11.0, rack[2], 100) is None


def test_phi_follows_the_rhythm_of_the_node() -> None:
    limits = LIMITS.heartbeat
    slow, fast = Rhythm(), Rhythm()
    for number in range(50):
        slow.beat(number * 20.0, limits)
        fast.beat(number * 1.0, limits)
    assert fast.silent(11.0, limits)
    assert not slow.silent(60.0, limits)
    assert slow.silent(100.0, limits)
    phis = [slow.phi(float(silent_s), limits) for silent_s in range(0, 200, 5)]
    assert phis == sorted(phis)
    slow.beat(50 * 20.0 + 400.0, limits)
    assert slow.silent(100.0, limits), "a long silence is not a new rhythm"


def test_one_answer_ends_all_doubt() -> None:
    observers = Observers()
    for _ in range(3):
        observers.probe("b", False, 1.0)
        observers.probe("a", False, 1.0)
    assert observers.failing(2) == ["a", "b"]
    observers.probe("c", True, 2.0)
    assert observers.failing(1) == []


STAMPS = {
    "uptime": lambda at_s: f"[{at_s + 5e6:.6f}] ",
    "iso": lambda at_s: (
        f"kern  :err   : 2026-11-0{1 + int(at_s // 86400)}T"
        f"{int(at_s % 86400 // 3600):02d}:{int(at_s % 3600 // 60):02d}:{int(at_s % 60):02d},000000+00:00 "
    ),
}


@pytest.mark.parametrize("form", STAMPS)
def test_a_line_told_again_after_a_repair_is_not_acted_on_twice_and_a_new_one_is(form: str) -> None:
    fleet = Fleet(4)
    fleet.kmsg("n01", STAMPS[form](fleet.at_s) + LOST)
    old = STAMPS[form](fleet.at_s) + LOST
    fleet.feed("n01", "note", action="drain", text="a new board")
    fleet.at_s += 3000.0
    fleet.kmsg("n01", STAMPS[form](fleet.at_s) + "nvidia-uvm: Loaded the UVM driver")
    fleet.feed("n01", "note", action="undrain", text="done")
    fleet.kmsg("n01", old)
    assert len(fleet.of(Decision)) == 1
    assert "stale" in {out.rule for out in fleet.of(Suppressed)}
    fleet.at_s += 700.0
    fleet.kmsg("n01", STAMPS[form](fleet.at_s) + LOST)
    assert len(fleet.of(Decision)) == 2


def test_a_line_of_an_earlier_boot_is_known_by_its_stamp() -> None:
    fleet = Fleet(4)
    fleet.run(10)
    old = f"[5000000.1] {LOST}"
    fleet.kmsg("n01", old)
    fleet.at_s += 400.0
    fleet.feed("n01", "beat", boot="b2")
    fleet.feed("n01", "log", boot="b2", source="kmsg", line=old)
    assert len(fleet.of(Decision)) == 1
    fleet.feed("n01", "log", boot="b2", source="kmsg", line=f"[12.5] {LOST}")
    assert len(fleet.of(Decision)) == 2, "lost again, early in the new boot"
