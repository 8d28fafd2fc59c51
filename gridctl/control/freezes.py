"""A freeze on its way to the agents: from a controller, or from any process where no controller can run."""

import asyncio
from collections.abc import Mapping

from gridagent.wire import FreezeRequest
from gridctl.control.settings import load_fleet
from gridctl.control.trustee import Trustee
from gridctl.errors import ConfigError
from gridctl.home import Home
from gridctl.ports.agents import AgentError, Agents
from gridctl.trust import IdentityError


async def relay(agents: Agents, request: FreezeRequest, urls: Mapping[str, str]) -> list[dict[str, str]]:
    """[{"node", "answer"}]: "ok", or why this agent did not take it or not for good."""

    async def one(name: str, url: str) -> dict[str, str]:
        try:
            reply = await agents.freeze(url, request)
        except AgentError as error:
            return {"node": name, "answer": str(error)}
        return {"node": name, "answer": "ok" if reply.durable else reply.text}

    return list(await asyncio.gather(*(one(name, url) for name, url in urls.items())))


def freeze_directly(home: Home, request: FreezeRequest) -> list[dict[str, str]]:
    """Sends it to all agents from this process, with the home's certificate; answers as `relay`.

    Writes nothing: it is in no journal, and an agent that misses it does not get it later. Raises
    `ConfigError` where the home says neither who is asked nor by whom.
    """

    async def send() -> list[dict[str, str]]:
        urls = {node.name: node.url for node in load_fleet(home).node}
        names = {url: name for name, url in urls.items()}
        try:
            trustee = Trustee(home.trust)
        except (IdentityError, OSError) as error:
            raise ConfigError(str(error)) from None
        agents = Agents(trustee.context, lambda url, tls: trustee.check(tls, names.get(url, "")))
        try:
            return await relay(agents, request, urls)
        finally:
            await agents.close()

    return asyncio.run(send())
