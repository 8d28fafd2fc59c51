"""Cordons: whether new work may come to this node, and who said so. Kept over restarts."""

from pathlib import Path
from typing import Any

import msgspec

from gridagent.errors import ConfigError, Refused
from gridagent.identity import write_file
from gridagent.ops import arguments
from gridagent.wire import OpRequest

GRIDCTL = "gridctl"


class CordonState(msgspec.Struct, frozen=True):
    """What is remembered. `owner` "" means that there is no cordon."""

    owner: str = ""
    reason: str = ""
    quarantined: bool = False


class _Cordon(msgspec.Struct):
    reason: str
    owner: str = GRIDCTL
    quarantine: bool = False


class _Uncordon(msgspec.Struct):
    owner: str = GRIDCTL


class Cordons:
    """The node's own mark. Raises `ConfigError` on a damaged file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.state = CordonState()
        if path.exists():
            try:
                self.state = msgspec.json.decode(path.read_bytes(), type=CordonState)
            except (OSError, msgspec.MsgspecError) as error:
                raise ConfigError(
                    f"{path} is damaged ({error}); remove it, then cordon again if need be"
                ) from None

    def set(self, state: CordonState) -> dict[str, Any]:
        """Puts a state in force and returns the old one: the inverse needs it. Raises `OSError`."""
        before = self.state
        write_file(self._path, msgspec.json.encode(state), 0o600)
        self.state = state
        return {"before": msgspec.to_builtins(before), "now": msgspec.to_builtins(state)}


class Cordon:
    """node.cordon: takes the node out, unless somebody else already did: then their mark stays."""

    def __init__(self, cordons: Cordons) -> None:
        self._cordons = cordons

    def check(self, request: OpRequest) -> None:
        """Raises `Refused` without an owner."""
        if not arguments(request, _Cordon).owner:
            raise Refused("bad-request", "node.cordon needs an owner")

    async def run(self, request: OpRequest) -> Any:
        """Returns the state before and now."""
        args, before = arguments(request, _Cordon), self._cordons.state
        state = CordonState(args.owner, args.reason, args.quarantine)
        if before.owner not in ("", args.owner):
            state = CordonState(before.owner, before.reason, before.quarantined or args.quarantine)
        return self._cordons.set(state)


class Uncordon:
    """node.uncordon: lifts a cordon of the same owner, and with it a quarantine."""

    def __init__(self, cordons: Cordons) -> None:
        self._cordons = cordons

    def check(self, request: OpRequest) -> None:
        """Raises `Refused` for somebody else's cordon."""
        args, state = arguments(request, _Uncordon), self._cordons.state
        if state.owner not in ("", args.owner):
            raise Refused(
                "not-owner",
                f"{state.owner} cordoned this node ({state.reason}); only {state.owner} lifts that",
            )

    async def run(self, request: OpRequest) -> Any:
        """Returns the state before and now."""
        return self._cordons.set(CordonState())
