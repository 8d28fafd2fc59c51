"""The controller's journal and what is folded from it: plans, runs, incidents, freezes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from gridagent.journal import Journal, JournalError, JournalFull, JournalLocked, Record, Tail, read, verify
from gridctl.assess.rates import tables
from gridctl.assess.record import FleetRecord
from gridctl.control.incidents import Incidents
from gridctl.detect.standing import Death
from gridctl.errors import GridctlError, Refused
from gridctl.home import Home
from gridctl.model.plans import Plan
from gridctl.model.runs import ENDS, Incident, Run
from gridctl.notify.duty import Past
from gridctl.runbook import progress
from gridctl.runbook.progress import Progress
from gridctl.runbook.spares import Claims

#: Who confirms what a site has armed, and drives it.
POLICY = "policy"


class Ledger:
    """The only writer of the home's journal. Raises `GridctlError` if another one is at work."""

    def __init__(self, home: Home, actor: str) -> None:
        self._folder = home.journal
        self._actor = actor
        self.plans: dict[str, Plan] = {}
        self.runs: dict[str, tuple[str, Progress]] = {}  #: run -> its plan's id, where it stands
        self.driven: set[str] = set()  #: runs that this process has in hand
        self.incidents = Incidents()
        self.record = FleetRecord(tables())  #: faults, repairs and signals of each node
        self.told = Past()  #: whom incidents were told to, and who wants silence
        self.freezes: dict[str, dict[str, Any]] = {}  #: scope -> the newest freeze or thaw of it
        self.owed: list[dict[str, Any]] = []  #: of freezes in force: what could not be written yet
        self.missed: dict[str, set[str]] = {}  #: scope -> nodes that this has not reached yet
        self.deaths: dict[str, Death] = {}  #: job -> the last death of one of its ranks
        self.steered: set[str] = set()  #: runs that a person has taken a hand in after they had begun
        self.facts: dict[str, dict[str, Any]] = {}  #: node -> what it is, as journaled last
        self.said: set[tuple[Any, ...]] = set()  #: what was journaled of the stream: never twice
        self._news = asyncio.Event()
        try:
            self._journal = Journal(home.journal)
        except JournalLocked as error:
            raise GridctlError(str(error)) from None
        found = verify(home.journal)
        self.damage = ""  #: why nothing may rest on what the journal says
        if not found.ok:
            self.damage = (
                f"record {found.first_bad} of {home.journal}: {found.what}. Nothing is begun on it: find out"
                " who did that, then put a sound copy there or move it away, and restart the controller"
            )
        self._take_all()

    def _take_all(self) -> None:
        """Folds the journal in; of a damaged one, what is left is shown."""
        for record in read(self._folder, damaged=bool(self.damage)):
            try:
                self._take(record)
            except (
                LookupError,
                TypeError,
                ValueError,
                AttributeError,
            ):  # it says something else than written
                if not self.damage:
                    raise
        self.runs = {run: its for run, its in self.runs.items() if its[0] in self.plans or not self.damage}

    @property
    def seq(self) -> int:
        return self._journal.last_seq

    @property
    def head(self) -> str:
        """Hash of the last record."""
        return self._journal.head

    def append(self, kind: str, data: dict[str, Any]) -> Record:
        """Writes one record to the disk. Raises `Refused`: disk-full or journal; nothing may follow then."""
        self.settle()
        return self._write(kind, data)

    def insist(self, audit: dict[str, Any]) -> None:
        """Writes down a freeze or whom it missed. What cannot be written holds all the same, and is owed."""
        try:
            self.append("audit", audit)
        except Refused:
            self.owed.append(audit)
            self._take_audit(audit)

    def settle(self) -> None:
        """Writes what is owed; nothing else is written before. Raises `Refused`."""
        while self.owed:
            self._write("audit", self.owed[0])
            del self.owed[0]

    def _write(self, kind: str, data: dict[str, Any]) -> Record:
        try:
            record = self._journal.append(kind, self._actor, data)
        except JournalFull as error:
            raise Refused("disk-full", f"nothing was done: {error}") from None
        except JournalError as error:
            raise Refused("journal", f"nothing was done: {error}") from None
        self._take(record)
        self._news.set()
        self._news = asyncio.Event()
        return record

    def close(self) -> None:
        self._journal.close()

    def run(self, run: str) -> Run:
        """Raises `Refused` for an unknown id."""
        if run not in self.runs:
            raise Refused("unknown-run", f"there is no run {run}: `gridctl run list` shows them")
        plan, state = self.runs[run]
        return progress.view(run, self.plans[plan], state, driven=run in self.driven)

    def plan(self, plan: str) -> Plan:
        """Raises `Refused` for an unknown id."""
        if plan not in self.plans:
            raise Refused("unknown-plan", f"there is no plan {plan}: make one with `gridctl swap plan NODE`")
        return self.plans[plan]

    def incident(self, incident: str) -> Incident:
        """Raises `Refused` for an unknown id."""
        found = self.incidents.get(incident)
        if found is None:
            raise Refused("unknown-incident", f"there is no incident {incident}: see `gridctl incidents`")
        return found

    def all_runs(self) -> list[Run]:
        return [self.run(run) for run in self.runs]

    def open_plan(self, incident: str, now_unix_s: float) -> Plan | None:
        """The newest plan of an incident, for ranks to leave its node, that could still be applied."""
        used = {plan for plan, _ in self.runs.values()}
        for plan in reversed(self.plans.values()):
            fits = plan.incident == incident and bool(plan.moves)
            if fits and plan.id not in used and plan.expires_unix_s > now_unix_s:
                return plan
        return None

    def claims(self, now_unix_s: float) -> Claims:
        """Which spares are spoken for."""
        used = {plan for plan, _ in self.runs.values()}
        return Claims(
            {run: self.plans[self.runs[run][0]] for run in self.unended()},
            [p for p in self.plans.values() if p.id not in used and p.expires_unix_s > now_unix_s],
        )

    def cut_rates(self) -> list[tuple[int, float]]:
        """(bytes, milliseconds) of the committed cuts, the newest 20."""
        found = []
        for _, state in self.runs.values():
            for value in state.done.get("cut", []):
                if isinstance(value, dict) and value.get("cut_ms") and value.get("state_bytes"):
                    found.append((int(value["state_bytes"]), float(value["cut_ms"])))
        return found[-20:]

    async def events(self, after: int) -> AsyncIterator[Record]:
        """Records above `after`, then new ones as they come, for ever."""
        tail = Tail(self._folder, after, damaged=bool(self.damage))
        while True:
            news = self._news
            for record in tail.new():
                yield record
            await news.wait()

    def _take(self, record: Record) -> None:
        data = record.data
        if record.kind == "plan":
            plan = msgspec.convert(data["plan"], Plan)
            self.plans[plan.id] = plan
        elif record.kind in ("run", "step"):
            plan_id, state = self.runs.get(data["run"], (data.get("plan", ""), Progress()))
            state = progress.fold(state, record.kind, data, record.t_unix_s)
            self.runs[data["run"]] = (plan_id, state)
        elif record.kind == "audit":
            self._take_audit(data)
        elif record.kind == "facts":
            self.facts[data["node"]] = data
        elif death := data.get("death"):
            self.deaths[data["job"]] = msgspec.convert(death, Death)
        if key := data.get("key"):
            self.said.add(tuple(key))
        self.told.take(record.kind, data, record.t_unix_s)
        self.incidents.take(record)
        self.record.take(record.kind, data, record.t_unix_s)

    def _take_audit(self, audit: dict[str, Any]) -> None:
        if audit.get("what") in ("freeze", "thaw"):
            self.freezes[audit["scope"]] = audit
        elif audit.get("what") == "relayed":
            self.missed[audit["scope"]] = set(audit["missed"])
        elif audit.get("what") in ("resume", "rollback", "aborted", "rolled-back") and audit["who"] != POLICY:
            self.steered.add(audit["run"])

    def unended(self) -> Iterator[str]:
        """Runs that have not come to an end."""
        return (run for run, (_, state) in self.runs.items() if state.state not in ENDS)
