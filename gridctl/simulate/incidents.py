"""Fourteen incidents that others had in public, each as a small recording with a number to hold against.

What must hold is said in the truth: who is to be moved, how many incidents, how many evictions at most.
Sizes are the public ones where a test can bear them; where not, `what` says both.
"""

import random
from collections.abc import Callable

import msgspec

from gridctl.simulate.hardware import advice, bus_loss, xid
from gridctl.simulate.layout import Fleet, fleet, pci
from gridctl.simulate.machine import BRAKE, HEAT
from gridctl.simulate.story import Line, Silence, Span, Story, Values

Counts = dict[str, int]
_BEGIN_S = 900.0


class Incident(msgspec.Struct, frozen=True):
    """`tell` adds to the story of `nodes` nodes, and returns what is to be counted."""

    what: str
    hours: float
    nodes: int
    tell: Callable[[Story, random.Random], Counts]
    gpus: int = 2
    rack_nodes: int = 8


def _crash_churn(story: Story, chance: random.Random) -> Counts:
    nodes = story.fleet.jobs["train-1"][:3]
    times_s = sorted(chance.uniform(_BEGIN_S, 11_000.0) for _ in range(28))
    for t_s in times_s:  # 28 crashes, 8 channels, 3 nodes
        for node in nodes:
            story.kernel(t_s, node, *(xid(channel % 2, 45, f"Ch {channel:08x}") for channel in range(8, 16)))
        story.ended.append(Span(t_s, t_s + 60.0, "train-1"))
    story.nothing("app-crash", times_s[0], *nodes)
    return {"incidents": 0, "incidents_max": 3}


def _job_crash(story: Story, chance: random.Random) -> Counts:
    nodes = [node.name for node in story.fleet.nodes][:77]
    for node in nodes:
        t_s = _BEGIN_S + chance.uniform(0.0, 55.0)
        story.kernel(t_s, node, *(xid(gpu, 45, "Ch 00000008") for gpu in range(story.fleet.gpus)))
    for job in story.fleet.jobs:
        story.ended.append(Span(_BEGIN_S, _BEGIN_S + 300.0, job))
    story.nothing("app-crash", _BEGIN_S, *nodes)
    return {"incidents": 1, "incidents_max": 1}


def _rack_reboots(story: Story, chance: random.Random) -> Counts:
    for index, node in enumerate(story.fleet.nodes):
        t_s = _BEGIN_S + index // 18 * 300.0
        story.note(t_s - 5.0, node.name, "reboot", "a new driver, rack by rack")
        lasts_s = chance.uniform(150.0, 240.0)
        story.reboot(t_s, node.name, lasts_s)
        for gpu in range(node.gpus):
            up_s = t_s + lasts_s + chance.uniform(0.0, 20.0)
            story.values(
                up_s,
                up_s + chance.uniform(60.0, 240.0),
                node.name,
                f"gpu:{gpu}",
                nvlink_down=chance.randint(1, 18),
            )
        if index % 18 < 2:
            story.look(t_s, node.name)
        story.nothing("planned-reboot", t_s, node.name)
    for job in story.fleet.jobs:
        story.ended.append(Span(_BEGIN_S - 60.0, _BEGIN_S + 1500.0, job))
    return {"incidents_max": 0}


def _storm(story: Story, chance: random.Random) -> Counts:
    node = story.fleet.jobs["train-1"][2]
    texts = [
        xid(index % 2, 95, f"Uncontained: FBHUB (0x{index // 2:x}, 0x1). RST: Yes, D-RST: No")
        for index in range(29)
    ]

    def lines() -> list[Line]:
        order = random.Random(f"{story.fleet.seed}/storm")
        t_s, told = _BEGIN_S, []
        for number in range(20_300):
            text = texts[number] if number < len(texts) else order.choice(texts)
            told.append(Line(round(t_s, 4), node, "log", {"source": "kmsg", "line": text}))
            t_s += 0.002
        return told

    del chance
    story.later(_BEGIN_S, lines)
    story.look(_BEGIN_S, node)
    story.stop(_BEGIN_S, _BEGIN_S + 120.0, node)
    story.fault(
        "hbm-uncontained", _BEGIN_S, node, "gpu:0", "ecc_uncontained", preempt_job=True, signal="streamed"
    )
    return {"incidents_max": 1}


