"""The runbook `hot-swap`: ranks of a node, or of some of its devices, move to warm spares at one boundary.

Pure. `selection.select` says which ranks go where; then the controller asks their sessions; `build`
makes the plan out of their answers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gridagent.wire import (
    ChairOffer,
    HandoverCut,
    HandoverJoin,
    HandoverOpen,
    LaunchSpec,
    Member,
    SessionReport,
    Specialise,
    plain,
)
from gridctl.assess.forecast import Forecast
from gridctl.model.fleet import Node
from gridctl.model.plans import NOT_TAKEN, Call, Move, Plan, Step
from gridctl.model.policy import Policy
from gridctl.runbook import basis, preflight
from gridctl.runbook.gates import seal
from gridctl.runbook.price import LEAD_STEPS, WARMUP_STEPS, price
from gridctl.runbook.references import Other, launch_reference, result_reference
from gridctl.runbook.selection import Selection, refuse_if_fatal, status_of

#: An operation of a run that was turned back may still run on the node for so long.
BUSY_S = 90.0
#: The process is not there any more: then there is nothing to undo or to release.
GONE = ["not-found"]
#: It may end before it has answered, or never have heard of the hand-over; what was prepared also ends
#: by itself (`ttl_s`).
ENDING = [*GONE, "op-failed"]
#: A node that is left may well die. Its old process is fenced by its epoch and never trains again.
LEFT = [*ENDING, "node-unreachable"]


def build(
    selection: Selection,
    reports: Sequence[SessionReport],
    launches: Sequence[LaunchSpec],
    nodes: Mapping[str, Node],
    policy: Policy,
    *,
    ids: tuple[str, str, str],
    now_unix_s: float,
    rates: Sequence[tuple[int, float]] = (),
    forecasts: Mapping[str, Forecast] | None = None,
    warnings: Sequence[str] = (),
) -> Plan:
    """The sealed plan. `reports` and `launches` belong to the moves, in their order; `ids` are those of
    plan, hand-over and incident; `warnings` are the plan's first notes. Raises `Refused` where a session
    says that it cannot be moved."""
    plan_id, handover, incident = ids
    request, job, moves = selection.request, selection.job, selection.moves
    reports = [
        msgspec.structs.replace(report, rank=move.rank) for move, report in zip(moves, reports, strict=True)
    ]
    blockers = list(selection.blockers)
    for move, report, launch, spare in zip(moves, reports, launches, selection.spares, strict=True):
        blockers += preflight.of_reports(report, spare.facts, move.target.node)
        blockers += preflight.of_launch(report, launch)
        blockers += preflight.of_environment(report, launch, spare)
    refuse_if_fatal(blockers)
    relied_on = basis.of_nodes(selection.members, nodes)
    for report in reports:
        relied_on.update(basis.of_report(report))
    return seal(
        Plan(
            id=plan_id,
            runbook="hot-swap",
            incident=incident,
            who=request.who,
            node=request.node,
            job=job.name,
            devices=request.devices,
            created_unix_s=now_unix_s,
            expires_unix_s=now_unix_s + policy.plan_expiry_s,
            handover=handover,
            epoch_from=job.epoch,
            epoch_to=job.epoch + 1,
            chair=selection.chair,
            moves=moves,
            members=selection.members,
            steps=_Steps(selection, reports, launches, nodes, policy, handover).all(),
            relied_on=relied_on,
            cost=price(selection, reports, policy, rates, forecasts or {}),
            bit_identical=not blockers,
            standing=selection.standing,
            assume_dead=request.assume_dead,
            blockers=blockers,
            notes=[*warnings, *selection.notes, *_risks(selection, launches), *_notes(selection, nodes)],
        )
    )


# --------------------------------------------------------------------------------------------------


class _Steps:
    """The steps of one plan. Deadlines follow the job's own pace, with room for a loaded machine."""

    def __init__(
        self,
        selection: Selection,
        reports: Sequence[SessionReport],
        launches: Sequence[LaunchSpec],
        nodes: Mapping[str, Node],
        policy: Policy,
        handover: str,
    ) -> None:
        self.selection = selection
        self.reports = reports
        self.launches = launches
        self.node = nodes[selection.request.node]
        self.policy = policy
        self.handover = handover
        self.epoch = selection.job.epoch
        step_s = max(
            [rank.step_s_median for rank in selection.job.ranks] + [r.step_s_median for r in reports]
        )
        state_bytes = sum(sum(report.state_bytes.values()) for report in reports)
        self.warm_s = 120.0 + 30.0 * (WARMUP_STEPS + 1) * step_s
        self.join_s = 60.0 + 4.0 * step_s
        self.cut = HandoverCut(
            handover=handover,
            lead_steps=LEAD_STEPS,
            arm_deadline_s=20.0 + 8.0 * step_s,
            cut_deadline_s=10.0 + math.ceil(state_bytes / 50e6),
            resume_deadline_s=10.0,
        )
        self.cut_s = self.cut.arm_deadline_s + self.cut.cut_deadline_s + 2 * self.cut.resume_deadline_s + 5.0
        self.watch_s = 60.0 + 10.0 * policy.watch_steps * step_s

    def all(self) -> list[Step]:
        steps = [self._preflight(), self._engage(), self._cordon(), self._reserve(), self._specialise()]
        steps += [self._open(), self._join(), self._cut(), self._watch(), self._release(), self._end()]
        return [step for step in steps if step is not None]

    def _call(self, member: Member, kind: str, args: dict[str, Any], deadline_s: float = 30.0) -> Call:
        return Call(
            node=member.node,
            url=member.url,
            kind=kind,
            job=self.selection.job.name,
            args={**args, "session": member.session},
            deadline_s=deadline_s,
        )

    def _preflight(self) -> Step:
        return Step(
            name="preflight",
            text="ask the sessions that leave once more, compare with the plan",
            calls=[self._call(move.source, "job.describe", {}) for move in self.selection.moves],
            verify="reports-hold",
            deadline_s=45.0,
        )

    def _run_ends(self) -> list[Call]:
        nodes = {member.node: member.url for member in self.selection.members}
        if not self.selection.request.assume_dead:
            nodes[self.node.name] = self.node.url  # it may have no process of the job any more
        return [
            Call(node=node, url=url, kind="run.end", deadline_s=15.0, tolerate=["node-unreachable"])
            for node, url in sorted(nodes.items())
        ]

    def _engage(self) -> Step:
        """Has no call of its own: its inverse lets the nodes go when everything else was undone."""
        return Step(name="engage", text="the run takes its nodes", inverse=self._run_ends())

    def _cordon(self) -> Step | None:
        """None where somebody has cordoned the node already: then it is not ours to lift. A node that does
        not answer cannot be told."""
        name, url = self.node.name, self.node.url
        request = self.selection.request
        if status_of(self.node).cordoned or request.devices or request.assume_dead:
            return None
        reason = f"gridctl hand-over {self.handover}"
        return Step(
            name="cordon",
            text=f"cordon {name}: nothing new is placed on it; it stays so after the swap",
            calls=[Call(node=name, url=url, kind="node.cordon", args={"reason": reason}, deadline_s=BUSY_S)],
            verify="cordoned",
            inverse=[Call(node=name, url=url, kind="node.uncordon", deadline_s=15.0)],
            deadline_s=BUSY_S + 15.0,
        )

    def _reserve(self) -> Step:
        """Has no call of its own: its inverse parks one for each that undoing `specialise` has retired."""
        return Step(
            name="reserve",
            text=f"take {len(self.selection.spares)} spare(s) out of the pool",
            inverse=[
                Call(
                    node=move.target.node,
                    url=move.target.url,
                    kind="spare.park",
                    args={"count": 1, "gpus": spare.gpus},
                    deadline_s=60.0,
                    undoes=["specialise", index],
                )
                for index, (spare, move) in enumerate(
                    zip(self.selection.spares, self.selection.moves, strict=True)
                )
            ],
        )

    def _specialise(self) -> Step:
        calls, inverse = [], []
        for move, report, launch in zip(self.selection.moves, self.reports, self.launches, strict=True):
            order = plain(
                Specialise(
                    handover=self.handover,
                    launch=launch,
                    epoch=self.epoch,
                    step=report.step,
                    warmup_steps=WARMUP_STEPS,
                    buckets=report.buckets,
                )
            )
            order["launch"] = _launch(self.selection, move, launch)
            calls.append(self._call(move.target, "handover.specialise", order, self.warm_s))
            ended = {"handover": self.handover, "reason": f"hand-over {self.handover} ended"}
            retire = self._call(move.target, "handover.retire", ended)
            inverse.append(msgspec.structs.replace(retire, tolerate=[*ENDING, NOT_TAKEN]))
        ranks = ", ".join(str(move.rank) for move in self.selection.moves)
        return Step(
            name="specialise",
            text=f"the spare(s) run the script as rank {ranks} against stand-ins and warm up",
            calls=calls,
            verify="warm",
            inverse=inverse,
            deadline_s=self.warm_s + 15.0,
            hasty=True,
        )

    def _open(self) -> Step:
        chair = self.selection.chair
        order = HandoverOpen(
            handover=self.handover,
            job=self.selection.job.name,
            epoch_from=self.epoch,
            epoch_to=self.epoch + 1,
            members=self.selection.members,
            ttl_s=self._ttl_s(),
        )
        return Step(
            name="open",
            text=f"rank {chair.rank} on {chair.node} takes the chair and hosts the new epoch's store",
            calls=[self._call(chair, "handover.open", plain(order))],
            inverse=[
                msgspec.structs.replace(
                    self._call(
                        member, "handover.abort", {"handover": self.handover, "reason": "the run turned back"}
                    ),
                    tolerate=[
                        *ENDING,
                        "busy",
                    ],  # another run has the node: this one has prepared nothing there
                )
                for member in self.selection.processes
            ],
            deadline_s=45.0,
        )

    def _join(self) -> Step:
        selection = self.selection
        calls = []
        for member in selection.processes:
            order = plain(
                HandoverJoin(
                    handover=self.handover,
                    job=selection.job.name,
                    epoch_from=self.epoch,
                    epoch_to=self.epoch + 1,
                    me=member,
                    chair=selection.chair,
                    members=selection.members,
                    store=ChairOffer(store_host="", store_port=0, nonce=""),
                    standing=selection.standing,
                    ttl_s=self._ttl_s(),
                    arm_deadline_s=self.cut.arm_deadline_s,
                    cut_deadline_s=self.cut.cut_deadline_s,
                    resume_deadline_s=self.cut.resume_deadline_s,
                )
            )
            order["store"] = result_reference("open")
            calls.append(self._call(member, "handover.join", order, self.join_s))
        return Step(
            name="join",
            text="all members meet the chair and build the groups of the new epoch; "
            + ("the others come to stand before one step" if selection.standing else "training goes on"),
            calls=calls,
            deadline_s=self.join_s + 15.0,
            hasty=True,
        )

    def _cut(self) -> Step:
        how = "move the state" if self.selection.standing else "stop at one boundary, move the state"
        return Step(
            name="cut",
            text=f"arm, {how}, verify, commit: epoch {self.epoch + 1}",
            calls=[self._call(self.selection.chair, "handover.cut", plain(self.cut), self.cut_s)],
            precheck="all-training",
            verify="committed",
            deadline_s=self.cut_s + 15.0,
            commits=True,
        )

    def _watch(self) -> Step:
        steps = self.policy.watch_steps
        return Step(
            name="watch",
            text=f"{steps} steps against the band of the last {self.policy.band_steps}",
            watch_steps=steps,
            deadline_s=self.watch_s,
        )

    def _release(self) -> Step | None:
        """None where nothing is left of the process that had the rank."""
        holders = [
            Member(role="source", rank=move.rank, node=move.origin, url=move.origin_url, session=move.holder)
            for move in self.selection.moves
            if move.holder
        ]
        if not holders:
            return None
        return Step(
            name="release",
            text="the frozen process(es) on the old node end",
            calls=[
                msgspec.structs.replace(
                    self._call(holder, "handover.release", {"handover": self.handover}), tolerate=LEFT
                )
                for holder in holders
            ],
            verify="released",
            deadline_s=60.0,
        )

    def _end(self) -> Step:
        return Step(name="end", text="the run lets go of its nodes", calls=self._run_ends(), deadline_s=30.0)

    def _ttl_s(self) -> float:
        """What was prepared must outlive the join and the whole cut."""
        return max(120.0, self.join_s + self.cut_s + 60.0)


