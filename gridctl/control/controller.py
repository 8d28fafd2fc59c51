"""The controller: the only place where time passes and effects happen."""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gridagent.wire import FreezeRequest, StreamRecord
from gridctl.control.assessor import Assessor
from gridctl.control.autopilot import Autopilot
from gridctl.control.cordons import uncordon
from gridctl.control.devicelog import DeviceLog
from gridctl.control.driver import Driver
from gridctl.control.facts import journal_facts
from gridctl.control.followers import Followers
from gridctl.control.freezes import relay, relayed
from gridctl.control.herald import Herald
from gridctl.control.keeper import Keeper
from gridctl.control.lease import FleetLease
from gridctl.control.ledger import Ledger
from gridctl.control.notary import Notary
from gridctl.control.planner import make_plan
from gridctl.control.poll import POLL_S, Poll
from gridctl.control.sentinel import Sentinel, close_incident
from gridctl.control.settings import detect_policy, load_fleet, load_policy
from gridctl.control.steplog import StepLog
from gridctl.control.taps import Taps
from gridctl.control.trustee import Trustee
from gridctl.control.turns import turn_for_ever
from gridctl.errors import ConfigError, GridctlError, Refused
from gridctl.home import Home
from gridctl.model.fleet import Node
from gridctl.model.plans import DryCall, Gate, Plan, Request
from gridctl.model.runs import ENDS, Run
from gridctl.ports.agents import Agents
from gridctl.runbook import gates, preflight
from gridctl.runbook.dry import dry_rest, dry_run, leases
from gridctl.runbook.engine import RunState
from gridctl.runbook.events import BackAsked, Event, Halted, Started
from gridctl.runbook.selection import refuse_if_fatal
from gridctl.runbook.wayback import check_not_past, done
from gridctl.trust import IdentityError

log = logging.getLogger("gridctl.control")


