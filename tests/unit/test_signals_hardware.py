"""Lines of NVLink, PCIe, the host and AMD GPUs, as their drivers print them; made-up hosts and addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent.signals.amd import AmdEvent, amd_event
from gridagent.signals.host import HostEvent, host_event, log_gap
from gridagent.signals.lines import unwrap
from gridagent.signals.nvidia import Identity, KernelParser, Silenced, Xid, recovery_value
from gridagent.signals.nvlink import LinkFault, LinkRegisters, link_fault, registers, switch_error
from gridagent.signals.pcie import PcieLine, pcie_line
from gridagent.signals.values import number

XID = "NVRM: Xid (PCI:0000:6d:00): 119, pid=9, name=b, Timeout after 6s"


@pytest.mark.parametrize(
    ("line", "message", "host", "program", "repeats"),
    [
        (f"<3>[ 77.5] {XID}", XID, "", "", 1),
        (f"Sun 2026-03-01 10:00:00 UTC n3 kernel: {XID}", XID, "n3", "kernel", 1),
        (f"Mar  1 10:00:00.250000 n3 kernel: {XID}", XID, "n3", "kernel", 1),
        (f"Mar  1 10:00:00 n3 kernel: message repeated 7 times: [ {XID}]", XID, "n3", "kernel", 7),
        ("Mar  1 10:00:00 n3 systemd[1]: Started x.", "Started x.", "n3", "systemd", 1),
    ],
)
def test_more_wrappers(line: str, message: str, host: str, program: str, repeats: int) -> None:
    record = unwrap(line)
    assert (record.message, record.host, record.program, record.repeats) == (message, host, program, repeats)


def test_times_of_wrappers() -> None:
    assert unwrap("Sun 2026-03-01 10:00:00.5 UTC n3 kernel: x").t_unix_s == 1772359200.5
    assert unwrap("<4>Mar  1 10:00:00 n3 kernel: x").year_s == 60 * 86400 + 10 * 3600
    assert unwrap("<12>[ 1.0] NVRM: x").kernel is False, "user space cannot write with the kernel's facility"


def test_pieces_of_two_lost_gpus_between_each_other() -> None:
    parser = KernelParser()
    pieces = (
        "NVRM: The NVIDIA GPU 0000:0f:00.0",
        "NVRM: The NVIDIA GPU 0000:1f:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    assert [event.pci for piece in pieces for event in parser.feed(piece)] == ["0000:0f:00.0", "0000:1f:00.0"]


def test_what_the_driver_says_beside_xids() -> None:
    parser = KernelParser()
    uuid = "GPU-00000000-1111-4222-8333-444444444444"
    assert parser.feed(f"NVRM: GPU at PCI:0000:6d:00: {uuid}") == [Identity(pci="0000:6d:00.0", uuid=uuid)]
    silenced = "NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:6d:00 (printing 1 of every 30)."
    assert parser.feed(silenced) == [Silenced(pci="0000:6d:00.0")]
    assert parser.feed("NVRM: GPU at PCI:0000:6d:00: GPU-short") == []


@pytest.mark.parametrize(
    ("text", "advice"),
    [("RST: Yes, D-RST: No", 1), ("RST: No, D-RST: Yes", 4), ("RST: No, D-RST: No", 0), ("", None)],
)
def test_contained_errors_carry_their_own_advice(text: str, advice: int | None) -> None:
    (event,) = KernelParser().feed(
        f"NVRM: Xid (PCI:0000:6d:00): 94, pid=1, name=a, Contained: SM (0x1). {text}"
    )
    assert isinstance(event, Xid)
    assert event.reset_advice == advice


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("None", 0),
        ("GPU Reset Required", 1),
        ("Reset", 1),
        ("Node Reboot Required", 2),
        ("Drain P2P", 3),
        ("Drain and Reset", 4),
        ("Recover IMEX domain", 5),
        ("Bus Reset", 6),
        ("System Reboot", 7),
        (4, 4),
        ("0x2", 2),
        ("0x2 (Node Reboot Required)", 2),
        ("[N/A]", None),
        ("[GPU requires reset]", None),
        ("", None),
        ("???", None),
    ],
)
def test_recovery_by_number_or_word(value: object, expected: int | None) -> None:
    assert recovery_value(value) == expected


def test_nvlink_registers() -> None:
    text = "NVLink: fatal error detected on link 11(0x10, 0x0, 0x2000000, 0x0, 0x0, 0x0, 0x0)"
    assert registers(text) == LinkRegisters(link=11, registers=[0x10, 0, 0x2000000, 0, 0, 0, 0])
    assert registers("NVLink: fatal error detected on link 11") is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "RLW_RXPIPE Nonfatal XC1 i0 Link 07 (0x040980c2 0x00000004 0x0 0x0)",
            LinkFault(unit="RLW_RXPIPE", fatal=False, link=7, words=[0x040980C2, 4, 0, 0]),
        ),
        (
            "NETIR_LINK_EVT   Fatal  XC 1 i 2 Link 01 [0xa]",
            LinkFault(unit="NETIR_LINK_EVT", fatal=True, link=1, words=[10]),
        ),
        ("NETIR Fatal XC0 i0 Link -1 (0x0)", LinkFault(unit="NETIR", fatal=True, link=None, words=[0])),
        ("NVLPW_CTRL non-fatal", LinkFault(unit="NVLPW_CTRL", fatal=False)),
        ("something else", None),
    ],
)
def test_nvlink_5_faults(text: str, fault: LinkFault | None) -> None:
    assert link_fault(text) == fault


def test_the_reason_of_a_link_that_went_down() -> None:
    fault = link_fault("NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x025001c6 0x0)")
    assert fault is not None
    assert (fault.reason, fault.status) == (37, 0)


def test_switch_errors() -> None:
    head = "nvidia-nvswitch2: SXid (PCI:0000:b3:00.0): 20034, "
    error = switch_error(head + "Fatal, Link 12 LTSSM Fault Up")
    assert error is not None
    assert (error.pci, error.switch, error.sxid, error.fatal, error.link) == (
        "0000:b3:00.0",
        2,
        20034,
        True,
        12,
    )
    for text, fatal in (
        ("Non-fatal, Link 1 x", False),
        ("Severity 1 Engine", True),
        ("Severity 0 x", None),
        ("Data {0x1}", None),
    ):
        error = switch_error(head + text)
        assert error is not None
        assert error.fatal is fatal
    assert switch_error("x " + head + "Fatal, Link 1") is None


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "pcieport 0000:40:01.1: AER: Multiple Corrected error received: 0000:41:00.0",
            PcieLine(
                pci="0000:40:01.1",
                driver="pcieport",
                says="report",
                severity="corrected",
                source="0000:41:00.0",
            ),
        ),
        (
            "pcieport 0000:40:01.1: AER: Uncorrectable (Non-Fatal) error message received from 0000:41:00.0",
            PcieLine(
                pci="0000:40:01.1",
                driver="pcieport",
                says="report",
                severity="nonfatal",
                source="0000:41:00.0",
            ),
        ),
        (
            "mlx5_core 0000:41:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Physical Layer, (x)",
            PcieLine(pci="0000:41:00.0", driver="mlx5_core", says="error", severity="fatal"),
        ),
        (
            "nvidia 0000:41:00.0: AER:    [18] MalfTLP                (First)",
            PcieLine(pci="0000:41:00.0", driver="nvidia", says="detail", error="MalfTLP"),
        ),
        (
            "nvidia 0000:41:00.0:   device [10de:2330] error status/mask=1/2",
            PcieLine(pci="0000:41:00.0", driver="nvidia", says="detail"),
        ),
        (
            "pcieport 0000:40:01.1: AER: device recovery successful",
            PcieLine(pci="0000:40:01.1", driver="pcieport", says="recovered"),
        ),
        (
            "pcieport 0000:40:01.1: DPC: containment event, status:0x1f01 source:0x0000",
            PcieLine(pci="0000:40:01.1", driver="pcieport", says="contained", severity="fatal"),
        ),
        (
            "pcieport 0000:40:01.1: pciehp: Slot(7): Link Down",
            PcieLine(pci="0000:40:01.1", driver="pcieport", says="link_down", severity="fatal"),
        ),
        ("pcieport 0000:40:01.1: enabling device", None),
        ("x pcieport 0000:40:01.1: AER: device recovery failed", None),
    ],
)
def test_pcie_lines(message: str, line: PcieLine | None) -> None:
    assert pcie_line(message) == line


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ("Linux version 6.8.0-60-generic (b@h) #63", HostEvent(says="boot")),
        ("-- Boot 0123456789abcdef0123456789abcdef --", HostEvent(says="boot")),
        ("mentions Linux version 6.8.0", None),
        (
            "EDAC MC2: 17 CE memory scrubbing error on P2_DIMM C1 (channel:0 slot:1 -  OVERFLOW area:DRAM)",
            HostEvent(says="ce", unit="P2_DIMM C1", count=17, mark="OVERFLOW"),
        ),
        ("EDAC MC2: 1 UE no place told", HostEvent(says="ue", unit="MC2")),
        ("EDAC skx MC2: HANDLING MCE MEMORY ERROR", None),
        (
            "CPU12: Core temperature above threshold, cpu clock throttled (total events = 9)",
            HostEvent(says="hot", unit="CPU12", count=9, mark="Core"),
        ),
        (
            "mce: CPU12: Package temperature/speed normal",
            HostEvent(says="cool", unit="CPU12", count=0, mark="Package"),
        ),
        (
            "INFO: task nvidia-smi:77 blocked for more than 241 seconds.",
            HostEvent(says="hung", unit="nvidia-smi", count=241),
        ),
        (
            "mlx5_core 0000:41:00.1: event:247:(pid 0): Detected insufficient power on the PCIe slot (26W).",
            HostEvent(says="slot_power", unit="0000:41:00.1", count=26),
        ),
        (
            "mlx5_core 0000:41:00.1: event:301:(pid 1): PCIe slot advertised sufficient power (75W).",
            None,
        ),
        (
            "Memory cgroup out of memory: Killed process 7 (a b) total-vm:1kB",
            HostEvent(says="oom", unit="a b", mark="cgroup"),
        ),
        (
            "nvme nvme2: Device not ready; aborting reset, CSTS=0x1",
            HostEvent(says="drive_lost", unit="nvme2"),
        ),
        ("nvme nvme2: I/O 12 QID 3 timeout, aborting", HostEvent(says="drive_error", unit="nvme2")),
        (
            "EXT4-fs error (device nvme2n1p1): x: Remounting filesystem read-only",
            HostEvent(says="drive_lost", unit="nvme2n1p1"),
        ),
        (
            "NVRM: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x58)",
            HostEvent(says="reset_required"),
        ),
        ("NVRM: Xid (PCI:0000:6d:00): 43, pid=1, name=NV_ERR_RESET_REQUIRED, Ch 8", None),
    ],
)
def test_host_lines(message: str, event: HostEvent | None) -> None:
    assert host_event(message) == event


def test_log_keepers_tell_of_losses() -> None:
    assert log_gap("/dev/kmsg buffer overrun, some messages lost.") == HostEvent(says="gap")
    assert log_gap("Journal started") is None


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (
            "amdgpu 0000:c6:00.0: amdgpu: uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
            AmdEvent(says="ras", pci="0000:c6:00.0"),
        ),
        (
            "amdgpu 0000:c6:00.0: amdgpu: socket: 1, die: 0 2 uncorrectable hardware errors detected in gfx",
            AmdEvent(says="ras", pci="0000:c6:00.0", count=2),
        ),
        ("amdgpu 0000:c6:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block", None),
        (
            "amdgpu 0000:c6:00.0: amdgpu: 5 correctable hardware errors detected in umc block",
            AmdEvent(says="corrected", pci="0000:c6:00.0", count=5),
        ),
        ("amdgpu 0000:c6:00.0: amdgpu: GPU reset(3) succeeded!", AmdEvent(says="reset", pci="0000:c6:00.0")),
        (
            "amdgpu 0000:c6:00.0: amdgpu: GPU reset end with ret = -110",
            AmdEvent(says="reset_failed", pci="0000:c6:00.0"),
        ),
        (
            "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma1 timeout, signaled seq=1",
            AmdEvent(says="hang"),
        ),
        (
            "amdgpu 0000:c6:00.0: amdgpu: {7}socket: 0, die: 0, 1 new uncorrectable hardware errors detected",
            AmdEvent(says="ras", pci="0000:c6:00.0"),
        ),
        (
            "amdgpu 0000:c6:00.0: amdgpu: {8} socket: 0, die: 1, 3 new poison consumption detected in gfx",
            AmdEvent(says="ras", pci="0000:c6:00.0", count=3),
        ),
        (
            "amdgpu 0000:c6:00.0: amdgpu: ring comp_1.0.1 timeout, signaled seq=44, emitted seq=46",
            AmdEvent(says="hang", pci="0000:c6:00.0"),
        ),
        ("amdgpu 0000:c6:00.0: amdgpu: ring gfx_0.0.0 timeout, but soft recovered", None),
        ("[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx timeout, but soft recovered", None),
        ("amdgpu 0000:c6:00.0: amdgpu: SMU is initialized successfully!", None),
    ],
)
def test_amd_lines(message: str, event: AmdEvent | None) -> None:
    assert amd_event(message) == event


def test_blanks_of_64_bits_are_unknown_as_text_too() -> None:
    for blank in ("9223372036854775794", "2147483632", 9.223372036854775807e18, "140737488355328.0"):
        assert number(blank) is None
    assert number("9007199254740993") == 9007199254740992.0


@given(st.text(max_size=300))
def test_no_text_raises(text: str) -> None:
    for message in (
        text,
        f"nvidia-nvswitch0: SXid (PCI:{text}",
        f"pcieport 0000:00:01.0: {text}",
        f"EDAC MC0: 1 CE {text}",
    ):
        for parser in (
            switch_error,
            pcie_line,
            host_event,
            amd_event,
            registers,
            link_fault,
            recovery_value,
            unwrap,
        ):
            parser(message)
    host_event(f"INFO: task {text}:7 blocked for more than 120 seconds.")
