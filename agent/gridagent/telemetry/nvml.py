"""Source `nvml`: all NVIDIA GPUs of a node, read through NVML (nvidia-ml-py) in a child process."""

from urllib.parse import parse_qsl

from gridagent.errors import ConfigError
from gridagent.home import Home
from gridagent.telemetry.gpus import Gpus, Timing


class Nvml(Gpus):
    """`events`: also tells Xids."""

    NAME = "nvml"
    LIBRARY = "NVML"
    LOST = "NVML says GPU is lost"

    def __init__(self, *, events: bool, expected: int = 0, timing: Timing | None = None) -> None:
        self.events = events
        command = ["gridagent.telemetry.nvml_child", *(["--events"] if events else [])]
        super().__init__(command, expected, timing)


def open_nvml(rest: str, home: Home) -> Nvml:
    """Reads the source `nvml`, which takes no options. Raises `ConfigError`."""
    if rest:
        raise ConfigError(f"{home.config_file}: source nvml takes nothing after its name, not {rest!r}")
    config = home.config()
    return Nvml(events=not any(map(_is_kernel_log, config.sources)), expected=config.gpus)


def _is_kernel_log(text: str) -> bool:
    """Whether a source hands on the kernel's own Xid lines, which say more than NVML's events."""
    name, _, query = text.partition("?")
    return name == "kmsg" or (name.startswith("log:") and ("as", "kmsg") in parse_qsl(query))
