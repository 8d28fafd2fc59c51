"""Kernel logs: what GPUs, links, PCIe and the machine say. Made-up hosts, addresses and numbers."""

import pytest

from gridctl.detect.diagnose.devices import devices
from gridctl.model.diagnosis import Diagnosis, Material

A, B = "0000:6d:00", "0000:c2:00"


def diagnosed(*texts: str) -> list[Diagnosis]:
    return list(devices([Material(f"input.{index}", text) for index, text in enumerate(texts)]))


def xid(
    number: int, text: str = "text", t_s: float = 10.0, pci: str = A, pid: int = 7, name: str = "trainer"
) -> str:
    return f"[{t_s:12.6f}] NVRM: Xid (PCI:{pci}): {number}, pid={pid}, name={name}, {text}"


def log(*lines: str) -> list[Diagnosis]:
    return diagnosed("\n".join(lines))


def brief(found: list[Diagnosis]) -> list[tuple[object, ...]]:
    return [(d.kind, d.xid, d.pci, d.action, d.preempt_job, d.event_count) for d in found]


RESET, REBOOT = "evacuate_and_reset_gpu", "evacuate_and_reboot"
ADVICE = "GPU recovery action changed from 0x0 (None) to 0x{} (x)"


def test_first_cause_wins_and_the_last_word_advises() -> None:
    (found,) = log(
        xid(62, "20aa11fe 00001c20"),
        *(xid(45, f"Ch {n:08x}", 10.1) for n in range(5)),
        xid(119, "Timeout after 6s of waiting for RPC response", 16.0),
        xid(154, ADVICE.format(1), 16.1),
        xid(154, ADVICE.format(2), 16.2),
    )
    assert brief([found]) == [("pmu_halt", 62, f"{A}.0", REBOOT, True, 1)]
    assert found.raw_lines == 9
    assert found.events[0]["chain"] == [62, 45, 119, 154]
    assert found.why.rule == "xid.62+recovery.2"
    assert found.why.source


def test_a_decisive_consequence_decides_and_the_cause_stays() -> None:
    (found,) = log(xid(109, "errorString CTX SWITCH TIMEOUT"), xid(120, "GSP task exception", 12.0))
    assert brief([found]) == [("context_switch_timeout", 109, f"{A}.0", RESET, True, 1)]


def test_a_teardown_flood_is_one_event_a_process_and_moves_nobody() -> None:
    (found,) = log(*(xid(45, f"Ch {n:08x}", 10 + n / 1000, (A, B)[n % 2], pid=n % 2) for n in range(500)))
    assert brief([found]) == [("channel_teardown", 45, f"{A}.0", "none", False, 2)]
    assert found.raw_lines == 500


def test_the_same_teardown_on_many_nodes_at_once_is_one_event() -> None:
    lines = [
        f"Jul  9 22:14:{n % 30:02d} n{n:02d} kernel: NVRM: Xid (PCI:{A}): 45, pid={n}, name=a, Ch 1"
        for n in range(60)
    ]
    (found,) = log(*lines)
    assert (found.kind, found.event_count, found.raw_lines) == ("channel_teardown", 1, 60)


def test_teardowns_by_nvlink_on_several_gpus_are_one_fabric_event() -> None:
    lines = [
        xid(45, f"Ch 1 caused by previous Xid {n}", 10.0, f"0000:{bus}:00")
        for n, bus in ((145, "1b"), (149, "2c"))
    ]
    assert brief(log(*lines)) == [("nvlink_error", 149, "0000:2c:00.0", REBOOT, True, 1)]
    assert brief(log(xid(45, "Ch 1 caused by previous Xid 79"))) == [
        ("gpu_lost", 79, f"{A}.0", REBOOT, True, 1)
    ]
    assert brief(log(xid(45, "Ch 1 caused by previous Xid 31"))) == [
        ("mmu_fault", 31, f"{A}.0", "fix_app", False, 1)
    ]


def test_a_storm_of_one_gpu_is_as_many_events_as_it_has_distinct_messages() -> None:
    lines = [
        xid(95, f"Uncontained: FBHUB{n % 7} (0x1). RST: Yes, D-RST: No", 10 + n / 1e4) for n in range(3000)
    ]
    assert brief(log(*lines)) == [("ecc_uncontained", 95, f"{A}.0", RESET, True, 7)]


