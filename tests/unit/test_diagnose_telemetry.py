"""Tools, telemetry, fabric and probes of GPU nodes. Made-up hosts, addresses and numbers."""

import pytest

from gridctl.detect.diagnose.devices import devices
from gridctl.model.diagnosis import Diagnosis, Material

RESET, REBOOT = "evacuate_and_reset_gpu", "evacuate_and_reboot"


def diagnosed(*texts: str) -> list[Diagnosis]:
    return list(devices([Material(f"input.{index}", text) for index, text in enumerate(texts)]))


def brief(found: list[Diagnosis]) -> list[tuple[object, ...]]:
    return [(d.kind, d.pci, d.action, d.preempt_job, d.event_count) for d in found]


HEAD = "pci.bus_id, index, gpu_recovery_action"


def test_a_recovery_that_the_driver_asks_for_whatever_the_order_of_columns() -> None:
    (found,) = diagnosed(f"{HEAD}\n00000000:6D:00.0, 4, Drain and Reset\n00000000:1A:00.0, 0, None\n")
    assert brief([found]) == [("recovery_action_pending", "0000:6d:00.0", RESET, True, 1)]
    (found,) = diagnosed("gpu_recovery_action,uuid,index\nReboot,GPU-1,5\nReboot,GPU-0,2\n[N/A],GPU-2,3\n")
    assert (found.action, found.event_count, [e["index"] for e in found.events]) == (REBOOT, 2, [2, 5])
    (found,) = diagnosed(f"{HEAD}\n00000000:6D:00.0, 4, Reboot\n00000000:1A:00.0, 2, Reset\n")
    assert brief([found]) == [("recovery_action_pending", "0000:1a:00.0", "per_gpu", True, 2)]
    assert [e["action"] for e in found.events] == [RESET, REBOOT]
    (found,) = diagnosed(f"{HEAD}\n00000000:6D:00.0, 4, Drain P2P\n")
    assert (found.action, found.preempt_job) == ("manual_review", False)


@pytest.mark.parametrize("parted_by", [",", ";", "\t", " , "])
def test_tables_are_parted_by_what_they_are_parted_by(parted_by: str) -> None:
    rows = ("index,gpu_recovery_action", "7,Node Reboot Required", "2,None")
    text = "\n".join(row.replace(",", parted_by) for row in rows)
    assert [(d.action, [e["index"] for e in d.events]) for d in diagnosed(text)] == [(REBOOT, [7])]


def test_records_in_a_document() -> None:
    assert [d.kind for d in diagnosed('{"kind": "gap", "records": 70}')] == ["missing_data"]
    gpus = '{"index": 0, "gpu_recovery_action": "None"}, {"index": 5, "gpu_recovery_action": 2}'
    document = f'{{"node": "n1", "gpus": [{gpus}]}}'
    assert [(d.action, [(e["index"], e["node"]) for e in d.events]) for d in diagnosed(document)] == [
        (REBOOT, [(5, "n1")])
    ]
    journal = (
        '{"MESSAGE": "NVRM: Xid (PCI:0000:6d:00): 79, x", "_HOSTNAME": "n1", "SYSLOG_IDENTIFIER": "kernel"}'
    )
    assert [d.kind for d in diagnosed(journal)] == ["gpu_lost"]
    assert [d.kind for d in diagnosed(journal.replace('"kernel"', '"trainer"'))] == []


def test_not_supported_is_neither_healthy_nor_broken() -> None:
    found = diagnosed(f"{HEAD}\n00000000:6D:00.0, 4, [N/A]\n")
    assert [(d.kind, d.severity) for d in found] == [("none", "info"), ("nvml_values", "info")]


def test_advice_goes_to_what_befell_the_gpu() -> None:
    log = "[ 5.0] NVRM: Xid (PCI:0000:6d:00): 94, pid=1, name=a, Contained: SM (0x1). RST: No, D-RST: No"
    (found,) = diagnosed(log, f"{HEAD}\n00000000:6D:00.0, 4, Reset\n")
    assert (found.kind, found.xid, found.action, found.preempt_job) == ("ecc_contained", 94, RESET, True)


