"""The daemon: puts the rooms together, starts them, and ends them in the right order."""

import asyncio
import signal
import ssl
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from gridagent import __version__, identity
from gridagent.errors import AgentError, ConfigError, OpFailed
from gridagent.home import AgentConfig, Home, boot_id, chassis_serial
from gridagent.journal import JournalError
from gridagent.launch import Launches
from gridagent.lease import Lease
from gridagent.meet import meet_there
from gridagent.ops import Effect
from gridagent.ops.desk import Desk
from gridagent.ops.evidence import CollectEvidence
from gridagent.ops.freeze import Freezes
from gridagent.ops.handover import RELAYED, Handovers, Relay, RetireSpare, SpecialiseSpare
from gridagent.ops.log import OpLog
from gridagent.ops.node import Cordon, Cordons, Uncordon
from gridagent.ops.reset import ResetNode
from gridagent.ops.spares import SparePark
from gridagent.service import Service
from gridagent.sessions import Session, Sessions
from gridagent.telemetry import Source, open_source
from gridagent.telemetry.beat import Beat
from gridagent.telemetry.gpus import Gpus
from gridagent.telemetry.metrics import Samples
from gridagent.telemetry.polled import Polled
from gridagent.telemetry.spool import Spool
from gridagent.wire import Ask, NodeStatus

HOUSEKEEPING_S = 1.0
#: How often the agent looks whether its certificate must be renewed.
RENEWAL_S = 900.0
#: How long SIGTERM waits for operations that run.
PATIENCE_S = 10.0


