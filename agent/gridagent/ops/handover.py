"""Hand-over operations are errands: checked, then relayed to the session that carries them out.

The agent also remembers the members of each hand-over it relays, because they say who may meet
whom: a sealed channel is only arranged between processes of one hand-over, and only with the node
whose certificate the member list names.
"""

import time
from typing import Any

import msgspec

from gridagent.errors import OpFailed, Refused, SessionLost
from gridagent.identity import Peer
from gridagent.launch import Launches
from gridagent.ops import arguments
from gridagent.ops.log import OpLog
from gridagent.ops.node import Cordons
from gridagent.redact import is_secret
from gridagent.sessions import Sessions
from gridagent.wire import (
    HandoverCut,
    HandoverJoin,
    HandoverOpen,
    MeetReply,
    MeetRequest,
    Member,
    OpRequest,
    Specialise,
    plain,
)


class _Abort(msgspec.Struct):
    handover: str
    reason: str


class _Release(msgspec.Struct):
    handover: str


class _Retire(msgspec.Struct):
    handover: str
    reason: str


class _Describe(msgspec.Struct):
    pass


class _ToSession(msgspec.Struct):
    session: str


class _Told(msgspec.Struct):
    """What an open and a join have in common, as far as this agent cares."""

    handover: str
    members: list[Member]
    ttl_s: float = 120.0


#: Kind -> what its args must be, besides `session`.
RELAYED: dict[str, type[msgspec.Struct]] = {
    "handover.specialise": Specialise,
    "handover.open": HandoverOpen,
    "handover.join": HandoverJoin,
    "handover.cut": HandoverCut,
    "handover.abort": _Abort,
    "handover.release": _Release,
    "handover.retire": _Retire,
    "job.describe": _Describe,
}
MEET_DEADLINE_S = 10.0


class Relay:
    """Every relayed kind but specialise."""

    def __init__(self, sessions: Sessions, handovers: "Handovers") -> None:
        self._sessions = sessions
        self._handovers = handovers

    def check(self, request: OpRequest) -> None:
        """Raises `Refused` for wrong args or a session that is not here."""
        arguments(request, RELAYED[request.kind])
        session_of(request, self._sessions)

    async def run(self, request: OpRequest) -> Any:
        """Returns the session's reply."""
        self._handovers.remember(request)
        session = arguments(request, _ToSession).session
        return await self._sessions.command(session, *_command(request), request.deadline_s)


class SpecialiseSpare(Relay):
    """handover.specialise: a parked spare learns its rank, and this node how that rank was started."""

    def __init__(
        self, sessions: Sessions, handovers: "Handovers", launches: Launches, cordons: Cordons
    ) -> None:
        super().__init__(sessions, handovers)
        self._launches = launches
        self._cordons = cordons

    def check(self, request: OpRequest) -> None:
        """Raises `Refused` also if it is not parked, for a quarantined node, for a secret in the launch."""
        super().check(request)
        spare = session_of(request, self._sessions)
        if spare.role != "spare" or spare.state != "parked":
            raise Refused(
                "bad-request", f"session {spare.id} is no parked spare but {spare.role}, {spare.state}"
            )
        if self._cordons.state.quarantined:
            raise Refused(
                "quarantined", f"this node is quarantined: {self._cordons.state.reason}; choose another"
            )
        secrets = sorted(name for name in arguments(request, Specialise).launch.env if is_secret(name))
        if secrets:
            raise Refused(
                "bad-request", f"the launch carries {', '.join(secrets)}: secrets never travel with it"
            )

    async def run(self, request: OpRequest) -> Any:
        """Returns the session's `SessionReport`, once it is warm."""
        spare = session_of(request, self._sessions)
        self._launches.promise(spare.id, arguments(request, Specialise).launch)
        spare.state = "specialising"
        try:
            value = await super().run(request)
        except BaseException:
            spare.state = "spent"
            self._launches.forget(spare.id)
            raise
        if spare.state == "specialising":
            spare.state = "warm"
        return value


class RetireSpare(Relay):
    """handover.retire: a spare ends, if it is this hand-over's. The process itself has the last word."""

    def check(self, request: OpRequest) -> None:
        """Raises `Refused` not-taken also if this node knows it to be parked, or another hand-over's."""
        super().check(request)
        spare, handover = session_of(request, self._sessions), arguments(request, _Retire).handover
        owner = self._handovers.owner(spare.id)
        if owner not in ("", handover) or (not owner and spare.role == "spare" and spare.state == "parked"):
            what = f"specialised for hand-over {owner}" if owner else "parked"
            raise Refused(
                "not-taken", f"session {spare.id} is {what}: it is not hand-over {handover}'s to end"
            )


