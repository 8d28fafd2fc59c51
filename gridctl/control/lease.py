"""The lease with which one controller steers: asked of all agents only while something is to be done."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from gridagent.wire import LeaseReply, LeaseRequest
from gridctl.errors import Refused
from gridctl.model.fleet import several
from gridctl.ports.agents import AgentError, AgentRefused, Agents

TTL_S = 15.0
TRIES = 3


class FleetLease:
    """`take` and `drop` are counted by user; it is renewed while there is one, then given back.

    `urls` tells the agents of the fleet, `on_lost` is called with a code and a text when it is gone.
    """

    def __init__(
        self,
        agents: Agents,
        holder: str,
        urls: Callable[[], Mapping[str, str]],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._agents = agents
        self._urls = urls
        self._on_lost = on_lost
        self._users: set[str] = set()
        self._renewal: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._held_until_s = 0.0
        self.holder = holder
        self.fence = 0
        self.granted: list[str] = []
        self._denied: dict[str, str] = {}  #: node -> why it did not grant it

    @property
    def held(self) -> bool:
        return bool(self._users) and time.monotonic() < self._held_until_s

    async def take(self, user: str, highest_seen: int) -> None:
        """Holds the lease for `user`. `highest_seen`: the highest fence that any agent has shown.

        Raises `Refused`: fenced while another controller's lease lives, no-lease without a majority,
        forbidden for a certificate without the role.
        """
        async with self._turn:
            if not self.held:
                await self._acquire(highest_seen)
            self._users.add(user)
            if self._renewal is None:
                self._renewal = asyncio.create_task(self._renew())

    def check_granted(self, nodes: Iterable[str]) -> None:
        """Raises `Refused` if one of these did not grant it: it would carry out nothing of what follows."""
        for node in sorted(nodes):
            if why := self._denied.get(node):
                raise Refused("no-lease", f"{node} did not grant the lease: {why}")

    async def drop(self, user: str) -> None:
        """Gives the lease back when nobody needs it any more."""
        async with self._turn:
            self._users.discard(user)
            if self._users or self._renewal is None:
                return
            self._renewal.cancel()
            self._renewal = None
            self._held_until_s = 0.0
            await self._ask(0.0)

    async def _acquire(self, highest_seen: int) -> None:
        self.fence = max(self.fence, highest_seen)
        replies: dict[str, LeaseReply | AgentError] = {}
        for _ in range(TRIES):
            self.fence += 1
            asked_s = time.monotonic()
            replies = await self._ask(TTL_S)
            if self._count(replies, asked_s):
                return
            seen = [reply.fence for reply in replies.values() if isinstance(reply, LeaseReply)]
            if max(seen, default=0) < self.fence:
                break
            self.fence = max(seen)
        await self._ask(0.0)
        raise self._refusal(replies)

    def _count(self, replies: Mapping[str, LeaseReply | AgentError], asked_s: float) -> bool:
        """Whether a majority of the whole fleet has granted it."""
        self.granted = sorted(
            node for node, reply in replies.items() if isinstance(reply, LeaseReply) and reply.granted
        )
        self._denied = {node: _why(replies[node]) for node in replies.keys() - {*self.granted}}
        if 2 * len(self.granted) <= len(replies):
            return False
        self._held_until_s = asked_s + TTL_S
        return True

    def _refusal(self, replies: Mapping[str, LeaseReply | AgentError]) -> Refused:
        for node, reply in sorted(replies.items()):
            if isinstance(reply, AgentRefused) and reply.code == "forbidden":
                return Refused("forbidden", f"{node}: {reply.text}")
            if isinstance(reply, LeaseReply) and not reply.granted and reply.holder:
                return Refused(
                    "fenced",
                    f"{reply.holder} acts on {node} with fence {reply.fence} and holds the lease for"
                    f" {reply.left_s:.0f} s more, or as long as it renews it: wait for the end of its run, or"
                    " act there",
                )
        silent = [node for node, reply in replies.items() if isinstance(reply, AgentError)]
        return Refused(
            "no-lease",
            f"{len(self.granted)} of {len(replies)} agents granted the lease, more than half are needed;"
            f" no answer from {several(silent) or 'none'}",
        )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(TTL_S / 3)
            asked_s = time.monotonic()
            replies = await self._ask(TTL_S)
            newer = [r for r in replies.values() if isinstance(r, LeaseReply) and r.fence > self.fence]
            if newer:
                self._lose(
                    "fenced", f"{newer[0].holder or 'another controller'} acts with fence {newer[0].fence}"
                )
                return
            if not self._count(replies, asked_s) and time.monotonic() > self._held_until_s:
                self._lose("no-lease", "no majority of the fleet's agents renewed the lease in time")
                return

    def _lose(self, code: str, text: str) -> None:
        self._held_until_s = 0.0
        self._users.clear()
        self._renewal = None
        self._on_lost(code, text)

    async def _ask(self, ttl_s: float) -> dict[str, LeaseReply | AgentError]:
        request = LeaseRequest(holder=self.holder, fence=self.fence, ttl_s=ttl_s)

        async def one(url: str) -> LeaseReply | AgentError:
            try:
                return await self._agents.lease(url, request)
            except AgentError as error:
                return error

        urls = self._urls()
        replies = await asyncio.gather(*(one(url) for url in urls.values()))
        return dict(zip(urls, replies, strict=True))


def _why(reply: LeaseReply | AgentError) -> str:
    """Why an agent did not grant the lease."""
    if isinstance(reply, AgentError):
        return str(reply)
    if reply.holder:
        return f"{reply.holder} acts there with fence {reply.fence}"
    return f"it has seen fence {reply.fence}, which is newer: try again in a moment"
