"""The controller as a process: one for each home, detached, with a log of its own."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time

from gridctl.control.client import Client
from gridctl.errors import ConfigError, GridctlError, Unanswered
from gridctl.home import Home

#: Importing, reading the journal and asking every node once, on a loaded machine.
START_S = 60.0
POLL_S = 0.05
TAIL_BYTES = 1500


def serve(home: Home, *, read_only: bool) -> None:
    """Is the controller in this process. Raises `GridctlError`."""
    from gridctl.trust import TrustError

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    home.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _lock(home)
    try:
        asyncio.run(_serve(home, read_only))
    except TrustError as error:
        raise ConfigError(str(error)) from None
    finally:
        os.close(lock)


async def _serve(home: Home, read_only: bool) -> None:
    from aiohttp import web

    from gridctl.control.controller import Controller
    from gridctl.control.server import Service

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    controller = Controller(home, read_only=read_only)
    runner = web.AppRunner(Service(controller, stop).application(), access_log=None, shutdown_timeout=1.0)
    try:
        await controller.start()
        await runner.setup()
        with contextlib.suppress(FileNotFoundError):  # what a killed controller left behind
            home.socket.unlink()
        before = os.umask(0o177)
        try:
            await web.UnixSite(runner, home.socket).start()
        finally:
            os.umask(before)
        logging.getLogger("gridctl.control").info("controller %s serves %s", os.getpid(), home.socket)
        await stop.wait()
    finally:
        with contextlib.suppress(FileNotFoundError):
            home.socket.unlink()
        await controller.close()
        await runner.cleanup()


def ensure_running(home: Home) -> Client:
    """A client of the running controller; starts one if there is none. Raises `Unanswered`."""
    client = Client(home)
    with contextlib.suppress(Unanswered):
        client.health()
        return client
    home.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gridctl.control", os.fspath(home.config), os.fspath(home.state)]
    with home.log.open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=home.state,
        )
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with contextlib.suppress(Unanswered):
            client.health()
            return client
        if child.poll() and not _locked(home):  # it failed, and not because another one was faster
            break
        time.sleep(POLL_S)
    raise Unanswered(f"the controller did not come up; the end of {home.log}:\n{_tail(home)}")


def _lock(home: Home) -> int:
    """Raises `GridctlError` while another controller of this home lives."""
    fd = os.open(home.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise GridctlError(f"another controller works in {home.state}: a home has one") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _locked(home: Home) -> bool:
    try:
        os.close(_lock(home))
    except GridctlError:
        return True
    return False


def _tail(home: Home) -> str:
    try:
        text = home.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    except OSError as error:
        return str(error)
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text).strip()
