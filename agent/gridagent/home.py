"""The agent's home: one folder with configuration, certificates, spool and operation journal."""

import contextlib
import fcntl
import os
import sys
import tomllib
from pathlib import Path

import msgspec

from gridagent.errors import ConfigError

DEFAULT_HOME = "/var/lib/gridagent"
#: The kernel's limit for a Unix socket's path, without the closing zero.
SOCKET_PATH_BYTES_MAX = 107
SPOOL_BYTES_MAX = 256 << 20
#: What stands for the GPU in the command that resets one.
GPU_NAMES = ("{uuid}", "{pci}", "{index}")


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """agent.toml. `node` and `listen` are needed, everything else has a default."""

    node: str
    listen: str  #: "host:port" of this node's own address; port 0 lets the kernel choose
    rack: str = ""
    nvlink_domain: str = ""
    cooling_zone: str = ""
    serial: str = ""  #: "": read from the firmware's tables
    gpus: int = 0
    gpu_model: str = ""
    driver: str = ""
    sources: list[str] = []  #: telemetry, e.g. "kmsg", "ethernet?interval=5"
    env_allow: list[str] = []  #: further patterns of environment names that a launch keeps
    reset_gpu: list[str] = []  #: the command that resets a GPU, e.g. ["nvidia-smi", "-r", "-i", "{uuid}"]
    reboot: list[str] = []  #: the command that reboots the node, e.g. ["systemctl", "reboot"]
    spool_bytes_max: int = SPOOL_BYTES_MAX
    sysroot: str = "/"  #: where /sys and /proc are read

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])


class Home:
    """Paths below the agent's home."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.config_file = self.root / "agent.toml"
        self.trust = self.root / "trust"
        self.spool = self.root / "spool"
        self.ops = self.root / "ops"
        self.launch = self.root / "launch"
        self.handovers = self.root / "handovers"
        self.socket = self.root / "agent.sock"
        self.url_file = self.root / "url"
        self.lease_file = self.root / "lease.json"
        self.freeze_file = self.root / "freeze.json"
        self.node_file = self.root / "node.json"
        self.cursors = self.root / "cursors"
        self.evidence = self.root / "evidence"
        self.replay_go = self.root / "replay.go"
        self._lock_fd = -1

    def config(self) -> AgentConfig:
        """Reads agent.toml. Raises `ConfigError` that names the file and the key."""
        try:
            table = tomllib.loads(self.config_file.read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"{self.config_file} is missing: write it (node, listen), or run `gridagent join`"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{self.config_file} cannot be read: {error}") from None
        for key in table.keys() - set(AgentConfig.__struct_fields__):
            print(f"gridagent: {self.config_file}: {key!r} is no key of mine, ignored", file=sys.stderr)
        try:
            config = msgspec.convert(table, AgentConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.config_file}: {error}") from None
        host, _, port = config.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f'{self.config_file}: listen = {config.listen!r} is not "host:port"')
        if host in ("0.0.0.0", "[::]", "*"):
            raise ConfigError(
                f"{self.config_file}: listen = {config.listen!r} names no address; write the node's own,"
                " because peers and the job's sessions use it too"
            )
        if not config.node:
            raise ConfigError(f"{self.config_file}: node is empty; write the node's name")
        if config.reset_gpu and not any(name in word for word in config.reset_gpu for name in GPU_NAMES):
            raise ConfigError(
                f"{self.config_file}: reset_gpu = {config.reset_gpu} would not know which GPU: write"
                f" {', '.join(GPU_NAMES)} where it belongs"
            )
        return config

    def prepare(self) -> None:
        """Makes the folders and takes the home for this process. Raises `ConfigError`."""
        try:
            for folder in (self.root, self.spool, self.ops, self.launch, self.handovers):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.root / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"the home {self.root} cannot be used: {error}") from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another agent serves {self.root}; stop it first, or give this one its own --home"
            ) from None
        path = self.socket.absolute()  # as sessions are told it, which were started elsewhere
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(f"{path} is too long for a Unix socket; use a shorter --home")
        with contextlib.suppress(FileNotFoundError):  # what a killed agent left behind
            self.socket.unlink()


def boot_id(sysroot: str) -> str:
    """The kernel's id of this boot, "" where there is none."""
    return _read_line(Path(sysroot) / "proc/sys/kernel/random/boot_id")


def chassis_serial(config: AgentConfig) -> str:
    """The chassis serial from agent.toml or the firmware, "" if neither tells."""
    return config.serial or _read_line(Path(config.sysroot) / "sys/class/dmi/id/product_serial")


def _read_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
