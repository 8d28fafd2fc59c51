"""Faults of GPUs, and what each shows: kernel lines in the driver's forms, and values.

Forms after public reports; numbers, processes and addresses are made up. A fault ends when the node has
been rebooted after its repair. Each function returns when the node is in service again.
"""

import random
from collections.abc import Callable

from gridctl.simulate.layout import pci
from gridctl.simulate.settings import settings
from gridctl.simulate.story import Story, Values

#: (story, chance, t_s, node, gpu, back_s) -> when the node is back
GpuFault = Callable[[Story, random.Random, float, str, int, float], float]
RECOVERY = {1: "GPU Reset Required", 2: "Node Reboot Required", 4: "Drain and Reset"}


def xid(gpu: int, number: int, text: str, process: str = "pid=51200, name=python3") -> str:
    """A kernel line's message."""
    return f"NVRM: Xid (PCI:{pci(gpu)[:-2]}): {number}, {process}, {text}"


def advice(gpu: int, action: int) -> str:
    """The driver's word on which recovery it now needs."""
    return xid(gpu, 154, f"GPU recovery action changed from 0x0 (None) to 0x{action:x} ({RECOVERY[action]})")


def _decisive(
    story: Story, cause: str, t_s: float, node: str, gpu: int, kind: str, back_s: float, **more: object
) -> float:
    """A fault that a kernel line tells of, and for which a running job must move."""
    returned_s = story.taken_out(t_s, node, back_s)
    story.look(t_s, node)
    known = {"preempt_job": True, "signal": "streamed", "until_t": round(returned_s, 3), **more}
    story.fault(cause, t_s, node, f"gpu:{gpu}", kind, **known)
    return returned_s


def bus_loss(story: Story, chance: random.Random, t_s: float, node: str, gpu: int, back_s: float) -> float:
    """The GPU is gone from one line to the next; nothing announces it."""
    form = chance.random()
    address = pci(gpu)
    decisive_s = t_s
    if form < 0.25:  # without a number, over several lines
        story.kernel(
            t_s,
            node,
            f"NVRM: The NVIDIA GPU {address}",
            "NVRM: (PCI ID: 10de:2330) installed in this system has",
            "NVRM: fallen off the bus and is not responding to commands.",
        )
        decisive_s = round(t_s + 0.0008, 4)
    else:
        if form < 0.4:  # its link goes down first, by less than two seconds
            port = f"pcieport 0000:{address[5:7]}:01.1"
            story.kernel(
                t_s - 1.7,
                node,
                f"{port}: AER: Corrected error received: 0000:{address[5:7]}:01.1",
                f"{port}: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
            )
        story.kernel(
            t_s,
            node,
            xid(gpu, 79, "GPU has fallen off the bus."),
            f"NVRM: GPU {address}: GPU has fallen off the bus.",
            advice(gpu, 2),
        )
    lost = _decisive(
        story,
        "bus-loss",
        t_s,
        node,
        gpu,
        "gpu_lost",
        back_s,
        decisive_t=decisive_s,
        also=["gpu_init_failure"],
    )
    story.mute(t_s, lost - 60.0, node, f"gpu:{gpu}")
    return lost


def gpu_fatal(story: Story, chance: random.Random, t_s: float, node: str, gpu: int, back_s: float) -> float:
    """The power controller or an engine stops; teardowns of the processes follow."""
    teardown = [xid(gpu, 45, f"Ch {channel:08x}") for channel in (8, 9, 10)]
    if chance.random() < 0.5:
        text, kind = xid(gpu, 62, "32a4 0d2f 00000000 20f5 2111 1ffe 20ef 0000"), "pmu_halt"
    else:
        text, kind = xid(gpu, 46, "GPU stopped processing"), "gpu_stopped_processing"
    story.kernel(t_s, node, text, *teardown, advice(gpu, 1))
    story.values(t_s + 0.1, back_s, node, f"gpu:{gpu}", util_pct=0, recovery_action=1)
    return _decisive(story, "gpu-fatal", t_s, node, gpu, kind, back_s)


def _announced(story: Story, chance: random.Random, t_s: float, node: str, gpu: int) -> None:
    """Corrected errors under load, ever more of them, for hours before."""
    since_s = t_s - chance.uniform(1.0, 12.0) * 3600.0
    peak_per_s = chance.uniform(4600.0, 17700.0)
    span_s = t_s - since_s

    def change(now_s: float, v: Values) -> None:
        part = (min(now_s, t_s) - since_s) / span_s
        v["ecc_sbe_total"] += int(peak_per_s * span_s * part**3 / 3)

    story.patch(since_s, t_s + 3600.0 * 24 * 60, node, f"gpu:{gpu}", change, steady_s=t_s)
    near_s = since_s + span_s * 0.5
    story.fault(
        "slow-death", near_s, node, f"gpu:{gpu}", "ecc_corrected_rate", signal="polled", until_t=round(t_s, 3)
    )


