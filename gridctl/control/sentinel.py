"""What the nodes tell, followed for ever: steps, phases, and what detection makes of the rest."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from gridagent.wire import StreamRecord
from gridctl.control.ledger import Ledger
from gridctl.control.steplog import StepLog
from gridctl.detect.ingest import Ingest
from gridctl.detect.policy import DetectPolicy, builtin
from gridctl.detect.standing import KINDS, RANK_DIED, RANK_SILENT, Standing
from gridctl.detect.watch import Watch
from gridctl.model.findings import SEVERITIES, Decision, Finding, Output, Verdict, WatchedNode
from gridctl.model.fleet import Node, jobs
from gridctl.model.runs import Incident

#: States of a rank whose job runs on the node.
_ON = ("training", "standing")
#: So long after a plan for a job that stands was refused it is asked for again.
AGAIN_S = 2.0


def steady_clock() -> Callable[[], float]:
    """The wall clock as it is now, which then goes on as time passes, whoever sets the machine's clock.

    Silence is measured with it: a clock that is set forward makes no node silent, and one that is set back
    hides none.
    """
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


def watched(node: Node) -> WatchedNode:
    """A node as detection knows it; of one that never answered, no more than its rack."""
    if (status := node.status) is None:
        return WatchedNode(name=node.name, rack=node.rack)
    return WatchedNode(
        name=node.name,
        rack=status.rack,
        nvlink_domain=status.nvlink_domain,
        cooling_zone=status.cooling_zone,
        gpus=status.gpus,
        driver=status.driver,
        spare=not any(rank.state == "training" for rank in status.ranks),
    )


class Sentinel:
    """Turns stream records into journal records. `propose` is called for a decision to swap."""

    def __init__(
        self,
        ledger: Ledger,
        steps: StepLog,
        propose: Callable[[Incident, Decision], Awaitable[bool]],
        policy: DetectPolicy | None = None,
    ) -> None:
        self._ledger = ledger
        self._steps = steps
        self._propose = propose
        policy = policy or builtin()
        self._jobs: dict[str, set[str]] = {}  #: node -> the jobs that have a rank on it
        self._watch = Watch(policy, jobs=self._jobs)
        self._ingest = Ingest(policy, self._watch)
        self._standing = Standing(ledger.deaths)
        self._now_unix_s = steady_clock()
        self._proposals: set[asyncio.Task[None]] = set()
        self._handovers: dict[str, tuple[str, str]] = {}  #: hand-over -> (incident, run)

    def nodes_changed(self, nodes: Iterable[Node]) -> None:
        """What detection should know of the fleet. Raises `Refused` if the journal cannot be written."""
        nodes = list(nodes)
        heard = all(node.status for node in nodes)
        found = self._standing.look(jobs(nodes), self._now_unix_s(), heard=heard)
        self._settle()
        for output in found:
            self._said(output)
        for node in nodes:
            if node.status:
                self._watch.update(watched(node))
                self._jobs[node.name] = {rank.job for rank in node.status.ranks if rank.state in _ON}

    def follow(self, policy: DetectPolicy) -> None:
        """Judges by another policy from now on; what was found stays."""
        self._watch.follow(policy)

    def expect(self, handover: str, incident: str, run: str) -> None:
        """Phases of this hand-over belong to this incident and run. "": the run is of none."""
        if handover:
            self._handovers[handover] = (incident, run)

    def feed(self, record: StreamRecord) -> None:
        """Takes one record. Raises `Refused` if the journal cannot be written."""
        self._steps.feed(record)
        if record.kind == "phase":
            self._phase(record)
        for output in self._ingest.record(record, self._now_unix_s()):
            self._said(output)

    def tick(self) -> None:
        """Lets time pass: silent nodes become blind. Raises `Refused` likewise."""
        for output in self._watch.tick(self._now_unix_s()):
            self._said(output)

    def verdict(self, node: str) -> str:
        """What detection thinks of a node."""
        return self._watch.verdict(node)

    def findings(self, node: str) -> list[Finding]:
        """What detection knows of a node at present, and of the jobs that stand for want of ranks there."""
        return self._standing.findings(node) + self._watch.findings(node)

    def warnings(self, job: str) -> list[str]:
        """What whoever brings a job on again that stands should know before."""
        return self._standing.warnings(job)

    async def close(self) -> None:
        for task in self._proposals:
            task.cancel()
        await asyncio.gather(*self._proposals, return_exceptions=True)

    def _settle(self) -> None:
        """Closes the incidents of deaths whose job goes on or is over; a run that has not ended closes its
        own."""
        unended = set(self._ledger.unended())
        for incident in self._ledger.incidents.all():
            if incident.state != "open" or incident.kind not in KINDS or not incident.job:
                continue
            if incident.reopened_by:
                continue
            fate = self._standing.fate(incident.job, incident.node)
            if fate and not unended.intersection(incident.runs):
                close_incident(self._ledger, incident.id, f"{incident.job}: {fate}")

    async def _until_proposed(self, incident: Incident, decision: Decision) -> None:
        """Asks once; for a job that stands until there is a plan: its ranks wait, and a spare may come."""
        while not await self._propose(incident, decision):
            if decision.kind != RANK_DIED:
                return
            await asyncio.sleep(AGAIN_S)
            if not self._standing.stands(decision):
                return

    def _phase(self, record: StreamRecord) -> None:
        v = record.v
        handover = str(v.get("handover", ""))
        key = ["phase", handover, v.get("session"), v.get("phase"), record.t_unix_s]
        if handover not in self._handovers or tuple(key) in self._ledger.said:
            return
        incident, run = self._handovers[handover]
        about = {name: v.get(name) for name in ("phase", "rank", "role", "session", "detail")}
        where = {"incident": incident, "run": run, "node": record.node, "handover": handover}
        self._ledger.append("note", {**where, **about, "t_unix_s": record.t_unix_s, "key": key})

    def _said(self, output: Output) -> None:
        data: dict[str, Any] = msgspec.to_builtins(output)
        # What is about processes is found anew by each controller, and was said if it stands in the incident.
        when = output.whose or output.t_unix_s
        key = [data["type"], output.node, output.device, output.kind, output.rule, when]
        said = tuple(key) in self._ledger.said
        if said and not output.whose:
            return
        known = self._ledger.incidents.open_on(output.node, output.job)
        incident = known or self._incident(output)
        if not (said and known):
            self._tell(output, {**data, "key": key, "incident": incident.id if incident else ""})
        if isinstance(output, Decision) and incident and output.decision == "swap_now":
            task = asyncio.ensure_future(self._until_proposed(incident, output))
            self._proposals.add(task)
            task.add_done_callback(self._proposals.discard)

    def _tell(self, output: Output, data: dict[str, Any]) -> None:
        died = isinstance(output, Finding) and output.kind == RANK_DIED
        incident = self._ledger.incidents.get(data["incident"])
        if died:
            data["death"] = msgspec.to_builtins(self._standing.death(output.job), order="sorted")
        if died and incident and incident.kind == RANK_SILENT:  # what was not known then is known now
            self._ledger.append("incident", _opened(incident.id, output))
        self._ledger.append("finding" if isinstance(output, Finding | Verdict) else "decision", data)

    def _incident(self, output: Output) -> Incident | None:
        """A new incident; None for what does not weigh enough."""
        weighs = SEVERITIES.index(output.severity) >= SEVERITIES.index("warning")
        if not (isinstance(output, Decision) or (isinstance(output, Finding) and weighs)):
            return None
        name = f"i-{secrets.token_hex(4)}"
        self._ledger.append("incident", _opened(name, output))
        return self._ledger.incidents.get(name)


def _opened(name: str, output: Output) -> dict[str, Any]:
    """The record of an incident that is open because of this."""
    node = output.node or "several nodes"
    where = node if output.device == "node" else f"{output.device} of {node}"
    return {
        "incident": name,
        "state": "open",
        "kind": output.kind,
        "node": output.node,
        "job": output.job,
        "title": f"{output.kind} on {where}",
        "t_unix_s": output.t_unix_s,
    }


def close_incident(ledger: Ledger, incident: str, why: str) -> None:
    """The reason of an incident is gone. Raises `Refused` if the journal cannot be written."""
    found = ledger.incidents.get(incident)
    if found and found.state == "open":
        data = {"incident": incident, "state": "closed", "kind": found.kind, "node": found.node}
        ledger.append("incident", {**data, "title": why})
