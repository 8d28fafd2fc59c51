"""Every message that crosses a process border, versioned.
* agent <-> training process or parked spare, over the node's Unix socket: length-prefixed msgpack
  (`gridagent.framing`), the unions `FromSession` and `ToSession`;
* controller -> agent and agent -> agent, over HTTPS with client certificates: JSON;
* agent -> controller, the resumable stream: one JSON `StreamRecord` a line.
A reader ignores fields that it does not know. A change that an older one would misunderstand raises
`WIRE_VERSION`; both ends compare it when they meet.
"""

from typing import Any

import msgspec

WIRE_VERSION = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages: immutable, keyword only, defaults are not sent."""


# ---- Unix socket: training process (or parked spare) -> agent


class Hello(Message, tag="hello"):
    """First frame of a session. Sent again after every reconnect, and whenever role or state change."""

    role: str  #: "rank" (a live rank of a job) or "spare" (parked, without a rank)
    session: str  #: random id of this process's session, constant over reconnects
    pid: int
    job: str = ""
    rank: int = -1
    world_size: int = 0
    epoch: int = 0
    step: int = 0
    facts: dict[str, str] = {}  #: what decides numerics: torch, threads, CPU flags, GPU, ...
    environment: dict[str, str] | None = None  #: variable -> digest: `gridagent.environment`; None: unknown
    state: str = ""  #: as in RankStatus or SpareStatus; "": training, or parked
    ward: int = -1  #: as in RankStatus
    gpus: list[int] = []  #: device indices on the node that a spare was given
    wire: int = WIRE_VERSION


class StepEntry(msgspec.Struct, frozen=True, array_like=True):
    """One finished training step, as the training thread saw it."""

    step: int
    t_unix_s: float
    step_s: float  #: time since the previous step ended
    loss: float | None = None
    grad_norm: float | None = None


class Progress(Message, tag="progress"):
    """Steps that ended since the last such message (sent a few times a second, never per step)."""

    job: str
    rank: int
    epoch: int
    entries: list[StepEntry]


class Phase(Message, tag="phase"):
    """A hand-over reached a phase in this process."""

    handover: str
    phase: str
    t_unix_s: float
    detail: dict[str, Any] = {}


class Reply(Message, tag="reply"):
    """Answer to a `Command`."""

    id: int
    ok: bool
    value: Any = None
    error: str = ""


class Ask(Message, tag="ask"):
    """The session wants of its agent: "meet" (args: `MeetRequest` fields + url) -> `MeetReply`; "damage" (a
    drill wants to spoil what is handed over: may it?) -> {}, or a refusal."""

    id: int
    kind: str
    args: dict[str, Any] = {}


class Farewell(Message, tag="farewell"):
    """The session ends on purpose. `digests` is the proof of the final state, by category."""

    reason: str  #: "finished", "released" (source after a swap), "retired" (discarded spare), "failed"
    step: int = 0
    epoch: int = 0
    digests: dict[str, str] = {}


FromSession = Hello | Progress | Phase | Reply | Ask | Farewell


# agent -> training process


class Command(Message, tag="command"):
    """The agent asks the session to do something; exactly one `Reply` with the same id follows.

    Kinds and their args (a struct below, as a dict) -> value of the reply:
    describe        {}                     `SessionReport`
    specialise      `Specialise`           `SessionReport`, once warmed up (parked spares only)
    open            `HandoverOpen`         `ChairOffer` (the chair only): listens, hosts the new store
    meet            `MeetRequest`          `MeetReply`: key agreement for one sealed channel
    join            `HandoverJoin`         {} once the groups of the next epoch stand
    cut             `HandoverCut`          `CutReport` (the chair only): arm ... resume, or abort
    abort           {handover, reason}     {} ; drops what was prepared, never after a commit
    release         {handover}             {} ; a frozen source ends its process
    retire          {handover, reason}     {} ; a spare specialised for this hand-over ends its process
    digest          {}                     {"step", "epoch", "digests"} at the next boundary
    """

    id: int
    kind: str
    args: dict[str, Any] = {}
    deadline_s: float = 30.0


class Answer(Message, tag="answer"):
    """Answer to an `Ask`."""

    id: int
    ok: bool
    value: Any = None
    error: str = ""


ToSession = Command | Answer


# ---- What the commands carry


class Blocker(Message):
    """Why a swap is impossible, or possible but not bit-identical."""

    code: str  #: stable word, e.g. "unregistered-tensor", "threads-differ"
    text: str  #: what, where, what to do next
    fatal: bool  #: True: not possible. False: possible, not bit-identical


class SessionReport(Message):
    """What a session says of itself; the pre-flight compares a source's with a spare's."""

    role: str
    job: str
    rank: int
    world_size: int
    epoch: int
    step: int
    pid: int
    state_bytes: dict[str, int] = {}  #: category (parameters, optimizer, buffers, rng, other) -> bytes
    groups: list[str] = []  #: "name:rank,rank,..." in creation order
    buckets: str = ""  #: DDP's rebuilt bucket layout, "" where there is no DDP
    inventory: str = ""  #: digest over names, dtypes and shapes of all state tensors
    facts: dict[str, str] = {}
    environment: dict[str, str] | None = None  #: as in Hello
    blockers: list[Blocker] = []
    step_s_median: float = 0.0


class LaunchSpec(Message):
    """How a rank was started (registered by `gridagent exec`), so that a spare can become it."""

    job: str
    rank: int
    world_size: int
    argv: list[str]  #: as after `--`, e.g. ["python", "train.py", "--lr", "3e-4"]
    cwd: str
    env: dict[str, str] = {}  #: allow-listed names only; those like *_KEY, *TOKEN*, *SECRET*, *PASS* never
    withheld: int = 0  #: so many variables look like secrets: they are neither in `env` nor compared
    local_rank: int = 0
    gpus: list[int] = []  #: device indices on the node; [] on CPU
    python: str = ""  #: sys.version of the interpreter


class Specialise(Message):
    """A parked spare becomes rank `launch.rank` of the job: runs the script against stand-in groups."""

    handover: str
    launch: LaunchSpec
    epoch: int
    step: int  #: the job's step about now: a script that makes groups late sees a realistic number
    warmup_steps: int = 3
    buckets: str = ""  #: the job's DDP bucket layout, replayed by the stand-in


class Member(Message):
    """One process of a hand-over. A source whose session is a survivor's stands for a rank whose process has
    died: that survivor, its deputy, has its state from its own replica and from its memory of the rank."""

    role: str  #: "survivor", "source" or "target"
    rank: int
    node: str
    url: str  #: https URL of the node's agent
    session: str  #: session id of the process
    mark: str = ""  #: of a rank that a deputy stands for: see `RankStatus.mark`


class HandoverOpen(Message):
    """The chair opens a hand-over. `members` also says which node may meet as which (role, rank)."""

    handover: str  #: transfer id; never reused, keys are bound to it
    job: str
    epoch_from: int
    epoch_to: int
    members: list[Member]
    ttl_s: float = 120.0  #: whatever was prepared is dropped by itself after this


class ChairOffer(Message):
    """Where the new epoch's store listens. The nonce proves that the right server answered."""

    store_host: str
    store_port: int
    nonce: str


