"""The controller as a process: one for each home, detached, with a log of its own."""

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from gridctl.control.client import Client, listens
from gridctl.control.settings import load_fleet
from gridctl.errors import ConfigError, GridctlError, Hangs, Unanswered
from gridctl.home import Home

if TYPE_CHECKING:
    from gridctl.control.controller import Controller

#: Importing, reading the journal and asking every node once, on a loaded machine.
START_S = 60.0
POLL_S = 0.05
LOOK_S = 2.0
#: A controller that was just killed may hold its lock for a moment longer.
LOCK_S = 2.0
TAIL_BYTES = 1500


def serve(home: Home, *, read_only: bool, listen: str) -> None:
    """Is the controller in this process. Raises `GridctlError`."""
    from gridctl.trust import IdentityError, TrustError

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # every node takes two
    home.make_state()
    lock = _lock(home, patience_s=LOCK_S)
    os.chdir(home.state)  # the folder where it was started may be unmounted
    try:
        asyncio.run(_serve(home, lock, read_only, listen))
    except (TrustError, IdentityError) as error:
        raise ConfigError(str(error)) from None
    finally:
        os.close(lock)


async def _serve(home: Home, lock: int, read_only: bool, listen: str) -> None:
    from aiohttp import web

    from gridctl.control.controller import Controller
    from gridctl.control.server import Service

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    controller = Controller(home, read_only=read_only)
    stop_joining: Callable[[], Awaitable[None]] | None = None
    runner = web.AppRunner(Service(controller, stop).application(), access_log=None, shutdown_timeout=1.0)
    try:
        await controller.start()
        if listen:
            stop_joining = await _let_join(controller, listen)
        await runner.setup()
        with contextlib.suppress(FileNotFoundError):  # what a killed controller left behind
            home.socket.unlink()
        before = os.umask(0o177)
        try:
            await web.UnixSite(runner, home.socket).start()
        finally:
            os.umask(before)
        logging.getLogger("gridctl.control").info("controller %s serves %s", os.getpid(), home.socket)
        watching = asyncio.create_task(_until_homeless(home, lock, stop))
        await controller.until(stop)
        watching.cancel()
    finally:
        with contextlib.suppress(FileNotFoundError):
            home.socket.unlink()
        if stop_joining:
            await stop_joining()
        await controller.close()
        await runner.cleanup()


async def _until_homeless(home: Home, lock: int, stop: asyncio.Event) -> None:
    """Ends a controller whose home was deleted: nobody could reach it any more."""
    while True:
        try:
            mine = os.path.samestat(os.fstat(lock), os.stat(home.lock))
        except FileNotFoundError:
            mine = False
        if not mine:
            logging.getLogger("gridctl.control").warning("%s is gone: the controller ends", home.lock)
            stop.set()
            return
        await asyncio.sleep(LOOK_S)


async def _let_join(controller: "Controller", listen: str) -> Callable[[], Awaitable[None]]:
    """Opens the endpoint where nodes enrol and renew. Returns what closes it."""
    from gridctl.trust import Authority, serve_join

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port[:6]) > 65535:
        raise ConfigError(f"--listen {listen}: HOST:PORT is needed, with a port up to 65535")

    def audit(data: dict[str, Any]) -> None:
        controller.ledger.append("audit", {"what": "join", **data})

    url, stop = await serve_join(Authority(controller.home.trust), host.strip("[]"), int(port), audit)
    logging.getLogger("gridctl.control").info("nodes join at %s", url)
    return stop


def ensure_running(home: Home) -> Client:
    """A client of the running controller; starts one if there is none.

    Raises `Unanswered`, `Hangs` where another one would only find the home taken, `ConfigError`.
    """
    if running := _running(home):
        return running
    load_fleet(home)  # a mistake in it is said here, not by a process that nobody sees
    home.make_state()
    before = home.log.stat().st_size if home.log.exists() else 0
    try:
        child = _spawn(home)
    except OSError as error:
        raise Unanswered(f"no controller can be started in {home.state}: {error.strerror}") from None
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if running := _running(home):
            return running
        if child and os.waitpid(child, os.WNOHANG)[0]:
            child = 0
            if not _locked(home):  # else another one was faster, and is on its way
                break
        time.sleep(POLL_S)
    silent = Unanswered(f"the controller did not come up; the end of {home.log}:")
    silent.add_note(_tail(home, before))
    raise silent


def _running(home: Home) -> Client | None:
    """A client of the running controller, if there is one. Raises `Hangs`."""
    try:
        return connect_running(home)
    except Hangs:
        raise
    except Unanswered:
        return None


def connect_running(home: Home) -> Client:
    """A client of the running controller. Raises `Unanswered`, `Hangs`."""
    if not listens(home):
        raise Unanswered(
            f"no controller serves {home.socket}: `gridctl watch` is one, most commands start one"
        )
    client = Client(home)
    try:
        client.health()
    except BaseException:
        client.close()
        raise
    return client


def _spawn(home: Home) -> int:
    """The process id of a new controller in a session of its own, whose words go to the log."""
    command = [sys.executable, "-m", "gridctl.control", os.fspath(home.config), os.fspath(home.state)]
    appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.fspath(home.log), appending, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=streams, setsid=True)


def _lock(home: Home, patience_s: float = 0.0) -> int:
    """Raises `GridctlError` if another controller of this home still lives after `patience_s`."""
    fd = os.open(home.lock, os.O_RDWR | os.O_CREAT, 0o600)
    until_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < until_s:
                time.sleep(POLL_S)
                continue
            os.close(fd)
            raise GridctlError(f"another controller works in {home.state}: a home has one") from None
    with contextlib.suppress(OSError):  # the lock holds without the number, also on a full disk
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _locked(home: Home) -> bool:
    try:
        os.close(_lock(home))
    except GridctlError:
        return True
    return False


def _tail(home: Home, after: int) -> str:
    try:
        text = home.log.read_bytes()[after:][-TAIL_BYTES:].decode(errors="replace")
    except OSError as error:
        return str(error)
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text).strip() or "nothing: full disk?"
