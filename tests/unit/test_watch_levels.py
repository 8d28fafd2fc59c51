"""Values that must stay to count, and jobs that do not get on: the true case, the near miss, the unknown."""

from typing import Any

import pytest

from gridagent.wire import StreamRecord
from gridctl.detect.device import Cleared
from gridctl.detect.levels import Levels
from gridctl.detect.policy import LevelRow, builtin, parse_table
from gridctl.detect.watch import Watch
from gridctl.errors import ConfigError
from gridctl.model.findings import Decision, Finding, Output, Suppressed, WatchedNode

POLICY = builtin()
ROWS = [row for rows in POLICY.levels.values() for row in rows]
BUSY = {"util_pct": 97.0}


def played(device: str, *samples: dict[str, Any]) -> list[Finding | Cleared]:
    levels = Levels(POLICY.levels[device], "n1", f"{device}:0")
    return [out for at, values in enumerate(samples) for out in levels.feed(float(at), values)]


def kinds(outputs: list[Finding | Cleared]) -> list[str]:
    return [out.rule if isinstance(out, Finding) else f"end of {out.kind}" for out in outputs]


def test_every_row_has_a_source_and_moves_nobody_by_itself() -> None:
    assert len({row.rule for row in ROWS}) == len(ROWS) >= 12
    for row in ROWS:
        assert len(row.source) > 20
        assert row.severity in ("info", "warning", "critical")


@pytest.mark.parametrize("cell", ["maybe", "at_most\tx"])
def test_a_wrong_row_is_refused(cell: str) -> None:
    heading = "\t".join(LevelRow.__struct_fields__)
    row = f"r\tgpu\tm\t{cell}\t1\t0\t1\t1\t0\tk\tl\tm\tnode\twarning\tnone\tnone\ts"
    with pytest.raises(ConfigError):
        parse_table(f"{heading}\n{row}\n", LevelRow, "x")


def test_a_power_brake_that_stays_is_told_once_and_ends_when_it_is_gone() -> None:
    held = [{"throttle": 0x84}] * 20
    assert kinds(played("gpu", *held)) == ["level.power-brake"]
    assert kinds(played("gpu", *held, *[{"throttle": 4}] * 6)) == [
        "level.power-brake",
        "end of hw_power_brake",
    ]


@pytest.mark.parametrize("throttle", [0, 1, 4, 4 | 1, None, "ERR!"])
def test_the_everyday_power_cap_is_nothing(throttle: object) -> None:
    assert played("gpu", *[{"throttle": throttle}] * 50) == []


def test_heat_that_comes_and_goes_is_nothing() -> None:
    assert played("gpu", *[{"throttle": 0x40}, {"throttle": 0}, {"throttle": 0}] * 30) == []


def test_fewer_lanes_count_under_load_only() -> None:
    narrow = {"pcie_width": 8, "pcie_width_max": 16, "pcie_gen": 1, "pcie_gen_max": 5}
    assert played("gpu", *[narrow | {"util_pct": 3.0}] * 50) == []
    assert played("gpu", *[narrow] * 50) == []
    assert kinds(played("gpu", *[narrow | BUSY] * 50)) == ["level.pcie-width", "level.pcie-gen"]


def test_a_port_that_was_never_up_is_not_lost() -> None:
    assert played("nic", *[{"state": 0}] * 50) == []
    assert kinds(played("nic", {"state": 1}, *[{"state": 0}] * 50)) == ["level.port-down"]
    assert played("nic", *[{"state": 1}, {"state": 0}] * 50) == []
    assert played("nic", {"state": 1}, *[{"state": None}] * 50) == []


def test_counters_count_by_increase_and_not_since_boot() -> None:
    assert played("nic", *[{"link_downed_total": 40}] * 50) == []
    assert played("nic", *[{"link_downed_total": n} for n in (40, 41, 0, 0, 1)]) == [], "two, and a reset"
    assert kinds(played("nic", *[{"link_downed_total": n} for n in (40, 41, 42, 43)])) == ["level.link-flap"]


class Training:
    """A job of four nodes: a step each 2 s, a sample each 10 s."""

    def __init__(self) -> None:
        self.names = [f"n{number}" for number in range(4)]
        nodes = [WatchedNode(name=name) for name in self.names]
        self.watch = Watch(POLICY, nodes, {name: {"j"} for name in self.names})
        self.at_s, self.step = 0.0, 0
        self.outputs: list[Output] = []

    def feed(self, node: str, kind: str, **v: Any) -> None:
        record = StreamRecord(seq=1, boot="b", t_unix_s=self.at_s, node=node, kind=kind, v=v)
        self.outputs += self.watch.feed(record)

    def run(self, seconds: int, *, steps: bool = True, loss: float | None = 2.0, util: float = 99.0) -> None:
        for _ in range(0, seconds, 2):
            self.at_s += 2.0
            self.step += steps
            for rank, name in enumerate(self.names):
                self.feed(name, "beat")
                if steps:
                    self.feed(name, "progress", job="j", rank=rank, step=self.step, loss=loss)
                if self.at_s % 10 == 0:
                    self.feed(name, "sample", device="gpu:0", v={"util_pct": util})
            self.outputs += self.watch.tick(self.at_s)

    def told(self) -> list[tuple[str, str]]:
        return [(out.kind, out.rule) for out in self.outputs if isinstance(out, Finding | Suppressed)]


