"""What happens every day and must move nobody."""

import random
from collections.abc import Callable, Iterable

from gridctl.simulate.hardware import xid
from gridctl.simulate.layout import pci
from gridctl.simulate.machine import HEAT, NIC
from gridctl.simulate.settings import settings
from gridctl.simulate.story import Line, Silence, Span, Story, Values, kernel

Noise = Callable[[Story, random.Random, float, str], None]
#: How an application's crash begins; teardowns of all its processes follow.
_CRASHES = (
    (13, "Graphics SM Warp Exception on (GPC {a}, TPC {b}, SM 0): Out Of Range Address"),
    (31, "Ch 0000000{a}, intr 00000000. MMU Fault: ENGINE GRAPHICS faulted @ 0x7f{b}_1c000000."),
    (43, "Ch 0000000{a}"),
    (68, "Video processor exception: NVDEC0, {a}{b}"),
)


def _crash(chance: random.Random, gpu: int, process: str) -> str:
    number, text = chance.choice(_CRASHES)
    return xid(gpu, number, text.format(a=chance.randint(0, 7), b=chance.randint(0, 7)), process)


def app_crash(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """A job crashes: one rank's error first, then teardowns on all GPUs of all its nodes."""
    job = story.fleet.job_of(node)
    members = story.fleet.jobs.get(job, [node])
    gpus = story.fleet.gpus
    story.kernel(t_s, node, _crash(chance, chance.randrange(gpus), "pid=40017, name=python3"))
    lags_s = sorted(chance.uniform(0.02, 3.0) for _ in members)

    def teardown() -> Iterable[Line]:
        for member, lag_s in zip(members, lags_s, strict=True):
            for gpu in range(gpus):
                process = f"pid={40000 + gpu * 17}, name=python3"
                lines = [xid(gpu, 45, f"Ch {channel:08x}", process) for channel in (8, 9, 10)]
                yield from kernel(t_s + lag_s, member, *lines)

    story.later(t_s, teardown)
    if job:
        story.ended.append(Span(t_s, t_s + chance.uniform(120.0, 600.0), job))
    story.look(t_s, node)
    story.nothing("app-crash", t_s, *members)


def app_fault(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """A user who looks for an error of his own: the same few numbers again and again."""
    gpu = chance.randrange(story.fleet.gpus)
    at_s = t_s
    for attempt in range(chance.randint(1, 12)):
        process = f"pid={50000 + attempt * 13}, name=python3"
        story.kernel(at_s, node, _crash(chance, gpu, process), xid(gpu, 45, "Ch 00000008", process))
        at_s += chance.uniform(20.0, 1200.0)
    story.look(t_s, node)
    story.nothing("app-fault", t_s, node)


def planned_reboot(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """Somebody reboots the node and says so; NVLinks and ports come up one after the other."""
    lasts_s = chance.uniform(150.0, 420.0)
    story.note(t_s - 1.0, node, "reboot", "a new kernel")
    story.reboot(t_s, node, lasts_s)
    story.stop(t_s, t_s + lasts_s + 60.0, node)
    up_s = t_s + lasts_s
    story.values(up_s, up_s + chance.uniform(30.0, 200.0), node, "gpu", nvlink_down=1)
    story.values(up_s, up_s + chance.uniform(10.0, 90.0), node, NIC, state=0)
    story.out(t_s, up_s + 300.0, node)
    story.look(t_s, node)
    story.nothing("planned-reboot", t_s, node)


def control_flap(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """The way to the node is bad: beats are missing and one observer misses it; its job is well."""
    names = [other.name for other in story.fleet.nodes]
    observer = names[(names.index(node) - settings().pace.observer_steps[0]) % len(names)]
    at_s = t_s
    for _ in range(chance.randint(2, 12)):
        story.silences.append(Silence(at_s, at_s + chance.uniform(6.0, 90.0), node, frozenset({observer})))
        at_s += chance.uniform(100.0, 1800.0)
    story.out(t_s, at_s, node)
    story.look(t_s, node)
    story.nothing("control-flap", t_s, node)


def rack_silent(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """A management switch restarts: nobody reaches the nodes of a rack, and their jobs go on."""
    rack = next(other.rack for other in story.fleet.nodes if other.name == node)
    members = [other.name for other in story.fleet.nodes if other.rack == rack]
    end_s = t_s + chance.uniform(60.0, 240.0)
    for member in members:
        story.silences.append(Silence(t_s, end_s, member))
        story.out(t_s, end_s, member)
    story.look(t_s, *members)
    story.nothing("rack-silent", t_s, *members)


def blind_agent(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """No GPU of the node gives a value for a while; the driver or the agent hangs, the job goes on."""
    end_s = t_s + chance.uniform(300.0, 3600.0)
    story.mute(t_s, end_s, node, "gpu")
    story.out(t_s, end_s, node)
    story.look(t_s, node)
    story.fault(
        "blind-agent",
        t_s,
        node,
        "node",
        "missing_data",
        fault="monitor",
        also=["driver_unresponsive"],
        signal="polled",
        until_t=round(end_s, 3),
    )


def blind_gpu(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """One GPU gives no value for a while."""
    gpu = f"gpu:{chance.randrange(story.fleet.gpus)}"
    end_s = t_s + chance.uniform(30.0, 900.0)
    story.mute(t_s, end_s, node, gpu)
    story.out(t_s, end_s, node)
    story.look(t_s, node)
    also = ["driver_unresponsive"]
    story.fault(
        "blind-gpu",
        t_s,
        node,
        gpu,
        "missing_data",
        fault="monitor",
        also=also,
        signal="polled",
        until_t=round(end_s, 3),
    )


def thermal_swing(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """Single samples look hot: a sensor swings, the next value is as before."""
    gpu = f"gpu:{chance.randrange(story.fleet.gpus)}"
    stride = chance.randint(3, 7)

    def change(now_s: float, v: Values) -> None:
        if int(now_s) % stride == 0 and v["throttle"] is not None:
            v["temp_c"] += 20
            v["throttle"] |= HEAT

    story.patch(t_s, t_s + 600.0, node, gpu, change)
    story.look(t_s, node)
    story.nothing("thermal-swing", t_s, node)


def port_blip(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """A link is lost once, for less than two seconds."""
    story.values(t_s, t_s + chance.uniform(0.3, 1.8), node, NIC, state=0)
    story.added(t_s, t_s + 86400.0, node, NIC, link_downed_total=1)
    story.look(t_s, node)
    story.nothing("port-blip", t_s, node)


def forged_line(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """A process whose name, or whose words to /dev/kmsg, look like the driver's."""
    del chance
    forged = f"NVRM: Xid (PCI:{pci(0)[:-2]}): 79"
    story.kernel(
        t_s,
        node,
        f"python3[515]: {forged}, GPU has fallen off the bus.",
        xid(1, 43, "x", f"pid=7, name={forged[6:21]}"),
    )
    story.look(t_s, node)
    story.nothing("forged-line", t_s, node)


def unknown_xid(story: Story, chance: random.Random, t_s: float, node: str) -> None:
    """A number that no table knows."""
    gpu = chance.randrange(story.fleet.gpus)
    story.kernel(t_s, node, xid(gpu, chance.randint(400, 999), "A text of a later driver"))
    story.look(t_s, node)
    story.nothing("unknown-xid", t_s, node)


NOISE: dict[str, Noise] = {
    "app-crash": app_crash,
    "app-fault": app_fault,
    "planned-reboot": planned_reboot,
    "control-flap": control_flap,
    "rack-silent": rack_silent,
    "blind-agent": blind_agent,
    "blind-gpu": blind_gpu,
    "thermal-swing": thermal_swing,
    "port-blip": port_blip,
    "forged-line": forged_line,
    "unknown-xid": unknown_xid,
}