def test_healthy_from_one_source_takes_back_nothing() -> None:
    smi = "$ nvidia-smi --query-gpu=index,gpu_recovery_action --format=csv,noheader\n0, None\n3, {}\n"
    dmon = "$ dcgmi dmon -c 1 -e 230\n#Entity   GPUTL  XIDER\nID\nGPU 0     7      0\nGPU 3     N/A    120\n"
    health = '$ dcgmi health -c -j\n{"body": {"Overall Health": {"value": "Healthy"}}}\n'
    (found,) = diagnosed(smi.format("Reset") + dmon + health)
    assert (found.kind, found.xid, found.pci, found.action, found.preempt_job) == (
        "gsp_error",
        120,
        None,
        RESET,
        True,
    )
    (found,) = diagnosed(smi.format("None") + dmon + health)
    assert (found.kind, found.preempt_job) == ("gsp_error", False), "a gauge keeps what is over"


def test_a_gauge_is_an_event_when_it_changes_and_the_log_decides_the_count() -> None:
    line = 'DCGM_FI_DEV_XID_ERRORS{{gpu="5",UUID="GPU-5",pci_bus_id="00000000:6D:00.0",Hostname="n1"}} {} {}'
    same = "\n".join(line.format(31, 1_760_000_000_000 + n * 60_000) for n in range(30))
    assert brief(diagnosed(same)) == [("mmu_fault", "0000:6d:00.0", "fix_app", False, 1)]
    assert [d.kind for d in diagnosed("\n".join(line.format(0, n) for n in range(9)))] == ["none"]
    row = '{{"ts": {}, "source": "dcgm", "gpu": 5, "value": {}}}'
    xid = "NVRM: Xid (PCI:0000:6d:00): 94, pid=9, name=a, Contained: SM (0x1)"
    kernel = f'{{"ts": 100.0, "source": "kmsg", "line": "{xid}"}}'
    covered = "\n".join([row.format(90, 0), kernel, row.format(110, 94), row.format(999, 94)])
    assert brief(diagnosed(covered)) == [("ecc_contained", "0000:6d:00.0", "restart_app", False, 1)]
    twice = "\n".join([row.format(1, 94), kernel.replace("100.0", "90000.0"), row.format(90030, 94)])
    assert brief(diagnosed(twice)) == [("ecc_contained", "0000:6d:00.0", "restart_app", False, 2)]


def test_blanks_of_dcgm_are_no_numbers() -> None:
    line = 'DCGM_FI_DEV_ROW_REMAP_FAILURE{{gpu="5",UUID="GPU-5"}} {}'
    assert [d.kind for d in diagnosed(line.format(9223372036854775794))] == ["missing_data"]
    assert [d.action for d in diagnosed(line.format(1))] == ["evacuate_and_replace_gpu"]


LINKS = (
    "index, pci.bus_id, pstate, utilization.gpu [%], pcie.link.gen.current, pcie.link.gen.max, "
    "pcie.link.width.current, pcie.link.width.max"
)


@pytest.mark.parametrize(
    ("row", "hit"),
    [
        ("P0, 97 %, 4, 5, 16, 16", True),  # slower under load
        ("P0, 97 %, 5, 5, 4, 16", True),  # narrower
        ("P8, 0 %, 5, 5, 8, 16", True),  # the width never falls by design
        ("P8, 0 %, 1, 5, 16, 16", False),  # idle: slower by design
        ("P8, [N/A], 1, 5, 16, 16", False),
        ("P0, 97 %, [N/A], 5, [N/A], 16", False),
        ("P0, 97 %, 5, 5, 16, 16", False),
    ],
)
def test_pcie_links_under_load(row: str, hit: bool) -> None:
    found = diagnosed(f"{LINKS}\n1, 00000000:6D:00.0, {row}\n2, 00000000:6E:00.0, P0, 90 %, 5, 5, 16, 16\n")
    assert [d.kind for d in found if d.kind not in ("none", "nvml_values")] == ["pcie_downgrade"] * hit
    if hit:
        assert brief(found[:1]) == [("pcie_downgrade", "0000:6d:00.0", "drain_and_reseat", False, 1)]


