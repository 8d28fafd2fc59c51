"""A year of a fleet as its journal would have it, for benchmarks of the history.

What happens is the simulator's (`gridctl.simulate`): faults of all classes with their truth, and noise. What
a controller writes of it is made here, in the controller's own structs and words, since a watchdog and real
hand-overs for a year of 1,024 nodes would take days. Records are chained and hashed by the journal itself;
only its fsync is left out.
"""

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from gridagent.journal import Journal
from gridagent.wire import Member
from gridctl.model.findings import Decision, Finding, Suppressed
from gridctl.model.plans import Cost, Move, Plan, Step
from gridctl.model.truth import Fault, Noise
from gridctl.simulate.layout import fleet
from gridctl.simulate.plan import life

BEGIN_UNIX_S = 1_764_547_200.0
YEAR_H = 8760.0
#: Suppressed application noise is kept once an hour and node by the watchdog; so much of the simulator's.
NOISE_MAX = 200_000
STEPS = "preflight engage cordon reserve specialise open join cut watch end".split()
PHASES = "armed go standing decided prepared committed ready running".split()

Event = tuple[float, int, str, dict[str, Any]]


def write(folder: Path, nodes: int, times: float, seed: str) -> tuple[int, int]:
    """Writes the journal. Returns how many records and incidents there are."""
    who = fleet(nodes, seed)
    truth = life(who, YEAR_H, times).truth()
    chance, serial = random.Random(f"year {seed}"), count()
    jobs = {node: job for job, members in who.jobs.items() for node in members}
    streams: list[Iterator[Event]] = [
        _fault(fault, jobs.get(fault.node, ""), chance, serial) for fault in truth.faults
    ]
    share = min(1.0, NOISE_MAX / max(1, len(truth.noise)))
    streams += [_noise(noise, serial) for noise in truth.noise if chance.random() < share]
    events = sorted((event for stream in streams for event in stream), key=lambda event: event[:2])
    now_unix_s = [BEGIN_UNIX_S]
    with patch("gridagent.journal.os.fsync"), Journal(folder, lambda: now_unix_s[0]) as log:
        for node in who.nodes:
            facts = {"node": node.name, "rack": node.rack, "node_class": "H100 x 8", "driver": "555.42"}
            more = {"nvlink_domain": node.nvlink_domain, "cooling_zone": node.cooling_zone, "gpus": node.gpus}
            held = {
                job: [members.index(node.name)] for job, members in who.jobs.items() if node.name in members
            }
            log.append("facts", "year", {**facts, **more, "spare": node.spare, "jobs": held, "devices": {}})
        for t_s, _, kind, data in events:
            now_unix_s[0] = BEGIN_UNIX_S + t_s
            log.append(kind, "year", data)
        return log.last_seq, len(truth.faults)


def _fault(fault: Fault, job: str, chance: random.Random, serial: "count[int]") -> Iterator[Event]:
    """What is written of a fault, from the first finding to the incident's end."""
    name, t_s = f"i-{next(serial):08x}", fault.t + chance.uniform(0.1, 20.0)
    where = {"incident": name, "node": fault.node, "job": job}
    about = {"t_unix_s": BEGIN_UNIX_S + t_s, "node": fault.node, "device": fault.device, "kind": fault.kind}

    def told(kind: str, data: dict[str, Any]) -> Event:
        return (t_s, next(serial), kind, data)

    title = {"kind": fault.kind, "title": f"{fault.kind} on {fault.device} of {fault.node}"}
    yield told("incident", {**where, **title, "state": "open", "t_unix_s": about["t_unix_s"]})
    severity, why = (
        ("critical" if fault.preempt_job else "warning"),
        [f"NVRM: Xid 48 of {fault.pci}: {fault.kind}"],
    )
    found = Finding(
        **about, severity=severity, why=why, rule=f"xid.{fault.kind}", layer="kernel", fault=fault.fault
    )
    yield told("finding", {**msgspec.to_builtins(found), "incident": name})
    ended = "the finding has ended"
    if fault.preempt_job and job:
        decided = Decision(**about, severity=severity, why=why, rule="decisive", decision="swap_now")
        yield told("decision", {**msgspec.to_builtins(decided), "incident": name})
        yield told("decision", _choice(name, fault, chance))
        for t_s, kind, data in _swap(name, fault, job, t_s, chance):  # noqa: B020 - time goes on
            yield (t_s, next(serial), kind, data)
        ended = "the run is done"
    t_s += chance.uniform(60.0, 3 * 3600.0)
    if chance.random() < 0.5:
        yield told("audit", {"what": "ack", **where, "who": "ann@ops", "value": "", "reason": "mine"})
    t_s += chance.uniform(60.0, 3600.0)
    yield told("incident", {**where, **title, "title": ended, "state": "closed"})