@pytest.mark.parametrize("name", ["my job, v2", "Xid (PCI:0000:", "a]: NVRM: Xid", "x, GPU has f"])
def test_process_names_forge_nothing(name: str) -> None:
    (found,) = log(xid(43, "Ch 00000008", name=name))
    assert brief([found]) == [("gpu_stopped_processing", 43, f"{A}.0", "fix_app", False, 1)]
    lost = f"NVRM: Xid (PCI:{B}): 79, pid=1, name=x, GPU has fallen off the bus."
    for line in (
        f"[ 1.0] {name}: {lost}",
        f"Mar  1 10:00:00 n1 {name.split()[0]}[7]: {lost}",
        f"12,7,5,-;{lost}",
    ):
        assert not any(d.preempt_job for d in log(line))


def test_a_number_without_a_meaning_is_reported_and_moves_nobody() -> None:
    assert brief(log(xid(3999, "new"))) == [("unknown_xid", 3999, f"{A}.0", "manual_review", False, 1)]


def test_a_gpu_that_left_the_bus_in_three_boots_is_quarantined_in_one_it_is_not() -> None:
    lost = "May  3 09:27:41 n1 kernel: NVRM: Xid (PCI:0000:a4:00): 79, pid=1, name=a, GPU is off the bus."
    boot = "May  3 11:00:00 n1 kernel: Linux version 6.8.0"
    assert brief(log(lost, boot, lost, boot, lost)) == [
        ("gpu_lost", 79, "0000:a4:00.0", "quarantine", True, 3)
    ]
    assert brief(log(boot, lost, lost)) == [("gpu_lost", 79, "0000:a4:00.0", REBOOT, True, 1)]
    other = lost.replace("a4", "a5")
    assert brief(log(other, boot, lost)) == [("gpu_lost", 79, "0000:a4:00.0", REBOOT, True, 1)]


def test_a_gpu_that_is_lost_again_hours_later_has_been_back() -> None:
    again = [xid(79, "GPU has fallen off the bus.", 10.0 + 20_000 * n) for n in range(3)]
    assert brief(log(*again)) == [("gpu_lost", 79, f"{A}.0", "quarantine", True, 3)]
    said_again = [xid(79, "GPU has fallen off the bus.", 10.0 + 600 * n) for n in range(3)]
    assert brief(log(*said_again)) == [("gpu_lost", 79, f"{A}.0", REBOOT, True, 1)]


def test_a_gpu_that_is_not_supported_is_not_lost() -> None:
    pieces = [
        "NVRM: The NVIDIA GPU {}",
        "NVRM: installed in this system is not supported by the",
        "NVRM: NVIDIA x driver",
    ]
    lost = [
        "NVRM: The NVIDIA GPU {}",
        "NVRM: installed in this system has",
        "NVRM: fallen off the bus and is not responding",
    ]
    lines = [f"[ 5.0] {piece.format('0000:01:00.0')}" for piece in pieces]
    lines += [f"[ 6.0] {piece.format('0000:02:00.0')}" for piece in lost]
    assert brief(log(*lines)) == [("gpu_lost", None, "0000:02:00.0", REBOOT, True, 1)]


def test_what_was_before_the_boot_is_history() -> None:
    lost = "May  3 09:27:41 n1 kernel: NVRM: Xid (PCI:0000:a4:00): 79, pid=1, name=a, GPU is off the bus."
    for boot in (
        "May  4 12:00:00 n1 kernel: Linux version 6.8.0",
        "-- Boot 0123456789abcdef0123456789abcdef --",
    ):
        (found,) = log(lost, boot)
        assert (found.kind, found.action, found.fault, found.event_count) == ("none", "none", "monitor", 0)
    later = "May  4 12:00:00 n1 kernel: [    3.100000] NVRM: Xid (PCI:0000:a5:00): 31, pid=1, name=a, Ch 8"
    earlier = lost.replace("kernel: ", "kernel: [ 5000.000000] ")
    assert [d.kind for d in log(earlier, later)] == ["mmu_fault"], "uptime goes back at boots only"


