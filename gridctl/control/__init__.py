"""The controller, and the way to it: a process of its own that a closed terminal does not end."""

from typing import TYPE_CHECKING

from gridctl.home import Home

if TYPE_CHECKING:
    from gridctl.control.client import Client


def main(home: Home, *, read_only: bool = False, listen: str = "") -> None:
    """Is the controller of `home` until SIGTERM, SIGINT or POST /v1/stop.

    `listen` ("HOST:PORT"): nodes join and renew there as well; HOST is the address that they call.
    Raises `ConfigError`, or `GridctlError` if another one is at work.
    """
    from gridctl.control.process import serve

    serve(home, read_only=read_only, listen=listen)


def ensure(home: Home) -> "Client":
    """A client of the home's controller; one is started, detached, if none runs.

    Raises `Unanswered` with the last lines of its log if it does not come up.
    """
    from gridctl.control.process import ensure_running

    return ensure_running(home)


def connect(home: Home) -> "Client":
    """A client of the home's controller, if one runs. Raises `Unanswered`."""
    from gridctl.control.process import connect_running

    return connect_running(home)
