"""Shell completion of live names: from the controller within a bound, else from its last answer."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from gridctl.home import Home

#: A shell waits for this; a controller that is slower is not waited for.
BOUND_S = 0.3
#: Younger names are not asked for again: pressing Tab three times asks once.
FRESH_S = 3.0
#: Older names are no help.
STALE_S = 3600.0

_BYTES_MAX = 4 << 20


def _names(view: str, member: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        with contextlib.suppress(Exception):  # whatever is wrong, a shell's prompt is no place to say it
            return [name for name in _known(Home.find(), view, member) if name.startswith(incomplete)]
        return []

    return complete


nodes = _names("nodes", "name")
jobs = _names("jobs", "name")
plans = _names("plans", "id")
runs = _names("runs", "id")
incidents = _names("incidents", "id")


def nodes_or_incidents(incomplete: str) -> list[str]:
    """What evidence can be taken of."""
    return [*nodes(incomplete), *incidents(incomplete)]


def _known(home: Home, view: str, member: str) -> list[str]:
    cache = home.state / f"completion-{view}.json"
    age_s = _age_s(cache)
    if age_s > FRESH_S:
        try:
            items = json.loads(_get(home.socket, f"/v1/view/{view}", time.monotonic() + BOUND_S))
        except (OSError, ValueError):
            if age_s > STALE_S:
                return []
        else:
            _keep(cache, [name for item in items if _typeable(name := str(item[member]))])
    found: list[str] = json.loads(cache.read_text(encoding="utf-8"))
    return found


def _typeable(name: str) -> bool:
    """A name with blanks or controls would be something else by the time the shell has read it."""
    return bool(name) and name.isprintable() and not set(name) & set(" \t'\"`$\\;&|<>()*?[]{}!~#")


def _age_s(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return float("inf")


def _keep(path: Path, names: list[str]) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(names), encoding="utf-8")
    draft.replace(path)


def _get(path: Path, target: str, deadline_s: float) -> bytes:
    """One GET over the controller's socket, by `deadline_s` of the monotonic clock or not at all."""
    with socket.socket(socket.AF_UNIX) as connection:

        def bounded() -> None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)

        bounded()
        connection.connect(os.fspath(path))
        connection.sendall(f"GET {target} HTTP/1.0\r\nHost: gridctl\r\n\r\n".encode())
        answer = bytearray()
        while len(answer) < _BYTES_MAX:
            bounded()
            piece = connection.recv(1 << 16)
            if not piece:
                break
            answer += piece
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0] + b" ":
        raise ValueError("no answer of the contract")
    return body
