"""Evidence of a node before anything destroys it: what is gathered, packed and handed out.

A collection runs in a child process of its own (`python -m gridagent.evidence`): what hangs in a driver, or
needs much memory, harms no agent. The child is told an `Order` on stdin and prints an `Outcome`.
"""

from typing import Any

import msgspec

from gridagent.wire import EvidenceItem

#: Uncompressed bytes of a whole archive, and how long its spool goes back.
BYTES_MAX = 256 << 20
SPOOL_S = 3600.0


class RankProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of this node. `env` is what a launch keeps: no secrets."""

    job: str
    rank: int
    pid: int
    state: str
    argv: list[str] = []
    env: dict[str, str] = {}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to do."""

    id: str
    folder: str  #: the archives' folder
    sysroot: str
    spool: str
    about: dict[str, Any]  #: for the manifest: node, boot, incident, who asked
    status: dict[str, Any]  #: the agent's NodeStatus
    ranks: list[RankProcess]
    logs: list[str]  #: log files that the agent follows, absolute below `sysroot`
    t_unix_s: float
    deadline_s: float  #: for everything
    bytes_max: int = BYTES_MAX


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; `error` says why there is no archive."""

    bytes: int = 0
    sha256: str = ""
    items: list[EvidenceItem] = []
    error: str = ""
