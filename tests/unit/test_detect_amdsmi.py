"""What the agent's source `amdsmi` and the kernel tell of an AMD GPU, as the watchdog takes it."""

from typing import Any

import pytest
from gpu_world import GpuNode

from gridctl.model.findings import Decision, Finding, Output, Suppressed

VALUES = {"temp_c": 61, "util_pct": 97, "ecc_dbe_total": 0, "lost": 0}
PCI = "0000:c1:00.0"


class Node(GpuNode):
    def __init__(self) -> None:
        super().__init__("gpu:0", PCI)

    def sample(self, **values: Any) -> list[Output]:
        return super().sample(**{**VALUES, **values})

    def kernel(self, line: str) -> list[Output]:
        return self.feed("log", source="kmsg", line=line)


def found(outputs: list[Output]) -> list[tuple[str, str, bool]]:
    return [(out.kind, out.device, out.preempt_job) for out in outputs if isinstance(out, Finding)]


def decided(outputs: list[Output]) -> list[str]:
    return [out.kind for out in outputs if isinstance(out, Decision)]


def test_a_gpu_that_has_left_the_bus_is_decisive() -> None:
    node = Node()
    assert found(node.sample()) == []
    silent = dict.fromkeys(VALUES)
    assert found(node.sample(**silent)) == []  # as in a reset
    outputs = node.sample(**{**silent, "lost": 1})
    assert (found(outputs), decided(outputs)) == ([("gpu_lost", "gpu:0", True)], ["gpu_lost"])


def test_a_gpu_that_is_listed_no_more_is_unknown() -> None:
    node = Node()
    node.sample()
    outputs = [out for _ in range(20) for out in node.sample(**dict.fromkeys(VALUES))]
    assert found(outputs) == [("missing_data", "gpu:0", False)]


def test_uncorrectable_errors_that_rise_wait_for_a_second_layer() -> None:
    node = Node()
    node.sample(ecc_dbe_total=7)  # of before: no news
    assert found(node.sample(ecc_dbe_total=None)) == []
    assert found(node.sample(ecc_dbe_total=7)) == []
    outputs = node.sample(ecc_dbe_total=8)
    assert (found(outputs), decided(outputs)) == ([("ecc_uncorrectable_dram", "gpu:0", False)], [])
    line = "driver unresponsive: gpu:0 (0000:c1:00.0) did not answer within 5 s"
    outputs = [out for _ in range(3) for out in node.feed("log", source="amdsmi", line=line)]
    assert found(outputs) == [("driver_unresponsive", "gpu:0", False)] * 2  # a warning, then critical
    assert decided(outputs) == ["ecc_uncorrectable_dram"]


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        (f"amdgpu {PCI}: amdgpu: device lost from bus!", ("gpu_lost", "gpu:0", True)),
        (
            f"amdgpu {PCI}: amdgpu: {{3}}socket: 0, die: 0, 1 new uncorrectable hardware errors detected",
            ("amd_ras_fatal", "gpu:0", True),
        ),
        (f"amdgpu {PCI}: amdgpu: GPU reset end with ret = -110", ("gpu_stopped_processing", "gpu:0", True)),
        (
            f"amdgpu {PCI}: amdgpu: ring sdma0 timeout, signaled seq=1",
            ("gpu_stopped_processing", "gpu:0", False),
        ),
    ],
)
def test_what_the_kernel_says_of_an_amd_gpu(line: str, finding: tuple[str, str, bool]) -> None:
    node = Node()
    node.sample()
    assert found(node.kernel(line)) == [finding]
    assert found(node.kernel(line)) == []  # a repeat
    assert found(Node().feed("log", source="torch", line=line)) == []
    assert found(Node().kernel(f"python[77]: {line}")) == []


def test_what_the_kernel_says_in_passing_is_no_finding() -> None:
    node = Node()
    node.sample()
    for line in (
        f"amdgpu {PCI}: amdgpu: GPU reset begin!",
        f"amdgpu {PCI}: amdgpu: GPU reset(2) succeeded!",
        f"amdgpu {PCI}: amdgpu: ring gfx_0.0.0 timeout, but soft recovered",
        "[drm] VRAM is lost due to GPU reset!",
    ):
        assert node.kernel(line) == []
    outputs = node.kernel(f"amdgpu {PCI}: amdgpu: 5 correctable hardware errors detected in umc block")
    assert [type(out) for out in outputs] == [Suppressed]