def _launch(selection: Selection, move: Move, spec: LaunchSpec) -> dict[str, Any]:
    """The reference to how a rank is started: by its own launch, else as another one that takes its place."""
    if spec.rank == move.rank:
        return launch_reference(move.origin, spec)
    there = sorted(rank.rank for rank in selection.job.ranks if rank.node == move.origin)
    other = Other(rank=move.rank, local_rank=there.index(move.rank), gpus=move.gpus)
    return launch_reference(selection.deputy(move).node, spec, other)


def _has_died(move: Move, selection: Selection) -> str:
    taken = selection.request.assume_dead and move.origin == selection.request.node
    return "is taken for dead" if taken else "has died"


def _risks(selection: Selection, launches: Sequence[LaunchSpec]) -> Iterator[str]:
    """What a person takes upon himself."""
    name, job = selection.request.node, selection.job
    if selection.request.assume_dead:
        yield (
            f"{name} does not answer and is taken for dead on your word. A process of {job.name} that lives"
            f" there after all trains no further: the others have left the groups of epoch {job.epoch}, and"
            " it is no member of the next one. But until it ends by itself (GRIDAGENT_HOLD_S, status 75) it"
            " may write what the script writes by itself, a checkpoint or a log, and a scheduler may take its"
            f" end for the job's. {name} is not cordoned either: see to it that it is off, or cut off"
        )
    for move, spec in zip(selection.moves, launches, strict=True):
        if spec.rank != move.rank:
            yield (
                f"how rank {move.rank} was started is not known any more: it is started as rank {spec.rank}"
                " was, with its own number. Where the ranks' command lines differ, this is wrong"
            )
        if spec.withheld:
            yield (
                f"{spec.withheld} environment variable(s) of rank {spec.rank} look like secrets (*KEY*,"
                " *TOKEN*, *PASS* ... in the name, or a login in the value): nobody compares them, so a"
                " script must not compute with them"
            )


