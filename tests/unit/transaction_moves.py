"""What may happen next in the world of a hand-over, for free or as a fault, and what must hold in it."""

from collections.abc import Iterator

from transaction_world import (
    BEGUN,
    BROKEN,
    CAPTURED,
    CAPTURING,
    CHAIR_TOLD,
    DEAD,
    GATHERED,
    GATHERING,
    GOOD,
    MEMBER_TOLD,
    RESTORING,
    STOP,
    Model,
    Step,
    Violation,
    World,
)

from gridagent.train import transaction_events as ev
from gridagent.train.transaction import Member
from gridagent.train.transaction_events import Phase
from gridagent.train.transaction_messages import TARGET, Entry

Ending = tuple[str, tuple[str, ...]]  # what the records say, then the phase of the chair and of every member


def free_moves(model: Model, world: World) -> Iterator[Step]:
    """Everything that may happen next and is nobody's fault."""
    chair = world[0]
    if chair != DEAD:
        machine = model.machines.values[chair]
        if machine.phase == Phase.IDLE:
            yield Step(model, world, "start").to_chair(ev.Start(0))
        if machine.deadline() is not None:
            yield Step(model, world, "deadline of the chair").to_chair(ev.Tick())
        if machine._writing is not None:
            step = Step(model, world, machine._writing.kind, "is durable").append(machine._writing)
            yield step.to_chair(ev.Recorded(machine._writing))
    over = model.lean and (chair == DEAD or model.final[chair])
    for i in range(len(model.parties)):
        moves = [*_deliveries(model, world, i), *_again(model, world, i), *_work(model, world, i)]
        yield from moves
        if over and moves:
            return  # from here on the members do not meet again: one after the other is every order


def _deliveries(model: Model, world: World, i: int) -> Iterator[Step]:
    name = model.parties[i].id
    mid, down, ups, channel, _, _ = model.processes.values[world[4 + i]]
    for up, queue in ((True, ups), (False, down)):
        if queue:
            step = Step(model, world, "from" if up else "to", name, model.messages.values[queue[0]])
            yield step.deliver(i, step.pop(i, up), up)
    if channel & BROKEN and not channel & CHAIR_TOLD:
        yield Step(model, world, "chair sees the end of", name).told(i, CHAIR_TOLD)
    if channel & BROKEN and not channel & MEMBER_TOLD and mid != DEAD:
        yield Step(model, world, name, "sees the end of the chair").told(i, MEMBER_TOLD)


def _again(model: Model, world: World, i: int) -> Iterator[Step]:
    """Second deliveries of messages that a fault made copies of."""
    bag = model.stales.values[world[3]]
    for number, (party, up, message) in enumerate(bag):
        if party == i:
            msg = model.messages.values[message]
            step = Step(model, world, "again from" if up else "again to", model.parties[i].id, msg)
            step.keep(bag[:number] + bag[number + 1 :])
            yield step.deliver(i, message, up)


def _work(model: Model, world: World, i: int) -> Iterator[Step]:
    """A process by itself: its training thread, its share of the transfer, its deadlines."""
    name = model.parties[i].id
    mid, down, _, channel, flags, epoch = model.processes.values[world[4 + i]]
    if mid == DEAD:
        return
    machine = model.machines.values[mid]
    if model.free_to_train(i, flags, epoch) and not flags & BEGUN:
        yield Step(model, world, name, "begins S in epoch", epoch).flag(i, BEGUN)
    if flags & STOP and machine.phase in (Phase.ARMED, Phase.GO):
        yield Step(model, world, name, "reaches S").reach(i)
    if flags & CAPTURING and not flags & CAPTURED:
        yield Step(model, world, name, "captured").flag(i, CAPTURED).to_member(i, ev.CaptureDone("d"))
    if flags & RESTORING and machine.phase == Phase.GO and not machine._moved:
        source = model.processes.values[world[4 + model.source_of[i]]]
        if source[4] & CAPTURED:
            yield Step(model, world, name, "restored").flag(i, GOOD).to_member(i, ev.RestoreDone("d"))
    if flags & GATHERING and not flags & GATHERED and machine.phase == Phase.COMMITTED:
        peers = [model.processes.values[world[4 + j]] for j in model.new]
        if all(peer[4] & GATHERING for peer in peers):
            yield Step(model, world, name, "gathered").flag(i, GATHERED).to_member(i, ev.GatherDone())
        if any(peer[0] == DEAD for peer in peers):
            step = Step(model, world, name, "cannot gather: a peer is gone").flag(i, GATHERED)
            yield step.to_member(i, ev.GatherFailed("-"))
    if machine.deadline() is not None and (not _hard(machine) or (channel & BROKEN and not down)):
        yield Step(model, world, "deadline of", name).to_member(i, ev.Tick())


def _hard(machine: Member) -> bool:
    """Does this deadline end the process? It is set so late that the chair's own has long fired."""
    return machine.phase >= (Phase.COMMITTED if machine.me.role == TARGET else Phase.PREPARED)


def patient_moves(model: Model, world: World) -> Iterator[Step]:
    """Hard deadlines, in a world where nothing else can happen."""
    for i, party in enumerate(model.parties):
        mid = model.processes.values[world[4 + i]][0]
        if mid != DEAD and model.machines.values[mid].deadline() is not None:
            yield Step(model, world, "hard deadline of", party.id).to_member(i, ev.Tick())