def test_what_the_driver_calls_resolved_is_history_but_not_a_failed_remap() -> None:
    done = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    assert [d.kind for d in log(xid(95), xid(154, ADVICE.format(1)), xid(154, done, 900.0))] == ["none"]
    assert [d.kind for d in log(xid(64), xid(154, done, 900.0))] == ["row_remap_failure"]


def test_memory_errors_are_judged_by_the_past_of_the_gpu() -> None:
    log_text = "\n".join([xid(48, "DBE"), xid(63, "Row Remapper: New row"), xid(154, ADVICE.format(4))])
    assert brief(diagnosed(log_text)) == [("ecc_uncorrectable_dram", 48, f"{A}.0", RESET, True, 1)]
    past = '{"pci": "0000:6D:00.0", "priors": [{"xid": 63, "days_ago": 4}, {"xid": 94, "days_ago": 2}]}'
    assert brief(diagnosed(log_text, past)) == [
        ("ecc_uncorrectable_dram", 48, f"{A}.0", "replace_gpu", True, 1)
    ]
    for other in (past.replace("6D", "6E"), past.replace('"days_ago": ', '"days_ago": 9'), "{}", "[1]"):
        assert brief(diagnosed(log_text, other))[0][3] == RESET
    identity = "[ 9.0] NVRM: GPU at PCI:0000:6d:00: GPU-00000000-1111-4222-8333-444444444444"
    by_uuid = past.replace('"pci": "0000:6D:00.0"', '"uuid": "GPU-00000000-1111-4222-8333-444444444444"')
    assert brief(diagnosed(f"{identity}\n{log_text}", by_uuid))[0][3] == "replace_gpu"


@pytest.mark.parametrize(
    "past",
    [
        '{"pci": "0000:6d:00.0", "history": [63, 94]}',
        '{"pci": "0000:6d:00.0", "previous_xids": {"63": 1, "48": 2}}',
        '{"previous": [{"xid": 63, "age_days": 1}, {"xid": 63, "age_days": 2}]}',
    ],
)
def test_pasts_are_told_in_many_ways(past: str) -> None:
    assert diagnosed(xid(48, "DBE"), past)[0].action == "replace_gpu"


def test_a_row_that_goes_bad_just_after_a_boot_counts() -> None:
    past = (
        '{{"pci": "0000:6d:00.0", "uptime_s": {}, "history": [{{"xid": 63}}], '
        '"remapped_rows": {{"uncorrectable_before": 4, "uncorrectable_after": 5}}}}'
    )
    assert diagnosed(xid(94), past.format(90))[0].action == "replace_gpu"
    assert diagnosed(xid(94), past.format(90000))[0].action == "restart_app"


def test_one_compute_unit_and_several_jobs_is_hardware() -> None:
    text = "Graphics SM Warp Exception on (GPC {}, TPC 4, SM 0): Illegal Instruction Encoding"
    same = [xid(13, text.format(3), 1000.0 * n, pid=n) for n in range(1, 4)]
    (found,) = log(*same)
    assert (found.kind, found.action, found.fault, found.event_count) == (
        "sm_exception",
        "drain_and_diagnose",
        "node",
        3,
    )
    for near in (
        [xid(13, text.format(n), 1000.0 * n, pid=n) for n in range(1, 4)],  # another unit each time
        [xid(13, text.format(3), 1000.0 * n, pid=5) for n in range(1, 4)],  # one job
        [xid(13, text.format(3), 90_000.0 * n, pid=n) for n in range(1, 4)],  # days between them
        [xid(13, text.format(3), 1000.0 * n, (A, B)[n % 2], pid=n) for n in range(1, 3)],  # another GPU
    ):
        assert [d.action for d in log(*near)] == ["fix_app"]


def test_a_program_that_fails_everywhere_is_the_program_also_if_run_again() -> None:
    def burst(t_s: float, pid: int) -> list[str]:
        return [
            xid(13, f"Graphics SM Warp Exception on (GPC {n % 8}, TPC {n // 8}, SM 0): x", t_s, pid=pid)
            for n in range(40)
        ]

    (found,) = log(*burst(10.0, 1), xid(43, "Ch 10", 10.1, pid=1))
    assert brief([found]) == [("sm_exception", 13, f"{A}.0", "fix_app", False, 1)]
    assert (found.raw_lines, found.events[0]["chain"]) == (41, [13, 43])
    assert log(*burst(10.0, 1), *burst(4000.0, 2))[0].action == "fix_app"