def _slow_death(story: Story, chance: random.Random) -> Counts:
    del chance
    node = story.fleet.jobs["train-1"][4]
    begin_s, blind_s = _BEGIN_S, _BEGIN_S + 1500.0

    def corrected(t_s: float, v: Values) -> None:
        """4,600 a second at first, 17,700 at last; nothing is added while it is idle."""
        busy_s = min(t_s, blind_s) - begin_s
        v["ecc_sbe_total"] += int(4600.0 * busy_s + 13_100.0 * busy_s**2 / 3000.0)

    story.patch(begin_s, 1e9, node, "gpu:1", corrected)
    story.mute(blind_s, blind_s + 600.0, node, "gpu")
    story.look(begin_s, node)
    gpu = {"signal": "polled", "until_t": None}
    story.fault("slow-death", begin_s, node, "gpu:1", "ecc_corrected_rate", **gpu)
    story.fault("blind-agent", blind_s, node, "node", "missing_data", fault="monitor", signal="polled")
    return {"incidents_max": 2}


def _power_brake(story: Story, chance: random.Random) -> Counts:
    nodes = chance.sample(story.fleet.jobs["train-1"], 9)

    def brake(_t_s: float, v: Values) -> None:
        v["throttle"] |= BRAKE
        v["sm_clock_mhz"] = 345

    def capped(_t_s: float, v: Values) -> None:
        v["throttle"] |= 0x4

    for node in story.fleet.nodes:
        story.patch(_BEGIN_S, 1e9, node.name, "gpu", brake if node.name in nodes else capped)
    for name in sorted(nodes):
        story.look(_BEGIN_S, name)
        story.fault("psu", _BEGIN_S, name, "node", "hw_power_brake", fault="environment", signal="polled")
    return {"incidents": 1}


def _swing(story: Story, chance: random.Random) -> Counts:
    node = story.fleet.jobs["train-1"][1]
    hot = [chance.random() < 0.4 for _ in range(1800)]

    def swing(t_s: float, v: Values) -> None:
        second = int(t_s - _BEGIN_S)
        v["temp_margin_c"] = -20 if hot[second % len(hot)] else 20
        if hot[second % len(hot)] and not hot[(second - 1) % len(hot)]:
            v["throttle"] |= HEAT

    story.patch(_BEGIN_S, _BEGIN_S + 1700.0, node, "gpu", swing)
    story.look(_BEGIN_S + 900.0, node)
    story.nothing("thermal-swing", _BEGIN_S, node)
    return {"incidents_max": 0}


def _recovery_action(story: Story, chance: random.Random) -> Counts:
    del chance
    node = story.fleet.jobs["train-1"][3]
    story.values(_BEGIN_S, 1e9, node, "gpu:1", recovery_action=1)
    story.look(_BEGIN_S, node)
    story.fault("gsp", _BEGIN_S, node, "gpu:1", "recovery_action_pending", preempt_job=True, signal="polled")
    return {"incidents_max": 1}


def _restart(story: Story, chance: random.Random) -> Counts:
    """A loss, its repair, and then whoever reads the log begins anew from its first line."""
    node = story.fleet.jobs["train-1"][3]
    back_s = bus_loss(story, chance, _BEGIN_S, node, 1, _BEGIN_S + 1200.0)
    for again_s in (back_s + 120.0, back_s + 400.0):
        for index, text in enumerate((xid(1, 79, "GPU has fallen off the bus."), advice(1, 2))):
            # The file holds lines of the boot before: their stamps are of that boot's clock.
            line = {"source": "kmsg", "line": text}
            story.lines.append(
                Line(again_s + index / 1000, node, "log", line, stamp_t=back_s + 300_000.0 + index)
            )
    return {"evictions": 1, "incidents_max": 1}


def _lost_reply(story: Story, chance: random.Random) -> Counts:
    del chance
    node = story.fleet.jobs["train-1"][3]
    story.note(_BEGIN_S - 2.0, node, "reboot", "asked for; no reply came")
    story.note(_BEGIN_S + 20.0, node, "reboot", "asked for again with the same id")
    story.reboot(_BEGIN_S, node, 240.0)
    story.stop(_BEGIN_S - 2.0, _BEGIN_S + 400.0, node)
    story.look(_BEGIN_S, node)
    story.nothing("planned-reboot", _BEGIN_S, node)
    return {"incidents_max": 0}


def _flapping_link(story: Story, chance: random.Random) -> Counts:
    node = story.fleet.jobs["train-1"][2]
    names = [other.name for other in story.fleet.nodes]
    observer = names[names.index(node) - 1]
    for number in range(25):
        t_s = _BEGIN_S + number * 2700.0 + chance.uniform(0.0, 600.0)
        story.silences.append(Silence(t_s, t_s + chance.uniform(12.0, 75.0), node, frozenset({observer})))
    story.dense.append(Span(_BEGIN_S, 2.0 * 3600.0, node))
    story.nothing("control-flap", _BEGIN_S, node)
    return {"incidents_max": 0}


