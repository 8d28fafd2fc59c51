"""A made-up incident: what a journal says of a GPU that failed, a swap, and people who wrote about it."""

from pathlib import Path
from typing import Any

import msgspec

from gridagent.journal import Journal
from gridagent.wire import Blocker, Member
from gridctl.model.plans import Cost, Move, Plan, Step

NOW = 1_800_000_000.0
INCIDENT = "i-11aa22bb"
HOSTILE = "</pre><script>alert(1)</script> | `x` \x1b[2J\r\n# no heading <img src=x onerror=y> [/red] \u202e"
LINE = "Double Bit ECC Error"

_OPENED = {
    "incident": INCIDENT,
    "kind": "ecc_dbe",
    "node": "n2",
    "job": "lm",
    "title": "ecc_dbe on gpu:3 of n2",
}
_SEEN = {"incident": INCIDENT, "node": "n2", "device": "gpu:3", "job": ""}
_FINDING = {
    **_SEEN,
    "type": "finding",
    "kind": "ecc_dbe",
    "severity": "fatal",
    "action": "evacuate_and_reset_gpu",
    "preempt_job": True,
    "when": "now",
    "why": [f"Xid 48: a double bit error: {LINE!r}"],
    "rule": "xid.48",
    "layer": "kernel",
    "fault": "node",
    "xid": 48,
    "pci": "0000:9b:00.0",
}
_SUPPRESSED = {
    **_SEEN,
    "type": "suppressed",
    "kind": "xid_63",
    "severity": "warning",
    "why": ["Xid 63: a row is remapped", "follows xid.48 on the same GPU: the first cause counts"],
    "rule": "chain.xid.48",
}
_DECISION = {
    **_SEEN,
    "type": "decision",
    "kind": "ecc_dbe",
    "decision": "swap_now",
    "severity": "fatal",
    "action": "evacuate_and_reset_gpu",
    "rules": ["xid.48", "confirm.device"],
    "why": [f"Xid 48: a double bit error: {LINE!r}", "ecc_dbe_total rose by 1"],
}


def _cost(name: str, gpu_h: float) -> dict[str, Any]:
    part = {"name": name, "gpu_h": gpu_h, "usd": gpu_h * 2.5, "how": "3 GPUs", "basis": "base rate"}
    return {"gpu_h": gpu_h, "usd": gpu_h * 2.5, "parts": [part]}


_CHOICE = {
    "incident": INCIDENT,
    "node": "n2",
    "kind": "ecc_dbe",
    "type": "choice",
    "action": "swap_now",
    "wanted": "swap_now",
    "why": ["a decisive finding"],
    "automatic": False,
    "cheapest": "watch",
    "uncertain": True,
    "p_24h": 0.91,
    "basis": "this node's own record",
    "alternatives": [
        {"action": "watch", "cost": _cost("recovery if it fails", 3.1), "refused": ""},
        {"action": "evacuate_device", "cost": _cost("pause", 0.001), "refused": "no spare for one GPU"},
        {"action": "swap_now", "cost": _cost("pause", 0.0125), "refused": ""},
    ],
}


def _member(node: str, rank: int, role: str) -> Member:
    return Member(role=role, rank=rank, node=node, url=f"https://{node}:7000", session=f"s-{node}")


PLAN = Plan(
    id="p-33cc44dd",
    runbook="hot-swap",
    incident=INCIDENT,
    who="gridctl",
    node="n2",
    job="lm",
    devices=[],
    created_unix_s=NOW + 3,
    expires_unix_s=NOW + 303,
    steps=[
        Step(name="cordon", text="cordon n2"),
        Step(name="cut", text="arm, move the state, verify, commit: epoch 1", commits=True),
        Step(name="watch", text="5 steps against the band of the last 20", watch_steps=5),
    ],
    relied_on={},
    epoch_to=1,
    moves=[Move(rank=1, source=_member("n2", 1, "source"), target=_member("n4", 1, "target"), origin="n2")],
    members=[
        _member("n1", 0, "survivor"),
        _member("n2", 1, "source"),
        _member("n3", 2, "survivor"),
        _member("n4", 1, "target"),
    ],
    cost=Cost(
        steps_lost=0,
        pause_s=0.27,
        preparation_s=16.0,
        state_bytes=6_000_000,
        comparison=["now: pause 0.000225 GPU-h", "in 24 h: recovery if it fails first 0.0132 GPU-h"],
    ),
    blockers=[Blocker(code="driver-differs", text="n4 has driver 556, n2 has 555", fatal=False)],
    notes=["n4 is not_attested"],
)
_RUN = {"incident": INCIDENT, "run": "r-55ee66ff", "plan": PLAN.id, "node": "n2", "job": "lm"}
_STEP = {"incident": INCIDENT, "run": "r-55ee66ff"}
_PHASE = {"incident": INCIDENT, "run": "r-55ee66ff", "node": "n1", "rank": 0, "handover": "h-1", "detail": {}}
CUT = {
    "handover": "h-1",
    "outcome": "commit",
    "epoch": 1,
    "boundary_step": 60,
    "cut_ms": 125.5,
    "t_boundary_unix_s": NOW + 20.0,
    "t_resume_unix_s": NOW + 20.1255,
    "state_bytes": 6_000_000,
    "parts_ms": {"capture": 20.0, "verify": 5.5},
    "digests": {"1": {"optimizer": "b" * 64, "parameters": "a" * 64}},
}
_ARCHIVE = {
    "what": "evidence",
    "incident": INCIDENT,
    "node": "n2",
    "id": "ev-1",
    "who": "ann@desk",
    "state": "collected",
    "text": "ann@desk took evidence of n2",
    "file": "n2-ev-1.tar.gz",
    "bytes": 4096,
    "sha256": "c" * 64,
    "taken_unix_s": NOW + 8,
}
_BY = {"incident": INCIDENT, "who": "ann@desk", "value": ""}