class Controller:
    """One for each home. Raises `ConfigError` and `GridctlError` where the home is not usable."""

    def __init__(self, home: Home, *, read_only: bool = False) -> None:
        self.home = home
        self.fleet = load_fleet(home)
        self.policy = load_policy(home)
        self._read_only = read_only or self.fleet.fleet.read_only
        self.trustee = Trustee(home.trust)
        self.agents = Agents(self.trustee.context, self._check_peer, self.trustee.flaw)
        holder = _holder(home)
        self.ledger = Ledger(home, holder)
        self.lease = FleetLease(self.agents, holder, lambda: self.urls, self._lease_lost)
        self.steps = StepLog()
        self.devices = DeviceLog()
        self.autopilot = Autopilot(self)
        self.sentinel = Sentinel(self.ledger, self.steps, self.autopilot.propose, detect_policy(self.policy))
        self.assessor = Assessor(self)
        self.herald = Herald(self)
        self.notary = Notary(self)
        self.poll = Poll(self.agents)
        self.taps = Taps(self._heard)
        self.keeper = Keeper(home, self.taps)
        self.followers = Followers(self.agents, self.taps.feed)
        self._files = _stamps(home)
        self._misread = ""  #: what is wrong with the files since they were read
        self._drivers: dict[str, Driver] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._turning: asyncio.Task[None] | None = None
        self._applying = asyncio.Lock()

    def _check_peer(self, url: str, tls: Any) -> None:
        """Raises `AgentRefused` unless the node that fleet.toml has at `url` is at the other end."""
        name = next((name for name, its in self.urls.items() if its == url), "")
        self.trustee.check(tls, name)

    @property
    def urls(self) -> dict[str, str]:
        return {node.name: node.url for node in self.fleet.node}

    @property
    def read_only(self) -> str:
        """Why this controller changes nothing; empty where it acts."""
        return "it is read-only" if self._read_only else self.trustee.may_only_look

    @property
    def nodes(self) -> dict[str, Node]:
        """Every node of the fleet as the last poll found it."""
        return self.poll.nodes

    async def start(self) -> None:
        """Begins to ask the nodes and to follow those that answer; waits for the first answers."""
        for run, (plan, _) in self.ledger.runs.items():
            known = self.ledger.plans[plan]
            self.sentinel.expect(known.handover, known.incident, run)
        self.poll.keep(self.fleet.node)
        await self.poll.first()
        self.keeper.start()
        parts = (
            ("following the nodes", self._follow),
            ("tending the fleet's trust", self._tend_trust),
            ("passing a freeze on", self._relay_missed),
            ("taking up what was interrupted", self.autopilot.take_up),
            ("watching the time", self._let_time_pass),
            ("telling people", self.herald.turn),
            ("signing the journal", self.notary.turn),
            ("keeping the history", self.keeper.turn),
        )
        self._turning = asyncio.create_task(turn_for_ever(parts, POLL_S))

    async def until(self, stop: asyncio.Event) -> None:
        """Returns once `stop` is set. Raises `GridctlError` if the controller's own loop ends before that."""
        assert self._turning is not None
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([stopped, self._turning], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not stop.is_set():
            raise GridctlError(f"the controller's loop has ended, please report it: {self._turning!r}")

    async def close(self) -> None:
        """Lets go of everything. Runs in hand stay as they are in the journal: interrupted."""
        tasks = [*self._runs.values(), *([self._turning] if self._turning else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.herald.close()
        await self.poll.close()
        await self.followers.close()
        await self.keeper.close()
        await self.sentinel.close()
        await self.agents.close()
        self.ledger.close()

    # ----------------------------------------------------------------------------------------------
    # What is out there

    async def look(self, names: set[str]) -> Mapping[str, Node]:
        """Asks these nodes and returns them as they are now."""
        return await self.poll.look(names)

    async def survey(self, names: set[str]) -> Mapping[str, Node]:
        """All nodes; those that ever answered and `names` were asked just now."""
        return await self.poll.survey(names)

    def refresh(self) -> None:
        """Takes up at once what changed in the home's files, e.g. a node that was enrolled a moment ago.

        Waits for nobody: such a node is asked, and known to be not asked yet until then.
        """
        self._reread_files()
        self.poll.keep(self.fleet.node)

    def _heard(self, record: StreamRecord) -> None:
        self.devices.feed(record)
        self.sentinel.feed(record)

    async def _follow(self) -> None:
        self.refresh()
        self.sentinel.nodes_changed(self.nodes.values())
        self.followers.keep(self.nodes)
        journal_facts(self.ledger, self.devices, self.nodes.values())

    async def _tend_trust(self) -> None:
        for act in self.trustee.acts():
            if tuple(act["key"]) not in self.ledger.said:
                self.ledger.append("audit", act)
        await self.trustee.turn(self.agents, list(self.nodes.values()), read_only=bool(self.read_only))

    async def _let_time_pass(self) -> None:
        self.ledger.settle()
        self.sentinel.tick()
        self.assessor.turn()
        for incident in self.ledger.incidents.forgotten(time.time(), self.ledger.plans):
            close_incident(self.ledger, incident.id, "no plan of it was applied, and all have expired")

    def _reread_files(self) -> None:
        """Nodes that were enrolled since, another policy, a renewed certificate; unreadable ones again and
        again."""
        stamps = _stamps(self.home)
        if stamps == self._files:
            return
        before, self._misread = self._misread, ""
        try:
            self.fleet, self.policy = load_fleet(self.home), load_policy(self.home)
            self.sentinel.follow(detect_policy(self.policy))
            self.trustee.reload()
        except ConfigError as error:
            self._misread = str(error)
        except (OSError, IdentityError) as error:  # half of a new pair, perhaps
            self._misread = f"{self.home.trust / 'operator.crt'} and its key: {error}"
        self._files = [] if self._misread else stamps
        if self._misread not in ("", before):
            log.warning("%s; what was read before stays in force", self._misread)

    # ----------------------------------------------------------------------------------------------
    # Plans and runs

    async def plan(self, request: Request) -> Plan:
        """Raises `Refused` with every blocker."""
        self._refuse_unsound()
        if why := self.trustee.may_only_look:
            raise Refused("forbidden", f"a plan asks the ranks themselves, which is for operators: {why}")
        return await make_plan(self, request)

    def dry_run(self, plan_id: str) -> list[DryCall]:
        """Every call that the plan would make. Raises `Refused` for an unknown plan."""
        return dry_run(self.ledger.plan(plan_id), self.urls)

    def dry_steer(self, run: str, verb: str) -> list[DryCall]:
        """Every call that abort, rollback or resume would make now. Raises `Refused` where they would."""
        plan = self._steerable(run, verb)
        state = self._state(run, plan)
        if verb != "resume":
            check_not_past(state)
        elif run in self._drivers:
            raise _in_hand(run)
        taken = [] if run in self._drivers else leases(self.urls)
        return taken + dry_rest(plan, state.progress, self.urls, back=verb != "resume")

    async def apply(self, plan_id: str, gate: Gate) -> Run:
        """Starts the run of a plan. Raises `Refused`; then nothing was changed."""
        self.may_act()
        self._refuse_unsound()
        async with self._applying:
            plan = self.ledger.plan(plan_id)
            if used := [run for run, (its, _) in self.ledger.runs.items() if its == plan_id]:
                raise Refused("used-plan", f"plan {plan_id} was applied as run {used[0]}: make a new plan")
            gates.check_gate(plan, gate)
            gates.check_alone(plan.node, plan.job, self.ledger.all_runs())
            gates.check_nodes(plan, self.ledger.claims(time.time()))
            nodes = await self.look(plan.nodes)
            self._refuse_frozen(plan.job)
            gates.check_unsteered(self.lease.holder, nodes.values())
            refuse_if_fatal(
                [b for node in nodes.values() for b in preflight.of_node(node, plan.job, self.policy)]
            )
            gates.check_fresh(plan, time.time(), nodes)
            gates.check_silent(plan, await self.look({plan.node}))
            run = f"r-{secrets.token_hex(4)}"
            await self.take_lease(run)
            try:
                self.lease.check_granted(plan.nodes)
                about = {"incident": plan.incident, "plan": plan.id, "run": run}
                self.ledger.append("gate", {**about, **msgspec.to_builtins(gate)})
                self._record_lease(plan, run)
            except Refused:
                await self.lease.drop(run)
                raise
            return await self._drive(run, plan, Started(gate.who), gate.who)

    async def abort(self, run: str, gate: Gate) -> Run:
        """Turns a run back before its commit. Raises `Refused`."""
        return await self._back(run, gate, "aborted")

    async def rollback(self, run: str, gate: Gate) -> Run:
        """Undoes what a run has done, before its commit. Raises `Refused`."""
        return await self._back(run, gate, "rolled-back")

    async def resume(self, run: str, gate: Gate) -> Run:
        """Goes on with an interrupted or held run. Raises `Refused`."""
        self._refuse_unsound()
        plan = self._confirmed(run, gate, "resume")
        if run in self._drivers:
            raise _in_hand(run)
        return await self._take_up(run, plan, Started(gate.who, accept=True), gate)

    async def uncordon(self, node: str, gate: Gate) -> Node:
        """Opens a repaired node for new work. Raises `Refused`."""
        self.may_act()
        self._refuse_unsound()
        async with self._applying:
            return await uncordon(self, node, gate)

    async def freeze(self, scope: str, gate: Gate, *, frozen: bool) -> list[dict[str, str]]:
        """Relays a freeze or thaw to all agents; those that miss it get it when they answer again."""
        self.may_act()
        gates.check_meant(scope, gate)
        what = "freeze" if frozen else "thaw"
        said = {"what": what, "scope": scope, "who": gate.who, "reason": gate.reason}
        if frozen:
            self.ledger.insist(said)
        else:  # to set going again needs the journal
            self.ledger.append("audit", said)
        request = FreezeRequest(scope=scope, frozen=frozen, who=gate.who, reason=gate.reason)
        answers = await self._relay(request, self.urls)
        outcome = relayed(scope, answers)
        try:
            self._note_relayed(outcome)
        except Refused:
            self.ledger.insist(outcome)
        return answers

    # ----------------------------------------------------------------------------------------------

    def may_act(self) -> None:
        """Raises `Refused` where this controller changes nothing."""
        if why := self.read_only:
            raise Refused("read-only", f"this controller changes nothing: {why}")

    def _refuse_unsound(self) -> None:
        """Nothing begins on files that cannot be read or on a journal that somebody changed."""
        if self._misread:
            raise ConfigError(f"{self._misread}: nothing is planned or begun until that is corrected")
        if self.ledger.damage:
            raise Refused("journal", self.ledger.damage)

    def _refuse_frozen(self, job: str) -> None:
        for scope in ("fleet", job):
            if (freeze := self.ledger.freezes.get(scope)) and freeze["what"] == "freeze":
                raise Refused(
                    "frozen",
                    f"{scope} was frozen by {freeze['who']} ({freeze['reason']}) from this home, and not"
                    " thawed from it: `gridctl thaw` ends that",
                )

    async def take_lease(self, user: str) -> None:
        """Steers for `user` until `lease.drop`. Raises `Refused`."""
        highest = max((node.status.fence for node in self.nodes.values() if node.status), default=0)
        await self.lease.take(user, highest)

    def _record_lease(self, plan: Plan, run: str) -> None:
        lease = {"fence": self.lease.fence, "holder": self.lease.holder, "granted": self.lease.granted}
        self.ledger.append("lease", {"incident": plan.incident, "run": run, **lease})

    async def _drive(self, run: str, plan: Plan, event: Event, who: str) -> Run:
        driver = Driver(self, run, plan, who)
        self._drivers[run] = driver
        self.ledger.driven.add(run)
        self.sentinel.expect(plan.handover, plan.incident, run)
        self._runs[run] = asyncio.create_task(self._drive_to_end(run, plan, driver, event))
        await asyncio.sleep(0)  # the run's first record
        if run not in self.ledger.runs:
            await self._runs[run]
            problem = driver.halted
            raise Refused(problem.code if problem else "journal", problem.text if problem else "not started")
        return self.ledger.run(run)

    async def _drive_to_end(self, run: str, plan: Plan, driver: Driver, event: Event) -> None:
        try:
            await driver.drive(event)
        finally:
            self.ledger.driven.discard(run)
            del self._drivers[run], self._runs[run]
        if problem := driver.halted:
            log.warning("run %s was let go: %s", run, problem.text)
            with contextlib.suppress(Refused):
                text = f"run {run} was let go: {problem.text}; `gridctl run resume {run}` goes on"
                self.ledger.append("note", {"incident": plan.incident, "run": run, "text": text})
        ended = self.ledger.runs.get(run)
        if ended and (ended[1].state == "done" or (ended[1].ended and self._manual(plan.incident))):
            with contextlib.suppress(Refused):
                close_incident(self.ledger, plan.incident, f"run {run} is {ended[1].state}")
        await self.lease.drop(run)

    def _manual(self, incident: str) -> bool:
        found = self.ledger.incidents.get(incident)
        return found is not None and found.kind == "manual"

    def _confirmed(self, run: str, gate: Gate, verb: str) -> Plan:
        """The plan of a run that somebody means to steer. Raises `Refused`."""
        self.may_act()
        gates.check_meant(self.ledger.run(run).node, gate)
        return self._steerable(run, verb)

    def _steerable(self, run: str, verb: str) -> Plan:
        """The plan of a run that has not ended. Raises `Refused`."""
        found = self.ledger.run(run)
        if found.state == "done":
            raise done(run, self.ledger.plan(found.plan))
        if found.state in ENDS:
            raise Refused("not-now", f"run {run} has ended ({found.state}): there is nothing to {verb}")
        return self.ledger.plan(found.plan)

    async def _back(self, run: str, gate: Gate, end: str) -> Run:
        plan = self._confirmed(run, gate, "undo")
        driver = self._drivers.get(run)
        if driver is None:  # what it has done is known from the journal only
            self._refuse_unsound()
        check_not_past(self._state(run, plan))
        asked = BackAsked(gate.who, gate.reason, end)
        if driver is None:
            return await self._take_up(run, plan, asked, gate)
        self.ledger.append("audit", {**self._audit(run, plan, gate), "what": end})
        driver.tell(asked)
        return self.ledger.run(run)

    def _state(self, run: str, plan: Plan) -> RunState:
        driver = self._drivers.get(run)
        return driver.state if driver else Driver(self, run, plan, "").state

    async def _take_up(self, run: str, plan: Plan, event: Event, gate: Gate) -> Run:
        """Takes a run in hand again that nobody drives."""
        async with self._applying:
            await self.look(plan.nodes)
            await self.take_lease(run)
            try:
                what = "resume" if isinstance(event, Started) else "rollback"
                self.ledger.append("audit", {**self._audit(run, plan, gate), "what": what})
                self._record_lease(plan, run)
            except Refused:
                await self.lease.drop(run)
                raise
            return await self._drive(run, plan, event, gate.who)

    def _audit(self, run: str, plan: Plan, gate: Gate) -> dict[str, Any]:
        text = f"{gate.who}: {gate.reason}"
        about = {"incident": plan.incident, "run": run, "who": gate.who, "reason": gate.reason}
        return {**about, "text": text}

    def _lease_lost(self, code: str, text: str) -> None:
        for driver in self._drivers.values():
            driver.tell(Halted(code, text))

    async def _relay(self, request: FreezeRequest, urls: Mapping[str, str]) -> list[dict[str, str]]:
        return await relay(self.agents, request, urls)

    def _note_relayed(self, outcome: dict[str, Any]) -> None:
        before = self.ledger.missed.get(outcome["scope"], set())
        if outcome["refused"] or set(outcome["missed"]) != before:
            self.ledger.append("audit", outcome)

    async def _relay_missed(self) -> None:
        for scope, missed in list(self.ledger.missed.items()):
            back = {n: url for n, url in self.urls.items() if n in missed and self.nodes[n].reachable}
            freeze = self.ledger.freezes.get(scope)
            if not back or freeze is None:
                continue
            request = FreezeRequest(
                scope=scope, frozen=freeze["what"] == "freeze", who=freeze["who"], reason=freeze["reason"]
            )
            answers = await self._relay(request, back)
            self._note_relayed(relayed(scope, answers, missed - set(back)))


def _holder(home: Home) -> str:
    """The name under which this home's controllers hold leases: the next one takes over from a killed one."""
    try:
        if name := home.holder_file.read_text(encoding="utf-8").strip():
            return name
    except FileNotFoundError:
        pass
    name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    home.holder_file.write_text(f"{name}\n", encoding="utf-8")
    return name


def _stamps(home: Home) -> list[int]:
    files = (home.fleet_file, home.policy_file, home.trust / "operator.crt")
    return [path.stat().st_mtime_ns if path.exists() else 0 for path in files]


def _in_hand(run: str) -> Refused:
    return Refused("not-now", f"run {run} is in hand: there is nothing to resume")
