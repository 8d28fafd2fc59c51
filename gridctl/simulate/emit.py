"""Plays a story: the records of a fleet, in order of time, one second after the other.

Memory holds the story and one second of records, however long it lasts.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any

import msgspec

from gridagent.wire import StreamRecord
from gridctl.simulate.actors import Actor, Job
from gridctl.simulate.layout import pci
from gridctl.simulate.machine import NIC
from gridctl.simulate.script import written
from gridctl.simulate.settings import settings
from gridctl.simulate.story import EVER, Crowd, Line, Story

#: What a node has beside its GPUs.
_OTHERS = (NIC, "psu:0", "node")

Told = tuple[float, str, str, str, dict[str, Any]]  #: time, node, boot, kind, fields


class Quiet(msgspec.Struct, frozen=True):
    """A node and a while in which nothing happens to it: its beats, samples of all its devices and answers to
    its probes are usual. What else it says, progress above all, is told."""

    node: str
    boot: str
    idle: bool
    seconds: range  #: of the samples
    lag_s: float  #: all its records come so long after a second, to the last bit
    beats: range  #: seconds of its beats, the first is that of the first sample
    targets: list[str]  #: who answers its probes; the last one has the time of `probed`
    probed: int
    devices: int
    like: Hashable  #: whatever else of this node is like this, its devices say the same but for noise
    sample: Callable[[int, int], StreamRecord]  #: (number of the device, any second) -> its record
    free_mib: Callable[
        [int], int
    ]  #: second -> main memory that is available, in the sample of the node itself


#: Says whether it has taken such a while; what it has not is told record by record.
Passes = Callable[[Quiet], bool]


def _never(quiet: Quiet) -> bool:
    del quiet
    return False


class Stage:
    """The fleet while a story is played."""

    def __init__(self, story: Story) -> None:
        fleet = story.fleet
        chance = fleet.chance("values")
        self._pace = settings().pace
        self._salt = chance.getrandbits(512) | 1
        self.actors = [Actor(index, facts, chance) for index, facts in enumerate(fleet.nodes)]
        self.named = {actor.name: actor for actor in self.actors}
        self.jobs = {name: Job(name, chance) for name in fleet.jobs}
        self.dense: dict[str, Actor] = {}
        self._pci = [pci(gpu) for gpu in range(fleet.gpus)]
        self._lag_s = [round(0.9 * index / len(self.actors), 4) for index in range(len(self.actors))]
        self._out: list[Told] = []
        self._ahead: list[tuple[float, int, Line, Iterator[Line]]] = []
        self._told = 0
        for name, members in fleet.jobs.items():
            for rank, member in enumerate(members):
                self.named[member].rank = self.named[member].own_rank = (self.jobs[name], rank)
        self._script = written(story, self)
        self._acts_s: dict[str, list[float]] = {}  #: node -> when an act changes it; "": many of them
        for t_s, names, _ in self._script:
            for name in names or ("",):
                self._acts_s.setdefault("" if name in self.jobs else name, []).append(t_s)

    def play(self, hours: float, passes: Passes = _never) -> Iterator[StreamRecord]:
        """The records of so many hours. What `passes` takes is not told record by record."""
        due = seq = 0
        end = int(hours * 3600)
        for second in range(end):
            while due < len(self._script) and self._script[due][0] < second + 1:
                self._script[due][2]()
                due += 1
            while self._ahead and self._ahead[0][0] < second + 1:
                _, _, line, stream = heappop(self._ahead)
                self.tell(line)
                self._pour(stream)
            if passes is not _never:
                self._pass_over(second, end, passes)
            self._beats(second)
            self._samples(second)
            self._probes(second)
            self._progress(second)
            self._out.sort(key=itemgetter(0))
            for t_s, node, boot, kind, v in self._out:
                seq += 1
                yield StreamRecord(seq, boot, t_s, node, kind, v)
            self._out.clear()

    # -- the regular records

    def _beats(self, second: int) -> None:
        every = self._pace.beat_s
        for actor in self.actors if second == 0 else self.actors[second % every :: every]:
            if actor.told_until_s > second:
                continue
            t_s = self._time_s(actor, second)
            if not actor.silences or not actor.silent(t_s):
                self._beat(actor, t_s)

    def _time_s(self, actor: Actor, second: int) -> float:
        return round(second + self._lag_s[actor.index], 4)

    def _beat(self, actor: Actor, t_s: float) -> None:
        actor.beats += 1
        self._add(t_s, actor, "beat", {"boot": actor.boot, "seq": actor.beats})

    def _samples(self, second: int) -> None:
        for actor in self.actors[second % self._pace.sample_s :: self._pace.sample_s]:
            if not actor.dense and actor.told_until_s <= second:
                self._sample(actor, second)
        for actor in self.dense.values():
            if actor.told_until_s <= second:
                self._sample(actor, second)

    def _sample(self, actor: Actor, second: int) -> None:
        t_s = self._time_s(actor, second)
        if actor.silences and actor.silent(t_s):
            return
        for number in range(len(actor.gpus) + len(_OTHERS)):
            v = self._regular(actor, number, second)
            if actor.patches:
                self._changed(actor, t_s, str(v["device"]), v["v"])
            self._add(t_s, actor, "sample", v)

    def _regular(self, actor: Actor, number: int, second: int) -> dict[str, Any]:
        """What one of its devices, the GPUs first, says when nothing unusual holds for it."""
        sound, gpu, noise = actor.sound, number < len(actor.gpus), self._noise(actor, number, second)
        if gpu:
            v = sound.gpu(number, noise, actor.idle())
            return {"device": actor.gpus[number], "pci": self._pci[number], "v": v}
        device = _OTHERS[number - len(actor.gpus)]
        t_s = self._time_s(actor, second)
        return {"device": device, "v": sound.other(device, t_s, noise)}

    def _noise(self, actor: Actor, number: int, second: int) -> int:
        return self._salt * (second * len(self.actors) + actor.index + 1) >> 16 * number + 24 & 0xFFFF

    def _changed(self, actor: Actor, t_s: float, device: str, v: dict[str, Any]) -> None:
        for patch in actor.patches:
            if patch.begin <= t_s < patch.end and patch.device in (device, device.partition(":")[0]):
                patch.change(t_s, v)

    def _probes(self, second: int) -> None:
        for actor in self.actors[second % self._pace.sample_s :: self._pace.sample_s]:
            for target in self._targets(actor):
                if not target.dense and (actor.told_until_s <= second or target.silences):
                    self._probe(actor, target, second)
        if second % self._pace.dense_probe_s == 0:
            for target in self.dense.values():
                for step in self._pace.observer_steps:
                    self._probe(self.actors[(target.index - step) % len(self.actors)], target, second)

    def _targets(self, observer: Actor) -> list[Actor]:
        places = (observer.index + step for step in self._pace.observer_steps)
        return [self.actors[place % len(self.actors)] for place in places]

    def _probe(self, observer: Actor, target: Actor, second: int) -> None:
        t_s = self._time_s(observer, second)
        if observer is target or (observer.silences and observer.silent(t_s)):
            return
        missed = bool(target.silences) and target.missed(observer.name, t_s)
        self._add(t_s, observer, "probe", {"target": target.name, "rtt_us": None if missed else 11.0})

    def _progress(self, second: int) -> None:
        for actor in self.actors[second % self._pace.progress_s :: self._pace.progress_s]:
            t_s = self._time_s(actor, second)
            if actor.rank is None or (actor.silences and actor.silent(t_s)):
                continue
            job, rank = actor.rank
            if job.stopped or job.hung:
                continue
            loss = None if job.no_number else round(2.0 + (second % 97) / 1000, 3)
            fields = {"job": job.name, "rank": rank, "step": job.step(t_s), "loss": loss}
            self._add(t_s, actor, "progress", {**fields, "step_s": job.step_s, "grad_norm": 0.6})

    def _add(self, t_s: float, actor: Actor, kind: str, v: dict[str, Any]) -> None:
        self._out.append((t_s, actor.name, actor.boot, kind, v))

    # -- what need not be told

    def _pass_over(self, second: int, end: int, passes: Passes) -> None:
        """Offers the nodes to whom nothing happens now: for a minute, or for as long as nothing will happen.

        While a job stands it counts when a GPU was last seen in use: nobody is ahead of time then. Up to the
        next power of two the fractions of seconds are equal to the last bit, so beats are at equal distances.
        """
        if self._ahead or self._out:
            return  # lines are being told
        every = self._pace.sample_s
        stands = any(job.stopped or job.hung for job in self.jobs.values())
        for actor in self.actors[second % every :: every]:
            if not actor.silences and actor.told_until_s <= second and not (actor.dense and stands):
                until_s = min(end, 1 << second.bit_length(), self._unchanged_until_s(actor, second))
                minutes = min(1, (until_s - second) // every) if stands else (until_s - second) // every
                lasts = range(second, second + int(minutes) * every, 1 if actor.dense else every)
                if lasts and passes(self._quiet(actor, lasts, every)):
                    actor.told_until_s = second + int(minutes) * every
                    actor.beats += len(range(second, actor.told_until_s, self._pace.beat_s))

    def _unchanged_until_s(self, actor: Actor, second: int) -> float:
        """Up to when nothing befalls it or whom it probes; no later than `second` while it changes."""
        until_s = EVER
        for name in ("", actor.name, *(target.name for target in self._targets(actor))):
            acts_s = self._acts_s.get(name, ())
            if (at := bisect_left(acts_s, second)) < len(acts_s):
                until_s = min(until_s, acts_s[at] - 1.0)
        for patch in actor.patches:
            changes = patch.steady > second or patch.device == "node"
            until_s = min(until_s, second if changes else patch.end - 1.0)
        return until_s

    def _quiet(self, actor: Actor, seconds: range, every: int) -> Quiet:
        until_s = seconds.stop
        targets = [target for target in self._targets(actor) if not target.dense and not target.silences]
        return Quiet(
            node=actor.name,
            boot=actor.boot,
            idle=actor.idle(),
            seconds=seconds,
            lag_s=self._time_s(actor, seconds[0]) - seconds[0],
            beats=range(seconds[0], until_s, self._pace.beat_s),
            targets=[target.name for target in targets if target is not actor],
            probed=until_s - every,
            devices=len(actor.gpus) + len(_OTHERS),
            like=(actor.name, actor.idle(), *actor.patches),
            sample=partial(self._record, actor),
            free_mib=partial(self._free_mib, actor),
        )

    def _record(self, actor: Actor, number: int, second: int) -> StreamRecord:
        """What it says of a device as long as nothing happens."""
        t_s, v = self._time_s(actor, second), self._regular(actor, number, second)
        for patch in actor.patches:
            if patch.device in (v["device"], v["device"].partition(":")[0]):
                patch.change(t_s, v["v"])
        return StreamRecord(0, actor.boot, t_s, actor.name, "sample", v)

    def _free_mib(self, actor: Actor, second: int) -> int:
        return actor.sound.free_mib(self._noise(actor, len(actor.gpus) + _OTHERS.index("node"), second))

    # -- what happens beside them

    def tell(self, line: Line) -> None:
        """A record out of the story, if its node can be heard."""
        actor = self.named[line.node]
        if actor.silent(line.t) and line.kind != "note":
            return
        v = line.v
        if v.get("source") == "kmsg":
            v = {**v, "line": actor.kernel_line(line.t if line.stamp_t is None else line.stamp_t, v["line"])}
        self._add(line.t, actor, line.kind, v)

    def boot(self, t_s: float, actor: Actor) -> None:
        """The node is up again: its first word is a beat."""
        actor.rebooted(t_s)
        self._beat(actor, t_s)

    def crowd(self, crowd: Crowd) -> None:
        """Begins to tell the lines of a crowd."""
        self._pour(iter(crowd.make()))

    def _pour(self, stream: Iterator[Line]) -> None:
        if (line := next(stream, None)) is not None:
            self._told += 1
            heappush(self._ahead, (line.t, self._told, line, stream))


def play(story: Story, hours: float, passes: Passes = _never) -> Iterator[StreamRecord]:
    """The records of a story; without what `passes` takes, see `Quiet`."""
    return Stage(story).play(hours, passes)
