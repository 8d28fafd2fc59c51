"""Small recordings of a fleet of 12 nodes in 3 racks, made here: sound, and with one thing that happens."""

from collections.abc import Callable, Iterator
from typing import Any

from gridagent.wire import StreamRecord
from gridctl.model.findings import WatchedNode

NAMES = [f"{rack}{number}" for rack in "uvw" for number in range(1, 5)]
JOBS = {name: {"long-run"} for name in NAMES[:8]}
END_S = 400
Line = tuple[float, str, str, dict[str, Any]]  #: time, node, kind, fields
Change = Callable[[Line], Iterator[Line]]


def facts() -> list[WatchedNode]:
    return [WatchedNode(name=n, rack=n[0], nvlink_domain=f"d-{n[0]}", gpus=2, spare=n == "w4") for n in NAMES]


def sound() -> Iterator[Line]:
    """A beat each 5 s, a probe of two others and a sample each 10 s, a step each 4 s."""
    for second in range(END_S):
        for index, name in enumerate(NAMES):
            at_s = second + index / 100
            if second % 5 == 0:
                yield at_s, name, "beat", {"boot": f"boot-{name}", "seq": second // 5 + 1}
            if second % 10 == 1:
                for step in (1, 5):
                    target = NAMES[(index + step) % len(NAMES)]
                    yield at_s, name, "probe", {"target": target, "rtt_us": 11.0}
            if second % 10 == 2:
                for gpu in range(2):
                    values = {"temp_c": 60 + index, "util_pct": 98, "throttle": 4, "ecc_dbe_total": 0}
                    yield at_s, name, "sample", {"device": f"gpu:{gpu}", "v": values}
            if second % 4 == 3 and name in JOBS:
                fields = {"job": "long-run", "rank": index, "step": second // 4, "loss": 2.5}
                yield at_s, name, "progress", fields


def kmsg(at_s: float, node: str, text: str) -> Line:
    return at_s, node, "log", {"source": "kmsg", "line": f"[{9000 + at_s:.6f}] NVRM: {text}"}


def records(change: Change, extra: list[Line]) -> Iterator[StreamRecord]:
    lines = [changed for line in sound() for changed in change(line)] + extra
    boots: dict[str, str] = {}
    for seq, (at_s, node, kind, v) in enumerate(sorted(lines, key=lambda line: line[:2])):
        if kind == "beat":
            boots[node] = v["boot"]
        yield StreamRecord(seq=seq, boot=boots.get(node, ""), t_unix_s=at_s, node=node, kind=kind, v=v)


def same(line: Line) -> Iterator[Line]:
    yield line


def gone(nodes: set[str], begin_s: float, end_s: float = END_S, boot: str = "") -> Change:
    """These nodes say nothing and answer nobody; they come back with another boot, if one is given."""

    def change(line: Line) -> Iterator[Line]:
        at_s, node, kind, v = line
        away = begin_s <= at_s < end_s
        if away and node in nodes:
            return
        if away and kind == "probe" and v["target"] in nodes:
            v = v | {"rtt_us": None}
        if at_s >= end_s and kind == "beat" and node in nodes and boot:
            v = v | {"boot": boot}
        yield at_s, node, kind, v

    return change


def ahead(name: str, by_s: float) -> Change:
    def change(line: Line) -> Iterator[Line]:
        at_s, node, kind, v = line
        yield at_s + by_s * (node == name), node, kind, v

    return change


def without(kinds: set[str], nodes: set[str], begin_s: float) -> Change:
    """A node's agent reads nothing any more, or a job makes no step."""

    def change(line: Line) -> Iterator[Line]:
        at_s, node, kind, v = line
        if at_s >= begin_s and node in nodes and kind in kinds:
            if kind == "sample":
                yield at_s, node, kind, v | {"v": dict.fromkeys(v["v"])}
            return
        yield line

    return change


LOST = "GPU 0000:8a:00.0: GPU has fallen off the bus."
CRASH = [
    kmsg(150 + i / 50, name, f"Xid (PCI:0000:{bus}:00): {xid}, pid=77, name=train, Ch 0000000{i}")
    for i, name in enumerate(NAMES[:8])
    for xid, bus in ((13, "1a"), (45, "1a"), (45, "8a"))
]
FORGED = (120.0, "u3", "log", {"source": "kmsg", "line": "python3[5]: NVRM: Xid (PCI:0000:8a:00): 79, x"})

#: name -> (what becomes of the sound fleet, what is added)
SCENARIOS: dict[str, tuple[Change, list[Line]]] = {
    "sound": (same, [FORGED]),
    "clock-ahead": (ahead("v2", 7200.0), []),
    "bus-loss": (same, [kmsg(150.5, "v2", LOST)]),
    "bus-loss-of-a-spare": (same, [kmsg(150.5, "w4", LOST)]),
    "node-gone": (gone({"v2"}, 150), []),
    "rack-silent": (gone({"v1", "v2", "v3", "v4"}, 150, 300), []),
    "planned-reboot": (
        gone({"v2"}, 150, 300, boot="boot-next"),
        [(149.0, "v2", "note", {"text": "new kernel", "action": "reboot"})],
    ),
    "human-drain": (
        same,
        [(100.0, "v2", "note", {"text": "ann: fans", "action": "drain"}), kmsg(150.5, "v2", LOST)],
    ),
    "application-crash": (without({"progress"}, set(NAMES[:8]), 150), CRASH),
    "silent-hang": (without({"progress"}, set(NAMES[:8]), 150), []),
    "agent-blind": (without({"sample"}, {"v2"}, 150), []),
    "mass-fault": (same, [kmsg(150 + i / 50, name, LOST) for i, name in enumerate(NAMES[:9])]),
}
