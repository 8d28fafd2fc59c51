"""What `gridctl.assess` says of the nodes as they are now; what becomes of an incident, in the journal.

Every figure comes from somewhere: findings and verdict from the sentinel, history from the journal, ranks and
spares from the last poll, prices and limits from policy.toml.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from gridagent.wire import NodeStatus
from gridctl.assess.caps import DAY_S, Act, full
from gridctl.assess.decide import Case, Choice
from gridctl.assess.forecast import Forecast, NodeHistory, forecast
from gridctl.assess.outlook import NodeRisk, outlook
from gridctl.assess.rates import Base, base_of
from gridctl.assess.risk import weights
from gridctl.control.ledger import Ledger
from gridctl.control.sentinel import Sentinel
from gridctl.errors import Refused
from gridctl.model.actions import RECOVER
from gridctl.model.findings import Finding
from gridctl.model.fleet import GIVEN_UP, Job, Node, Rank, jobs, spares
from gridctl.model.plans import PROPOSER
from gridctl.model.policy import Policy
from gridctl.model.runs import Incident
from gridctl.runbook import preflight
from gridctl.runbook.gates import for_a_person
from gridctl.runbook.spares import choose

#: The owner of cordons that gridctl set itself: they are nobody's wish.
OURS = "gridctl"


class World(Protocol):
    """What this needs of the controller."""

    ledger: Ledger
    sentinel: Sentinel
    policy: Policy

    @property
    def read_only(self) -> str: ...

    @property
    def nodes(self) -> dict[str, Node]: ...


class Assessor:
    """Answers from the controller's present state; nothing is kept here."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._weights = weights()

    def all(self) -> list[NodeRisk]:
        """Of every node, by name."""
        scene = _Scene(self._world, time.time())
        return [self._of(scene, name) for name in sorted(self._world.nodes)]

    def one(self, node: str) -> NodeRisk:
        """Raises `Refused` for a node that the fleet has not."""
        if node not in self._world.nodes:
            raise Refused("unknown-node", f"the fleet has no node {node!r}; `gridctl nodes` lists them")
        return self._of(_Scene(self._world, time.time()), node)

    def forecasts(self, names: Iterable[str]) -> dict[str, Forecast]:
        """The forecasts of these nodes of the fleet."""
        scene = _Scene(self._world, time.time())
        return {name: scene.forecast(name) for name in names}

    def turn(self) -> None:
        """Writes down what changed in the choices about open incidents. Raises `Refused` if it cannot."""
        all_of_them = self._world.ledger.incidents.all()
        open_ones = [i for i in all_of_them if i.state == "open" and i.kind != "manual"]
        if open_ones:
            scene = _Scene(self._world, time.time())
            for incident in open_ones:
                if incident.node in self._world.nodes:
                    self._weigh(scene, incident)

    def weigh(self, incident: Incident) -> Choice:
        """The choice about the node of an incident, journaled if it is another one than before."""
        return self._weigh(_Scene(self._world, time.time()), incident)

    def _weigh(self, scene: "_Scene", incident: Incident) -> Choice:
        found = self._of(scene, incident.node, incident.job)
        choice = msgspec.to_builtins(found.choice)
        if _gist(choice) != _gist(incident.choice):
            about = {"incident": incident.id, "node": incident.node, "kind": incident.kind, "type": "choice"}
            rests = {"p_24h": found.forecast.p_24h, "basis": found.forecast.basis}
            self._world.ledger.append("decision", {**about, **rests, **choice})
        return found.choice

    def _of(self, scene: "_Scene", name: str, job: str = "") -> NodeRisk:
        faults = self._world.ledger.record.faults_since(name, scene.now_unix_s - 30 * DAY_S)
        return outlook(scene.case(name, job), scene.history(name), len(faults), self._weights)


