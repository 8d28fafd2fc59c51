"""How a rank was started: registered by `gridagent exec`, so that a spare can become it."""

import os
import re
import sys
from pathlib import Path

import msgspec

from gridagent.environment import carried, withheld
from gridagent.errors import AgentError
from gridagent.home import AgentConfig, Home
from gridagent.identity import write_file
from gridagent.names import job_flaw
from gridagent.redact import is_secret
from gridagent.wire import LaunchSpec

_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class LaunchError(AgentError):
    """A process cannot be registered or started."""


def check_job(job: str) -> str:
    """The name of a job, if it is one. Raises `LaunchError`."""
    if why := job_flaw(job):
        raise LaunchError(why)
    return job


def session_environment(home: Home, config: AgentConfig, job: str) -> dict[str, str]:
    """What a training process or a parked spare needs to find its agent."""
    return {
        "GRIDAGENT_SOCKET": str(home.socket.absolute()),
        "GRIDAGENT_JOB": job,
        "GRIDAGENT_ADDR": config.host,
        "GRIDAGENT_HANDOVERS": str(home.handovers.absolute()),
    }


class Launches:
    """The launch specs of this node's ranks, one file each; a job's name becomes part of a file name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, job: str, rank: int) -> LaunchSpec | None:
        """The spec of a rank, None if it is not known here."""
        return _read(self._rank_file(job, rank))

    def put(self, spec: LaunchSpec) -> None:
        """Registers a rank. Raises `LaunchError` for a job name that is no file name, `OSError`."""
        write_file(self._rank_file(spec.job, spec.rank), msgspec.json.encode(spec), 0o600)

    def drop(self, job: str, rank: int) -> None:
        """The rank has left this node."""
        self._rank_file(job, rank).unlink(missing_ok=True)

    def promise(self, session: str, spec: LaunchSpec) -> None:
        """A spare (`session`) was given this spec; it counts once the spare holds the rank."""
        write_file(self._promise_file(session), msgspec.json.encode(spec), 0o600)

    def promised(self, session: str) -> bool:
        """Whether this session was given a rank and has not taken it yet."""
        return self._promise_file(session).exists()

    def take(self, session: str, gpus: list[int]) -> LaunchSpec | None:
        """The spare holds the rank now: its promise becomes the rank's spec, on the spare's own devices."""
        path = self._promise_file(session)
        spec = _read(path)
        if spec:
            spec = msgspec.structs.replace(spec, gpus=gpus)
            self.put(spec)
            path.unlink(missing_ok=True)
        return spec

    def forget(self, session: str) -> None:
        """The spare will not take the rank."""
        self._promise_file(session).unlink(missing_ok=True)

    def _rank_file(self, job: str, rank: int) -> Path:
        return self._folder / f"{check_job(job)}-{rank}.json"

    def _promise_file(self, session: str) -> Path:
        return self._folder / f"{_session_file(session)}.promise"


def register(home: Home, config: AgentConfig, job: str, argv: list[str]) -> dict[str, str]:
    """Writes the launch spec of this very process and returns the environment it is to run with.

    Raises `LaunchError` for what is no name of a job, if RANK or WORLD_SIZE is missing, or if the file cannot
    be written.
    """
    check_job(job)
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error}): start one"
            " `gridagent exec` for each rank, e.g. by torchrun --no-python"
        ) from None
    for option in argv:
        name = option.lstrip("-").partition("=")[0]
        if option.startswith("-") and is_secret(name):
            print(
                f"gridagent: the option --{name} looks like a secret. Arguments are kept as they are, in"
                " files that only this user reads, here and on a spare's node: better give secrets by a file",
                file=sys.stderr,
            )
    spec = LaunchSpec(
        job=job,
        rank=rank,
        world_size=world_size,
        argv=argv,
        cwd=os.getcwd(),
        env=carried(os.environ, config.env_allow),
        withheld=withheld(os.environ),
        local_rank=local_rank,
        gpus=_own_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""), local_rank),
        python=sys.version,
    )
    try:
        home.launch.mkdir(mode=0o700, parents=True, exist_ok=True)
        Launches(home.launch).put(spec)
    except OSError as error:
        raise LaunchError(f"rank {rank} of {job} cannot be registered below {home.root}: {error}") from None
    return {**os.environ, **session_environment(home, config, job)}


def _own_gpus(visible: str, local_rank: int) -> list[int]:
    devices = [int(device) for device in visible.split(",") if device.strip().isdecimal()]
    return [devices[local_rank]] if local_rank < len(devices) else devices


def _read(path: Path) -> LaunchSpec | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LaunchSpec)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise LaunchError(f"{path} is damaged: {error}; restart the rank with gridagent exec") from None


def _session_file(session: str) -> str:
    if not _SAFE_NAME.fullmatch(session) or session.startswith("."):
        raise LaunchError(f"session {session!r} may hold letters, digits, dot, dash and underscore only")
    return session
