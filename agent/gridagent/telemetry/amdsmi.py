"""Source `amdsmi`: all AMD GPUs of a node, read through AMD SMI (amdsmi) in a child process."""

from gridagent.errors import ConfigError
from gridagent.home import Home
from gridagent.telemetry.gpus import Gpus, Timing


class AmdSmi(Gpus):
    """`root`: where /sys is looked for."""

    NAME = "amdsmi"
    LIBRARY = "AMD SMI"
    LOST = "it does not answer on the PCI bus"

    def __init__(self, *, root: str = "/", expected: int = 0, timing: Timing | None = None) -> None:
        lost_s = (timing or Timing()).lost_s
        super().__init__(["gridagent.telemetry.amdsmi_child", root, str(lost_s)], expected, timing)


def open_amdsmi(rest: str, home: Home, sysroot: str) -> AmdSmi:
    """Reads the source `amdsmi`, which takes no options. Raises `ConfigError`."""
    if rest:
        raise ConfigError(f"{home.config_file}: source amdsmi takes nothing after its name, not {rest!r}")
    return AmdSmi(root=sysroot, expected=home.config().gpus)
