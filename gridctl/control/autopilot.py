"""What gridctl does without a person: plans for decisions; where the site has armed it, it applies them, and
goes on with its own runs that the end of a controller has interrupted. Else it says who must act."""

import contextlib
import time
from typing import Any, Protocol

from gridctl.control.assessor import Assessor
from gridctl.control.ledger import POLICY, Ledger
from gridctl.errors import Refused
from gridctl.model.findings import Decision
from gridctl.model.fleet import Node, several
from gridctl.model.plans import PROPOSER, Gate, Plan, Request
from gridctl.model.policy import Policy
from gridctl.model.runs import Incident, Run
from gridctl.runbook.gates import for_a_person

#: Such a refusal passes by itself: nodes answer, another act ends.
_PASSING = ("no-lease", "node-unreachable", "not-now", "frozen")


class World(Protocol):
    """What this needs of the controller."""

    assessor: Assessor
    ledger: Ledger
    policy: Policy

    @property
    def read_only(self) -> str: ...

    @property
    def nodes(self) -> dict[str, Node]: ...

    async def plan(self, request: Request) -> Plan:
        """Raises `Refused`."""
        ...

    async def apply(self, plan_id: str, gate: Gate) -> Run:
        """Raises `Refused`."""
        ...

    async def resume(self, run: str, gate: Gate) -> Run:
        """Raises `Refused`."""
        ...


class Autopilot:
    """One for each controller. Never more than one run of it begins for a plan: `apply` sees to that."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unplanned: dict[str, str] = {}  #: incident -> why there is no plan, as it was said last
        self._interrupted = set(world.ledger.unended())  #: nobody drives them when a controller starts

    # ----------------------------------------------------------------------------------------------
    # Decisions

    async def propose(self, incident: Incident, decision: Decision) -> bool:
        """A plan for a decision to swap; a site that has armed it gets it applied as well. False: not now."""
        world = self._world
        open_plan = world.ledger.open_plan(incident.id, time.time())
        if self._unplanned.get(incident.id) == "stale-plan" and open_plan and open_plan.who == PROPOSER:
            open_plan = None
        if open_plan and (open_plan.who != PROPOSER or not world.policy.auto):
            return True
        try:
            choice = world.assessor.weigh(world.ledger.incident(incident.id))
            devices = [decision.device] if choice.action == "evacuate_device" else []
            wish = Request(
                node=decision.node, job=decision.job, devices=devices, incident=incident.id, who=PROPOSER
            )
            plan = open_plan or await world.plan(wish)
            # The plan has asked all nodes anew: a spare may have come, or what it says needs a person.
            choice = world.assessor.weigh(world.ledger.incident(incident.id))
            if choice.automatic and not for_a_person(plan):
                reason = decision.why[0] if decision.why else decision.kind
                await world.apply(plan.id, Gate(digest=plan.digest, who=POLICY, reason=reason, yes=True))
            elif world.policy.auto:
                self._ask(plan, for_a_person(plan) or choice.why[:1])
        except Refused as error:
            text = f"no plan for {decision.node}: {error.text}"
            if self._unplanned.get(incident.id) != error.code:  # else it was said
                self._unplanned[incident.id] = error.code
                with contextlib.suppress(Refused):
                    world.ledger.append("note", {"incident": incident.id, "code": error.code, "text": text})
            return False
        return True

    def _ask(self, plan: Plan, why: list[str]) -> None:
        """Tells once that nothing happens unless a person applies the plan. Raises `Refused`."""
        text = (
            f"a person is needed: plan {plan.id} is not applied by itself, although `auto` is armed:"
            f" {'; '.join(why)}. `gridctl swap apply {plan.id}`; once that has expired, `gridctl swap plan"
            f" {plan.node} --job {plan.job}` makes another"
        )
        blockers = sorted(blocker.code for blocker in plan.blockers)
        key = ["person", plan.incident, plan.job, plan.node, plan.epoch_from, *blockers]
        self._once({"incident": plan.incident, "text": text, "key": key})

    def _once(self, note: dict[str, Any]) -> None:
        if tuple(note["key"]) not in self._world.ledger.said:
            self._world.ledger.append("note", note)

    # ----------------------------------------------------------------------------------------------
    # Runs that the end of a controller has interrupted

    async def take_up(self) -> None:
        """Goes on, once, with each of its own runs that nobody drives. Raises `Refused` for the journal.

        What was done stands in the journal, and what was on its way is answered from the agents' journals:
        operation ids are made of the run's and the step's name.
        """
        for name in sorted(self._interrupted):
            run = self._world.ledger.run(name)
            if run.state != "interrupted":  # it has ended, is held for a person, or somebody was quicker
                self._interrupted.discard(name)
            elif not self._own(run):
                self._wait(run, "person", "a person has begun or steered it, and decides how it goes on")
                self._interrupted.discard(name)
            elif hindrance := self._hindrance(run):
                self._wait(run, *hindrance)
            else:
                await self._resume(run)

    async def _resume(self, run: Run) -> None:
        reason = f"the controller that drove run {run.id} has ended"
        try:
            await self._world.resume(run.id, Gate(who=POLICY, reason=reason, yes=True))
        except Refused as error:
            self._wait(run, error.code, error.text)
            if error.code in _PASSING:
                return
        self._interrupted.discard(run.id)

    def _wait(self, run: Run, code: str, why: str) -> None:
        """Tells once for each reason and step that the run stays as it is."""
        step = next((step.name for step in reversed(run.steps) if step.started_unix_s), "")
        where = f" in step {step}" if step else ""
        text = (
            f"run {run.id} of {run.who or 'somebody'} was interrupted{where} by the end of its controller and"
            f" waits: {why}. `gridctl run resume {run.id}` goes on, `gridctl run rollback {run.id}` undoes it"
        )
        key = ["interrupted", run.id, step, code]
        self._once({"incident": run.incident, "run": run.id, "text": text, "key": key})

    def _own(self, run: Run) -> bool:
        """Whether no person has had a say in it."""
        return run.who == POLICY and run.id not in self._world.ledger.steered

    def _hindrance(self, run: Run) -> tuple[str, str] | None:
        """Why this controller does not go on with its own run, as a word and in words; None where it may."""
        world = self._world
        if not world.policy.auto:
            return "disarmed", "`auto` is not armed any more"
        if why := world.read_only:
            return "read-only", why
        scopes = ("fleet", run.job)
        frozen = {scope for scope in scopes if world.ledger.freezes.get(scope, {}).get("what") == "freeze"}
        told = [node.status for node in world.nodes.values() if node.status]
        frozen |= {scope for status in told for scope in status.frozen if scope in scopes}
        if frozen:
            return "frozen", f"{several(frozen)} is frozen"
        silent = self._silent(run)
        return ("node-unreachable", f"no answer yet from {several(silent)}") if silent else None

    def _silent(self, run: Run) -> set[str]:
        """The nodes that must say what there is before anything is done, and have not. Once the ranks have
        moved, the one that they have left may well be dead."""
        plan, nodes = self._world.ledger.plan(run.plan), self._world.nodes
        done = {step.name for step in run.steps if step.state == "done"}
        left = {plan.node} if any(step.commits and step.name in done for step in plan.steps) else set()
        members = {member.node for member in plan.members} - left
        return {name for name in members if name not in nodes or not nodes[name].reachable}
