"""Nodes and jobs as they stand at one second of a story."""

import random

from gridctl.model.findings import WatchedNode
from gridctl.simulate.layout import uptime_s
from gridctl.simulate.story import Patch, Silence
from gridctl.simulate.values import Sound

_CHECKPOINT_STEPS = 50


class Actor:
    """A node of the fleet: its boot, what is unusual at present, which rank it has."""

    def __init__(self, index: int, facts: WatchedNode, chance: random.Random) -> None:
        self.index = index
        self.name = facts.name
        self.gpus = [f"gpu:{number}" for number in range(facts.gpus)]
        self.sound = Sound(facts, chance)
        self.boot = f"{chance.getrandbits(32):08x}"
        self.beats = 0
        self.dense = 0
        self.told_until_s = 0  #: up to then its usual records were passed over
        self.patches: list[Patch] = []
        self.silences: list[Silence] = []
        self.rank: tuple[Job, int] | None = None
        self.own_rank: tuple[Job, int] | None = None
        self._chance = chance
        self._up_since_s = -uptime_s(facts.name)
        self._lines = chance.randint(1000, 90_000)
        self._form = chance.randrange(2)

    def rebooted(self, t_s: float) -> None:
        self.boot = f"{self._chance.getrandbits(32):08x}"
        self.beats = 0
        self._up_since_s = t_s - 40.0
        self._lines = 900

    def kernel_line(self, t_s: float, message: str) -> str:
        """The message as this node's log has it: as /dev/kmsg or as dmesg prints it."""
        self._lines += 1
        up_s = t_s - self._up_since_s
        if self._form:
            return f"[{up_s:12.6f}] {message}"
        return f"3,{self._lines},{round(up_s * 1e6)},-;{message}"

    def silent(self, t_s: float) -> bool:
        return any(silence.begin <= t_s < silence.end for silence in self.silences)

    def missed(self, observer: str, t_s: float) -> bool:
        """Does this observer get no answer from it?"""
        return any(
            silence.begin <= t_s < silence.end
            and (silence.missed_by is None or observer in silence.missed_by)
            for silence in self.silences
        )

    def idle(self) -> bool:
        return self.rank is None or self.rank[0].stopped > 0


class Job:
    """A training job: steps while it runs, back to its last checkpoint after a stop."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self.step_s = round(chance.uniform(4.0, 20.0), 1)
        self.stopped = 0  #: reasons for which it does not run
        self.hung = 0  #: reasons for which it stands, with busy GPUs
        self.no_number = 0
        self._steps = chance.randint(2000, 40_000)
        self._since_s = 0.0

    def step(self, t_s: float) -> int:
        return self._steps + max(0, int((t_s - self._since_s) / self.step_s))

    def change(self, member: str, by: int, t_s: float) -> None:
        """One more reason not to run, or not to be well, or one less."""
        stood = self.stopped or self.hung
        setattr(self, member, getattr(self, member) + by)
        stands = self.stopped or self.hung
        if stands and not stood:
            self._steps = self.step(t_s) // _CHECKPOINT_STEPS * _CHECKPOINT_STEPS
        elif stood and not stands:
            self._since_s = t_s
