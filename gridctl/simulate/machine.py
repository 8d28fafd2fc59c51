"""Faults of what is around the GPUs: host, cooling, power, ports, links, and of the job as a whole."""

import random
from collections.abc import Callable

from gridctl.simulate.settings import settings
from gridctl.simulate.story import Silence, Span, Story, Values

#: (story, chance, t_s, node, back_s) -> when the node is in service again
NodeFault = Callable[[Story, random.Random, float, str, float], float]
#: NVML clock event bits: software power cap, software and hardware slowdown by heat, power brake.
HEAT, BRAKE = 0x60, 0x80
NIC = "nic:mlx5_0/1"


def host_gone(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """The host crashes: nobody hears of it or reaches it, until somebody has repaired it."""
    del chance
    limits = settings().faults
    back_s = max(back_s, t_s + 1800.0)
    story.silences.append(Silence(t_s, back_s + limits.reboot_s, node))
    story.boots.append((back_s + limits.reboot_s, node))
    returned_s = back_s + limits.reboot_s + 60.0
    story.stop(t_s, t_s + limits.drain_s, node)
    story.note(returned_s, node, "undrain", f"operations: {node} is back")
    story.elsewhere(t_s + limits.drain_s, returned_s, node)
    story.out(t_s, returned_s, node)
    story.look(t_s, node)
    story.fault(
        "host-gone",
        t_s,
        node,
        "node",
        "peer_unreachable",
        preempt_job=True,
        signal="polled",
        until_t=round(returned_s, 3),
    )
    return returned_s


def maintenance(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """People take the node out, and say so first."""
    del chance
    returned_s = story.taken_out(t_s, node, back_s)
    story.look(t_s, node)
    story.nothing("maintenance", t_s, node)
    return returned_s


def thermal_gpu(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """One GPU is throttled by its own heat while the others are cool."""
    gpu = chance.randrange(story.fleet.gpus)
    _hot(story, t_s, back_s, node, f"gpu:{gpu}", chance.randint(20, 26))
    story.out(t_s, back_s, node)
    _stays(story, "thermal-gpu", t_s, node, f"gpu:{gpu}", "thermal_throttle", back_s)
    return back_s


def cooling(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """A fan or a pump fails: all GPUs of the node are throttled, and the air is warm."""
    _hot(story, t_s, back_s, node, "gpu", chance.randint(20, 26))
    story.added(t_s, back_s, node, "node", inlet_c=8.0)
    story.out(t_s, back_s, node)
    _stays(story, "cooling", t_s, node, "node", "thermal_throttle", back_s, fault="environment")
    return back_s


def psu(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """One supply gives no power; in half of the cases the boards brake."""
    story.values(t_s, back_s, node, "psu:0", ok=0, in_w=0)
    if chance.random() < 0.5:

        def brake(_t_s: float, v: Values) -> None:
            v["throttle"] = int(v["throttle"] or 0) | BRAKE

        story.patch(t_s, back_s, node, "gpu", brake, steady_s=t_s)
    story.out(t_s, back_s, node)
    also = ["hw_power_brake"]
    _stays(story, "psu", t_s, node, "node", "power_supply_lost", back_s, fault="environment", also=also)
    return back_s


def port_down(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """A port of the compute network stays down."""
    del chance
    story.values(t_s, back_s, node, NIC, state=0)
    story.added(t_s, back_s, node, NIC, link_downed_total=1)
    story.kernel(t_s, node, "mlx5_core 0000:5e:00.0: Port: 1 Link DOWN")
    story.out(t_s, back_s, node)
    _stays(story, "port-down", t_s, node, NIC, "ib_port_down", back_s, also=["link_flap"])
    return back_s


def link_flaps(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """A cable or its optics: the link goes down again and again for a few seconds."""
    at_s = t_s
    count = chance.randint(4, 9)
    for _ in range(count):
        story.added(at_s, back_s, node, NIC, link_downed_total=1, symbol_err_total=40)
        story.values(at_s, at_s + chance.uniform(0.5, 2.5), node, NIC, state=0)
        at_s += chance.uniform(60.0, 600.0)
    story.out(t_s, back_s, node)
    _stays(story, "link-flaps", t_s, node, NIC, "link_flap", back_s, also=["ib_port_down"], fault="fabric")
    return back_s


def pcie_width(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """A GPU's link comes back with fewer lanes, or slower."""
    gpu = f"gpu:{chance.randrange(story.fleet.gpus)}"
    if chance.random() < 0.5:
        story.values(t_s, back_s, node, gpu, pcie_width=8)
    else:
        story.values(t_s, back_s, node, gpu, pcie_gen=3)
    story.out(t_s, back_s, node)
    _stays(story, "pcie-width", t_s, node, gpu, "pcie_downgrade", back_s)
    return back_s


def silent_hang(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """The whole job stands with busy GPUs and nothing says anything, until somebody starts it again."""
    del back_s
    return _of_the_job(story, chance, t_s, node, "silent-hang", "silent_hang", "app")


def not_a_number(story: Story, chance: random.Random, t_s: float, node: str, back_s: float) -> float:
    """The loss of a job is no number any more; which rank began it, nobody knows."""
    del back_s
    return _of_the_job(story, chance, t_s, node, "not-a-number", "numerical_corruption", "unknown")


def _of_the_job(
    story: Story, chance: random.Random, t_s: float, node: str, cause: str, kind: str, fault: str
) -> float:
    job = story.fleet.job_of(node)
    if not job:
        return t_s
    end_s = t_s + chance.uniform(1200.0, 3600.0)
    spans = story.pauses if cause == "silent-hang" else story.no_numbers
    spans.append(Span(t_s, end_s, job))
    if cause != "silent-hang":
        story.ended.append(Span(end_s, end_s + 120.0, job))
    members = story.fleet.jobs[job]
    story.look(t_s, node)
    story.fault(
        cause,
        t_s,
        node,
        "node",
        kind,
        fault=fault,
        nodes=members,
        signal="polled",
        until_t=round(end_s, 3),
        also=["silent_hang", "numerical_corruption"],
    )
    return t_s


def _hot(story: Story, begin_s: float, end_s: float, node: str, device: str, by_c: int) -> None:
    """Heat that rises for ten minutes; the driver slows the clocks once it is too hot."""

    def change(t_s: float, v: Values) -> None:
        part = min(1.0, (t_s - begin_s) / 600.0)
        v["temp_c"] += int(by_c * part)
        v["mem_temp_c"] += int(by_c * part)
        if part == 1.0:
            v["throttle"] |= HEAT
            v["sm_clock_mhz"] = 1200

    story.patch(begin_s, end_s, node, device, change, steady_s=begin_s + 601.0)


def _stays(
    story: Story,
    cause: str,
    t_s: float,
    node: str,
    device: str,
    kind: str,
    back_s: float,
    **more: object,
) -> None:
    """A fault that values tell of, and for which no running job must move at once."""
    story.look(t_s, node)
    story.fault(cause, t_s, node, device, kind, signal="polled", until_t=round(back_s, 3), **more)


NODE_FAULTS: dict[str, NodeFault] = {
    "host-gone": host_gone,
    "maintenance": maintenance,
    "thermal-gpu": thermal_gpu,
    "cooling": cooling,
    "psu": psu,
    "port-down": port_down,
    "link-flaps": link_flaps,
    "pcie-width": pcie_width,
    "silent-hang": silent_hang,
    "not-a-number": not_a_number,
}