def fault_moves(model: Model, world: World) -> Iterator[Step]:
    """Everything that costs one fault."""
    chair = world[0]
    if chair != DEAD and not model.final[chair]:
        yield Step(model, world, "operator cancels").to_chair(ev.Cancel("-"))
    for i in range(len(model.parties)):
        yield from _deaths(model, world, i)
        yield from _copies(model, world, i)
        yield from _failures(model, world, i)


def _deaths(model: Model, world: World, i: int) -> Iterator[Step]:
    name = model.parties[i].id
    mid, _, _, channel, _, _ = model.processes.values[world[4 + i]]
    if mid == DEAD:
        return
    yield Step(model, world, name, "is killed").excuse().kill(i)
    writing: Entry | None = model.machines.values[world[0]]._writing if i == 0 else None
    if writing is not None:
        yield Step(model, world, name, "is killed after its write").excuse().append(writing).kill(i)
    if i and not channel & BROKEN:
        yield Step(model, world, "channel breaks:", name).excuse().break_channel(i)
    machine = model.machines.values[mid]
    if machine.deadline() is not None and _hard(machine):
        yield Step(model, world, name, "stalls past its hard deadline").excuse().to_member(i, ev.Tick())


def _copies(model: Model, world: World, i: int) -> Iterator[Step]:
    if i == 0:
        return  # its messages never leave the chair's process
    _, down, ups, _, _, _ = model.processes.values[world[4 + i]]
    for up, queue in ((True, ups), (False, down)):
        if queue:
            msg = model.messages.values[queue[0]]
            step = Step(
                model, world, "first of two from" if up else "first of two to", model.parties[i].id, msg
            )
            step.keep(tuple(sorted((*model.stales.values[world[3]], (i, up, queue[0])))))
            yield step.deliver(i, step.pop(i, up), up)


def _failures(model: Model, world: World, i: int) -> Iterator[Step]:
    name = model.parties[i].id
    mid, _, _, _, flags, _ = model.processes.values[world[4 + i]]
    if mid == DEAD or model.final[mid]:
        return
    machine = model.machines.values[mid]
    yield Step(model, world, name, "refuses").to_member(i, ev.Refuse("-"))
    if flags & CAPTURING and not machine._moved and machine.phase == Phase.PREPARED:
        yield Step(model, world, name, "fails to capture").to_member(i, ev.CaptureFailed("-"))
    if flags & RESTORING and not machine._moved and machine.phase == Phase.GO:
        yield Step(model, world, name, "fails to restore").to_member(i, ev.RestoreFailed(("-",)))
        yield Step(model, world, name, "restores other bytes").to_member(i, ev.RestoreDone("x"))
    if flags & GATHERING and not flags & GATHERED and machine.phase == Phase.COMMITTED:
        step = Step(model, world, name, "fails to gather").flag(i, GATHERED)
        yield step.to_member(i, ev.GatherFailed("-"))


def check(model: Model, world: World) -> None:
    """What must hold in every world."""
    told = model.fold(world[1]).epoch
    begun: set[int] = set()
    owned: list[int] = []
    for i, party in enumerate(model.parties):
        mid, _, _, _, flags, epoch = model.processes.values[world[4 + i]]
        if flags & BEGUN:
            begun.add(epoch)
        if mid != DEAD and model.free_to_train(i, flags, epoch):
            owned.append(party.rank)
            if epoch != told:
                raise Violation(f"{party.id} may train in e+{epoch}, the records say epoch {told}")
    if len(begun) > 1:
        raise Violation(f"step S was begun in epochs {sorted(begun)}")
    if begun and begun != {told}:
        raise Violation(f"step S was begun in e+{begun.pop()}, the records say epoch {told}")
    if len(set(owned)) != len(owned):
        raise Violation(f"two processes may train one rank: {owned}")


def ending(model: Model, world: World) -> Ending:
    """Where a path ended: nothing can happen any more, so every living machine must be through."""
    report = model.fold(world[1])
    members = {2: model.old, 1: model.new, 0: model.old}.get(report.epoch, [])
    processes = [model.processes.values[number] for number in world[4:]]
    if world[0] != DEAD and not model.final[world[0]]:
        raise Violation(f"the chair is stuck in {model.machines.values[world[0]].phase.name}")
    for party, (mid, _, _, _, flags, _) in zip(model.parties, processes, strict=True):
        if mid != DEAD and not model.final[mid]:
            raise Violation(f"{party.id} is stuck in {model.machines.values[mid].phase.name}")
        if mid != DEAD and party.role == TARGET and report.outcome != "commit" and flags & GOOD:
            raise Violation(f"{party.id} keeps what it restored, although the outcome is {report.outcome}")
    late = [model.parties[i].id for i in members if not processes[i][4] & BEGUN]
    if late and all(processes[i][0] != DEAD for i in members):
        raise Violation(f"all members of epoch {report.epoch} live, but {late} never begin S")
    mids = [world[0], *(process[0] for process in processes)]
    phases = ["DEAD" if mid == DEAD else model.machines.values[mid].phase.name for mid in mids]
    return report.outcome, tuple(phases)
