"""node.reset: the site's own command resets a GPU of this node, or reboots it. It cannot be taken back.

Never while a process of a job, or a spare, is here, and only on a cordoned node. It is asked for of one boot:
after another one has begun, nothing is left to be done. An agent that ended in the middle of a reboot and
finds another boot knows that it took place; of a GPU it does not know, and says so.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from gridagent.errors import OpFailed, Refused
from gridagent.home import AgentConfig
from gridagent.ops import arguments
from gridagent.ops.evidence import CollectEvidence
from gridagent.ops.log import OpLog
from gridagent.ops.node import Cordons
from gridagent.redact import redacted_text
from gridagent.sessions import Sessions
from gridagent.telemetry.gpus import Gpus
from gridagent.telemetry.metrics import Samples
from gridagent.telemetry.spool import Spool
from gridagent.wire import OpRequest, ResetReport, plain

KIND = "node.reset"
OUTPUT_BYTES_MAX = 4096
POLL_S = 0.05
#: Longer than a source waits for its library; then it lets go of all GPUs.
LET_GO_S = 40.0
#: More of what it prints is dropped.
MEMORY_BYTES_MAX = 1 << 20
NOT_BEGUN = 127

#: States of a rank's process in which it, or its job, has something here.
_LIVES = ("training", "standing", "frozen")
_GPU = re.compile(r"gpu:(\d{1,4})")
#: What a driver calls a GPU, and no command takes for an option.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,99}")


class _Reset(msgspec.Struct):
    boot: str
    device: str = ""
    uuid: str = ""  #: the GPU that is meant, as far as it was known: `device` is but a number
    pci: str = ""


class ResetNode:
    """`gpus`: the sources that have GPUs open and let go of them meanwhile."""

    def __init__(
        self,
        config: AgentConfig,
        boot: str,
        sessions: Sessions,
        cordons: Cordons,
        samples: Samples,
        spool: Spool,
        evidence: CollectEvidence,
        gpus: Sequence[Gpus],
    ) -> None:
        self._config, self._boot = config, boot
        self._sessions, self._cordons = sessions, cordons
        self._samples, self._spool = samples, spool
        self._evidence, self._gpus = evidence, gpus

    def take_up(self, log: OpLog) -> None:
        """Ends the reboots in which an agent before this one was: it is another boot, so they are done."""
        for entry in log.entries.values():
            args = entry.request.args
            asked = (entry.request.kind, entry.status.state) == (KIND, "interrupted")
            if asked and not args.get("device") and args["boot"] != self._boot:
                report = ResetReport(text="the node has booted since", t_unix_s=time.time())
                log.end(entry, "agent", value=plain(report))

    def check(self, request: OpRequest) -> None:
        """Raises `Refused`: no-command, not-idle, starting, busy, bad-request for another boot or GPU."""
        args = arguments(request, _Reset)
        command = self._command(args)
        if args.boot != self._boot:
            raise Refused("bad-request", f"this is boot {self._boot}, asked was boot {args.boot[:64]!a}")
        if not self._cordons.state.owner:
            raise Refused("not-idle", "this node is not cordoned: new work may come to it at any moment")
        if not self._sessions.complete:
            raise Refused("starting", "processes that an agent before this one had may be on their way here")
        self._refuse_processes()
        if name := self._evidence.running:
            raise Refused(
                "busy", f"{name} collects evidence here, which this would destroy: wait for its end"
            )
        if not shutil.which(command[0]):
            raise Refused("no-command", f"{command[0]} of agent.toml is no program that can be run here")

    def _refuse_processes(self) -> None:
        for rank in self._sessions.ranks():
            if rank.state in _LIVES:
                text = f"rank {rank.rank} of {rank.job} (process {rank.pid}) is {rank.state} here"
                raise Refused("not-idle", f"{text}: move it away first (`gridctl swap plan`)")
        for spare in self._sessions.spares():
            raise Refused("not-idle", f"a spare is {spare.state} here: end its process {spare.pid} first")

    def _command(self, args: _Reset) -> list[str]:
        """The words to run. Raises `Refused`."""
        if not args.device:
            if not self._config.reboot:
                raise Refused("no-command", _unwritten("reboot", '["systemctl", "reboot"]'))
            return self._config.reboot
        if not self._config.reset_gpu:
            example = '["nvidia-smi", "--gpu-reset", "-i", "{uuid}"]'
            raise Refused("no-command", _unwritten("reset_gpu", example))
        match = _GPU.fullmatch(args.device)
        if match is None:
            raise Refused("bad-request", f"{args.device[:64]!a} is no GPU: gpu:N")
        names = self._samples.about(args.device) | {"index": match[1]}
        for name, meant in (("uuid", args.uuid), ("pci", args.pci)):
            if meant and names[name] != meant:
                text = f"{args.device} is {names[name] or 'a GPU of which nothing was told'} here now"
                raise Refused("bad-request", f"{text}, meant was {meant[:64]!a}: plan again")
        return [self._filled(word, names, args.device) for word in self._config.reset_gpu]

    def _filled(self, word: str, names: dict[str, str], device: str) -> str:
        for name in ("uuid", "pci", "index"):
            if (place := f"{{{name}}}") in word:
                if not _NAME.fullmatch(names[name]):
                    text = f"no source has told the {name} of {device}, which reset_gpu in agent.toml names"
                    raise Refused("no-command", f"{text}: {{index}} is its number")
                word = word.replace(place, names[name])
        return word

    async def run(self, request: OpRequest) -> Any:
        """Returns `ResetReport`. Raises `OpFailed` where it was killed: what it has done is not known."""
        args = arguments(request, _Reset)
        status, text = NOT_BEGUN, ""
        end_s = time.monotonic() + request.deadline_s
        async with contextlib.AsyncExitStack() as stack:
            try:
                command = self._command(args)
                for source in self._gpus:
                    await stack.enter_async_context(source.let_go(min(LET_GO_S, request.deadline_s / 2)))
                self._refuse_processes()  # one may have come meanwhile
            except (Refused, TimeoutError) as error:
                text = f"not begun: {error}"
            else:
                if not args.device:
                    self._spool.append("note", {"action": "reboot", "text": f"asked for by {request.who}"})
                status, text = await _carried_out(command, end_s - time.monotonic())
        return plain(ResetReport(status=status, text=text, t_unix_s=time.time()))


def _unwritten(key: str, example: str) -> str:
    return (
        f"this node has no command for that: write {key} = {example} into its agent.toml, restart its agent"
    )


async def _carried_out(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Exit status and output; `NOT_BEGUN` where it cannot be started. Raises `OpFailed` if it had to be
    killed. It goes on to its end whatever becomes of this agent, and prints into memory of its own."""
    with open(os.memfd_create("output"), "rb", buffering=0) as output:
        fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
        try:
            child = subprocess.Popen(
                command,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return NOT_BEGUN, f"not begun: {command[0]} cannot be run: {error.strerror}"
        end_s, first = time.monotonic() + limit_s, b""
        while child.poll() is None and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)
            if os.fstat(output.fileno()).st_size > MEMORY_BYTES_MAX:
                first = first or os.pread(output.fileno(), OUTPUT_BYTES_MAX, 0)
                os.ftruncate(output.fileno(), 0)
        first = first or os.pread(output.fileno(), OUTPUT_BYTES_MAX, 0)
    said = redacted_text(first.decode(errors="replace")).strip()
    if child.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        text = (
            f"{command[0]} did not end within {limit_s:.0f} s and was killed: what it has done is not known"
        )
        raise OpFailed(f"{text}. It said: {said or 'nothing'}")
    return child.returncode, said
