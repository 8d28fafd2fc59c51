"""What detection says: findings, verdicts, decisions, and what it held back and why.

Every output has the keys that `gridctl replay` prints: t, type, node, device, kind, severity, action,
preempt_job, when, why, rule.
"""

import msgspec

#: From harmless to worst; the order is total.
SEVERITIES = ("info", "warning", "critical", "fatal")


class WatchedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as a recording's header or the controller describes it."""

    name: str
    rack: str = ""
    nvlink_domain: str = ""
    cooling_zone: str = ""
    gpus: int = 0
    driver: str = ""  #: version of the GPU's driver
    spare: bool = False  #: no rank runs on it: a fault there is no reason for a swap


class _Said(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    t_unix_s: float
    node: str
    device: str  #: "gpu:3", "pci:0000:9b:00.0" while the number is not known, or "node"
    kind: str
    severity: str = "info"
    action: str = "none"
    preempt_job: bool = False
    when: str = "none"
    why: list[str] = []  #: the evidence, one line each
    rule: str = ""
    job: str = ""  #: where it is about one job and not about the node; `gridctl replay` does not print it
    #: The processes that it is about, each with its epoch: so the same is known again, whenever it is found.
    #: Not printed either.
    whose: str = ""


class Finding(_Said, frozen=True, kw_only=True, tag="finding"):
    """Something was seen. The same node, device and kind again is an update of the finding before."""

    layer: str  #: kernel, device or heartbeat: who saw it
    fault: str  #: node, app, fabric, driver, config, environment, monitor, unknown
    xid: int | None = None
    pci: str = ""


class Verdict(_Said, frozen=True, kw_only=True, tag="verdict"):
    """A node's state has changed. `kind` is healthy, suspect, faulty or blind (nothing is heard of it)."""


class Decision(_Said, frozen=True, kw_only=True, tag="decision"):
    """What ought to be done. `kind` is the first cause."""

    decision: str  #: swap_now, or quarantine for a node on which no rank runs
    rules: list[str] = []  #: every rule it rests on


class Suppressed(_Said, frozen=True, kw_only=True, tag="suppressed"):
    """Something was seen and is not acted on; `rule` and `why` say for what reason."""


Output = Finding | Verdict | Decision | Suppressed


def worse(one: str, other: str) -> str:
    """The higher of two severities."""
    return max(one, other, key=SEVERITIES.index)
