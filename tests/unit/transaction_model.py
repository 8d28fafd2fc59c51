"""Explores every interleaving of a hand-over: `python -m tests.unit.transaction_model --faults 2`.

The world: a chair, its members, one FIFO channel each way per member (they are TCP), the chair's record
file, and training in the abstract. A rank's training thread stands before step S - 1 < S and either
begins S or is held; a step is done when all ranks of one epoch have begun it (the collective), so
"nobody begins S in two epochs" is stronger than "no step is done in two epochs".

Free in any order: every delivery, every step of a training thread, the end of a disk write, capture,
restore and gather, and every deadline, as early as it likes. One fault of the budget each: a process
dies; a channel breaks (what was in flight arrives up to any point, then both ends see Lost); a message is
delivered and a copy of it again at any later time; the operator cancels; capture, restore or gather
fails; a restored digest differs; the driver refuses; a *hard* deadline fires while its chair would still
have answered (a stalled process). A chair that is killed while it writes leaves the record or not.

Not faults here: agents and the controller, because neither is a party; their death reaches no machine.
A process that was killed never comes back under the same hand-over id. What restarts is the reader of
the records: `fold_records` over the file must agree with what the processes did, in every state.

Faults are explored in layers, fewest first: a world that was seen with fewer faults, or with no excuse
for a death, is not explored again, because everything that can follow has been covered. A machine whose
phase is final takes no event (checked for every machine met), so what is under way to it is dropped.
Texts (reasons, findings) take no part in a world's identity: no decision depends on them but on whether
there is one. Neither does what a machine will not read again in its phase (`READ_BEFORE`).

Lean exploration (all but `--full`) also leaves out orders that cannot matter:

* The chair and the member in its process hear each other at once: no channel lies between them. The driver
  hands these messages through a queue, so delays are possible; only `--full` has them.
* A member that may stop at S does so at once: before it heard Go it answers a deadline, a loss, a refusal
  and an Abort at S exactly as it does on the way there.
* A machine in its final phase begins step S at once if it may: that only makes the checks stricter.
* An abort is durable at once: without the record its reader says abort too, and that Abort is sent later
  is as if it arrived later.
* When the chair is final or dead, the members move one after the other, and nothing is captured, restored or
  gathered any more: no message connects the members, the records stay as they are, and every check but the
  last looks at one member and the records.

`--full` makes all these moves in all orders; a test compares the two where both are feasible.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from transaction_moves import Ending, check, ending, fault_moves, free_moves, patient_moves
from transaction_world import Model, Violation, World

from gridagent.train.transaction import Chair, Member
from gridagent.train.transaction_events import Phase


@dataclass
class Found:
    """What an exploration met."""

    states: int
    transitions: int
    endings: Counter[Ending]


class Explorer:
    """Visits every world that is reachable with a number of faults, and checks each."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.came_from: dict[World, World | None] = {}
        self.transitions = 0
        self.endings: Counter[Ending] = Counter()

    def explore(self, faults: int) -> Found:
        """Raises Violation, with the way there, as soon as a rule is broken or a path does not end."""
        layer: list[tuple[World, World | None]] = [(self.model.start, None)]
        for left in range(faults, -1, -1):
            following: list[tuple[World, World | None]] = []
            for world, parent in layer:
                if not self._seen(world):
                    self._walk(world, parent, following if left else None)
            layer = following
        self._check_final_machines()
        return Found(len(self.came_from), self.transitions, self.endings)

    def _check_final_machines(self) -> None:
        machines = self.model.machines.values
        for base in (Chair, Member):
            events = {event for mid, event in self.model.effects if isinstance(machines[mid], base)}
            for machine in [m for m in machines if isinstance(m, base) and m.phase >= Phase.RUNNING]:
                before = vars(machine).copy()
                for event in events:
                    if machine.on(event, 0.0) or vars(machine) != before:
                        raise Violation(f"{machine.phase.name} is final, yet a machine took {event}")

    def _seen(self, world: World) -> bool:
        return world in self.came_from or (bool(world[2]) and (*world[:2], 0, *world[3:]) in self.came_from)

    def _walk(
        self, start: World, parent: World | None, later: list[tuple[World, World | None]] | None
    ) -> None:
        """Depth first over the moves that cost nothing; what a fault leads to is for `later`."""
        self.came_from[start] = parent
        path: list[tuple[World, Iterator[World]]] = [(start, self._free(start, later))]
        on_path = {start}
        while path:
            world, moves = path[-1]
            following = next(moves, None)
            if following is None:
                path.pop()
                on_path.discard(world)
            elif following in on_path:
                raise self._traced(Violation("a path that never ends"), world)
            elif not self._seen(following):
                self.came_from[following] = world
                on_path.add(following)
                path.append((following, self._free(following, later)))

    def _free(self, world: World, later: list[tuple[World, World | None]] | None) -> Iterator[World]:
        try:
            check(self.model, world)
            steps = free_moves(self.model, world)
            first = next(steps, None)
            if first is None:
                steps = patient_moves(self.model, world)
                first = next(steps, None)
            if first is None:
                self.endings[ending(self.model, world)] += 1
            else:
                for step in chain((first,), steps):
                    self.transitions += 1
                    yield step.world()
            for step in fault_moves(self.model, world) if later is not None else ():
                self.transitions += 1
                following = step.world()
                if later is not None and not self._seen(following):
                    later.append((following, world))
        except Violation as violation:
            raise (violation if violation.trace else self._traced(violation, world)) from None

    def _traced(self, violation: Violation, world: World) -> Violation:
        """Names every move on the way to `world` and what was being done there."""
        trace = [_words(self.model.doing)]
        parent = self.came_from[world]
        while parent is not None:
            trace.append(self._between(parent, world))
            world, parent = parent, self.came_from[parent]
        violation.trace = trace[::-1]
        return violation

    def _between(self, before: World, after: World) -> str:
        for moves in (free_moves, fault_moves, patient_moves):
            for step in moves(self.model, before):
                if step.world() == after:
                    return _words(step.label)
        return "?"


def _words(label: tuple[object, ...]) -> str:
    return " ".join(map(str, label))


def main() -> None:
    """Explores from the command line and prints what it met."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--survivors", type=int, default=2)
    options.add_argument("--pairs", type=int, default=1, help="sources, each with its target")
    options.add_argument("--faults", type=int, default=1)
    options.add_argument("--full", action="store_true", help="leave no move out (slow)")
    given = options.parse_args()
    began = time.monotonic()
    try:
        found = Explorer(Model(given.survivors, given.pairs, lean=not given.full)).explore(given.faults)
    except Violation as violation:
        raise SystemExit("\n".join([*violation.trace, f"VIOLATION: {violation}"])) from None
    print(
        f"{given.survivors} survivors, {given.pairs} moves, up to {given.faults} faults:"
        f" {found.states} worlds, {found.transitions} transitions in {time.monotonic() - began:.0f} s;"
        f" paths end in {dict(Counter(outcome for outcome, _ in found.endings.elements()))}"
    )


if __name__ == "__main__":
    main()
