"""Where the operator's files are."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gridctl.errors import ConfigError

#: The kernel's limit for the path of a Unix socket is 108 bytes with the closing zero.
_SOCKET_PATH_BYTES_MAX = 107


@dataclass(frozen=True)
class Home:
    """The operator's home: `config` holds what a person wrote, `state` what gridctl writes."""

    config: Path
    state: Path

    @classmethod
    def at(cls, root: Path | str) -> "Home":
        """Everything below one folder, as `$GRIDCTL_HOME` asks for. Raises `ConfigError`."""
        try:
            path = Path(root).expanduser().absolute()
        except RuntimeError as error:
            raise ConfigError(f"GRIDCTL_HOME={root}: {error}") from None
        return cls(path, path)

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> "Home":
        """`$GRIDCTL_HOME`, else `gridctl` below the XDG folders for configuration and state.

        Raises `ConfigError` where there is neither.
        """
        if root := environ.get("GRIDCTL_HOME"):
            return cls.at(root)
        try:
            user = Path(environ.get("HOME") or Path.home())
        except RuntimeError:
            raise ConfigError("this user has no home folder: set GRIDCTL_HOME to a folder of yours") from None
        config = Path(environ.get("XDG_CONFIG_HOME") or user / ".config") / "gridctl"
        state = Path(environ.get("XDG_STATE_HOME") or user / ".local" / "state") / "gridctl"
        return cls(config, state)

    def make_state(self) -> None:
        """Makes the folder for what gridctl writes. Raises `ConfigError`."""
        try:
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.state} cannot be made ({error.strerror}): set GRIDCTL_HOME to a folder of yours"
            ) from None

    @property
    def fleet_file(self) -> Path:
        return self.config / "fleet.toml"

    @property
    def policy_file(self) -> Path:
        return self.config / "policy.toml"

    @property
    def notify_file(self) -> Path:
        """Who is told of incidents, and how."""
        return self.config / "notify.toml"

    @property
    def questions(self) -> Path:
        """The site's own questions of `gridctl ask`."""
        return self.config / "questions"

    @property
    def trust(self) -> Path:
        return self.config / "trust"

    @property
    def journal(self) -> Path:
        return self.state / "journal"

    @property
    def history(self) -> Path:
        """Where the journal is sealed, and telemetry is kept, unless policy.toml says elsewhere."""
        return self.state / "history"

    @property
    def spool(self) -> Path:
        """What the nodes' streams tell, until it is compacted."""
        return self.state / "spool"

    @property
    def checkpoints(self) -> Path:
        """Signed checkpoints of the journal's chain."""
        return self.state / "checkpoints.jsonl"

    @property
    def evidence(self) -> Path:
        """Where a run puts the archives that it has taken before it reset anything."""
        return self.state / "evidence"

    @property
    def log(self) -> Path:
        return self.state / "controller.log"

    @property
    def lock(self) -> Path:
        """Held by the one controller of this home for as long as it lives."""
        return self.state / "controller.lock"

    @property
    def holder_file(self) -> Path:
        """The name under which this home's controllers hold leases."""
        return self.state / "holder"

    @property
    def socket(self) -> Path:
        """Raises `ConfigError` where the path is too long for a Unix socket."""
        path = self.state / "controller.sock"
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
            raise ConfigError(f"{path} is too long for a Unix socket: choose a shorter $GRIDCTL_HOME")
        return path