class HandoverJoin(Message):
    """A member joins: meets the chair, builds the next epoch's groups, a source meets its target."""

    handover: str
    job: str
    epoch_from: int
    epoch_to: int
    me: Member
    chair: Member
    members: list[Member]
    store: ChairOffer
    ttl_s: float = 120.0
    arm_deadline_s: float = 20.0  #: bounds of the cut, the same for all: see `HandoverCut`
    cut_deadline_s: float = 10.0
    resume_deadline_s: float = 10.0
    frozen_s: float = 1800.0  #: a source ends so long after it gave its rank away, if nobody releases it
    standing: bool = False  #: all ranks stand in a spoilt step: that step, or the next, is the boundary
    damage: str = ""  #: spoils the transfer on purpose; agents refuse it unless started to allow it


class MeetRequest(Message):
    """One process asks another for a sealed channel: X25519 public key in, public key out.

    Goes process -> own agent -> (mutual TLS) -> peer's agent -> peer process. The peer's agent
    checks that the caller's certificate names the node of `role`/`rank` in the hand-over.
    """

    handover: str
    role: str  #: role of the caller
    rank: int  #: rank of the caller
    purpose: str  #: "star" (member -> chair) or "state" (source -> target)
    to_session: str  #: session id of the process that is to be met
    public_key: bytes  #: 32 bytes, X25519


