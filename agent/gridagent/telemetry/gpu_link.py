"""The parent's end of the processes that read GPUs: started, asked, left behind, never waited for."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from gridagent.telemetry.gpu_child import Message

_DECODER = msgspec.json.Decoder(Message)


class ChildGone(Exception):
    """The child has ended, or says what cannot be understood."""


class Child:
    """One child and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader, self._writer = reader, writer

    def ask(self, request: str) -> None:
        """Sends one request. It is small: it fits the socket also where the child does not read."""
        self._writer.write(request.encode() + b"\n")

    async def receive(self, until_s: float) -> Message | None:
        """The next message; None if none comes until `until_s` (the loop's clock). Raises `ChildGone`."""
        try:
            async with asyncio.timeout_at(until_s):
                line = await self._reader.readline()
            if not line.endswith(b"\n"):
                raise ChildGone(f"status {self.process.poll()}")
            return _DECODER.decode(line)
        except TimeoutError:
            return None
        except (OSError, ValueError) as error:  # ValueError: a line beyond all measure, or no message
            raise ChildGone(repr(error)) from None

    def leave(self) -> None:
        """Kills the process and closes the socket; waits for neither."""
        self.process.kill()
        self._writer.close()


class Children:
    """Starts children, and keeps those that were left until the kernel gives them back.

    `command`: the module that a child runs, and its arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = (sys.executable, "-m", *command)
        self._left: list[Child] = []

    async def start(self) -> Child:
        """A new child. Raises `OSError` where none can be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # stderr stays the agent's: a crash of the driver's library is said there
                process = subprocess.Popen(
                    self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
                )
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return Child(process, reader, writer)

    def abandon(self, child: Child) -> None:
        """Leaves a child behind, whatever it does."""
        child.leave()
        self._left.append(child)

    def reap(self) -> int:
        """Collects children that have ended; how many are left."""
        self._left = [child for child in self._left if child.process.poll() is None]
        return len(self._left)
