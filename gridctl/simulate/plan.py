"""When what happens to whom: base rates, weak nodes, bursts, repeats after a repair."""

import random
from collections.abc import Iterator

from gridctl.simulate.hardware import GPU_FAULTS
from gridctl.simulate.layout import Fleet
from gridctl.simulate.machine import NODE_FAULTS
from gridctl.simulate.noise import NOISE
from gridctl.simulate.settings import GPU_YEAR_H, Cause, causes, settings
from gridctl.simulate.story import Story

_DAY_S = 86400.0
#: What befalls nobody: nodes settle at first, and what begins at the very end can be found by nobody.
EDGE_S = 900.0


def life(fleet: Fleet, hours: float, times: float = 1.0) -> Story:
    """So many hours of this fleet. `times`: all rates times this, for more events in less time."""
    story = Story(fleet)
    chance = fleet.chance("plan")
    frailty = _frailty(fleet)
    end_s = hours * 3600.0
    due = sorted(
        (t_s, cause.name, node)
        for cause in causes().values()
        for t_s, node in _arrivals(fleet, cause, end_s, times, frailty)
    )
    for t_s, name, node in due:
        begin_s, where = t_s, node
        while begin_s < end_s - EDGE_S:
            returned_s = _befall(story, chance, name, begin_s, where)
            if returned_s is None:
                break
            _burst(story, chance, begin_s, end_s, where)
            again_s = _again(chance, returned_s)
            if again_s is None:
                break
            begin_s = again_s
    return story


def _frailty(fleet: Fleet) -> list[float]:
    chance = fleet.chance("frailty")
    shape = settings().faults.frailty_shape
    return [chance.gammavariate(shape, 1.0 / shape) for _ in fleet.nodes]


def _arrivals(
    fleet: Fleet, cause: Cause, end_s: float, times: float, frailty: list[float]
) -> Iterator[tuple[float, str]]:
    """First events of a class: what bursts and repeats add is taken off."""
    chance = fleet.chance(cause.name)
    faults = settings().faults
    gpu_years = sum(node.gpus for node in fleet.nodes) * end_s / 3600.0 / GPU_YEAR_H
    expected = cause.per_1000_gpu_years / 1000.0 * gpu_years * times
    hardware = cause.name not in NOISE
    if hardware:
        expected *= (1.0 - faults.burst_share) * (1.0 - faults.repeat_7d)
    names = [node.name for node in fleet.nodes]
    at_s = EDGE_S
    while expected > 0:
        at_s += chance.expovariate(expected / (end_s - 2 * EDGE_S)) if end_s > 2 * EDGE_S else end_s
        if at_s >= end_s - EDGE_S:
            return
        node = chance.choices(names, frailty)[0] if hardware else chance.choice(names)
        yield round(at_s, 3), node


def _befall(story: Story, chance: random.Random, name: str, t_s: float, node: str) -> float | None:
    """Tells of one event; returns when a repaired node is back, None where nothing was repaired."""
    cause = causes()[name]
    limits = settings().faults
    repair_days = min(chance.lognormvariate(cause.repair_mu, cause.repair_sigma), limits.repair_days_max)
    back_s = round(t_s + max(1800.0, repair_days * _DAY_S), 3)
    gpu = chance.randrange(story.fleet.gpus)
    if not story.free(t_s - 600.0, t_s + 1800.0, node):
        return None  # it is out of service already
    if make := GPU_FAULTS.get(name):
        returned_s = make(story, chance, t_s, node, gpu, back_s)
    elif node_fault := NODE_FAULTS.get(name):
        returned_s = node_fault(story, chance, t_s, node, back_s)
    else:
        NOISE[name](story, chance, t_s, node)
        return None
    return returned_s if returned_s > t_s else None


def _burst(story: Story, chance: random.Random, t_s: float, end_s: float, node: str) -> None:
    """Another incident soon after: of a neighbour, by what they share."""
    limits = settings().faults
    if chance.random() >= limits.burst_share:
        return
    rack = next(other.rack for other in story.fleet.nodes if other.name == node)
    near = [other.name for other in story.fleet.nodes if other.rack == rack and other.name != node]
    at_s = round(t_s + chance.uniform(1.0, limits.burst_s), 3)
    if near and at_s < end_s - EDGE_S:
        weights = [causes()[name].per_1000_gpu_years for name in GPU_FAULTS]
        name = chance.choices(list(GPU_FAULTS), weights)[0]
        _befall(story, chance, name, at_s, chance.choice(near))


def _again(chance: random.Random, returned_s: float) -> float | None:
    """When the same comes again after a repair, if it does within a week."""
    limits = settings().faults
    draw = chance.random()
    if draw < limits.repeat_1d:
        return round(returned_s + chance.uniform(600.0, _DAY_S), 3)
    if draw < limits.repeat_7d:
        return round(returned_s + chance.uniform(_DAY_S, 7 * _DAY_S), 3)
    return None