class MeetReply(Message):
    """Where the process that was met listens, and its half of the key agreement."""

    public_key: bytes
    host: str
    port: int


class HandoverCut(Message):
    """The chair runs arm -> boundary -> capture -> verify -> commit -> resume. All bounds in seconds."""

    handover: str
    lead_steps: int = 3  #: boundary S = the chair's step + this
    arm_deadline_s: float = 20.0  #: all must have armed and reached S by then, else abort
    cut_deadline_s: float = 10.0  #: from the first rank at S to the outcome, else abort
    resume_deadline_s: float = 10.0  #: from commit to the new epoch's first step, else the old members go on


class CutReport(Message):
    """How a cut ended. Every duration is measured on one clock (the chair's, or the named process's)."""

    handover: str
    outcome: str  #: "commit", "abort" or "returned" (committed, but the target died before any step)
    epoch: int  #: the epoch that trains on
    boundary_step: int
    reason: str = ""  #: why not commit
    found: list[str] = []  #: what verification found, one line each
    parts_ms: dict[str, float] = {}  #: capture, transport, verify, switch
    cut_ms: float = 0.0
    state_bytes: int = 0
    digests: dict[str, dict[str, str]] = {}  #: rank -> category -> digest, equal at both ends
    owners: dict[str, str] = {}  #: rank -> session id
    t_boundary_unix_s: float = 0.0
    t_resume_unix_s: float = 0.0


# ---- HTTPS: controller -> agent


class RankStatus(Message):
    """A live training process on this node."""

    job: str
    rank: int
    world_size: int
    session: str
    pid: int
    epoch: int
    step: int
    connected: bool
    #: training, standing (in a step that a peer's death spoilt: nobody has applied it, or all will), frozen
    #: (a source after commit), finished, lost
    state: str = "training"
    ward: int = -1  #: while it stands: the rank whose small rank-local state it keeps
    mark: str = ""  #: of a process that is gone: "STEP DIGEST", what it wrote down last of its small state
    t_step_unix_s: float = 0.0
    step_s_median: float = 0.0
    loss: float | None = None
    gpus: list[int] = []
    digests: dict[str, str] = {}  #: of a finished session


class SpareStatus(Message):
    """A parked process that can take a rank."""

    session: str
    pid: int
    connected: bool
    state: str  #: parked, specialising, warm, spent (failed or aborted: it can only be retired)
    facts: dict[str, str] = {}
    environment: dict[str, str] | None = None  #: as in Hello
    gpus: list[int] = []


class OpStatus(Message):
    """How an operation stands; `value` is what its kind answers, once it is done."""

    id: str
    kind: str
    run: str
    state: str  #: accepted, done, failed, interrupted (the agent died in it)
    t_unix_s: float
    error: str = ""
    value: Any = None


class NodeStatus(Message):
    """GET /v1/status"""

    node: str
    url: str
    serial: str  #: chassis serial: "the replacement is the same machine" is noticed by it
    boot_id: str
    version: str
    now_unix_s: float  #: skew is noticed by it
    rack: str = ""
    nvlink_domain: str = ""
    cooling_zone: str = ""
    gpus: int = 0
    gpu_model: str = ""
    driver: str = ""
    cordoned: bool = False
    cordon_reason: str = ""
    cordon_owner: str = ""  #: who set it: only gridctl's own cordon is ever lifted by gridctl
    quarantined: bool = False
    frozen: list[str] = []  #: scopes: "fleet" or a job id
    frozen_by: dict[str, str] = {}  #: scope -> who froze it, and in brackets why
    fence: int = 0
    lease_holder: str = ""
    lease_left_s: float = 0.0
    cert_not_after_unix_s: float = 0.0
    attestation: str = "not_attested"
    ranks: list[RankStatus] = []
    spares: list[SpareStatus] = []
    complete: bool = True  #: False: sessions that an agent before this one had may be on their way here
    marks: dict[str, str] = {}  #: session -> RankStatus.mark, of processes that this agent does not know
    running_op: str = ""
    resets: list[str] = []  #: what agent.toml has a command for: "gpu", "reboot"
    stream_seq: int = 0
    wire: int = WIRE_VERSION