def test_a_job_that_is_busy_and_makes_no_step_hangs() -> None:
    job = Training()
    job.run(100)
    job.run(120, steps=False)
    assert job.told() == [("silent_hang", "progress.hang")]
    assert not any(isinstance(out, Decision) or out.preempt_job for out in job.outputs)
    job.run(20)
    job.run(120, steps=False)
    assert len(job.told()) == 2, "a second hang is another one"


def test_a_job_that_has_ended_does_not_hang() -> None:
    job = Training()
    job.run(100)
    job.run(200, steps=False, util=0.0)
    assert job.told() == []


def test_a_job_one_of_whose_processes_crashed_has_its_reason() -> None:
    job = Training()
    job.run(100)
    job.feed("n2", "log", source="kmsg", line="NVRM: Xid (PCI:0000:4e:00): 43, pid=3, name=a, Ch 00000010")
    job.run(120, steps=False)
    assert ("silent_hang", "progress.explained") in job.told()
    assert not any(isinstance(out, Finding) for out in job.outputs)


def test_a_loss_that_is_no_number_any_more_is_told_once_a_single_one_is_not() -> None:
    job = Training()
    job.run(40, loss=None)  # never reported
    job.run(40)
    job.run(4, loss=None)
    job.run(20)
    assert job.told() == []
    job.run(40, loss=None)
    assert job.told() == [("numerical_corruption", "progress.no-number")]


def counted(metric: str, per_s: float, *, turns: int = 30, every_s: float = 10.0) -> list[str]:
    levels = Levels(POLICY.levels["nic"], "n1", "nic:0")
    samples = [(turn * every_s, {metric: 5000 + per_s * every_s * turn}) for turn in range(turns)]
    return kinds([out for at_s, values in samples for out in levels.feed(at_s, values)])


def test_pauses_count_by_their_rate_and_only_if_they_stay() -> None:
    assert counted("rx_pause_total", 2000) == ["level.pause-received"]
    assert counted("tx_pause_total", 2000) == ["level.pause-sent"]
    assert counted("rx_pause_total", 500) == counted("rx_pause_total", 2000, turns=7) == []
    assert counted("rx_pause_total", 200, every_s=1.0) == [], "by the second and not by the reading"


def test_of_congestion_only_what_a_port_does_to_others_weighs() -> None:
    by_rule = {row.rule: row for row in ROWS}
    assert by_rule["pause-received"].severity == by_rule["out-of-sequence"].severity == "info"
    assert (by_rule["pause-sent"].severity, by_rule["pause-sent"].fault) == ("warning", "node")


def outlasting(row: LevelRow) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Samples that fulfil a row's condition, and such that do not."""
    more = {"util_pct": 99.0} if row.load_pct else {}
    if row.test in ("rises", "rate"):
        step = 10 * max(row.value, 1.0)
        return [more | {row.metric: step * turn} for turn in range(40)], [
            more | {row.metric: 400 * step}
        ] * 40
    hit, miss = {"at_most": (row.value, row.value + 1), "below_max": (1.0, 4.0)}.get(
        row.test, (row.value, 0.0)
    )
    if row.test == "below_max":
        more[f"{row.metric}_max"] = 4.0
    return [more | {row.metric: hit}] * 40, [more | {row.metric: miss}] * 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_every_row_waits_for_the_boot_to_settle_is_told_once_and_ends(row: LevelRow) -> None:
    hits, misses = outlasting(row)
    name, grace_s = f"{row.device}:0" if row.device != "node" else "node", POLICY.thresholds.boot.grace_s
    watch = Watch(POLICY, [WatchedNode(name="n1")])

    def fed(samples: list[dict[str, Any]], from_s: float, boot: str) -> list[str]:
        told = []
        for turn, values in enumerate(samples):
            v = {"device": name, "v": values}
            told += watch.feed(
                StreamRecord(seq=1, boot=boot, t_unix_s=from_s + turn, node="n1", kind="sample", v=v)
            )
        return [out.rule for out in told if isinstance(out, Finding)]

    fed(misses[:2], 0.0, "b1")
    assert fed(misses[:2] + hits, 1000.0, "b2") == [], "within the grace of its boot"
    assert fed(misses[:1] + hits, 1000.0 + grace_s, "b2") == [f"level.{row.rule}"]
    assert fed([misses[-1], hits[-1]] * 2, 1100.0 + grace_s, "b2") == [], "it neither ends nor begins anew"
    for turn in (1, 2):
        assert fed(misses, 1200.0 + grace_s + turn * (row.window_s + 100.0), "b2") == []
    assert watch.verdict("n1") == "healthy"
    assert watch.findings("n1") == []