def test_memory_faults_of_several_jobs_on_one_gpu_only() -> None:
    same = [xid(31, "Ch 8", 1000.0 * n, pid=n) for n in range(1, 4)]
    assert [d.action for d in log(*same)] == ["drain_and_diagnose"]
    assert [d.action for d in log(*same, xid(31, "Ch 8", 1.0, B))] == ["fix_app"]


@pytest.mark.parametrize(
    ("registers", "action"),
    [
        ("0x1", "observe"),
        ("0x100000", "observe"),
        ("0x10", "drain_and_reset_gpu"),
        ("0x1000", "drain_and_reset_gpu"),
        ("0x400000", "drain_and_check_cable"),
        ("0x400010", "drain_and_reset_gpu"),
        ("0x8", "manual_review"),
        ("0x0, 0x0, 0x4", "drain_and_reset_gpu"),
        ("0x0, 0x0, 0x0, 0x0, 0x100000", "observe"),
        ("0x0", "drain_and_diagnose"),
    ],
)
def test_the_registers_of_xid_74_decide(registers: str, action: str) -> None:
    (found,) = log(xid(74, f"NVLink: fatal error detected on link 5({registers})"))
    assert (found.kind, found.action, found.preempt_job, found.fault) == (
        "nvlink_error",
        action,
        False,
        "fabric",
    )


def test_a_link_that_fails_again_and_again_is_hardware() -> None:
    text = "NVLink: fatal error detected on link 5(0x20, 0x0)"
    assert log(*(xid(74, text, 1000.0 * n) for n in range(4)))[0].action == "drain_and_diagnose"


def test_nvlink_5_by_word_and_sub_code() -> None:
    fatal = xid(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x025001c6 0x0)", 12.0)
    asks_154 = xid(145, "RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0xe2 0x4)", 11.0, B)
    (found,) = log(asks_154, fatal)
    assert brief([found]) == [("nvlink_error", 149, f"{A}.0", RESET, True, 2)]
    assert [(e["unit"], e["fatal"], e["link"]) for e in found.events] == [
        ("RLW_SRC_TRACK", False, 12),
        ("NETIR_LINK_EVT", True, 3),
    ]
    assert "look there" in found.why.evidence[-1], "the sub-code points to the other end of the link"
    assert brief(log(asks_154)) == [("nvlink_error", 145, f"{B}.0", "restart_app", False, 1)]
    assert log(xid(147, "TREX Nonfatal XC0 i0 Link 1 (0x0 0x80000000)"))[0].action == "observe"
    assert log(xid(150, "worded as never before"))[0].action == "manual_review"
    assert log(xid(149, "NETIR Fatal XC0 i0 Link -1 (0x0)"))[0].events[0]["link"] is None


def test_the_driver_s_advice_on_a_contained_error() -> None:
    text = "Contained: SM (0x1). RST: {}, D-RST: No"
    assert log(xid(94, text.format("No")))[0].action == "restart_app"
    (found,) = log(xid(94, text.format("Yes")))
    assert (found.kind, found.action, found.preempt_job) == ("ecc_contained", RESET, True)


def test_time_outs_go_on_however_long_and_silence_is_no_end() -> None:
    lines = [xid(119, f"Timeout waiting for RPC from GSP! {n}", 45.0 * n, pid=n) for n in range(1, 9)]
    silenced = (
        f"[ 400.0] NVRM: Rate limiting GSP RPC error prints for GPU at PCI:{A} (printing 1 of every 30)."
    )
    (found,) = log(*lines, silenced)
    assert brief([found]) == [("gsp_timeout", 119, f"{A}.0", RESET, True, 1)]
    assert found.events[0]["suppressed_repeats"] is True


