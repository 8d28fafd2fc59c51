"""The training process's end of the Unix socket to its node's agent.

One thread reads and reconnects; every command runs in a thread of its own, so that a long one never
keeps the next from being heard. An agent that is gone costs the training nothing.
"""

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gridagent import framing, wire

_log = logging.getLogger("gridagent.train")
_FLUSH_S = 0.25
#: A stopped agent holds a sender up for so long at most, and once only.
_SEND_S = 1.0
_PENDING_STEPS_MAX = 100_000


class LinkError(Exception):
    """The agent is not there, or refused; the text is the agent's."""


class Link:
    """Connection to the agent. `handlers` maps command kinds to functions(args) -> value."""

    def __init__(self, path: str, hello: Callable[[], wire.Hello]) -> None:
        self.handlers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self._path = path
        self._hello = hello
        self._sock: socket.socket | None = None
        self._send_lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._asks: dict[int, tuple[threading.Event, list[wire.Answer]]] = {}
        self._next_id = 0
        self._closed = False
        #: With the epoch of each. Where no agent comes for a long time, the newest.
        self._steps: deque[tuple[int, wire.StepEntry]] = deque(maxlen=_PENDING_STEPS_MAX)
        self._commands: list[threading.Thread] = []
        self.connected = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gridagent-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def step(self, epoch: int, entry: wire.StepEntry) -> None:
        """Remembers one step that was finished in `epoch`; sent with the next flush."""
        self._steps.append((epoch, entry))

    def send(self, message: wire.Message) -> bool:
        """Sends one message; False if the agent is not there just now."""
        with self._send_lock:
            sock = self._sock
            if sock is None:
                return False
            try:
                sock.sendall(framing.frame(message))
            except OSError:  # perhaps in the middle of a frame: no other may follow it there
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                return False
            return True

    def ask(self, kind: str, args: dict[str, Any], timeout_s: float) -> Any:
        """Has the agent do something and returns its answer. Raises `LinkError`."""
        event: threading.Event = threading.Event()
        answers: list[wire.Answer] = []
        with self._send_lock:
            self._next_id += 1
            number = self._next_id
            self._asks[number] = (event, answers)
        try:
            if not self.send(wire.Ask(id=number, kind=kind, args=args)):
                raise LinkError(f"this node's agent is not running; {kind} is not possible")
            if not event.wait(timeout_s):
                raise LinkError(f"this node's agent did not answer {kind} within {timeout_s:.0f} s")
        finally:
            self._asks.pop(number, None)
        if not answers[0].ok:
            raise LinkError(answers[0].error)
        return answers[0].value

    def flush(self) -> None:
        """Sends the steps that have not been sent."""
        with self._flush_lock:  # the training thread flushes too, where it stops
            hello = self._hello()
            # One by one: a step may end at this very moment, and each must go exactly once.
            steps = [self._steps.popleft() for _ in range(len(self._steps))]
            while steps:
                epoch = steps[0][0]
                entries = [entry for its, entry in steps if its == epoch]
                if not self.send(wire.Progress(job=hello.job, rank=hello.rank, epoch=epoch, entries=entries)):
                    self._steps.extendleft(reversed(steps))
                    return
                steps = steps[len(entries) :]

    def settle(self, timeout_s: float) -> None:
        """Lets commands that run now come to their reply."""
        end_s = time.monotonic() + timeout_s
        for thread in self._commands:
            thread.join(max(0.0, end_s - time.monotonic()))

    def close(self, farewell: wire.Farewell) -> None:
        """Says good-bye and ends the thread."""
        self.flush()
        self.send(farewell)
        self._closed = True
        with self._send_lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        wait_s = 0.05
        while not self._closed:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(_SEND_S)
                sock.connect(self._path)
                sock.sendall(framing.frame(self._hello()))
                wait_s = 0.05
                self._serve(sock)
            except OSError:
                pass  # nobody is there
            except Exception:  # else the agent would hear nothing more of a rank that trains on
                _log.exception("the connection to the agent is made anew")
            finally:
                sock.close()
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, 1.0)

    def _serve(self, sock: socket.socket) -> None:
        with self._send_lock:
            self._sock = sock
        self.connected.set()
        try:
            self._read(sock)
        finally:
            self.connected.clear()
            with self._send_lock:
                self._sock = None
            self._fail_asks()

    def _fail_asks(self) -> None:
        """What this connection was asked for is answered by nobody any more."""
        for number, (event, answers) in list(self._asks.items()):
            answers.append(wire.Answer(id=number, ok=False, error="this node's agent ended meanwhile"))
            event.set()

    def _read(self, sock: socket.socket) -> None:
        unframer = framing.Unframer(at_agent=False)
        incoming = select.poll()
        incoming.register(sock, select.POLLIN)
        flushed_s = time.monotonic()
        while not self._closed:
            try:
                if incoming.poll(_FLUSH_S * 1e3):
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    for message in unframer.feed(data):
                        self._dispatch(message)
            except (OSError, framing.WireError) as error:
                if not self._closed:
                    _log.warning("lost the connection to the agent: %s", error)
                return
            if time.monotonic() - flushed_s >= _FLUSH_S:
                flushed_s = time.monotonic()
                self.flush()

    def _dispatch(self, message: Any) -> None:
        if isinstance(message, wire.Answer):
            waiting = self._asks.get(message.id)
            if waiting is not None:
                waiting[1].append(message)
                waiting[0].set()
        elif isinstance(message, wire.Command):
            thread = threading.Thread(
                target=self._execute, args=(message,), name=f"gridagent-{message.kind}", daemon=True
            )
            thread.start()
            self._commands = [*(t for t in self._commands if t.is_alive()), thread]

    def _execute(self, command: wire.Command) -> None:
        handler = self.handlers.get(command.kind)
        try:
            if handler is None:
                raise LinkError(f"this process cannot {command.kind} in its present state")
            value = handler(command.args)
        except Exception as error:  # whatever goes wrong belongs to whoever asked, not to the training
            text = str(error) or type(error).__name__
            self.send(wire.Reply(id=command.id, ok=False, error=text))
            return
        self.send(wire.Reply(id=command.id, ok=True, value=value))
