"""Freezes: a stop that the node honours by itself, controller or not, until somebody thaws it."""

from pathlib import Path

import msgspec

from gridagent.errors import ConfigError, Refused
from gridagent.identity import write_file
from gridagent.wire import FreezeRequest

#: What may still be done in a frozen scope: it leads back to undisturbed training, or has no effect on it.
STILL_ALLOWED = frozenset({"handover.abort", "handover.retire", "run.end"})


class Freezes:
    """Frozen scopes ("fleet" or a job id), kept over restarts. Raises `ConfigError` on a damaged file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scopes: dict[str, FreezeRequest] = {}
        self._saved = True  #: the disk has what is in force
        if path.exists():
            try:
                self._scopes = msgspec.json.decode(path.read_bytes(), type=dict[str, FreezeRequest])
            except (OSError, msgspec.MsgspecError) as error:
                raise ConfigError(
                    f"{path} is damaged ({error}); remove it, then freeze again if need be"
                ) from None

    @property
    def scopes(self) -> list[str]:
        return sorted(self._scopes)

    @property
    def by(self) -> dict[str, str]:
        """Scope -> who froze it, and in brackets why."""
        return {scope: f"{freeze.who} ({freeze.reason})" for scope, freeze in sorted(self._scopes.items())}

    def put(self, request: FreezeRequest) -> str:
        """Freezes or thaws a scope at once, whatever the disk says. Returns what `save` does."""
        scopes = {scope: freeze for scope, freeze in self._scopes.items() if scope != request.scope}
        if request.frozen:
            scopes[request.scope] = request
        self._scopes, self._saved = scopes, False
        return self.save()

    def save(self) -> str:
        """Writes what is in force, unless the disk has it. Returns why it could not be written, else ""."""
        if not self._saved:
            try:
                write_file(self._path, msgspec.json.encode(self._scopes), 0o600)
            except OSError as error:
                return str(error)
            self._saved = True
        return ""

    def check(self, kind: str, jobs: set[str]) -> None:
        """Raises `Refused` if an operation of this kind on one of these jobs is frozen."""
        for scope in ("fleet", *sorted(jobs)):
            freeze = self._scopes.get(scope)
            if freeze and kind not in STILL_ALLOWED:
                raise Refused(
                    "frozen",
                    f"{scope} was frozen by {freeze.who} ({freeze.reason}); thaw it to let {kind} through",
                )