def test_gpus_that_need_different_answers() -> None:
    lines = [
        xid(46),
        xid(69, "Class Error: x", 100.0, B),
        xid(92, "High", 200.0, "0000:d1:00"),
        xid(45, "Ch 1", 300.0, "0000:d2:00"),
    ]
    found = log(*lines)
    (mixed,) = [d for d in found if d.kind == "mixed"]
    assert (mixed.action, mixed.xid, mixed.pci, mixed.event_count, mixed.preempt_job) == (
        "per_gpu",
        46,
        f"{A}.0",
        3,
        False,
    )
    assert [e["action"] for e in mixed.events] == [RESET, "fix_app", "observe"]
    assert len(found) == 5
    echo = [xid(79, "GPU has fallen off the bus."), xid(43, "Ch 8", 11.0, B)]
    assert [d.kind for d in log(*echo)] == ["gpu_lost", "gpu_stopped_processing"], (
        "what follows needs no answer of its own"
    )


PORT, GPU = "0000:60:01.0", "0000:61:00.0"


def test_the_link_failed_before_the_gpu_left() -> None:
    lines = [
        f"[ 50.0] pcieport {PORT}: AER: Uncorrected (Fatal) error received: {PORT}",
        f"[ 50.0] pcieport {PORT}: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (x)",
        f"[ 50.0] pcieport {PORT}:    [ 5] SDES                   (First)",
        f"[ 50.1] nvidia {GPU}: AER: can't recover (no error_detected callback)",
        xid(79, "GPU has fallen off the bus.", 50.2, "0000:61:00"),
        f"[ 51.0] pcieport {PORT}: AER: device recovery failed",
    ]
    assert brief(log(*lines)) == [("gpu_lost", 79, GPU, "evacuate_and_inspect_pcie", True, 1)]
    after = [lines[4], *lines[:4]]
    assert brief(log(*after)) == [("gpu_lost", 79, GPU, REBOOT, True, 1)], (
        "errors after the loss are its echo"
    )
    long_before = [line.replace("50.", "5.") for line in lines[:3]] + [lines[4]]
    assert log(*long_before)[0].action == REBOOT


@pytest.mark.parametrize("word", ["Uncorrected", "Uncorrectable"])
def test_no_gpu_recovers_from_an_uncorrected_error(word: str) -> None:
    lines = [
        f"[ 7.0] pcieport {PORT}: AER: {word} (Non-Fatal) error message received from {GPU}",
        f"[ 7.0] nvidia {GPU}: PCIe Bus Error: severity={word} (Non-Fatal), type=Transaction Layer, (x)",
        f"[ 7.0] nvidia {GPU}:    [14] CmpltTO                (First)",
    ]
    (found,) = log(*lines)
    assert (found.kind, found.pci, found.action, found.preempt_job) == ("pcie_uncorrected", GPU, REBOOT, True)
    adapter = [line.replace("nvidia", "mlx5_core") for line in lines]
    assert log(*adapter)[0].preempt_job is False
    recovered = [*adapter, f"[ 8.0] pcieport {PORT}: AER: device recovery successful"]
    assert [(d.severity, d.action) for d in log(*recovered)] == [("warning", "observe")]


