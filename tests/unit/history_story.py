"""Journals made by hand, for tests of history: what History reads, without what makes the chain."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gridctl.history import History
from gridctl.history.ask import Asked, compose, questions
from gridctl.model.policy import Policy

#: A midnight in UTC.
T0 = 1_699_920_000.0
HOUR = 3600.0
Told = tuple[float, str, dict[str, Any]]  #: seconds after T0, kind, data


def written(folder: Path, told: Sequence[Told]) -> History:
    """A History over these records, in this order."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "00000001.jsonl").open("w", encoding="utf-8") as file:
        for seq, (t, kind, data) in enumerate(told, 1):
            record = {"seq": seq, "t_unix_s": T0 + t, "kind": kind, "actor": "c", "data": data}
            file.write(json.dumps({**record, "prev": "", "hash": ""}) + "\n")
    return History(folder)


def answer(history: History, name: str, policy: Policy | None = None, **asked: Any) -> list[dict[str, Any]]:
    """The rows of a saved question; times are hours after T0."""
    times = {
        f"{word}_unix_s": T0 + asked.pop(f"{word}_h") * HOUR
        for word in ("since", "until")
        if f"{word}_h" in asked
    }
    question = questions(Path("nowhere"))[name]
    sql = compose(
        history, question, Asked(**{"until_unix_s": T0 + 100 * HOUR, **times}, **asked), policy or Policy()
    )
    columns, rows = history.query(sql)
    assert columns == list(question.columns), "the header says which columns there are"
    return [dict(zip(columns, row, strict=True)) for row in rows]


def facts(t: float, node: str, rack: str, driver: str = "550", **more: Any) -> Told:
    its = {
        "node": node,
        "rack": rack,
        "node_class": "H100 x 8",
        "driver": driver,
        "gpu_model": "H100",
        "gpus": 8,
    }
    rest = {"serial": f"S-{node}", "boot_id": "b", "spare": False, "jobs": {}, "devices": {}}
    return t, "facts", {**its, **rest, **more}


def opened(t: float, incident: str, node: str, kind: str = "ecc_uncorrectable_dram") -> Told:
    return (
        t,
        "incident",
        {"incident": incident, "state": "open", "kind": kind, "node": node, "job": "lm", "title": "T"},
    )


def closed(t: float, incident: str, node: str, **more: Any) -> Told:
    return (
        t,
        "incident",
        {"incident": incident, "state": "closed", "kind": "k", "node": node, "title": "C", **more},
    )


def finding(t: float, incident: str, node: str, kind: str, device: str = "gpu:0", **more: Any) -> Told:
    its = {"incident": incident, "type": "finding", "node": node, "device": device, "kind": kind, "job": "lm"}
    return (
        t,
        "finding",
        {**its, "severity": "critical", "action": "evacuate_and_reset_gpu", "why": ["w"], **more},
    )


def decision(t: float, incident: str, node: str, **more: Any) -> Told:
    its = {"incident": incident, "type": "decision", "node": node, "device": "gpu:0", "decision": "swap_now"}
    return (
        t,
        "decision",
        {**its, "kind": "ecc_uncorrectable_dram", "action": "evacuate_and_reset_gpu", **more},
    )


def uncordon(t: float, node: str) -> Told:
    return t, "audit", {"what": "uncordon", "node": node, "who": "ann", "reason": "repaired"}