class _Scene:
    """The fleet at one moment: what is the same for all nodes is worked out once."""

    def __init__(self, world: World, now_unix_s: float) -> None:
        self.now_unix_s = now_unix_s
        self._world = world
        self._nodes = world.nodes
        self._jobs = {job.name: job for job in jobs(world.nodes.values())}
        self._gpus = {name: _gpus(job) for name, job in self._jobs.items()}
        self._here: dict[str, dict[str, list[Rank]]] = {}  #: node -> job -> its ranks there
        for job in self._jobs.values():
            for rank in job.ranks:
                self._here.setdefault(rank.node, {}).setdefault(job.name, []).append(rank)
        gpus = {name: node.status.gpus for name, node in world.nodes.items() if node.status}
        self._base: Base = base_of(world.ledger.record.known, world.ledger.record.fleet(now_unix_s, gpus))
        self._parked = sum(spare.state == "parked" for spare in spares(world.nodes.values()))
        plans = world.ledger.plans
        self._acts = [
            self._act(state.started_unix_s, plans[plan].node, plans[plan].job)
            for plan, state in world.ledger.runs.values()
            if plans[plan].moves  # a reset leaves no node: nobody was there any more
        ]
        self._own = {(p.node, p.job, p.epoch_from): p for p in plans.values() if p.who == PROPOSER}
        self._decided = {
            i.node
            for i in world.ledger.incidents.all()
            if i.state == "open"
            and i.decision.get("decision") == "swap_now"
            and i.decision.get("action") != RECOVER  # which says nothing of the node
        }

    def history(self, name: str) -> NodeHistory:
        return self._world.ledger.record.node(name, self.now_unix_s)

    def verdict(self, name: str) -> str:
        return "faulty" if name in self._decided else self._world.sentinel.verdict(name)

    def forecast(self, name: str) -> Forecast:
        status = self._status(name)
        return forecast(
            self._base,
            [f for f in self._world.sentinel.findings(name) if f.action != RECOVER],
            gpus=status.gpus if status else 0,
            node=self.history(name),
            faulty=self.verdict(name) == "faulty",
        )

    def case(self, name: str, about: str = "") -> Case:
        """The node's case; where jobs stand for want of ranks there, that of job `about` or the first."""
        policy, node = self._world.policy, self._nodes[name]
        findings, stands = self._findings(name, about)
        job, ranks = self._wanting(stands) if stands else self._ranks(name)
        device = next((f.device for f in findings if f.preempt_job), "")
        there = [rank for rank in ranks if device in {f"gpu:{gpu}" for gpu in rank.gpus}]
        takers, targets = self._spares(node, ranks, there)
        recovery_h = policy.recovery_h or self._base.known.priors.recovery.hours
        own = self._act(self.now_unix_s, name, job.name if job else "")
        return Case(
            node=name,
            verdict=self.verdict(name),
            findings=findings,
            forecast=self.forecast(name),
            spare=self.forecast(targets[0]) if targets else forecast(self._base),
            ranks=len(ranks),
            device_ranks=len(there),
            spares=takers,
            job_gpus=self._gpus[job.name] if job else 0,
            pause_s=self._pause_s(job.name if job else ""),
            step_s=max((rank.step_s_median for rank in ranks), default=0.0),
            window_h=policy.window_h,
            recovery_h=recovery_h,
            recovery_basis="policy.toml" if policy.recovery_h else self._base.known.priors.recovery.source,
            usd_per_gpu_h=policy.price_usd_per_gpu_h or None,
            run=self._run_on(stands) if stands else "",
            held=_held(node, job.name if job else ""),
            caps=full(policy.caps, self._acts, own, len(self._nodes)),
            armed=policy.auto and not self._world.read_only,
            person=self._person(name, job),
        )

    def _findings(self, name: str, about: str) -> tuple[list[Finding], str]:
        """What is known of the node, and which job's standing is among it."""
        found = self._world.sentinel.findings(name)
        stands = next((f.job for f in found if f.action == RECOVER and about in ("", f.job)), "")
        return [f for f in found if f.action != RECOVER or f.job == stands], stands

    def _wanting(self, name: str) -> tuple[Job | None, list[Rank]]:
        """A job that stands, and its ranks without a process that anybody knows of: one plan is for all."""
        job = self._jobs.get(name)
        return job, [rank for rank in job.ranks if rank.state in (*GIVEN_UP, "unknown")] if job else []

    def _person(self, node: str, job: Job | None) -> str:
        """Why gridctl's own newest plan, for the job as it is now to leave the node, needs a person."""
        plan = self._own.get((node, job.name, job.epoch)) if job else None
        return "; ".join(for_a_person(plan)) if plan else ""

    def _run_on(self, job: str) -> str:
        ledger = self._world.ledger
        return next((run for run in ledger.unended() if ledger.plans[ledger.runs[run][0]].job == job), "")

    def _ranks(self, name: str) -> tuple[Job | None, list[Rank]]:
        """The largest job that has ranks on the node, and its ranks there, the dead ones too."""
        here = [
            (self._jobs[job], ranks)
            for job, ranks in self._here.get(name, {}).items()
            if any(rank.state != "finished" for rank in ranks)
        ]
        return max(here, key=lambda pair: (len(pair[0].ranks), pair[0].name), default=(None, []))

    def _spares(self, node: Node, ranks: list[Rank], there: list[Rank]) -> tuple[int, list[str]]:
        """How many of the ranks spares would take (all, those of the device, none), and on which nodes."""
        if self._is_quiet(node.name):  # nothing moves: which of them would do is not asked, spare by spare
            return self._parked, []
        for moved in (ranks, there):
            if moved and node.status:
                found, _ = choose(moved, node, self._nodes, self._world.policy)
                if found:
                    return len(found), [spare.node for spare in found]
        return 0, []

    def _is_quiet(self, name: str) -> bool:
        return self.verdict(name) in ("healthy", "blind") and not self._world.sentinel.findings(name)

    def _pause_s(self, job: str) -> float:
        """From the newest plan for the job; before the first one the size of its state is not known."""
        ledger = self._world.ledger
        known = next((plan.cost for plan in reversed(ledger.plans.values()) if plan.job == job), None)
        return preflight.pause_s(known.state_bytes if known else 0, ledger.cut_rates())[0]

    def _status(self, name: str) -> NodeStatus | None:
        return self._nodes[name].status if name in self._nodes else None

    def _act(self, t_unix_s: float, node: str, job: str) -> Act:
        status = self._status(node)
        return Act(
            t_unix_s=t_unix_s,
            node=node,
            job=job,
            rack=status.rack if status else "",
            nvlink_domain=status.nvlink_domain if status else "",
        )


def _gpus(job: Job) -> int:
    """On CPU a rank counts as one device."""
    return sum(len(rank.gpus) for rank in job.ranks) or len(job.ranks)


def _held(node: Node, job: str) -> str:
    """Which person's word forbids a move; "" where none does."""
    status = node.status
    if status is None:
        return ""
    if status.cordoned and status.cordon_owner != OURS:
        return f"cordoned by {status.cordon_owner or 'somebody'}: {status.cordon_reason or 'no reason given'}"
    frozen: Sequence[str] = [scope for scope in status.frozen if scope in ("fleet", job)]
    return f"frozen: {', '.join(frozen)}" if frozen else ""


def _gist(choice: Mapping[str, Any]) -> Any:
    """What makes a choice another one: not its figures, which move with every sample."""
    options = [(its["action"], bool(its.get("refused"))) for its in choice.get("alternatives", [])]
    return (*(choice.get(key) for key in ("action", "wanted", "automatic", "cheapest")), options)