def errors(per_s: float, load_pct: int = 95, count: int = 10) -> list[Diagnosis]:
    rows = [f"{load_pct},{n * 30},{n * 30 * per_s:.0f},6" for n in range(count)]
    return diagnosed("\n".join(["util_pct,t_s,sbe_volatile_total,gpu", *rows, "0,9000,{},6"]))


def test_corrected_errors_by_rate_and_only_under_load() -> None:
    (found,) = errors(9000)
    assert brief([found]) == [("ecc_corrected_rate", None, "drain_and_replace_gpu", False, 1)]
    assert [(d.severity, d.action) for d in errors(200)] == [("warning", "observe")]
    assert [d.kind for d in errors(0.1)] == ["none"]
    assert [d.kind for d in errors(9000, load_pct=0)] == ["none"]
    assert [d.kind for d in errors(9000, count=2)] == ["none"]


@pytest.mark.parametrize(
    ("masks", "kind", "action"),
    [
        (["0x80"] * 3, "hw_power_brake", "check_power"),
        (["128"] * 4, "hw_power_brake", "check_power"),
        (["0x80", "0x80", "0x0", "0x80"], "hw_power_brake", "observe"),
        (["0x60"] * 3, "thermal_throttle", "check_cooling"),
        (["0x4"] * 9, "none", "none"),
        (["0x1"] * 9, "none", "none"),
        (["[N/A]"] * 9, "none", "none"),
    ],
)
def test_clocks_that_are_held_down_poll_after_poll(masks: list[str], kind: str, action: str) -> None:
    rows = [f"2026/03/01 10:00:{n:02d}.000, {mask}, 3" for n, mask in enumerate(masks)]
    found = diagnosed("\n".join(["timestamp, clocks_throttle_reasons.active, index", *rows]))
    assert (found[0].kind, found[0].action, found[0].preempt_job) == (kind, action, False)


QUERY = """==============NVSMI LOG==============
Driver Version                            : 570.86.15
GPU 00000000:6D:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU Recovery Action                   : {recovery}
    Remapped Rows
        Uncorrectable Error               : 3
        Pending                           : {pending}
        Remapping Failure Occurred        : {failed}
    Retired Pages
        Single Bit ECC                    : N/A
        Double Bit ECC                    : {retired}
    Clocks Event Reasons
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : Active

"""


def query(
    recovery: str = "None", pending: str = "No", failed: str = "No", retired: str = "0"
) -> list[tuple[str, str]]:
    text = QUERY.format(recovery=recovery, pending=pending, failed=failed, retired=retired)
    return [(d.kind, d.action) for d in diagnosed(text) if d.kind != "hw_power_brake"]


def test_the_whole_query_of_nvidia_smi() -> None:
    assert query(pending="Yes") == [("row_remap_pending", "defer_reset_to_window")]
    assert query(failed="Yes") == [("row_remap_failure", "evacuate_and_replace_gpu")]
    assert query(recovery="Node Reboot") == [("recovery_action_pending", REBOOT)]
    assert query(retired="61") == [("row_remap_failure", "replace_gpu")]
    assert query(retired="5") == []
    assert query(pending="N/A", failed="N/A") == []


def fabric(*states: tuple[str, str]) -> list[Diagnosis]:
    text = "".join(
        f"GPU 00000009:0{n}:00.0\n    Fabric\n        State     : {state}\n        Status    : {status}\n"
        for n, (state, status) in enumerate(states, start=1)
    )
    return diagnosed(text)


OK, NA = ("Completed", "Success"), ("N/A", "N/A")


def test_the_status_counts_and_not_the_state() -> None:
    found = fabric(OK, ("Completed", "Insufficient Resources"), ("In Progress", "N/A"), OK)
    assert brief(found) == [
        ("fabric_registration_failed", "0009:02:00.0", "hold_node_out_of_service", False, 2)
    ]
    assert [d.kind for d in fabric(OK, OK)] == ["none"]
    assert [d.kind for d in fabric(NA, NA)] == ["not_applicable"], "a board without a fabric"
    assert brief(fabric(OK, NA)) == [
        ("fabric_registration_failed", "0009:02:00.0", "hold_node_out_of_service", False, 1)
    ]
    assert [(d.kind, d.severity) for d in fabric(OK, ("In Progress", "N/A"))] == [
        ("fabric_registration_failed", "warning")
    ]


