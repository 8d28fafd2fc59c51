"""What befalls a fleet: the words that faults and noise are told in, and their truth.

A story changes nothing by itself; `emit.py` plays it. Times are seconds since the recording's start.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from gridctl.model.truth import Counts, Fault, Noise, Truth
from gridctl.simulate.layout import Fleet, pci
from gridctl.simulate.settings import settings

EVER = float("inf")
Values = dict[str, Any]
Change = Callable[[float, Values], None]


class Line(msgspec.Struct, frozen=True):
    """A record beside the regular ones; of a kernel line only the message, its stamp comes later."""

    t: float
    node: str
    kind: str
    v: Values
    stamp_t: float | None = None  #: when the kernel printed it, where that was earlier


class Patch(msgspec.Struct, frozen=True):
    """Values of a device ("gpu:3", or "gpu" for all) are not the usual ones for a while.

    `steady`: from then on the change is the same at any time.
    """

    begin: float
    end: float
    node: str
    device: str
    change: Change
    steady: float = EVER


class Silence(msgspec.Struct, frozen=True):
    """Nothing is heard of a node. `missed_by`: who cannot reach it, None: nobody can."""

    begin: float
    end: float
    node: str
    missed_by: frozenset[str] | None = None


class Span(msgspec.Struct, frozen=True):
    """A time of a node or a job. `by`: the node that has another one's ranks meanwhile."""

    begin: float
    end: float
    name: str
    by: str = ""


class Crowd(msgspec.Struct, frozen=True):
    """Many lines at once, made when they are due: a fleet's month of them would not fit in memory."""

    t: float
    make: Callable[[], Iterable[Line]]


def kernel(t_s: float, node: str, *messages: str, gap_s: float = 0.0004) -> list[Line]:
    """Kernel lines, one after the other."""
    return [
        Line(round(t_s + index * gap_s, 4), node, "log", {"source": "kmsg", "line": message})
        for index, message in enumerate(messages)
    ]


