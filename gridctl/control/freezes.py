"""A freeze on its way to the agents: from a controller, or from any process where no controller can run."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gridagent.wire import FreezeRequest
from gridctl.control.settings import load_fleet
from gridctl.control.trustee import Trustee
from gridctl.errors import ConfigError, Refused
from gridctl.home import Home
from gridctl.ports.agents import AgentError, AgentRefused, Agents
from gridctl.trust import IdentityError


async def relay(agents: Agents, request: FreezeRequest, urls: Mapping[str, str]) -> list[dict[str, str]]:
    """[{"node", "answer"}]: "ok", or why this agent did not take it or not for good.

    `refused` beside them: it takes nothing from this certificate, and to ask again would not change that.
    """

    async def one(name: str, url: str) -> dict[str, str]:
        try:
            reply = await agents.freeze(url, request)
        except AgentError as error:
            answer = {"node": name, "answer": str(error)}
            # Without a status it was said on this side: somebody else answers at that address.
            final = isinstance(error, AgentRefused) and error.code == "forbidden" and error.status
            return {**answer, "refused": "forbidden"} if final else answer
        return {"node": name, "answer": "ok" if reply.durable else reply.text}

    return list(await asyncio.gather(*(one(name, url) for name, url in urls.items())))


def relayed(scope: str, answers: Sequence[Mapping[str, str]], unasked: Iterable[str] = ()) -> dict[str, Any]:
    """The audit record of what came of it; `unasked` have missed it before and were not asked now."""
    refused = sorted(a["node"] for a in answers if "refused" in a)
    missed = {a["node"] for a in answers if a["answer"] != "ok"} - {*refused}
    return {"what": "relayed", "scope": scope, "missed": sorted(missed | {*unasked}), "refused": refused}


def freeze_directly(home: Home, request: FreezeRequest) -> list[dict[str, str]]:
    """Sends it to all agents from this process, with the home's certificate; answers as `relay`.

    Writes nothing: it is in no journal, and an agent that misses it does not get it later. Raises
    `ConfigError` where the home says neither who is asked nor by whom, `Refused` without the role for it.
    """

    async def send() -> list[dict[str, str]]:
        urls = {node.name: node.url for node in load_fleet(home).node}
        names = {url: name for name, url in urls.items()}
        try:
            trustee = Trustee(home.trust)
        except (IdentityError, OSError) as error:
            raise ConfigError(str(error)) from None
        if why := trustee.may_only_look:
            raise Refused("read-only", f"nothing was frozen: {why}")
        agents = Agents(
            trustee.context, lambda url, tls: trustee.check(tls, names.get(url, "")), trustee.flaw
        )
        try:
            return await relay(agents, request, urls)
        finally:
            await agents.close()

    return asyncio.run(send())
