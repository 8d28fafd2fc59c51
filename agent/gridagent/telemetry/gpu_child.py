"""What a process that calls a GPU vendor's library does, whatever the vendor, and what it says to its parent.

It may hang, in the kernel too: then its parent leaves it behind. It gets a connected socket as standard
input. The parent writes "INDEX fast" or "INDEX slow" and gets an `Answer`; `XidEvent` and `Said` come
unasked. It ends when the parent does.
"""

import contextlib
import ctypes
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

Value = int | float | None
PR_SET_PDEATHSIG = 1


class Identity(msgspec.Struct, omit_defaults=True):
    """Which GPU it is; "" where the driver does not tell. `pci` is "dddd:bb:dd.f", lower case."""

    pci: str = ""
    uuid: str = ""
    serial: str = ""
    model: str = ""


class Answer(msgspec.Struct, tag="answer"):
    """What one read of a GPU gave: metric -> value, and metric -> error of those that should have one."""

    gpu: int  #: the library's index
    identity: Identity
    v: dict[str, Value]
    errors: dict[str, str] = {}
    lost: bool | None = False  #: None: nobody can say


class Ready(msgspec.Struct, tag="ready"):
    """The library has started: it lists `gpus` GPUs. `driver`: its version, "" where that is not told."""

    gpus: int
    driver: str = ""


class Failed(msgspec.Struct, tag="failed"):
    """The library cannot be used, and why. The child ends."""

    text: str


class Said(msgspec.Struct, tag="said"):
    """Something that a person should know about this source."""

    text: str


class XidEvent(msgspec.Struct, tag="xid"):
    """An Xid, told by NVML. `mig`: the instances it concerns, as the kernel writes them, or ""."""

    pci: str
    xid: int
    mig: str = ""


Message = Ready | Failed | Said | XidEvent | Answer


class Reader(Protocol):
    """One GPU."""

    def read(self, *, slow: bool) -> Answer:
        """Asks for everything; `slow`: also for what firmware keeps."""
        ...


class Unusable(Exception):
    """The vendor's library cannot be used; the text says why."""


class Out:
    """The socket to the parent; every thread writes whole lines."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock:
            self._link.sendall(msgspec.json.encode(message) + b"\n")


def serve(start: Callable[[Out], tuple[str, Sequence[Reader]]]) -> None:
    """Serves the parent until it closes the socket.

    `start` starts the library and gives the driver's version and all GPUs; it may raise `Unusable`.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=0) as link, contextlib.suppress(OSError):
        out = Out(link)
        try:
            driver, readers = start(out)
        except Unusable as error:
            out.send(Failed(str(error)))
            return
        out.send(Ready(len(readers), driver))
        with link.makefile("rb") as requests:
            for request in requests:
                index, pace = request.split()
                out.send(readers[int(index)].read(slow=pace == b"slow"))