class LeaseRequest(Message):
    """POST /v1/lease. Granted if no other holder's lease is live and `fence` exceeds the highest seen
    (or equals it, from the same holder: a renewal). `ttl_s` 0 gives the lease back."""

    holder: str
    fence: int
    ttl_s: float = 15.0


class LeaseReply(Message):
    """Who holds the node's lease now, and for how long yet."""

    granted: bool
    fence: int  #: highest seen
    holder: str
    left_s: float = 0.0


class FreezeRequest(Message):
    """POST /v1/freeze. Honoured by the agent itself: while frozen it refuses every effect but abort."""

    scope: str  #: "fleet" or a job id
    frozen: bool
    who: str
    reason: str


class FreezeReply(Message):
    """The freeze, or thaw, is in force. `durable` False: not on the agent's disk yet; `text` says why."""

    durable: bool = True
    text: str = ""


class OpRequest(Message):
    """POST /v1/ops. Journaled before its effect; the same id twice is answered from the journal.

    kinds: handover.specialise|open|join|cut|abort|release|retire (args: the struct above, plus `session`),
    node.cordon {reason, owner="gridctl", quarantine}, node.uncordon {owner="gridctl"}, run.end {} (the run
    lets go of the node), spare.park {count, gpus}, job.describe {session}, evidence.collect {incident}
    -> `Evidence`, node.reset {boot, device} -> `ResetReport`.
    """

    id: str
    run: str
    fence: int
    holder: str
    who: str
    kind: str
    job: str = ""
    args: dict[str, Any] = {}
    deadline_s: float = 60.0


class ResetReport(Message):
    """How the command ended that resets a device, or reboots the node: where no device is named."""

    status: int | None = None  #: its exit status; None: not known, the node has booted since
    text: str = ""  #: what it printed, bounded and without secrets, or why it was not begun
    t_unix_s: float = 0.0  #: when it had ended, by the node's clock


class EvidenceItem(Message):
    """One file of an archive of evidence, or what could not be had: then without a digest."""

    name: str
    bytes: int = 0
    sha256: str = ""
    note: str = ""  #: what is missing or was cut, and why


class Evidence(Message):
    """An archive (tar.gz) in the agent's home; GET /v1/evidence/ID gives its bytes, a part at a time."""

    id: str
    bytes: int
    sha256: str
    t_unix_s: float  #: when the collection began
    items: list[EvidenceItem] = []


class Refusal(Message):
    """Body of every 4xx/5xx answer."""

    code: str  #: stable word: fenced, frozen, busy, forbidden, unknown-op, disk-full, bad-request, ...
    text: str  #: what, to what, what to do next


class MeetCall(Message):
    """POST /v1/meet, agent -> agent, certificate role "node"."""

    request: MeetRequest


# ---- HTTPS: agent -> controller, GET /v1/stream?after=SEQ


class StreamRecord(Message):
    """One line of the stream, and of the spool. `seq` rises by one per node and never repeats.

    `kind` and `v` follow the recording format (sample, log, beat, progress, probe, note) plus
    `phase` (hand-over phases), `op` (what the agent carried out), `session` (hello, farewell, lost)
    and `gap` (records that had to be dropped, with their number).
    """

    seq: int
    boot: str
    t_unix_s: float
    node: str
    kind: str
    v: dict[str, Any] = {}


def plain(message: Message) -> dict[str, Any]:
    """The message as a dict of builtins, e.g. to become the `args` of a `Command`."""
    value: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return value
