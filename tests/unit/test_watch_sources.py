"""What sources say of their own reading: a stuck driver, a read that hangs, late lines, silence at first."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gridagent.wire import StreamRecord
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Decision, Finding, Output, Suppressed, WatchedNode

POLICY = builtin()
PCI = "0000:2a:00.0"
SILENT = f"driver unresponsive: gpu:1 ({PCI}) did not answer within 5 s"
LOST = "NVRM: Xid (PCI:0000:2a:00): 79, pid=1, GPU has fallen off the bus."
GSP = "NVRM: Xid (PCI:0000:2a:00): 62, pid=1, name=python, 0000(0000) 00000000 00000000"
VALUES = {"temp_c": 41.0, "recovery_action": 0, "remap_pending": 0}


class Node:
    def __init__(self) -> None:
        self.watch = Watch(POLICY, [WatchedNode(name="n1", gpus=2)])
        self.at = 1000.0

    def feed(self, kind: str, step_s: float = 1.0, boot: str = "b", **v: Any) -> list[Output]:
        self.at += step_s
        return self.watch.feed(StreamRecord(seq=1, boot=boot, t_unix_s=self.at, node="n1", kind=kind, v=v))

    def log(self, line: str, source: str = "nvml", step_s: float = 1.0, **v: Any) -> list[Output]:
        return self.feed("log", step_s, source=source, line=line, **v)

    def sample(self, device: str = "gpu:1", **values: Any) -> list[Output]:
        return self.feed("sample", device=device, pci=PCI, v=values)

    def note(self, source: str, state: str, text: str = "") -> list[Output]:
        return self.feed("note", source=source, state=state, text=text)

    @property
    def kinds(self) -> list[tuple[str, str, str]]:
        return [(f.kind, f.device, f.severity) for f in self.watch.findings("n1")]


def told(outputs: list[Output], of: type = Finding) -> list[tuple[str, str, str]]:
    return [(out.kind, out.device, out.rule) for out in outputs if isinstance(out, of)]


def test_a_driver_is_slow_once_and_stuck_after_three_times() -> None:
    node = Node()
    node.sample(**VALUES)
    assert told(node.log(SILENT)) == [("driver_unresponsive", "gpu:1", "source.driver-slow")]
    assert node.kinds == [("driver_unresponsive", "gpu:1", "warning")]
    assert told(node.log(SILENT, step_s=7)) == []
    assert told(node.log(SILENT, step_s=9)) == [
        ("driver_unresponsive", "gpu:1", "source.driver-unresponsive")
    ]
    assert node.kinds == [("driver_unresponsive", "gpu:1", "critical")]
    assert node.watch.verdict("n1") == "suspect"
    assert told(node.log(f"gpu:1 ({PCI}) answers again")) == []
    assert node.kinds == []
    assert node.watch.verdict("n1") == "healthy"


def test_single_misses_far_apart_stay_a_warning_and_a_value_ends_them() -> None:
    node = Node()
    for _ in range(6):
        node.log(SILENT, step_s=700)
    assert node.kinds == [("driver_unresponsive", "gpu:1", "warning")]
    node.sample("gpu:0", **VALUES)
    node.sample(**dict.fromkeys(VALUES))
    assert node.kinds == [("driver_unresponsive", "gpu:1", "warning")]
    node.sample(**VALUES)
    assert node.kinds == []


def test_a_driver_that_does_not_start_is_of_the_node_until_any_gpu_answers() -> None:
    node = Node()
    for _ in range(3):
        node.log("driver unresponsive: NVML has not started within 30 s", step_s=31)
    assert node.kinds == [("driver_unresponsive", "node", "critical")]
    node.sample("gpu:0", **VALUES)
    assert node.kinds == []


def test_a_stuck_driver_alone_moves_nobody_and_is_a_layer_of_its_own() -> None:
    node = Node()
    node.sample(**VALUES, ecc_dbe_total=0)
    outputs = [out for _ in range(9) for out in node.log(SILENT, step_s=6)]
    assert not [out for out in outputs if isinstance(out, Decision) or out.preempt_job]
    node = Node()
    node.sample(**VALUES, ecc_dbe_total=0)
    node.sample(**VALUES, ecc_dbe_total=3)
    outputs = [out for _ in range(3) for out in node.log(SILENT, step_s=6)]
    assert [(out.rule, set(out.rules)) for out in outputs if isinstance(out, Decision)] == [
        ("two-layers", {"device.ecc_dbe_total", "source.driver-unresponsive"})
    ]


def test_only_the_source_itself_says_so() -> None:
    node = Node()
    for source in ("torch", "kmsg", "slurm"):
        for _ in range(4):
            node.log(SILENT, source)
    assert node.kinds == []


def test_while_a_node_comes_up_nothing_is_concluded() -> None:
    node = Node()
    node.feed("beat", boot="a", seq=1)
    node.feed("beat", boot="c", seq=1)
    outputs = [out for _ in range(3) for out in node.feed("log", boot="c", source="nvml", line=SILENT)]
    assert told(outputs) == []
    assert ("driver_unresponsive", "gpu:1", "boot.grace") in told(outputs, Suppressed)


def test_a_read_that_hangs_is_blind_until_it_answers() -> None:
    node = Node()
    text = "infiniband: reading /sys/x has not returned after 5 s; all its values are unknown"
    assert told(node.note("infiniband", "hang", text)) == [("missing_data", "node", "source.read-hangs")]
    node.note("aer", "hang")
    assert len(node.kinds) == 2
    node.note("infiniband", "answers")
    assert [f.layer for f in node.watch.findings("n1")] == ["monitor.aer"]
    node.note("aer", "answers")
    assert node.watch.verdict("n1") == "healthy"


def test_lost_messages_are_told_and_conclude_nothing() -> None:
    node = Node()
    outputs = node.note("kmsg", "lost", "kmsg: 40 kernel messages before number 7 are lost")
    assert told(outputs, Suppressed) == [("missing_data", "node", "source.messages-lost")]
    assert "40 kernel messages" in outputs[0].why[0]
    assert node.kinds == []


def test_a_line_told_a_little_late_says_so_and_decides() -> None:
    node = Node()
    outputs = node.log(LOST, "kmsg", late_s=42.5)
    assert [out.kind for out in outputs if isinstance(out, Decision)] == ["gpu_lost"]
    assert "told 42 s after it was printed" in outputs[0].why


def test_a_line_told_too_late_is_evidence_and_decides_nothing_alone() -> None:
    node = Node()
    node.sample(**VALUES)
    outputs = node.log(LOST, "kmsg", late_s=7200.0)
    (found,) = [out for out in outputs if isinstance(out, Finding)]
    assert (found.kind, found.severity, found.preempt_job, found.when) == (
        "gpu_lost",
        "fatal",
        False,
        "after_job",
    )
    assert "too late to act on it alone" in found.why[-1]
    assert not [out for out in outputs if isinstance(out, Decision)]
    outputs = node.log(LOST, "kmsg")  # and it hides nothing that is said now
    assert [out.kind for out in outputs if isinstance(out, Decision)] == ["gpu_lost"]


def test_what_still_holds_confirms_a_late_line() -> None:
    node = Node()
    node.sample(**VALUES, lost=0)
    node.log(LOST, "kmsg", late_s=7200.0)
    outputs = node.sample(**dict.fromkeys(VALUES), lost=1)
    assert [(out.kind, out.rule) for out in outputs if isinstance(out, Decision)] == [
        ("gpu_lost", "decisive")
    ]


def test_a_gpu_that_is_silent_since_its_agent_began_is_unknown() -> None:
    node = Node()
    outputs: list[Output] = []
    for _ in range(5):
        node.sample("gpu:0", **VALUES)
        outputs += node.sample("gpu:1", lost=None)
    assert told(outputs) == [("missing_data", "gpu:1", "blind.device")]
    assert "nor any before since its agent began" in node.watch.findings("n1")[0].why[0]
    node.sample("gpu:1", **VALUES)
    assert node.kinds == []


def test_a_sample_without_any_metric_is_no_silence() -> None:
    node = Node()
    for _ in range(9):
        node.sample("gpu:1")
    assert node.kinds == []


@given(
    records=st.lists(
        st.tuples(
            st.sampled_from(["log", "note"]),
            st.text(max_size=30) | st.just(SILENT) | st.just(f"gpu:1 ({PCI}) answers again"),
            st.sampled_from(["nvml", "kmsg", "x"]) | st.none() | st.integers(),
            st.sampled_from(["hang", "answers", "lost", "failed", ""]) | st.none(),
            st.none() | st.floats() | st.text(max_size=3),
        ),
        max_size=40,
    )
)
def test_nothing_that_a_source_says_of_itself_moves_a_job(records: list[tuple[Any, ...]]) -> None:
    node = Node()
    for kind, text, source, state, late_s in records:
        outputs = node.feed(kind, source=source, state=state, text=text, line=text, late_s=late_s)
        assert not [out for out in outputs if out.preempt_job or isinstance(out, Decision)]