class Story:
    """Collects what happens."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.lines: list[Line] = []
        self.crowds: list[Crowd] = []
        self.patches: list[Patch] = []
        self.silences: list[Silence] = []
        self.boots: list[tuple[float, str]] = []
        self.pauses: list[Span] = []  #: a job makes no step; its GPUs stay busy
        self.ended: list[Span] = []  #: a job does not run: its GPUs are idle
        self.away: list[Span] = []  #: another node has the ranks of this one
        self.dense: list[Span] = []
        self.no_numbers: list[Span] = []  #: a job's loss is no finite number
        self.faults: list[Fault] = []
        self.noise: list[Noise] = []
        self._out: dict[str, list[Span]] = {}  #: node -> when it is out of service

    # -- what is told

    def kernel(self, t_s: float, node: str, *messages: str, gap_s: float = 0.0004) -> None:
        """Kernel lines, one after the other."""
        self.lines += kernel(t_s, node, *messages, gap_s=gap_s)

    def later(self, t_s: float, make: Callable[[], Iterable[Line]]) -> None:
        """Lines from this time on, in order of time; `make` gives the same each time."""
        self.crowds.append(Crowd(t_s, make))

    def note(self, t_s: float, node: str, action: str, text: str) -> None:
        self.lines.append(Line(round(t_s, 3), node, "note", {"text": text, "action": action}))

    def look(self, t_s: float, *nodes: str) -> None:
        """Samples of each second for the hour around this time."""
        around_s = settings().pace.dense_s
        self.dense += [Span(t_s - around_s, t_s + around_s, node) for node in nodes]

    # -- what is seen

    def patch(
        self, begin_s: float, end_s: float, node: str, device: str, change: Change, steady_s: float = EVER
    ) -> None:
        self.patches.append(Patch(begin_s, end_s, node, device, change, steady_s))

    def values(self, begin_s: float, end_s: float, node: str, device: str, **values: float | None) -> None:
        """Fixed values; None: the source has none."""

        def change(_t_s: float, v: Values) -> None:
            v.update(values)

        self.patch(begin_s, end_s, node, device, change, steady_s=begin_s)

    def added(self, begin_s: float, end_s: float, node: str, device: str, **values: float) -> None:
        """Counters that have gone up; a reboot takes them back."""

        def change(_t_s: float, v: Values) -> None:
            for metric, more in values.items():
                v[metric] += more

        self.patch(begin_s, end_s, node, device, change, steady_s=begin_s)

    def mute(self, begin_s: float, end_s: float, node: str, device: str) -> None:
        """A device that is listed and gives no value."""

        def change(_t_s: float, v: Values) -> None:
            v.update(dict.fromkeys(v))

        self.patch(begin_s, end_s, node, device, change, steady_s=begin_s)

    # -- what it means

    def out(self, begin_s: float, end_s: float, node: str) -> None:
        """The node is out of service: nothing else may befall it."""
        self._out.setdefault(node, []).append(Span(begin_s, end_s, node))

    def free(self, begin_s: float, end_s: float, node: str) -> bool:
        """Is the node in service for all of this time?"""
        return all(span.end <= begin_s or span.begin >= end_s for span in self._out.get(node, ()))

    def fault(self, cause: str, t_s: float, node: str, device: str, kind: str, **more: Any) -> None:
        """A true fault. `more`: members of `Fault`; `decisive_t` is `t` where nothing else is said."""
        number = device.removeprefix("gpu:")
        self.faults.append(
            Fault(
                **{
                    "t": round(t_s, 3),
                    "node": node,
                    "device": device,
                    "kind": kind,
                    "fault": "node",
                    "preempt_job": False,
                    "decisive_t": round(t_s, 3),
                    "pci": pci(int(number)) if number.isdigit() else "",
                    "cause": cause,
                    **more,
                }
            )
        )

    def nothing(self, cause: str, t_s: float, *nodes: str) -> None:
        """Something that is no fault of these nodes."""
        self.noise += [Noise(t=round(t_s, 3), node=node, cause=cause) for node in nodes]

    def truth(self, **counts: int) -> Truth:
        """The truth file."""
        faults = [self._judged(fault) for fault in sorted(self.faults, key=lambda f: (f.t, f.node, f.kind))]
        moved = {name for fault in faults if fault.preempt_job for name in fault.members()}
        return Truth(
            faults=faults,
            must_not_preempt=[node.name for node in self.fleet.nodes if node.name not in moved],
            counts=Counts(**{"incidents": len(faults), "evictions": len(moved), **counts}),
            noise=sorted(self.noise, key=lambda noise: (noise.t, noise.node)),
        )

    def _judged(self, fault: Fault) -> Fault:
        """Nobody is moved off a spare that no rank has come to yet."""
        came_s = min((span.begin for span in self.away if span.by == fault.node), default=EVER)
        idle = fault.node in self.fleet.spares() and fault.t < came_s
        return msgspec.structs.replace(fault, preempt_job=False) if idle else fault

    # -- what follows

    def elsewhere(self, begin_s: float, end_s: float, node: str) -> None:
        """The ranks of the node are on a spare meanwhile, if one is free."""
        taken = {span.by for span in self.away if span.begin < end_s and span.end > begin_s}
        free = [n for n in self.fleet.spares() if n not in taken and self.free(begin_s, begin_s, n)]
        self.away.append(Span(begin_s, end_s, node, free[0] if free else ""))

    def reboot(self, t_s: float, node: str, lasts_s: float) -> None:
        """The node goes down and comes back with another boot."""
        self.silences.append(Silence(t_s, t_s + lasts_s, node))
        self.boots.append((t_s + lasts_s, node))

    def stop(self, begin_s: float, end_s: float, node: str) -> None:
        """The job of this node stands until it goes on with a spare, or without the node."""
        if job := self.fleet.job_of(node):
            self.ended.append(Span(begin_s, end_s, job))

    def taken_out(self, t_s: float, node: str, back_s: float) -> float:
        """A person drains the node, its ranks go on elsewhere, it is repaired, rebooted and comes back.

        Returns when it is in service again.
        """
        limits = settings().faults
        drain_s = t_s + limits.drain_s
        back_s = max(back_s, drain_s + limits.reboot_s)
        returned_s = back_s + limits.reboot_s + 60.0
        self.note(drain_s, node, "drain", f"operations: {node} is taken out")
        self.stop(t_s, drain_s, node)
        self.note(back_s - 1.0, node, "reboot", "repaired")
        self.reboot(back_s, node, limits.reboot_s)
        self.note(returned_s, node, "undrain", f"operations: {node} is back")
        self.elsewhere(drain_s, returned_s, node)
        self.out(t_s, returned_s, node)
        return returned_s