MANAGER = "$ systemctl is-active nvidia-fabricmanager\n{}\n"
NOTHING = "Mar  1 10:00:00 n1 {}[9]: failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]\n"


def test_the_fabric_manager() -> None:
    down = ("fabricmanager_down", None, "drain_then_restart_fabricmanager", False, 1)
    plain = "gpu 0: state=Completed status=Success\ngpu 1: state=Completed status=Unknown Error\n"
    (found,) = diagnosed(plain + MANAGER.format("failed"))
    assert brief([found]) == [down]
    assert [e["index"] for e in found.events] == [1]
    exited = "Mar  1 10:00:00 n1 {}[1]: nvidia-fabricmanager.service: Main process exited, code=killed"
    assert brief(diagnosed(exited.format("systemd"))) == [down]
    assert diagnosed(exited.format("trainer")) == [], "only the service manager speaks of services"
    started = "Mar  1 10:05:00 n1 systemd[1]: Started NVIDIA fabric manager service."
    assert [d.kind for d in diagnosed(exited.format("systemd") + "\n" + started)] == ["none"]
    assert [d.kind for d in diagnosed(MANAGER.format("active"))] == ["none"]
    no_fabric = "index, fabric.state, fabric.status\n0, N/A, N/A\n1, [N/A], [N/A]\n"
    assert [d.kind for d in diagnosed(no_fabric, MANAGER.format("inactive"))] == ["not_applicable"]
    assert [d.kind for d in diagnosed(NOTHING.format("nv-fabricmanager"))] == ["not_applicable"]
    has_fabric = "index, fabric.state, fabric.status\n0, In Progress, N/A\n"
    assert [d.kind for d in diagnosed(has_fabric, NOTHING.format("nv-fabricmanager"))] == [
        "fabricmanager_down"
    ]
    assert diagnosed(NOTHING.format("trainer")) == []


def test_imex_is_for_several_nodes() -> None:
    line = "GPU:0 IMEX daemon status is -3 (not READY)"
    assert [d.kind for d in diagnosed(line)] == ["not_applicable"]
    assert [d.kind for d in diagnosed(f"GPU 0: NVIDIA GB200 (UUID: GPU-x)\n{line}")] == [
        "fabric_registration_failed"
    ]


def test_links_that_are_up_and_carry_nothing() -> None:
    slow = '{"node": "n4", "measured_busbw_gbps": 20, "expected_busbw_gbps": 400, "nvlink_active": [18, 18]}'
    assert brief(diagnosed(slow)) == [("nvlink_silent_fallback", None, "hold_node_out_of_service", False, 1)]
    assert [d.kind for d in diagnosed(slow.replace("20,", "390,"))] == ["none"]
    assert [d.kind for d in diagnosed(slow.replace("20,", "null,"))] == ["none"]
    assert [d.kind for d in diagnosed('{"p2p": [[true, true], [false, true]]}')] == ["nvlink_silent_fallback"]
    assert [d.kind for d in diagnosed('{"nvlink_links": [12, 11, 12]}')] == ["nvlink_degraded"]
    status = "GPU 0: NVIDIA H200 (UUID: GPU-a)\n\t Link 0: 26.562 GB/s\n\t Link 1: {}\n"
    assert [d.kind for d in diagnosed(status.format("<inactive>"))] == ["nvlink_degraded"]
    assert [d.kind for d in diagnosed(status.format("26.562 GB/s"))] == ["none"]


def probe(**fields: object) -> str:
    import json

    return json.dumps({"t": 10.0, "probe": "nvml", "mode": "local", **fields})