def test_corrected_errors_are_a_trend_however_many() -> None:
    line = "[ {}.0] pcieport 0000:00:1d.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (x)"
    (one,) = log(line.format(1))
    assert (one.kind, one.severity, one.action) == ("pcie_corrected", "info", "observe")
    (storm,) = log(*(line.format(n // 50) for n in range(1000)))
    assert (storm.severity, storm.action, storm.preempt_job, storm.event_count) == (
        "warning",
        "observe",
        False,
        1,
    )


def test_switch_errors_by_word_and_number() -> None:
    line = "[ 3.0] nvidia-nvswitch1: SXid (PCI:0000:b3:00.0): {}, {}"
    nonfatal = [
        line.format(12028, "Non-fatal, Link 3 x"),
        line.format(12028, "Data {0x1, 0x2}"),
        line.format(22013, "Non-fatal, Link 4 y"),
    ]
    (found,) = log(*nonfatal)
    assert (found.kind, found.sxid, found.pci, found.event_count, found.action) == (
        "nvswitch_nonfatal",
        12028,
        "0000:b3:00.0",
        2,
        "observe",
    )
    (found,) = log(line.format(20034, "Fatal, Link 3 x"), line.format(20034, "Fatal, Link 4 x"))
    assert (found.kind, found.sxid, found.action, found.preempt_job, found.event_count) == (
        "nvswitch_fatal",
        20034,
        REBOOT,
        True,
        1,
    )
    assert log(line.format(23009, "Non-fatal, Link 3 x"))[0].kind == "nvswitch_fatal", (
        "fatal whatever the word"
    )
    blind = "Unable to determine the device handle for GPU 0000:6d:00.0: Unknown Error"
    found_all = diagnosed(blind, line.format(20034, "Fatal, Link 3 x"))
    assert [(d.kind, d.pci) for d in found_all] == [("nvswitch_fatal", "0000:6d:00.0")]


def test_memory_modules_count_what_stands_in_the_line() -> None:
    line = "[ 1.0] EDAC MC0: {} CE memory read error on P1_DIMM_{} (channel:0 slot:0 - {} area:DRAM)"
    (found,) = log(line.format(200, "A1", ""), line.format(1, "A1", ""))
    assert (found.action, found.when, found.event_count, found.events[0]["count"]) == (
        "replace_dimm_in_window",
        "window",
        1,
        201,
    )
    assert log(line.format(1, "A1", ""))[0].action == "observe"
    assert log(line.format(1, "A1", "OVERFLOW"))[0].action == "replace_dimm_in_window"


def test_heat_is_one_event_a_time_whatever_the_number_of_cores() -> None:
    def hot(t_s: int, total: int) -> list[str]:
        text = "mce: CPU{}: Package temperature above threshold, cpu clock throttled (total events = {})"
        return [f"[ {t_s}.{n:03d}] " + text.format(n, total) for n in range(64)]

    cool = [f"[ 2.{n:03d}] CPU{n}: Package temperature/speed normal" for n in range(64)]
    (found,) = log(*hot(1, 30), *cool)
    assert (found.kind, found.action, found.event_count, found.raw_lines) == (
        "cpu_thermal",
        "check_cooling",
        1,
        128,
    )
    assert found.events == [{"total_events": 30, "cleared": True}]
    assert log(*hot(1, 30), *cool, *hot(900, 31))[0].event_count == 2


@pytest.mark.parametrize(
    ("line", "kind", "action", "preempt"),
    [
        ("INFO: task nvidia-smi:9 blocked for more than 120 seconds.", "driver_unresponsive", REBOOT, True),
        ("INFO: task python3:9 blocked for more than 120 seconds.", "none", "none", False),
        ("Out of memory: Killed process 9 (trainer) total-vm:1kB", "host_oom", "restart_app", False),
        (
            "nvme nvme1: Removing after probe failure status: -19",
            "storage_lost",
            "drain_and_replace_drive",
            False,
        ),
        ("nvme nvme1: I/O 7 QID 2 timeout, aborting", "storage_lost", "observe", False),
        (
            "NVRM: x: out of sync [NV_ERR_FABRIC_STATE_OUT_OF_SYNC] (0x87) @ a.c:1",
            "nvlink_fabric_error",
            REBOOT,
            True,
        ),
        ("NVRM: GPU 0000:6d:00.0: RmInitAdapter failed! (0x23:0x65:1401)", "gpu_init_failure", REBOOT, True),
        (
            "mlx5_core 0000:41:00.1: x: Detected insufficient power on the PCIe slot (26W).",
            "nic_slot_power",
            "observe",
            False,
        ),
        (
            "amdgpu 0000:c6:00.0: amdgpu: 1 uncorrectable hardware errors detected in umc block",
            "amd_ras_fatal",
            REBOOT,
            True,
        ),
        (
            "amdgpu 0000:c6:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",
            "none",
            "none",
            False,
        ),
        ("usb 1-1: new device", "none", "none", False),
    ],
)
def test_the_machine(line: str, kind: str, action: str, preempt: bool) -> None:
    (found,) = log(f"[ 12.0] {line}")
    assert (found.kind, found.action, found.preempt_job) == (kind, action, preempt)


def test_lost_records_are_told() -> None:
    line = "Mar  1 10:00:00 n1 systemd-journald[9]: /dev/kmsg buffer overrun, some messages lost."
    assert [d.kind for d in log(line)] == ["missing_data"]
    assert diagnosed("no log, no output, nothing") == []