def _choice(incident: str, fault: Fault, chance: random.Random) -> dict[str, Any]:
    cost = {"gpu_h": chance.uniform(0.01, 400.0), "usd": None, "parts": []}
    others = [
        {"action": action, "cost": cost, "refused": ""} for action in ("swap_now", "watch", "swap_in_window")
    ]
    return {
        "type": "choice",
        "incident": incident,
        "node": fault.node,
        "kind": fault.kind,
        "action": "swap_now",
        "wanted": "swap_now",
        "automatic": False,
        "uncertain": False,
        "cheapest": "swap_now",
        "alternatives": others,
        "why": [f"{fault.kind} is decisive"],
        "p_24h": 0.0039,
        "basis": "base rate",
    }


def _swap(
    incident: str, fault: Fault, job: str, t_s: float, chance: random.Random
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """A hand-over from plan to end, with its pause."""
    ident = f"{chance.getrandbits(32):08x}"
    run = {"incident": incident, "run": f"r-{ident}"}
    spare = f"spare-{chance.randrange(32)}"
    yield t_s + 0.5, "plan", {"incident": incident, "plan": _plan(ident, incident, fault, job, spare, t_s)}
    t_s += chance.uniform(20.0, 600.0)
    confirmed = {"plan": f"p-{ident}", "digest": ident * 8, "who": "ann@ops", "reason": fault.kind}
    yield t_s, "gate", {**run, **confirmed, "typed": fault.node, "yes": False}
    about = {"plan": f"p-{ident}", "node": fault.node, "job": job, "who": "ann@ops"}
    yield t_s, "run", {**run, **about, "state": "running"}
    pause_s = chance.uniform(0.1, 0.4)
    for index, step in enumerate(STEPS):
        yield t_s, "step", {**run, "step": step, "index": index, "state": "started"}
        if step == "cut":
            for number, phase in enumerate(PHASES):
                at = {"t_unix_s": BEGIN_UNIX_S + t_s + pause_s * number / 7, "node": spare, "phase": phase}
                more = {"rank": 0, "role": "rank", "session": ident, "detail": {"number": number}}
                yield t_s, "note", {**run, "handover": f"h-{ident}", **at, **more}
        t_s += chance.uniform(0.2, 4.0)
        values = [_cut(ident, t_s, pause_s)] if step == "cut" else []
        done = {"state": "done", "code": "", "text": "", "values": values}
        yield t_s, "step", {**run, "step": step, "index": index, **done}
    yield t_s, "run", {**run, **about, "state": "done", "code": "", "text": ""}


def _cut(ident: str, t_s: float, pause_s: float) -> dict[str, Any]:
    digests = dict.fromkeys(("parameters", "optimizer", "buffers", "rng", "other"), ident * 8)
    return {
        "outcome": "commit",
        "handover": f"h-{ident}",
        "epoch": 1,
        "boundary_step": int(t_s),
        "cut_ms": pause_s * 1000.0,
        "state_bytes": 1_400_000_000,
        "t_boundary_unix_s": BEGIN_UNIX_S + t_s,
        "t_resume_unix_s": BEGIN_UNIX_S + t_s + pause_s,
        "digests": {"0": digests},
        "owners": {"0": ident},
    }


def _plan(ident: str, incident: str, fault: Fault, job: str, spare: str, t_s: float) -> dict[str, Any]:
    source = Member(node=fault.node, url="https://10.0.0.1:7443", session=ident, role="source", rank=0)
    target = Member(node=spare, url="https://10.0.0.2:7443", session=ident, role="target", rank=0)
    plan = Plan(
        id=f"p-{ident}",
        runbook="hot-swap",
        incident=incident,
        who="gridctl",
        node=fault.node,
        job=job,
        devices=[],
        created_unix_s=BEGIN_UNIX_S + t_s,
        expires_unix_s=BEGIN_UNIX_S + t_s + 300.0,
        steps=[Step(name=name, text=f"{name} of {fault.node}") for name in STEPS],
        relied_on={f"node {fault.node}": f"serial SN-{fault.node}, boot {ident}"},
        handover=f"h-{ident}",
        epoch_to=1,
        chair=source,
        moves=[Move(rank=0, source=source, target=target)],
        members=[source, target],
        cost=Cost(steps_lost=0, pause_s=0.2, preparation_s=12.0, state_bytes=1_400_000_000),
        bit_identical=True,
        digest=ident * 8,
    )
    found: dict[str, Any] = msgspec.to_builtins(plan)
    return found


def _noise(noise: Noise, serial: "count[int]") -> Iterator[Event]:
    """Application noise, which the watchdog passes over and says so."""
    said = Suppressed(
        t_unix_s=BEGIN_UNIX_S + noise.t,
        node=noise.node,
        device="gpu:0",
        kind="app_error",
        why=[f"Xid 13, pid=1: {noise.cause}"],
        rule="xid.13",
    )
    yield noise.t, next(serial), "decision", {**msgspec.to_builtins(said), "incident": ""}
