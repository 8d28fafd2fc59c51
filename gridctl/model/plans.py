"""What is intended: plans, their steps and calls, and the gate in front of them."""

from typing import Any

import msgspec

from gridagent.wire import Blocker, Member

#: An agent's refusal to end a spare that is parked, or another run's: this run never had it.
NOT_TAKEN = "not-taken"
#: Who wants the plans that nobody asked for.
PROPOSER = "gridctl"


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/plan: what somebody wants."""

    node: str  #: the node that should be left
    to: str = ""  #: the node of the spare; "" lets gridctl choose
    job: str = ""  #: needed only where ranks of several jobs run on the node
    devices: list[str] = []  #: ["gpu:1"]: only the ranks on these devices; [] moves all ranks of the node
    assume_dead: bool = False  #: the node does not answer, and a person says that what ran there is dead
    incident: str = ""  #: "" opens one of kind "manual"
    who: str = ""
    runbook: str = "hot-swap"  #: or "reset": of the one device in `devices`, a reboot where there is none
    waiver: str = ""  #: of a reset: why it goes on without evidence, in a person's words


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One rank changes its process."""

    rank: int
    source: Member  #: who gives the state: the rank's own process, or a deputy where that has died
    target: Member
    origin: str = ""  #: the node that the rank leaves: how it was started is registered there
    origin_url: str = ""
    holder: str = ""  #: session that is left there, frozen, once the new process trains; "": none
    dead: bool = False  #: its process has died: `source` is the deputy, a survivor
    gpus: list[int] = []  #: at the origin


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan costs, before anybody confirms it. Durations are estimates, not promises."""

    steps_lost: int
    pause_s: float
    preparation_s: float  #: training goes on meanwhile
    state_bytes: int
    usd: float | None = None  #: of the pause, all ranks waiting; None without a price
    basis: str = ""  #: what the estimate rests on
    now_gpu_h: float = 0.0  #: acting now, against waiting `defer_h`: see `gridctl.assess.costs`
    deferred_gpu_h: float = 0.0
    defer_h: float = 24.0
    p_fault: float = 0.0  #: of the node that is left, within `defer_h`
    p_fault_basis: str = ""
    comparison: list[str] = []  #: every part of both, one line each, with what it rests on


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of an agent, as data.

    A value in `args` may be a reference that is resolved when the call is made:
    `{"$result": [STEP, INDEX]}` is the value of an earlier call of the same run, and
    `{"$launch": {"node", "job", "rank", "sha256"}}` is fetched from that node's agent and must have
    this digest; with "as" it becomes that of another rank. So a command line never stands in a plan or a
    journal.
    """

    node: str
    url: str
    kind: str
    job: str = ""
    args: dict[str, Any] = {}
    deadline_s: float = 60.0
    tolerate: list[str] = []  #: refusal codes that mean "already so"
    #: Of an inverse, [STEP, INDEX]: not made where it is known that this call of that step had no effect.
    undoes: list[Any] = []


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step: its calls are made at the same time, and all must succeed."""

    name: str
    text: str
    calls: list[Call] = []
    precheck: str = ""  #: name of a check in `gridctl.runbook.checks`, "" for none
    verify: str = ""  #: likewise, after the calls
    inverse: list[Call] = []
    stays_after: str = ""  #: name of a later step: once its calls may have had an effect, this is not undone
    deadline_s: float = 60.0
    hasty: bool = False  #: long calls that turning back ends: turned back at the first failure, not the last
    commits: bool = False  #: the point of no return: how it ended is asked for until it is known
    watch_steps: int = 0  #: instead of calls: so many steps of the job are waited for


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is confirmed is what is run: `digest` covers everything else in here."""

    id: str
    runbook: str
    incident: str
    who: str
    node: str
    job: str
    devices: list[str]
    created_unix_s: float
    expires_unix_s: float
    steps: list[Step]
    relied_on: dict[str, str]  #: facts that must not have changed when the plan is applied
    # of a hand-over
    handover: str = ""
    epoch_from: int = 0
    epoch_to: int = 0
    chair: Member | None = None
    moves: list[Move] = []
    members: list[Member] = []
    cost: Cost = Cost(steps_lost=0, pause_s=0.0, preparation_s=0.0, state_bytes=0)
    bit_identical: bool = False
    standing: bool = False  #: the job stands in a spoilt step, and this brings it on
    assume_dead: bool = False  #: `node` does not answer, and a person says that what ran there is dead
    # of a reset
    action: str = ""  #: what it is in the words of `gridctl.model.actions`
    waiver: str = ""  #: why it goes on without evidence; "": it does not
    blockers: list[Blocker] = []  #: none is fatal: a plan with a fatal one is never made
    notes: list[str] = []
    digest: str = ""

    @property
    def nodes(self) -> set[str]:
        """Those that take part. A node that is taken for dead does not."""
        return {member.node for member in self.members} or {self.node}

    @property
    def command(self) -> str:
        """What makes another plan like this."""
        if self.runbook == "reset":
            what = f"--gpu {self.devices[0].removeprefix('gpu:')}" if self.devices else "--reboot"
            return f"gridctl reset plan {self.node} {what}"
        return f"gridctl swap plan {self.node}"

    @property
    def purpose(self) -> str:
        """What becomes of the node, in a few words."""
        if self.runbook == "reset":
            return (
                f"{self.devices[0]} of {self.node} is reset" if self.devices else f"{self.node} is rebooted"
            )
        return f"{self.job} leaves {self.node}"


class DryCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as a dry run shows it."""

    step: str
    when: str  #: "do" or "undo"
    method: str
    url: str
    kind: str = ""
    args: dict[str, Any] = {}


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How somebody agreed: by typing the name that is asked for, or with --yes. Both need a reason."""

    who: str
    digest: str = ""  #: of the plan that was looked at; nothing but a plan has one
    reason: str = ""
    typed: str = ""
    yes: bool = False
