"""Plays a recording in place of a node's hardware, for a node that has none.

Only what comes from hardware and kernel is played (`KINDS`): heartbeats and training progress are
this agent's own. Times are shifted: a line of second t is reported t/speed seconds after the start.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from gridagent.errors import ConfigError
from gridagent.home import Home
from gridagent.telemetry import Reading

KINDS = frozenset({"sample", "log", "probe", "note"})
TRIGGER_POLL_S = 0.2


class Replay:
    """One node's lines of a recording (`.jsonl` or `.jsonl.gz`), once, from `trigger` on (None: at once)."""

    def __init__(self, file: Path, node: str, speed: float, trigger: Path | None) -> None:
        self._file = file
        self._node = node
        self._speed = speed
        self._trigger = trigger

    async def __aiter__(self) -> AsyncIterator[Reading]:
        while self._trigger is not None and not self._trigger.exists():
            await asyncio.sleep(TRIGGER_POLL_S)
        clock = asyncio.get_running_loop().time
        start_s = clock()
        for t_s, reading in self._lines():
            await asyncio.sleep(max(start_s + t_s / self._speed - clock(), 0.0))
            yield reading

    def _lines(self) -> Iterator[tuple[float, Reading]]:
        packed = self._file.suffix == ".gz"
        with gzip.open(self._file, "rt") if packed else self._file.open() as lines:
            next(lines)  # the header
            for line in lines:
                fields: dict[str, Any] = json.loads(line)
                if fields.pop("node", "") != self._node:
                    continue
                t_s, kind = float(fields.pop("t")), str(fields.pop("kind"))
                if kind in KINDS:
                    yield t_s, Reading(kind, fields)


def open_replay(text: str, home: Home, node: str) -> Replay:
    """Reads `FILE?node=NAME&speed=1&start=trigger`. Raises `ConfigError`.

    `node` is the name in the recording (default: this node's). With `start=trigger` the recording
    waits until the file `replay.go` exists in the agent's home. A relative FILE lies below the home.
    """
    name, _, query = text.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    node, speed, start = options.pop("node", node), options.pop("speed", "1"), options.pop("start", "now")
    where = f"{home.config_file}: source replay:{text}"
    if options:
        raise ConfigError(f"{where}: unknown option {', '.join(sorted(options))}; known: node, speed, start")
    if start not in ("now", "trigger"):
        raise ConfigError(f"{where}: start is {start!r}, must be now or trigger")
    try:
        factor = float(speed)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise ConfigError(f"{where}: speed is {speed!r}, must be a number above 0")
    file = home.root / name
    if file.suffix not in (".jsonl", ".gz") or not file.is_file():
        raise ConfigError(f"{where}: {file} is no recording (.jsonl or .jsonl.gz) that can be read")
    return Replay(file, node, factor, home.replay_go if start == "trigger" else None)
