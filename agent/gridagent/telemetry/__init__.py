"""What a node tells: sources (one file each) and the spool, which every record passes through."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from gridagent.errors import ConfigError
from gridagent.home import Home


class Reading(msgspec.Struct, frozen=True):
    """One record of a source. `kind` and `v` follow the stream's format (`wire.StreamRecord`)."""

    kind: str
    v: dict[str, Any]


class Source(Protocol):
    """Something that reports for as long as it is iterated. It never blocks the event loop."""

    def __aiter__(self) -> AsyncIterator[Reading]: ...


def open_source(text: str, home: Home, node: str, sysroot: str = "/") -> Source:
    """The source that a `sources` entry of agent.toml names. Raises `ConfigError`.

    Files are read below `sysroot`, unless the entry names a root of its own.
    """
    from gridagent.telemetry.files import NAMES, open_files

    if (files := open_files(text, home, sysroot)) is not None:
        return files
    scheme, _, rest = text.partition(":")
    if scheme == "replay":
        from gridagent.telemetry.replay import open_replay

        return open_replay(rest, home, node)
    if scheme == "nvml":
        from gridagent.telemetry.nvml import open_nvml

        return open_nvml(rest, home)
    if scheme == "amdsmi":
        from gridagent.telemetry.amdsmi import open_amdsmi

        return open_amdsmi(rest, home, sysroot)
    known = ", ".join((*NAMES, "nvml", "amdsmi", "replay:FILE?node=NAME"))
    raise ConfigError(f"{home.config_file}: {text!r} is no source; known: {known}")
