"""The operations of this node as its journal tells them. A record is on the disk before its effect.

How a rank was started is not among what is written: a command line may hold what nobody should read.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from gridagent.errors import ConfigError, Refused
from gridagent.journal import Journal, JournalError, JournalFull, read, verify
from gridagent.wire import OpRequest, OpStatus, plain


class Entry(msgspec.Struct):
    """One accepted operation and how far it came."""

    request: OpRequest
    status: OpStatus
    sha256: str  #: of the request's args as they were given
    t_end_unix_s: float = 0.0


class OpLog:
    """Opens the journal and reads it. Raises `JournalError`, and `ConfigError` if somebody changed it.

    An operation that was accepted and never ended is `interrupted`: the agent died in it, and
    whether its effect took place must be found out by looking.
    """

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder)
        self.entries: dict[str, Entry] = {}
        found = verify(folder)
        if not found.ok:
            self._journal.close()
            raise ConfigError(
                f"record {found.first_bad} of {folder}: {found.what}. What this node did cannot be relied on:"
                " find out who did that, then put a sound copy there or move the folder away"
            )
        for record in read(folder):
            if record.kind == "step":
                self._replay(record.data, record.t_unix_s)
        for entry in self.entries.values():
            if entry.status.state == "accepted":
                entry.status = msgspec.structs.replace(
                    entry.status,
                    state="interrupted",
                    error="the agent ended in the middle of it; look at the effect",
                )

    def accept(self, request: OpRequest, actor: str) -> Entry:
        """Raises `Refused` (disk-full, journal); then nothing was accepted."""
        written = {
            "event": "accepted",
            "request": plain(_written(request)),
            "args_sha256": args_digest(request),
        }
        t_unix_s = self._append(actor, written)
        return self._replay({**written, "request": plain(request)}, t_unix_s)

    def end(self, entry: Entry, actor: str, *, error: str = "", value: Any = None) -> None:
        """Records how an operation ended. Without space the end is remembered until the agent ends."""
        data = {
            "event": "failed" if error else "done",
            "id": entry.request.id,
            "error": error,
            "value": value,
        }
        try:
            t_unix_s = self._append(actor, data)
        except Refused as refused:
            t_unix_s = entry.status.t_unix_s
            data["error"] = f"{error} (not in the journal: {refused})" if error else ""
        self._replay(data, t_unix_s)

    def note(self, actor: str, data: dict[str, Any]) -> None:
        """Records something that is no operation: a freeze, a revocation list. Raises `Refused`."""
        self._append(actor, data, kind="audit")

    def close(self) -> None:
        """Gives the journal back."""
        self._journal.close()

    def _append(self, actor: str, data: dict[str, Any], kind: str = "step") -> float:
        try:
            return self._journal.append(kind, actor, data).t_unix_s
        except JournalFull as error:
            raise Refused("disk-full", f"nothing was done: {error}") from None
        except JournalError as error:
            raise Refused("journal", f"nothing was done: {error}") from None

    def _replay(self, data: dict[str, Any], t_unix_s: float) -> Entry:
        """One record's meaning, when it is written and when it is read again."""
        if data["event"] == "accepted":
            request = msgspec.convert(data["request"], OpRequest)
            status = OpStatus(
                id=request.id, kind=request.kind, run=request.run, state="accepted", t_unix_s=t_unix_s
            )
            sha256 = data.get("args_sha256") or args_digest(request)
            entry = self.entries[request.id] = Entry(request, status, sha256)
        else:
            entry = self.entries[data["id"]]
            entry.t_end_unix_s = t_unix_s
            entry.status = msgspec.structs.replace(
                entry.status, state=data["event"], error=data["error"], value=data["value"]
            )
        return entry


_canonical = msgspec.json.Encoder(order="deterministic").encode


def args_digest(request: OpRequest) -> str:
    """SHA-256 over the args' JSON, keys in order."""
    return hashlib.sha256(_canonical(request.args)).hexdigest()


def _written(request: OpRequest) -> OpRequest:
    """The request as the journal has it: a launch by its job, its rank and its digest."""
    launch = request.args.get("launch")
    if not isinstance(launch, dict):
        return request
    told = {"job": launch.get("job"), "rank": launch.get("rank")}
    told["sha256"] = hashlib.sha256(_canonical(launch)).hexdigest()
    return msgspec.structs.replace(request, args={**request.args, "launch": told})