class Handovers:
    """Who belongs to which hand-over, as far as this node was told; what is forgotten is refused."""

    def __init__(self, log: OpLog, node: str) -> None:
        self._node = node
        self._members: dict[str, tuple[float, list[Member]]] = {}  #: hand-over -> until when (monotonic), who
        self._owners: dict[str, str] = {}  #: session of a spare -> the hand-over that it was specialised for
        for entry in log.entries.values():
            # The wall clock tells only of the time before this agent, and is not believed if it was set back.
            self.remember(entry.request, max(0.0, time.time() - entry.status.t_unix_s))

    def remember(self, request: OpRequest, age_s: float = 0.0) -> None:
        """Takes the members of an open or join over, until its time to live is over; whose a spare is."""
        now_s = time.monotonic()
        self._members = {key: known for key, known in self._members.items() if known[0] > now_s}
        if request.kind in ("handover.open", "handover.join"):
            told = msgspec.convert(request.args, _Told)
            if told.ttl_s > age_s:
                self._members[told.handover] = (now_s + told.ttl_s - age_s, told.members)
        elif request.kind == "handover.specialise":
            self._owners[request.args["session"]] = request.args["handover"]

    def owner(self, session: str) -> str:
        """The hand-over for which this node has had a spare specialised; "" for none."""
        return self._owners.get(session, "")

    def check_outgoing(self, request: MeetRequest, url: str, session: str) -> Member:
        """The member that `session` wants to meet at `url`. Raises `OpFailed` for anybody else."""
        members = self._of(request.handover)
        target = _find(members, request.to_session)
        callers = [(m.role, m.rank) for m in members if m.session == session]  # a deputy is two members
        if (request.role, request.rank) not in callers:
            raise OpFailed(f"session {session} is not {request.role} {request.rank} of {request.handover}")
        if target is None or target.url.rstrip("/") != url.rstrip("/"):
            raise OpFailed(f"{url} with session {request.to_session} is no member of {request.handover}")
        return target

    def check_incoming(self, request: MeetRequest, peer: Peer) -> None:
        """Raises `Refused` unless `peer` is the node that may make this request, for a session here."""
        members = self._of(request.handover)
        if not members:
            raise Refused("starting", f"this node was told nothing of hand-over {request.handover} yet")
        callers = [m for m in members if (m.role, m.rank, m.node) == (request.role, request.rank, peer.name)]
        if peer.role != "node" or not callers:
            raise Refused(
                "forbidden",
                f"{peer.name} is not the node of {request.role} {request.rank} in {request.handover}",
            )
        target = _find(members, request.to_session)
        if target is None or target.node != self._node:
            raise Refused(
                "forbidden", f"session {request.to_session} is no member of {request.handover} here"
            )

    def _of(self, handover: str) -> list[Member]:
        until_s, members = self._members.get(handover, (0.0, []))
        return members if until_s > time.monotonic() else []


async def meet_here(sessions: Sessions, request: MeetRequest) -> MeetReply:
    """Asks the session on this node. Raises `OpFailed`, `Refused`."""
    _living(request.to_session, sessions)
    value = await sessions.command(request.to_session, "meet", plain(request), MEET_DEADLINE_S)
    try:
        return msgspec.convert(value, MeetReply)
    except msgspec.ValidationError as error:
        raise OpFailed(f"session {request.to_session} answered no MeetReply: {error}") from None


def session_of(request: OpRequest, sessions: Sessions) -> Any:
    """The session that a request names. Raises `Refused`."""
    return _living(arguments(request, _ToSession).session, sessions)


def _living(session: str, sessions: Sessions) -> Any:
    try:
        return sessions.get(session)
    except SessionLost as error:
        if not sessions.complete:
            raise Refused("starting", f"{error}; this agent is new: try again in a moment") from None
        raise Refused("not-found", str(error)) from None


def jobs_of(request: OpRequest, sessions: Sessions) -> set[str]:
    """All jobs that a request touches, whatever it says of itself."""
    launch = request.args.get("launch")
    named = [request.job, request.args.get("job"), launch.get("job") if isinstance(launch, dict) else ""]
    session = request.args.get("session")
    if isinstance(session, str):
        try:
            named.append(sessions.get(session).job)
        except SessionLost:
            pass  # refused later, by its effect
    return {job for job in named if isinstance(job, str) and job}


def _command(request: OpRequest) -> tuple[str, dict[str, Any]]:
    args = {key: value for key, value in request.args.items() if key != "session"}
    return request.kind.partition(".")[2], args


def _find(members: list[Member], session: str) -> Member | None:
    return next((member for member in members if member.session == session), None)
