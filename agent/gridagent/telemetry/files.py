"""The sources that read files, by the names that agent.toml knows."""

import hashlib
import math
from pathlib import Path
from urllib.parse import parse_qsl

from gridagent.errors import ConfigError
from gridagent.home import Home
from gridagent.telemetry.aer import Aer
from gridagent.telemetry.edac import Edac
from gridagent.telemetry.ethernet import Ethernet
from gridagent.telemetry.hwmon import Hwmon
from gridagent.telemetry.infiniband import InfiniBand
from gridagent.telemetry.kmsg import Kmsg
from gridagent.telemetry.logfile import LogFile
from gridagent.telemetry.nvme import Nvme
from gridagent.telemetry.polled import DEADLINE_S, Polled, Probe
from gridagent.telemetry.rapl import Rapl
from gridagent.telemetry.system import System
from gridagent.telemetry.tree import Tree

PROBES: dict[str, type[Probe]] = {
    "infiniband": InfiniBand,
    "ethernet": Ethernet,
    "aer": Aer,
    "edac": Edac,
    "hwmon": Hwmon,
    "rapl": Rapl,
    "nvme": Nvme,
    "system": System,
}
NAMES = ("kmsg", "log:FILE", *PROBES)
_SECONDS_MAX = 3600.0


def open_files(text: str, home: Home, sysroot: str = "/") -> Polled | None:
    """Reads `NAME?root=DIR&interval=SECONDS&deadline=SECONDS`; None if NAME is no source that reads files.

    `log:FILE` also takes `as=NAME`, the name of the log in its records. Raises `ConfigError`.
    """
    name, _, query = text.partition("?")
    is_log = name.startswith("log:")
    if not is_log and name != "kmsg" and name not in PROBES:
        return None
    where = f"{home.config_file}: source {text!r}"
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = {"root", "interval", "deadline"} | ({"as"} if is_log else set())
    if unknown := options.keys() - known:
        raise ConfigError(
            f"{where}: unknown option {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
        )
    root = Path(options.get("root", sysroot))
    if not root.is_absolute():
        raise ConfigError(f"{where}: root is {str(root)!r}, must be an absolute path")
    interval_s = _seconds(where, "interval", options["interval"]) if "interval" in options else None
    deadline_s = _seconds(where, "deadline", options["deadline"]) if "deadline" in options else DEADLINE_S
    digest = hashlib.sha256(f"{root}\n{name}".encode()).hexdigest()
    cursor = home.cursors / f"{digest[:16]}.json"
    probe: Probe
    if is_log:
        path = Path(name.removeprefix("log:"))
        if not path.is_absolute() or not path.name:
            raise ConfigError(f"{where}: {str(path)!r} is no absolute path of a file")
        probe = LogFile(Tree(root, name), str(path)[1:], options.get("as") or path.stem, cursor)
    elif name == "kmsg":
        probe = Kmsg(Tree(root, name), cursor)
    else:
        probe = PROBES[name](Tree(root, name))
    return Polled(probe, interval_s, deadline_s)


def _seconds(where: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _SECONDS_MAX:
        raise ConfigError(f"{where}: {key} is {text!r}, must be a number of seconds up to {_SECONDS_MAX:g}")
    return value
