from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent.wire import StreamRecord
from gridctl.detect.policy import XidRow, builtin, parse_table, xid_row
from gridctl.detect.watch import Watch
from gridctl.errors import ConfigError
from gridctl.model.findings import SEVERITIES, Decision, Finding, Output, Suppressed, Verdict, WatchedNode

POLICY = builtin()
PCI = "0000:5d:00"


class Node:
    """A node under watch; `at` is its clock, and the reader's."""

    def __init__(self, **facts: Any) -> None:
        self.watch = Watch(POLICY, [WatchedNode(name="n1", gpus=8, **facts)])
        self.at = 100.0
        self.boot = "b1"

    def feed(self, kind: str, after_s: float = 0.0, **v: Any) -> list[Output]:
        self.at += after_s
        record = StreamRecord(seq=1, boot=self.boot, t_unix_s=self.at, node="n1", kind=kind, v=v)
        return [out for out in self.watch.feed(record) if not isinstance(out, Verdict)]

    def log(self, message: str, after_s: float = 0.001) -> list[Output]:
        return self.feed("log", after_s, source="kmsg", line=f"[ {self.at:.3f}] {message}")

    def xid(self, xid: int, text: str = "text", after_s: float = 0.001, pci: str = PCI) -> list[Output]:
        return self.log(f"NVRM: Xid (PCI:{pci}): {xid}, pid=7, name=a, {text}", after_s)

    def sample(self, after_s: float = 1.0, device: str = "gpu:3", **v: Any) -> list[Output]:
        bus = "5d" if device == "gpu:3" else "19"
        return self.feed("sample", after_s, device=device, pci=f"0000:{bus}:00.0", v=v)

    @property
    def verdict(self) -> str:
        return self.watch.verdict("n1")


def decisions(outputs: list[Output]) -> list[Decision]:
    return [out for out in outputs if isinstance(out, Decision)]


def test_the_policy_has_every_known_number_once_and_with_its_source() -> None:
    assert sorted(POLICY.xids) == list(range(1, 177))
    for row in (*POLICY.xids.values(), *POLICY.recovery.values(), *POLICY.devices.values()):
        assert row.source
        assert row.preempt == "no" or row.when == "now"
        assert row.preempt == "no" or SEVERITIES.index(row.severity) >= SEVERITIES.index("critical")
    for xid in (13, 31, 43, 45, 68, 69):
        assert (POLICY.xids[xid].fault, POLICY.xids[xid].preempt) == ("app", "no")
    for xid in (48, 62, 64, 79, 95, 119, 120, 140):
        assert POLICY.xids[xid].preempt == "yes"
    assert xid_row(POLICY, 9999).kind == "unknown_xid"


def test_a_wrong_table_is_refused_with_its_line() -> None:
    heading = "xid\tkind\tmeaning\tfault\tseverity\taction\tpreempt\twhen\tsource\n"
    good = "1\tnone\tm\tnode\tinfo\tnone\tno\tnone\ts\n"
    assert parse_table(heading + good, XidRow, "x")[0].xid == 1
    for bad in ("1\tnone\n", good.replace("info", "bad"), good.replace("1\t", "one\t", 1)):
        with pytest.raises(ConfigError, match="x, line 3"):
            parse_table(heading + good + bad, XidRow, "x")


@pytest.mark.parametrize("xid", [x for x, row in POLICY.xids.items() if row.preempt == "yes"])
def test_a_decisive_xid_asks_for_a_swap_once(xid: int) -> None:
    node = Node()
    (decision,) = decisions(node.xid(xid))
    assert (decision.decision, decision.preempt_job, decision.rules) == ("swap_now", True, [f"xid.{xid}"])
    assert node.verdict == "faulty"
    assert decisions(node.xid(xid, after_s=100.0)) == []


@pytest.mark.parametrize("xid", [x for x, row in POLICY.xids.items() if row.preempt == "no"] + [999, 65535])
def test_no_other_xid_moves_anybody_however_often_it_comes(xid: int) -> None:
    node = Node()
    for index in range(60):
        outputs = node.xid(xid, text=f"Ch {index}", after_s=7.0)
        assert decisions(outputs) == []
        assert not any(out.preempt_job for out in outputs)


def test_app_faults_are_told_as_suppressed_with_their_rule() -> None:
    for xid in (13, 31, 43, 45, 68):
        node = Node()
        (out,) = node.xid(xid)
        assert isinstance(out, Suppressed)
        assert out.rule == f"xid.{xid}"
        assert node.verdict == "healthy"