def _notes(selection: Selection, nodes: Mapping[str, Node]) -> list[str]:
    notes = [
        f"the process of rank {move.rank} on {move.origin} {_has_died(move, selection)}, and the others"
        f" stand in the step that this spoilt; parameters and optimizer come from rank"
        f" {selection.deputy(move).rank}, a replica, the loader's position, random state and buffers"
        " from that rank's memory"
        for move in selection.moves
        if move.dead
    ]
    if selection.standing and not notes:
        notes.append(
            "no process has died, but all stand because a connection broke: the new process, and new"
            " connections of all, let them go on"
        )
    here = status_of(nodes[selection.request.node])
    for name in sorted({move.target.node for move in selection.moves}):
        there = status_of(nodes[name])
        if there.rack != here.rack:
            notes.append(
                f"{name} stands in rack {there.rack or 'unknown'}, {here.node} in {here.rack or 'unknown'}"
            )
        if not there.serial or not here.serial:
            notes.append(
                f"whether {name} and {here.node} are two machines is unknown: a chassis serial is missing"
            )
        if there.version != here.version:
            notes.append(f"the agents differ: {there.version} on {name}, {here.version} on {here.node}")
        if there.attestation != "attested":
            notes.append(f"{name} is {there.attestation}")
    if here.cordoned:
        owner = here.cordon_owner or "somebody"
        notes.append(f"{here.node} is cordoned by {owner} already and stays so whatever happens")
    return notes