def hbm_uncontained(
    story: Story, chance: random.Random, t_s: float, node: str, gpu: int, back_s: float
) -> float:
    """Memory loses data: two wrong bits, an error not contained, or a row that cannot be replaced."""
    if chance.random() < settings().faults.announced_share and story.free(t_s - 46_800.0, t_s, node):
        _announced(story, chance, t_s, node, gpu)
    form = chance.random()
    also = ["row_remap_pending", "ecc_contained"]
    if form < 0.5:
        kind = "ecc_uncorrectable_dram"
        lines = [
            xid(gpu, 48, "DBE (double-bit error) FBPA: 9, subp: 1"),
            xid(gpu, 171, "Additional to Xid 48/94 ECC errors: DRAM, FBPA 9"),
            xid(gpu, 63, "Row Remapper: New row marked for remapping, reset gpu to activate."),
            advice(gpu, 4),
        ]
        story.added(t_s, back_s, node, f"gpu:{gpu}", ecc_dbe_total=1, remap_uncorr_total=1, remap_pending=1)
    elif form < 0.8:
        kind = "ecc_uncontained"
        text = xid(gpu, 95, "Uncontained: FBHUB (0x2, 0x1). RST: Yes, D-RST: No")
        lines = [*[text] * chance.randint(1, 400), advice(gpu, 1)]
        story.added(t_s, back_s, node, f"gpu:{gpu}", ecc_dbe_total=2)
    else:
        kind, also = "row_remap_failure", []
        text = "Row Remapper: Failed to record row remapping in InfoROM."
        lines = [xid(gpu, 64, text, "pid='<unknown>', name=<unknown>")]
        story.added(t_s, back_s, node, f"gpu:{gpu}", remap_failed=1)
    story.kernel(t_s, node, *lines)
    return _decisive(story, "hbm-uncontained", t_s, node, gpu, kind, back_s, also=also)


def sram(story: Story, chance: random.Random, t_s: float, node: str, gpu: int, back_s: float) -> float:
    """Memory on the chip loses data."""
    del chance
    story.kernel(t_s, node, xid(gpu, 95, "Uncontained: GPC (0x4, 0x0). RST: Yes, D-RST: No"), advice(gpu, 1))
    story.added(t_s, back_s, node, f"gpu:{gpu}", ecc_sram_ue_total=1)
    return _decisive(story, "sram", t_s, node, gpu, "ecc_uncontained", back_s)


def gsp(story: Story, chance: random.Random, t_s: float, node: str, gpu: int, back_s: float) -> float:
    """The GPU's own processor gives no answer; in one case of five only the recovery field says so."""
    form = chance.random()
    if form < 0.2:
        story.values(t_s, back_s, node, f"gpu:{gpu}", recovery_action=2)
        kind, signal = "recovery_action_pending", "polled"
    else:
        expected = "Expected function 76 (GSP_RM_CONTROL) (0x20801702 0x4)."
        if form < 0.7:
            kind, text = "gsp_timeout", xid(gpu, 119, f"Timeout waiting for RPC from GSP! {expected}")
        else:
            kind, text = "gsp_error", xid(gpu, 120, "GSP task panic: 0x5 @ pc:0x1f2a, partition:4#0, task:1")
        story.kernel(t_s, node, text, advice(gpu, 2), gap_s=0.01)
        story.kernel(t_s + 6.0, node, text, text, gap_s=6.0)
        story.values(t_s + 0.1, back_s, node, f"gpu:{gpu}", recovery_action=2)
        signal = "streamed"
    also = ["recovery_action_pending"]
    return _decisive(story, "gsp", t_s, node, gpu, kind, back_s, signal=signal, also=also)


def nvlink(story: Story, chance: random.Random, t_s: float, node: str, gpu: int, back_s: float) -> float:
    """A link of the fifth generation fails for good; its partner only tells of a nonfatal error."""
    link = chance.randint(0, 17)
    words = "(0x{:08x} 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
    number = story.fleet.gpus
    partner = (gpu + 1) % number
    story.kernel(
        t_s,
        node,
        xid(partner, 145, f"RLW_REMAP Nonfatal XC1 i0 Link {link:02d} {words.format(0x1)}"),
        xid(gpu, 149, f"NETIR_LINK_EVT  Fatal   XC0 i0 Link {link:02d} {words.format(0xD)}"),
        advice(gpu, 1),
    )
    story.added(t_s + 0.1, back_s, node, f"gpu:{gpu}", nvlink_down=1, nvlink_recovery_total=1)
    also = ["nvlink_fabric_error", "nvlink_degraded"]
    decisive_s = round(t_s + 0.0004, 4)
    return _decisive(
        story, "nvlink", t_s, node, gpu, "nvlink_error", back_s, also=also, decisive_t=decisive_s
    )


def hbm_contained(
    story: Story, chance: random.Random, t_s: float, node: str, gpu: int, back_s: float
) -> float:
    """One process loses data and is started again; a row waits for the next reset."""
    del chance, back_s
    lines = (
        xid(gpu, 63, "Row Remapper: New row marked for remapping, reset gpu to activate."),
        xid(gpu, 94, "Contained: CE User Channel (0x9). RST: No, D-RST: No"),
        xid(gpu, 45, "Ch 00000008"),
    )
    story.kernel(t_s, node, *lines)
    reset_s = t_s + 2 * 86400.0  # the window that the row waits for
    story.note(reset_s, node, "reboot", "reset of GPUs with rows to replace")
    story.reboot(reset_s, node, settings().faults.reboot_s)
    story.out(reset_s, reset_s + 2 * settings().faults.reboot_s, node)
    story.added(t_s, reset_s, node, f"gpu:{gpu}", remap_pending=1, ecc_dbe_total=1)
    story.stop(t_s, t_s + 120.0, node)
    story.look(t_s, node)
    also = ["row_remap_pending", "ecc_uncorrectable_dram"]
    story.fault("hbm-contained", t_s, node, f"gpu:{gpu}", "ecc_contained", also=also, signal="streamed")
    return t_s


GPU_FAULTS: dict[str, GpuFault] = {
    "bus-loss": bus_loss,
    "gpu-fatal": gpu_fatal,
    "hbm-uncontained": hbm_uncontained,
    "hbm-contained": hbm_contained,
    "sram": sram,
    "gsp": gsp,
    "nvlink": nvlink,
}