def test_a_teardown_that_names_its_cause_counts_as_that() -> None:
    (finding, decision) = Node().xid(45, "Ch 00000001 caused by previous Xid 79")
    assert isinstance(finding, Finding)
    assert (finding.kind, finding.xid, finding.rule) == ("gpu_lost", 79, "xid.79.caused_by")
    assert isinstance(decision, Decision)


def test_first_cause_wins_and_the_driver_advises() -> None:
    node = Node()
    outputs = [
        *node.xid(62),
        *node.xid(45, "Ch 1"),
        *node.xid(45, "Ch 2"),
        *node.xid(119, "Timeout", after_s=6.0),
        *node.xid(154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"),
    ]
    findings = [out for out in outputs if isinstance(out, Finding)]
    assert [(f.kind, f.action) for f in findings] == [
        ("pmu_halt", "evacuate_and_reset_gpu"),
        ("pmu_halt", "evacuate_and_reboot"),
    ]
    assert [d.kind for d in decisions(outputs)] == ["pmu_halt"]
    assert [out.rule for out in outputs if isinstance(out, Suppressed)] == ["xid.45", "chain.xid.62"]


def test_a_worse_event_is_no_consequence() -> None:
    node = Node()
    assert decisions(node.xid(63)) == []
    (decision,) = decisions(node.xid(79))
    assert decision.kind == "gpu_lost"
    assert "xid.63" in decision.rules


def test_advice_makes_an_undecided_fault_decisive_but_never_lowers_one() -> None:
    node = Node()
    assert decisions(node.xid(94, "Contained: SM (0x1). RST: No, D-RST: No")) == []
    advice = "GPU recovery action changed from 0x0 (None) to 0x{} ({})"
    (decision,) = decisions(node.xid(154, advice.format(1, "GPU Reset Required")))
    assert (decision.kind, decision.action) == ("ecc_contained", "evacuate_and_reset_gpu")
    node = Node()
    (finding, _) = node.xid(64)
    assert finding.action == "evacuate_and_replace_gpu"
    for value, name in ((3, "Drain P2P"), (1, "GPU Reset Required")):
        node.xid(154, advice.format(value, name))
    (kept,) = node.watch.findings("n1")
    assert (kept.action, kept.severity, kept.preempt_job) == ("evacuate_and_replace_gpu", "fatal", True)
    assert node.xid(154, advice.format(0, "None")) == []


def test_nvlink_5_is_decided_by_the_word_in_the_line() -> None:
    line = "NETIR_LINK_EVT  {}   XC0 i0 Link 15 (0x0000000d 0x00000000)"
    assert decisions(Node().xid(149, line.format("Nonfatal"))) == []
    assert len(decisions(Node().xid(149, line.format("Fatal")))) == 1


def test_off_the_bus_without_a_number_is_what_79_is() -> None:
    node = Node()
    node.log("NVRM: The NVIDIA GPU 0000:5d:00.0")
    node.log("NVRM: (PCI ID: 10de:2330) installed in this system has")
    (decision,) = decisions(node.log("NVRM: fallen off the bus and is not responding to commands."))
    assert (decision.kind, decision.device) == ("gpu_lost", "pci:0000:5d:00.0")


@pytest.mark.parametrize("value", [1, 2, 4, 6, 7])
def test_a_recovery_action_that_streaming_missed_is_decisive(value: int) -> None:
    node = Node()
    assert node.sample(recovery_action=0) == []
    (finding, decision) = node.sample(recovery_action=value)
    assert (finding.kind, finding.rule) == ("recovery_action_pending", f"recovery.{value}")
    assert isinstance(decision, Decision)
    assert node.sample(recovery_action=value) == []
    node.sample(recovery_action=0)
    assert node.verdict == "healthy"


@pytest.mark.parametrize("value", [None, "[N/A]", "N/A", float("nan"), 0x7FFFFFF0, True])
def test_unknown_is_neither_zero_nor_a_fault(value: Any) -> None:
    node = Node()
    assert node.sample(recovery_action=value, remap_pending=value, ecc_sbe_total=value, util_pct=99) == []
    node.sample(recovery_action=4)
    node.sample(recovery_action=value)
    assert node.verdict == "faulty"


def rates(
    node: Node, per_s: float, count: int, util_pct: float | None = 98, start: float = 0.0
) -> list[Output]:
    outputs = []
    for index in range(count):
        outputs += node.sample(ecc_sbe_total=start + per_s * index, util_pct=util_pct)
    return outputs


def test_corrected_errors_under_load_are_watched_then_grave_and_never_alone_a_swap() -> None:
    node = Node()
    (finding,) = rates(node, 500, 5)
    assert (finding.kind, finding.severity, finding.action) == ("ecc_corrected_rate", "warning", "observe")
    assert node.verdict == "suspect"
    (finding,) = rates(node, 9000, 10, start=10_000)
    assert (finding.severity, finding.action, finding.when) == (
        "critical",
        "drain_and_replace_gpu",
        "after_job",
    )
    assert rates(node, 0, 100, util_pct=0, start=200_000) == []
    assert node.verdict == "suspect", "idle proves nothing"
    rates(node, 0, 100, start=200_000)
    assert node.verdict == "healthy"


def test_corrected_errors_that_do_not_last_or_are_idle_or_unknown_count_for_nothing() -> None:
    assert rates(Node(), 50, 50) == []
    assert rates(Node(), 9000, 50, util_pct=0) == []
    assert rates(Node(), 9000, 50, util_pct=None) == []
    node = Node()
    assert [
        out for total in (0, 9000, 9000, 9000, 9000, 9000) for out in rates(node, 0, 1, start=total)
    ] == []
    node = Node()
    resets = (5e9, 0, 6e9, 0, 7e9, 0)
    assert [out for total in resets for out in rates(node, 0, 1, start=total)] == []
    node = Node()
    assert [out for total in (5e9, 10, 20, 30, 40) for out in rates(node, 0, 1, start=total)] == []


def test_a_pending_remap_waits_for_a_window_and_clears_by_itself() -> None:
    node = Node()
    (finding,) = node.sample(remap_pending=1)
    assert (finding.kind, finding.preempt_job, finding.when) == ("row_remap_pending", False, "window")
    assert node.sample(remap_pending=1) == []
    node.sample(remap_pending=0)
    assert (node.verdict, node.watch.findings("n1")) == ("healthy", [])


def test_two_independent_layers_are_as_good_as_a_decisive_signal() -> None:
    node = Node()
    node.sample(ecc_dbe_total=0)
    assert decisions(node.sample(ecc_dbe_total=1)) == []
    (decision,) = decisions(node.xid(175, "memory"))
    assert decision.rule == "two-layers"
    assert decision.rules == ["device.ecc_dbe_total", "xid.175"]
    node.sample(ecc_dbe_total=1)
    assert node.verdict == "faulty"
    for change in ({"device": "gpu:1"}, {"after_s": 700.0}):
        node = Node()
        node.sample(ecc_dbe_total=0, device="gpu:3")
        node.sample(ecc_dbe_total=0, device="gpu:1")
        node.sample(ecc_dbe_total=1, device=change.get("device", "gpu:3"))
        assert decisions(node.xid(175, after_s=change.get("after_s", 1.0))) == []
        node.sample(ecc_dbe_total=1, device="gpu:3")
    assert len(decisions(node.sample(ecc_dbe_total=2, device="gpu:3"))) == 1, "seen again, near this time"


def test_two_warnings_of_one_layer_or_two_are_no_fault() -> None:
    node = Node()
    outputs = [
        *node.sample(remap_pending=1),
        *rates(node, 500, 5),
        *node.xid(63),
        *node.xid(92),
        *node.xid(121),
    ]
    assert decisions(outputs) == []
    assert node.verdict == "suspect"


def test_silence_is_blind_and_not_faulty() -> None:
    node = Node()
    assert node.verdict == "blind"
    node.feed("beat", boot="b1", seq=1)
    assert node.verdict == "healthy"
    assert node.watch.tick(node.at + 9.0) == []
    (verdict,) = node.watch.tick(node.at + 11.0)
    assert (verdict.kind, verdict.rule, verdict.preempt_job) == ("blind", "heartbeat.silent", False)
    assert node.watch.tick(node.at + 12.0) == []
    node.feed("beat", 20.0, boot="b1", seq=2)
    assert node.verdict == "healthy"


def test_a_node_whose_clock_runs_ahead_is_not_silent() -> None:
    node = Node()
    beat = StreamRecord(seq=1, boot="b1", t_unix_s=9e9, node="n1", kind="beat", v={})
    node.watch.feed(beat, 100.0)
    assert node.watch.tick(105.0) == []
    assert node.watch.verdict("n1") == "healthy"
    assert len(node.watch.tick(111.0)) == 1


def test_a_reboot_forgets_and_what_is_told_late_is_not_acted_on() -> None:
    node = Node()
    assert len(decisions(node.xid(79))) == 1
    node.boot = "b2"
    node.feed("beat")
    assert (node.verdict, node.watch.findings("n1")) == ("healthy", [])
    node.boot = "b1"
    assert node.xid(79) == []
    assert node.verdict == "healthy"
    node.boot = "b2"
    assert len(decisions(node.xid(79))) == 1


def test_a_held_node_is_not_decided_on() -> None:
    node = Node()
    node.feed("note", action="drain", text="admin")
    outputs = node.xid(79)
    assert decisions(outputs) == []
    assert [out.rule for out in outputs if isinstance(out, Suppressed)] == ["held"]
    assert node.verdict == "faulty"
    assert not any(out.preempt_job for out in outputs)
    assert decisions(node.feed("note", action="undrain")) == []  # whoever ends a drain says that it is sound
    assert node.verdict == "healthy"
    assert [d.decision for d in decisions(node.xid(79))] == ["swap_now"]  # and it is not
    node = Node()
    node.watch.hold("n1", "swapped before")
    assert decisions(node.sample(recovery_action=4)) == []
    node.watch.release("n1")
    assert len(decisions(node.feed("beat"))) == 1


def test_a_spare_is_quarantined_and_swapped_only_with_a_rank() -> None:
    node = Node(spare=True)
    (decision,) = decisions(node.xid(79))
    assert (decision.decision, decision.preempt_job) == ("quarantine", False)
    node.watch.update(WatchedNode(name="n1", spare=False))
    assert [d.decision for d in decisions(node.feed("beat"))] == ["swap_now"]


def test_lost_records_are_told_and_other_logs_are_not_read() -> None:
    node = Node()
    (gap,) = node.feed("gap", first=1, last=9, records=9)
    assert (gap.kind, gap.rule) == ("missing_data", "stream.gap")
    line = f"NVRM: Xid (PCI:{PCI}): 79, GPU has fallen off the bus."
    assert node.feed("log", source="torch", line=line) == []


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(["sample", "log", "beat", "progress", "probe", "note", "gap", "other"])


@given(st.lists(st.tuples(KINDS, st.dictionaries(st.sampled_from(["device", "v", "line", "source"]), JUNK))))
def test_no_record_raises(items: list[tuple[str, dict[str, Any]]]) -> None:
    node = Node()
    for kind, v in items:
        record = StreamRecord(seq=1, boot="b", t_unix_s=node.at, node="n1", kind=kind, v=v)
        node.watch.feed(record)
        gpu = {
            "device": "gpu:0",
            "v": dict.fromkeys(["ecc_sbe_total", "recovery_action"], next(iter(v.values()), 0)),
        }
        node.watch.feed(msgspec.structs.replace(record, kind="sample", v=gpu))


EVENTS = st.sampled_from(
    [*(f"xid {xid}" for xid in (13, 45, 48, 62, 63, 64, 74, 79, 94, 119, 175)), "pending", "dbe"]
)


def play(node: Node, events: list[str]) -> None:
    for index, event in enumerate(events):
        if event == "pending":
            node.sample(remap_pending=1)
        elif event == "dbe":
            node.sample(ecc_dbe_total=node.at)
        else:
            node.xid(int(event.split()[1]), text=f"t{index}", after_s=1.0)


@given(st.lists(EVENTS, max_size=8), EVENTS)
def test_more_evidence_never_lowers_anything(events: list[str], more: str) -> None:
    order = ["healthy", "suspect", "faulty"]
    node = Node()
    node.sample(ecc_dbe_total=0, remap_pending=0)
    play(node, events)
    before = node.verdict
    worst = max((SEVERITIES.index(f.severity) for f in node.watch.findings("n1")), default=0)
    play(node, [more])
    assert order.index(node.verdict) >= order.index(before)
    assert max((SEVERITIES.index(f.severity) for f in node.watch.findings("n1")), default=0) >= worst


def test_a_storm_stays_small() -> None:
    node = Node()
    outputs = [
        out for _ in range(5000) for out in node.xid(95, "Uncontained: LTC TAG (0x1). RST: Yes", after_s=1e-4)
    ]
    assert len(outputs) == 2
    outputs = []
    for index in range(5000):
        outputs += node.xid(79, pci=f"{index:04x}:5d:00", after_s=1e-4)
    assert len(node.watch.findings("n1")) <= 1024
