"""What the agent's source `nvml` tells means what the same thing means from elsewhere."""

from typing import Any

from gridagent.wire import StreamRecord
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Decision, Finding, Output, WatchedNode

VALUES = {"temp_c": 41, "recovery_action": 0, "remap_pending": 0}


class Node:
    def __init__(self) -> None:
        self.watch = Watch(builtin(), [WatchedNode(name="n1", gpus=2)])
        self.at = 100.0

    def feed(self, kind: str, **v: Any) -> list[Output]:
        self.at += 1
        return self.watch.feed(StreamRecord(seq=1, boot="b", t_unix_s=self.at, node="n1", kind=kind, v=v))

    def sample(self, **values: Any) -> list[Output]:
        return self.feed("sample", device="gpu:1", pci="0000:2a:00.0", v=values)


def found(outputs: list[Output]) -> list[tuple[str, str, bool]]:
    return [(out.kind, out.device, out.preempt_job) for out in outputs if isinstance(out, Finding)]


def test_a_gpu_that_nvml_calls_lost_is_decisive() -> None:
    node = Node()
    assert found(node.sample(**VALUES, lost=0)) == []
    outputs = node.sample(**dict.fromkeys(VALUES), lost=1)
    assert found(outputs) == [("gpu_lost", "gpu:1", True)]
    assert [out.node for out in outputs if isinstance(out, Decision)] == ["n1"]
    assert found(node.sample(**dict.fromkeys(VALUES), lost=1)) == []


def test_a_driver_that_does_not_answer_is_unknown_and_not_lost() -> None:
    node = Node()
    node.sample(**VALUES, lost=0)
    line = "driver unresponsive: gpu:1 (0000:2a:00.0) did not answer within 5 s"
    outputs = node.feed("log", source="nvml", line=line)
    for _ in range(20):
        outputs += node.sample(**dict.fromkeys(VALUES), lost=None)
    assert found(outputs) == [("driver_unresponsive", "gpu:1", False), ("missing_data", "gpu:1", False)]


def test_an_xid_told_by_nvml_is_one_of_the_kernels() -> None:
    node = Node()
    node.sample(**VALUES, lost=0)
    line = "NVRM: Xid (PCI:0000:2a:00): 79, told by NVML without the kernel's words"
    assert found(node.feed("log", source="nvml", line=line)) == [("gpu_lost", "gpu:1", True)]
    assert found(Node().feed("log", source="torch", line=line)) == []
