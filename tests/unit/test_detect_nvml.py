"""What the agent's source `nvml` tells means what the same thing means from elsewhere."""

from gpu_world import GpuNode

from gridctl.model.findings import Decision, Finding, Output

VALUES = {"temp_c": 41, "recovery_action": 0, "remap_pending": 0}


class Node(GpuNode):
    def __init__(self) -> None:
        super().__init__("gpu:1", "0000:2a:00.0")


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