class Daemon:
    """Everything that one agent has. Raises `ConfigError` where the home does not allow a start."""

    def __init__(self, home: Home, config: AgentConfig, *, allow_damage: bool) -> None:
        self.home, self._config = home, config
        own = identity.own_identity(home.trust)
        if own.role != "node" or own.name != config.node:
            raise ConfigError(f"{home.config_file} is of node {config.node!r}, but {home.trust} of {own}")
        self._boot = boot_id(config.sysroot)
        self._serial = chassis_serial(config)
        self.sources = {text: open_source(text, home, config.node, config.sysroot) for text in config.sources}
        self.spool = Spool(home.spool, config.node, self._boot, bytes_max=config.spool_bytes_max)
        for source in self.sources.values():
            if isinstance(source, Polled):
                source.stored = self.spool.stored
        self.samples = Samples()
        self.launches = Launches(home.launch)
        successor = home.url_file.exists()
        self.sessions = Sessions(home.socket, self.spool, self.launches, self._on_ask, successor=successor)
        self.lease = Lease(home.lease_file)
        self.freezes = Freezes(home.freeze_file)
        self._cordons = Cordons(home.node_file)
        self.log = OpLog(home.ops)
        self.handovers = Handovers(self.log, config.node)
        self._park = SparePark(home, self.sessions)
        self.evidence = CollectEvidence(home, config, self.launches, self.status)
        gpus = [source for source in self.sources.values() if isinstance(source, Gpus)]
        self._reset = ResetNode(
            config,
            self._boot,
            self.sessions,
            self._cordons,
            self.samples,
            self.spool,
            self.evidence,
            gpus,
        )
        self._reset.take_up(self.log)
        self._allow_damage = allow_damage
        self.desk = Desk(
            self.log, self.lease, self.freezes, self.spool, self._effects(), allow_damage=allow_damage
        )
        self._service = Service(self)
        self._server_tls = identity.server_context(home.trust)
        self._client_tls = identity.client_context(home.trust)
        self._url = ""

    def _effects(self) -> dict[str, Effect]:
        relay = Relay(self.sessions, self.handovers)
        return {
            **dict.fromkeys(RELAYED, relay),
            "handover.specialise": SpecialiseSpare(
                self.sessions, self.handovers, self.launches, self._cordons
            ),
            "handover.retire": RetireSpare(self.sessions, self.handovers),
            "node.cordon": Cordon(self._cordons),
            "node.uncordon": Uncordon(self._cordons),
            "node.reset": self._reset,
            "spare.park": self._park,
            "evidence.collect": self.evidence,
        }

    def status(self) -> NodeStatus:
        """What this node is and does now."""
        config, cordon = self._config, self._cordons.state
        return NodeStatus(
            node=config.node,
            url=self._url,
            serial=self._serial,
            boot_id=self._boot,
            version=__version__,
            now_unix_s=time.time(),
            rack=config.rack,
            nvlink_domain=config.nvlink_domain,
            cooling_zone=config.cooling_zone,
            gpus=config.gpus,
            gpu_model=config.gpu_model,
            driver=config.driver,
            cordoned=bool(cordon.owner),
            cordon_reason=cordon.reason,
            cordon_owner=cordon.owner,
            quarantined=cordon.quarantined,
            frozen=self.freezes.scopes,
            frozen_by=self.freezes.by,
            fence=self.lease.fence,
            lease_holder=self.lease.holder if self.lease.live else "",
            lease_left_s=self.lease.left_s,
            cert_not_after_unix_s=identity.own_identity(self.home.trust).not_after_unix_s,
            ranks=self.sessions.ranks(),
            spares=self.sessions.spares(),
            complete=self.sessions.complete,
            marks=self.sessions.marks(),
            running_op=self.desk.running,
            resets=[*["gpu"][: len(config.reset_gpu)], *["reboot"][: len(config.reboot)]],
            stream_seq=self.spool.seq,
        )

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT. Raises `AgentError` if a part of the agent fails."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.set_exception_handler(_on_loop_error)
        runner = web.AppRunner(self._service.application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await self._listen(runner)
        await self.sessions.start()
        parts = [
            self.spool.run(),
            self.sessions.sweep(),
            self._keep_house(),
            self._play("beat", Beat(self._boot)),
        ]
        parts += [self._play(text, source) for text, source in self.sources.items()]
        tasks = [asyncio.ensure_future(part) for part in (stop.wait(), *parts)]
        print(f"gridagent: node {self._config.node} serves {self._url}", file=sys.stderr, flush=True)
        await self._until_one_ends(stop, tasks)
        await self.desk.stop(PATIENCE_S)
        await self._service.stop()
        await runner.cleanup()
        await self.sessions.stop()
        ends: list[object] = []
        writer = tasks.pop(1)
        for group in (tasks, [writer]):  # sources wait at their end until the spool has what they told
            for task in group:
                task.cancel()
            ends += await asyncio.gather(*group, return_exceptions=True)
        self.spool.close()
        self.log.close()
        for end in ends:
            if isinstance(end, Exception):
                raise AgentError(f"a part of the agent failed: {end!r}; please report it") from end

    async def _until_one_ends(self, stop: asyncio.Event, tasks: list[asyncio.Task[Any]]) -> None:
        """Waits for the word to stop. A source may end before; a part that fails stops the agent."""
        while not stop.is_set():
            done, _ = await asyncio.wait(
                [task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )
            if any(task.exception() for task in done):
                return

    async def _listen(self, runner: web.AppRunner) -> None:
        """Binds. A port that the kernel chose once is kept over restarts, if it is still free."""
        host, port = self._config.host, self._config.port
        choices = [*_port_before(self.home.url_file), 0] if port == 0 else [port]
        for choice in choices:
            site = web.TCPSite(runner, host, choice, ssl_context=self._server_tls)
            try:
                await site.start()
                break
            except OSError as error:
                if choice == choices[-1]:
                    raise ConfigError(f"cannot listen on {self._config.listen}: {error.strerror}") from None
        port = runner.addresses[0][1]
        self._url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        if not _says(self.home.url_file, self._url):  # a full disk keeps no agent from coming back
            identity.write_file(self.home.url_file, self._url.encode(), 0o600)

    async def _play(self, name: str, source: Source) -> None:
        """Puts what a source tells into the spool; a source that fails says so there, and is blind."""
        try:
            async for reading in source:
                self.spool.append(reading.kind, reading.v)
                if reading.kind == "sample":
                    self.samples.take(reading.v)
        except (OSError, ValueError, KeyError, EOFError) as error:
            self.spool.append("note", {"text": f"source {name} failed and is silent now: {error!r}"})

    async def _keep_house(self) -> None:
        renew_at_s = 0.0
        while True:
            self._park.reap()
            self.freezes.save()
            now_s = time.monotonic()
            if now_s >= renew_at_s:
                renew_at_s = now_s + RENEWAL_S
                await self._renew()
            await asyncio.sleep(HOUSEKEEPING_S)

    async def _renew(self) -> None:
        """Renews the node's certificate once that is due. A failure is told, and tried again later."""
        from gridagent.enrolment import renew

        try:
            if not identity.renewal_due(self.home.trust, time.time()):
                return
            peer = await asyncio.to_thread(renew, self.home.root)
            for context in (self._server_tls, self._client_tls):
                identity.reload(context, self.home.trust)
        except (identity.IdentityError, OSError, ValueError) as error:  # also a folder that somebody works in
            self.spool.append("note", {"text": f"the certificate could not be renewed: {error}"})
        else:
            self.spool.append("note", {"text": f"renewed the certificate of {peer}"})

    async def _on_ask(self, session: Session, ask: Ask) -> Any:
        match ask.kind:
            case "meet":
                return await meet_there(
                    self._client_tls, self.home.trust, self.handovers, session.id, ask.args
                )
            case "damage" if self._allow_damage:
                return {}
            case "damage":
                raise OpFailed("this node's agent was not started with --allow-damage")
        raise OpFailed(f"{ask.kind!a} is nothing that this agent can be asked for")


def _says(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False


def _port_before(url_file: Path) -> list[int]:
    """The port of an earlier start: a hint, whatever the file says."""
    try:
        port = url_file.read_bytes().rpartition(b":")[2].strip()
    except OSError:
        return []
    return [int(port)] if port.isdigit() and 0 < int(port[:6]) < 65536 else []


def serve(home: Home, *, allow_damage: bool) -> int:
    """Runs the agent until SIGTERM. Raises `AgentError`."""
    config = home.config()
    home.prepare()

    async def main() -> None:
        await Daemon(home, config, allow_damage=allow_damage).run()

    try:
        asyncio.run(main())
    except JournalError as error:
        raise ConfigError(str(error)) from None
    return 0


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A stranger whose handshake fails is no event; everything else is said."""
    if not isinstance(context.get("exception"), ssl.SSLError | ConnectionError):
        loop.default_exception_handler(context)