def _mass_fault(story: Story, chance: random.Random) -> Counts:
    nodes = story.fleet.jobs["train-1"][:12]
    recovering = story.fleet.jobs["train-2"][0]
    story.note(_BEGIN_S - 600.0, recovering, "drain", "operations: a fan")
    story.note(_BEGIN_S + 300.0, recovering, "undrain", "operations: the fan is new")
    for node in nodes:
        t_s = round(_BEGIN_S + chance.uniform(0.0, 8.0), 3)
        story.kernel(t_s, node, xid(0, 79, "GPU has fallen off the bus."))
        story.mute(t_s, 1e9, node, "gpu:0")
        known = {"preempt_job": True, "signal": "streamed", "group_cap": True}
        story.fault("bus-loss", t_s, node, "gpu:0", "gpu_lost", **known)
    story.look(_BEGIN_S, *nodes[:3])
    story.ended.append(Span(_BEGIN_S, 1e9, "train-1"))
    return {"evictions_max": 4, "evictions": 4}


def _human_drain(story: Story, chance: random.Random) -> Counts:
    del chance
    node = story.fleet.jobs["train-1"][3]
    story.note(_BEGIN_S, node, "drain", "ann: the fans are loud, do not touch")
    story.stop(_BEGIN_S, _BEGIN_S + 120.0, node)
    story.elsewhere(_BEGIN_S + 120.0, 1e9, node)
    lost_s = _BEGIN_S + 600.0
    story.kernel(lost_s, node, xid(1, 79, "GPU has fallen off the bus."))
    story.mute(lost_s, 1e9, node, "gpu:1")
    story.look(lost_s, node)
    story.fault("bus-loss", lost_s, node, "gpu:1", "gpu_lost", signal="streamed")
    return {"incidents_max": 1}


def _off_the_bus(story: Story, chance: random.Random) -> Counts:
    del chance
    node = story.fleet.jobs["train-1"][3]
    story.kernel(
        _BEGIN_S,
        node,
        f"NVRM: The NVIDIA GPU {pci(1)}",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "systemd[1]: Started Session 4411 of user alice.",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    story.mute(_BEGIN_S, 1e9, node, "gpu:1")
    story.look(_BEGIN_S, node)
    told_s = round(_BEGIN_S + 0.0012, 4)
    known = {"preempt_job": True, "signal": "streamed", "also": ["gpu_init_failure"], "decisive_t": told_s}
    story.fault("bus-loss", _BEGIN_S, node, "gpu:1", "gpu_lost", **known)
    return {"incidents_max": 1}


#: By the order in which they were found. The public reports stand in docs/detection.md.
INCIDENTS: dict[str, Incident] = {
    "crash-churn": Incident(
        "672 teardowns (Xid 45) on 3 nodes within 3 h, nothing else", 3.2, 12, _crash_churn
    ),
    "job-crash": Incident("teardowns on 77 nodes of 11 racks within a minute", 0.75, 88, _job_crash, 8, 7),
    "rack-reboots": Incident(
        "racks of 18 reboot as planned, NVLinks come up late", 1.0, 36, _rack_reboots, 2, 18
    ),
    "uncontained-storm": Incident(
        "Xid 95 as 29 distinct lines, 800,000 in public, 20,300 here", 0.5, 8, _storm
    ),
    "slow-death": Incident("4,600 to 17,700 corrected errors a second, then no values", 1.0, 12, _slow_death),
    "power-brake": Incident(
        "the power brake held on 9 nodes, for 36 h in public, 2 h here", 2.0, 20, _power_brake
    ),
    "thermal-swing": Incident("a margin that swings between 20 and -20 degrees in seconds", 1.0, 8, _swing),
    "recovery-action": Incident("the driver asks for a reset and no line says so", 0.5, 8, _recovery_action),
    "controller-restart": Incident(
        "lines that were acted on are told again, after a reboot", 1.5, 8, _restart
    ),
    "lost-reply": Incident("a reboot is asked for twice, as its reply was lost", 0.75, 8, _lost_reply),
    "control-link": Incident(
        "25 time-outs of one observer within 19 h, the job is well", 19.5, 8, _flapping_link
    ),
    "mass-fault": Incident(
        "30 % of the nodes lose a GPU at once, one node comes back", 0.75, 40, _mass_fault
    ),
    "human-drain": Incident("a drained node loses a GPU: its drain is a person's", 0.75, 8, _human_drain),
    "off-the-bus": Incident("a loss that no Xid number tells of", 0.5, 8, _off_the_bus),
}


def incident_story(name: str, seed: int) -> tuple[Story, float, Counts]:
    """The story of an incident, how many hours it takes, and what its truth counts."""
    incident = INCIDENTS[name]
    who: Fleet = fleet(incident.nodes, f"{name}/{seed}", incident.gpus, incident.rack_nodes)
    story = Story(who)
    counts = incident.tell(story, who.chance("incident"))
    return story, incident.hours, counts