#: (seconds after NOW at which it was written, kind, data); `at` in the data: when it happened.
STORY: list[tuple[float, str, dict[str, Any]]] = [
    (-90000.0, "incident", {**_OPENED, "incident": "i-before", "kind": "ecc_sbe", "state": "open"}),
    (
        -3600.0,
        "facts",
        {
            "node": "n2",
            "rack": "r1",
            "node_class": "H200x8",
            "driver": "555",
            "gpu_model": "H200",
            "serial": "SN2",
        },
    ),
    (
        0.1,
        "finding",
        {**_SUPPRESSED, "incident": "", "kind": "temp_high", "rule": "boot.grace", "t_unix_s": NOW - 60},
    ),
    (0.5, "incident", {**_OPENED, "state": "open", "t_unix_s": NOW}),
    (0.6, "finding", {**_FINDING, "t_unix_s": NOW}),
    (0.7, "decision", {**_SUPPRESSED, "t_unix_s": NOW + 0.2}),
    (1.0, "decision", {**_DECISION, "t_unix_s": NOW + 0.3}),
    (1.2, "decision", _CHOICE),
    (3.0, "plan", {"incident": INCIDENT, "plan": msgspec.to_builtins(PLAN)}),
    (9.0, "audit", _ARCHIVE),
    (
        10.0,
        "gate",
        {**_RUN, "digest": "d", "who": "ann@desk", "reason": "the DBE is real", "typed": "n2", "yes": False},
    ),
    (10.1, "lease", {**_STEP, "fence": 7, "holder": "ctl", "granted": ["n1", "n2", "n3"]}),
    (10.2, "run", {**_RUN, "state": "running", "who": "ann@desk"}),
    (10.3, "step", {**_STEP, "step": "cordon", "index": 0, "state": "started"}),
    (10.4, "step", {**_STEP, "step": "cordon", "index": 0, "state": "done", "values": [{}]}),
    (19.0, "step", {**_STEP, "step": "cut", "index": 1, "state": "started"}),
    (20.2, "note", {**_PHASE, "phase": "armed", "t_unix_s": NOW + 19.9}),
    (20.3, "note", {**_PHASE, "phase": "running", "t_unix_s": NOW + 20.1255}),
    (20.4, "step", {**_STEP, "step": "cut", "index": 1, "state": "done", "values": [CUT]}),
    (20.5, "step", {**_STEP, "step": "watch", "index": 2, "state": "started"}),
    (
        21.5,
        "step",
        {
            **_STEP,
            "step": "watch",
            "index": 2,
            "state": "done",
            "values": [{"steps": 5, "problem": "", "note": "", "step_s_before": 0.1, "step_s_after": 0.125}],
        },
    ),
    (21.6, "run", {**_RUN, "state": "done"}),
    (21.7, "incident", {**_OPENED, "state": "closed", "title": "run r-55ee66ff is done"}),
    (60.0, "audit", {**_BY, "what": "ack", "reason": "on it"}),
    (61.0, "audit", {**_BY, "what": "assign", "value": "bob", "reason": "his rack"}),
    (62.0, "audit", {**_BY, "what": "note", "reason": f"the fan was loud\n{HOSTILE}"}),
    (
        63.0,
        "audit",
        {**_BY, "what": "link", "value": "https://tickets.example/1?a=b&c=d", "reason": "the RMA"},
    ),
    (64.0, "audit", {**_BY, "what": "link", "value": "javascript:alert(1)", "reason": HOSTILE}),
    (65.0, "incident", {**_OPENED, "incident": "i-part", "state": "open"}),
    (66.0, "incident", {**_OPENED, "incident": "i-part", "state": "closed", "merged_into": INCIDENT, **_BY}),
]
# The last one keeps its own name: `_BY` has the whole's.
STORY[-1][2]["incident"] = "i-part"
STORY[-1][2]["reason"] = "the same GPU"
UNCORDON = {"what": "uncordon", "node": "n2", "who": "bob", "reason": "GPU replaced"}


def write(folder: Path, *more: tuple[float, str, dict[str, Any]]) -> None:
    """The journal of it, always the same to the byte."""
    now = NOW

    with Journal(folder, lambda: now) as log:
        for after_s, kind, data in (*STORY, *more):
            now = NOW + after_s
            log.append(kind, "ctl", data)
