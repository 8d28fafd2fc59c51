"""Who may steer this node: the highest fence ever seen, and the live lease on it.

Both outlive the agent. The time left is counted on the monotonic clock, so a stepped clock neither
ends nor prolongs a lease; only over a restart the wall clock must do, and then a lease lasts at
most as long as it was granted for.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from gridagent.errors import ConfigError, Refused
from gridagent.identity import write_file
from gridagent.wire import LeaseReply, LeaseRequest

TTL_S_MAX = 120.0


class _Stored(msgspec.Struct, frozen=True):
    fence: Annotated[int, msgspec.Meta(ge=0)]  # never left out: a forgotten fence lets an old controller in
    holder: str = ""
    ttl_s: float = 0.0
    until_unix_s: float = 0.0


class Lease:
    """Raises `ConfigError` on an unreadable file: forgetting a fence would let an old controller in."""

    def __init__(
        self,
        path: Path,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._monotonic = monotonic
        self._wall = wall
        stored = _Stored(0)
        if path.exists():
            try:
                stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
            except (OSError, msgspec.MsgspecError) as error:
                raise ConfigError(f"{path} is damaged ({error}); remove it once no controller runs") from None
        self.fence = stored.fence
        self.holder = stored.holder
        left_s = min(max(stored.until_unix_s - wall(), 0.0), stored.ttl_s)
        self._until_s = monotonic() + left_s

    @property
    def left_s(self) -> float:
        return max(self._until_s - self._monotonic(), 0.0)

    @property
    def live(self) -> bool:
        return bool(self.holder) and self.left_s > 0

    def ask(self, request: LeaseRequest) -> LeaseReply:
        """Grants, renews or gives back. Raises `OSError`; then nothing changed.

        Only a new fence must be on the disk. A renewal that is not only ends sooner over a restart, and
        whoever steers now can also finish on a node whose disk is full.
        """
        same = request.holder == self.holder and request.fence == self.fence
        free = not self.live or self.holder == request.holder
        if not request.holder or not (same or (free and request.fence > self.fence)):
            return self._reply(granted=False)
        ttl_s = min(max(request.ttl_s, 0.0), TTL_S_MAX)
        stored = _Stored(request.fence, request.holder, ttl_s, self._wall() + ttl_s)
        with contextlib.suppress(OSError) if same else contextlib.nullcontext():
            write_file(self._path, msgspec.json.encode(stored), 0o600)
        self.fence, self.holder = request.fence, request.holder
        self._until_s = self._monotonic() + ttl_s
        return self._reply(granted=True)

    def check(self, holder: str, fence: int) -> None:
        """Raises `Refused` unless `holder` steers this node with `fence` now."""
        if fence < self.fence:
            raise Refused(
                "fenced",
                f"fence {fence} is older than {self.fence} of {self.holder}; another controller took over",
            )
        if self.live and holder != self.holder:  # its own newer fence comes with its next renewal
            raise Refused(
                "fenced",
                f"{self.holder} holds the lease with fence {self.fence} for {self.left_s:.0f} s more",
            )
        if not self.live or (holder, fence) != (self.holder, self.fence):
            raise Refused(
                "no-lease", f"{holder} holds no lease here with fence {fence}; ask for one, then try again"
            )

    def _reply(self, *, granted: bool) -> LeaseReply:
        holder = self.holder if self.live else ""
        return LeaseReply(granted=granted, fence=self.fence, holder=holder, left_s=self.left_s)