def swap(t: float, incident: str, node: str, run: str, target: str, **more: Any) -> list[Told]:
    """A run of 120 s that begins at t: 4 ranks of 8 GPUs, of which one moves. Its cut ends 50 s after t."""
    of = {
        "pause_ms": 1000.0,
        "outcome": "commit",
        "state": "done",
        "standing": False,
        "deferred": 10.0,
        **more,
    }
    moves = [{"rank": 1, "origin": node, "gpus": list(range(8)), "target": {"node": target}}]
    members = [{"rank": rank} for rank in (0, 1, 2, 3, 1)]
    plan = {
        "id": f"p-{run}",
        "runbook": "hot-swap",
        "node": node,
        "job": "lm",
        "moves": moves,
        "members": members,
    }
    plan |= {"standing": of["standing"], "handover": f"h-{run}", "cost": {"deferred_gpu_h": of["deferred"]}}
    about = {"incident": incident, "run": run}
    resumed = {
        "t_resume_unix_s": T0 + t + of.get("resumed_s", 50.0),
        "digests": {"1": {"rng": "aa", "optimizer": "bb"}},
    }
    cut = {
        "cut_ms": of["pause_ms"],
        "outcome": of["outcome"],
        "state_bytes": 4096,
        "handover": f"h-{run}",
        **resumed,
    }
    return [
        (t, "plan", {"incident": incident, "plan": plan}),
        (
            t,
            "run",
            {**about, "plan": f"p-{run}", "node": node, "job": "lm", "state": "running", "who": "ann"},
        ),
        (t + 40, "step", {**about, "step": "cut", "index": 7, "state": "started"}),
        (t + 50, "step", {**about, "step": "cut", "index": 7, "state": "done", "values": [cut]}),
        (t + 120, "run", {**about, "plan": f"p-{run}", "node": node, "job": "lm", "state": of["state"]}),
    ]


def story() -> list[Told]:
    """100 hours of three nodes of which n1 fails again and again; of n4 nothing is known but a finding."""
    dead = {"device": "node", "action": "recover_rank"}
    watch = [{"action": "watch", "cost": {"gpu_h": 36.0}}, {"action": "swap_now", "cost": {"gpu_h": 0.1}}]
    return [
        facts(0, "n1", "r1", jobs={"lm": [0, 1]}),
        facts(0, "n2", "r1", jobs={"lm": [2, 3]}),
        facts(0, "n3", "r2", "560", spare=True),
        # n1: a true fault, a swap of it
        opened(10 * HOUR, "i1", "n1"),
        finding(10 * HOUR, "i1", "n1", "ecc_uncorrectable_dram"),
        decision(10 * HOUR, "i1", "n1"),
        *swap(10 * HOUR + 60, "i1", "n1", "r1", "n3", pause_ms=1800.0),
        closed(10 * HOUR + 180, "i1", "n1", verdict="true_fault", who="ann"),
        facts(10 * HOUR + 180, "n3", "r2", "560", jobs={"lm": [1]}),
        decision(10.5 * HOUR, "i1", "n1"),
        # back, and failed again, twice
        uncordon(20 * HOUR, "n1"),
        opened(30 * HOUR, "i2", "n1"),
        decision(30 * HOUR, "i2", "n1"),
        closed(32 * HOUR, "i2", "n1"),
        uncordon(40 * HOUR, "n1"),
        opened(50 * HOUR, "i3", "n1", "gpu_lost"),
        decision(50 * HOUR, "i3", "n1", kind="gpu_lost"),
        # n2: a false alarm
        opened(60 * HOUR, "i4", "n2"),
        decision(60 * HOUR, "i4", "n2"),
        *swap(60 * HOUR + 60, "i4", "n2", "r2", "n3", pause_ms=900.0, deferred=6.0),
        closed(61 * HOUR, "i4", "n2", verdict="false_alarm", who="bob"),
        # a rank died, and the job was brought on
        opened(70 * HOUR, "i5", "n2", "rank_died"),
        finding(70 * HOUR, "i5", "n2", "rank_died", **dead),
        decision(70 * HOUR, "i5", "n2", **dead),
        (
            70 * HOUR,
            "decision",
            {"incident": "i5", "type": "choice", "action": "swap_now", "alternatives": watch},
        ),
        *swap(70 * HOUR + 60, "i5", "n2", "r3", "n3", pause_ms=20.0, standing=True, resumed_s=300.0),
        closed(70 * HOUR + 400, "i5", "n2"),
        # a rank died, and no spare was there
        opened(80 * HOUR, "i6", "n2", "rank_died"),
        finding(80 * HOUR, "i6", "n2", "rank_died", **dead),
        decision(80 * HOUR, "i6", "n2", **dead),
        (80 * HOUR, "note", {"incident": "i6", "code": "no-spare", "text": "no plan for n2"}),
        # a swap that turned back
        opened(90 * HOUR, "i7", "n2"),
        decision(90 * HOUR, "i7", "n2"),
        *swap(90 * HOUR + 60, "i7", "n2", "r4", "n3", pause_ms=500.0, outcome="abort", state="aborted"),
        finding(95 * HOUR, "", "n4", "thermal_throttle"),
    ]