def test_a_local_probe_that_cannot_be_killed() -> None:
    start, late = probe(state="start"), probe(state="deadline_exceeded")
    for stuck in ({"proc_state": "D"}, {"sigkill_sent": True, "still_alive": True}):
        (found,) = diagnosed(f"{start}\n{probe(state='deadline_exceeded', **stuck)}")
        assert (found.kind, found.action, found.preempt_job) == ("driver_unresponsive", REBOOT, True)
    assert [(d.severity, d.preempt_job) for d in diagnosed(f"{start}\n{late}")] == [("warning", False)]
    assert [d.action for d in diagnosed("\n".join([late] * 3))] == ["drain_and_diagnose"]
    assert [d.kind for d in diagnosed(f"{start}\n{probe(state='ok')}")] == ["none"]
    hung = "[ 5.0] INFO: task nvidia-smi:9 blocked for more than 120 seconds."
    assert [(d.kind, d.preempt_job) for d in diagnosed(late, hung)] == [("driver_unresponsive", True)]


def test_a_remote_probe_says_nothing_of_the_node() -> None:
    for remote in ({"mode": "remote"}, {"mode": None, "endpoint": "192.0.2.7:5555"}):
        (found,) = diagnosed("\n".join([probe(state="deadline_exceeded", proc_state="D", **remote)] * 9))
        assert (found.kind, found.fault, found.action) == ("missing_data", "monitor", "none")


@pytest.mark.parametrize(
    ("text", "kind", "pci", "action", "preempt"),
    [
        (
            "Unable to determine the device handle for GPU0000:6D:00.0: GPU is lost.  Reboot",
            "gpu_lost",
            "0000:6d:00.0",
            REBOOT,
            True,
        ),
        (
            "Unable to determine the device handle for gpu 0000:6D:00.0: Unknown Error",
            "gpu_lost",
            "0000:6d:00.0",
            "drain_and_diagnose",
            False,
        ),
        (
            "Unable to determine the device handle for GPU00:6D: Unknown Error",
            "gpu_lost",
            None,
            "drain_and_diagnose",
            False,
        ),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            "driver_unresponsive",
            None,
            "drain_and_diagnose",
            False,
        ),
        (
            "Failed to initialize NVML: Driver/library version mismatch",
            "config_mismatch",
            None,
            "fix_config",
            False,
        ),
        (
            "6d:00.0 3D controller: NVIDIA Corporation GH100 [H100] (rev ff)",
            "gpu_lost",
            "0000:6d:00.0",
            REBOOT,
            True,
        ),
        (
            '{"body": {"Overall Health": {"value": "Failure"}}}',
            "nvml_values",
            None,
            "drain_and_diagnose",
            False,
        ),
    ],
)
def test_tools_that_cannot_work(text: str, kind: str, pci: str | None, action: str, preempt: bool) -> None:
    (found,) = diagnosed(f"$ nvidia-smi\n{text}\n")
    assert (found.kind, found.pci, found.action, found.preempt_job) == (kind, pci, action, preempt)


def test_values_that_the_driver_could_not_give() -> None:
    head = "index, pci.bus_id, temperature.gpu, power.draw [W]"
    rows = {
        "[Unknown Error]": "[Unknown Error]",
        "[GPU requires reset]": "[GPU requires reset]",
        "[GPU is lost]": "[GPU is lost]",
    }
    text = "\n".join(
        [head, *(f"{n}, 00000000:{n}A:00.0, {t}, {p}" for n, (t, p) in enumerate(rows.items(), 1))]
    )
    found = {(d.kind, d.action): d for d in diagnosed(text)}
    assert ("gpu_lost", REBOOT) in found
    assert ("recovery_action_pending", RESET) in found
    mixed = found[("nvml_values", "per_gpu")]
    assert [e["action"] for e in mixed.events] == ["manual_review", RESET, REBOOT]
    (found_one,) = diagnosed(f"{head}\n1, 00000000:1A:00.0, ERR!, 70\n")
    assert (found_one.kind, found_one.action, found_one.severity) == (
        "nvml_values",
        "manual_review",
        "warning",
    )


def test_a_gpu_that_the_bus_has_and_the_driver_does_not() -> None:
    bus = "".join(f"0000:{n}a:00.0 3D controller: NVIDIA Corporation GH100 (rev a1)\n" for n in range(1, 5))
    listed = "".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\n" for n in range(3))
    assert [(d.kind, d.event_count) for d in diagnosed(bus, listed)] == [("gpu_count_mismatch", 1)]
    assert diagnosed(bus, listed + "GPU 3: NVIDIA H100 (UUID: GPU-3)\n") == []
