"""What holds for whatever the nodes tell: order, determinism, and that evidence only ever adds."""

import json
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.wire import StreamRecord
from gridctl.detect.playback import Playback
from gridctl.detect.policy import builtin
from gridctl.detect.policy.hardware import hardware
from gridctl.detect.watch import Watch
from gridctl.model.actions import ACTIONS, rung, stronger
from gridctl.model.findings import SEVERITIES, Decision, Output, WatchedNode
from gridctl.ports.recording import Recording

POLICY = builtin()
NAMES = [f"n{number}" for number in range(6)]
XIDS = (13, 31, 43, 45, 48, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 143, 145, 154, 999)
TEXTS = (
    "text",
    "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
    "RLW Fatal XC0 in Link 3",
)


def kmsg(at_s: float, node: str, xid: int, gpu: int, text: str) -> StreamRecord:
    line = f"NVRM: Xid (PCI:0000:{0x18 + gpu:02x}:00): {xid}, pid=4{gpu}, name=a, {text}"
    return StreamRecord(
        seq=1, boot="b1", t_unix_s=at_s, node=node, kind="log", v={"source": "kmsg", "line": line}
    )


EVENT = st.tuples(
    st.sampled_from([0.001, 1.0, 4.0, 40.0, 700.0]),
    st.sampled_from(XIDS),
    st.integers(0, 1),
    st.sampled_from(TEXTS),
)


def timed(events: list[tuple[float, int, int, str]]) -> list[tuple[float, int, int, str]]:
    at_s, found = 1000.0, []
    for gap_s, xid, gpu, text in events:
        at_s += gap_s
        found.append((at_s, xid, gpu, text))
    return found


def worst(events: list[tuple[float, int, int, str]]) -> tuple[bool, int, int]:
    """What is known at the end: is there a decision, a decisive finding, and how bad is the worst."""
    watch = Watch(POLICY, [WatchedNode(name="n0")])
    decided = False
    for at_s, xid, gpu, text in events:
        decided |= any(isinstance(out, Decision) for out in watch.feed(kmsg(at_s, "n0", xid, gpu, text)))
    found = watch.findings("n0")
    severity = max((SEVERITIES.index(f.severity) for f in found), default=0)
    return decided, sum(f.preempt_job for f in found) > 0, severity


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENT, min_size=1, max_size=12), st.data())
def test_more_evidence_never_lowers_anything(events: list[Any], data: st.DataObject) -> None:
    whole = timed(events)
    kept = data.draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole)))
    part = [event for event, keep in zip(whole, kept, strict=True) if keep]
    less, more = worst(part), worst(whole)
    assert all(b >= a for a, b in zip(less, more, strict=True)), (less, more)


def test_no_event_hides_another_one() -> None:
    for one in XIDS:
        for other in XIDS:
            for text in TEXTS:
                pair = timed([(1.0, one, 0, "text"), (1.0, other, 0, text)])
                both = worst(pair)
                for alone in pair:
                    assert all(b >= a for a, b in zip(worst([alone]), both, strict=True)), (one, other, text)


def story(draw: st.DrawFn) -> dict[str, list[StreamRecord]]:
    """A few nodes with beats, probes of each other and now and then a line of the kernel."""
    streams: dict[str, list[StreamRecord]] = {}
    for index, name in enumerate(NAMES):
        dies_s = draw(st.sampled_from([60, 1000, 1000, 1000]))
        logs = timed(draw(st.lists(EVENT, max_size=2)))
        records = [kmsg(50.0 + at_s % 100, name, xid, gpu, text) for at_s, xid, gpu, text in logs]
        for second in range(5, min(dies_s, 200), 5):
            at_s = second + index / 10
            base: dict[str, Any] = {"seq": 1, "boot": "b1", "node": name, "t_unix_s": at_s}
            records.append(StreamRecord(**base, kind="beat", v={}))
            target = NAMES[(index + 1) % len(NAMES)]
            answer = draw(st.sampled_from([9.0, 9.0, 9.0, None]))
            records.append(StreamRecord(**base, kind="probe", v={"target": target, "rtt_us": answer}))
        streams[name] = sorted(records, key=lambda record: record.t_unix_s)
    return streams


def played(records: list[StreamRecord], names: list[str]) -> bytes:
    nodes = [WatchedNode(name=name, rack=f"r{int(name[1:]) % 3}") for name in names]
    playback = Playback(POLICY, nodes, {name: {"j"} for name in names[:2]})
    return b"\n".join(msgspec.json.encode(line) for record in records for line in playback.feed(record))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_order_of_nodes_in_the_header_changes_no_byte(data: st.DataObject) -> None:
    streams = data.draw(st.composite(story)())
    records = sorted((r for stream in streams.values() for r in stream), key=lambda r: (r.t_unix_s, r.node))
    other = data.draw(st.permutations(NAMES))
    jobs = {name: {"j"} for name in NAMES[:2]}

    def lines(names: list[str]) -> list[dict[str, Any]]:
        nodes = [WatchedNode(name=name, rack=f"r{int(name[1:]) % 3}") for name in names]
        playback = Playback(POLICY, nodes, jobs)
        return [line for record in records for line in playback.feed(record)]

    assert json.dumps(lines(NAMES)) == json.dumps(lines(other))


def own(outputs: list[Output]) -> list[str]:
    """What is said of the nodes themselves: that depends on nobody else's order."""
    return sorted(
        msgspec.json.encode(out).decode() for out in outputs if type(out).__name__ in ("Finding", "Verdict")
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), EVENT), max_size=20), st.randoms(use_true_random=False))
def test_order_between_nodes_changes_no_finding(events: list[Any], chance: Any) -> None:
    records: dict[str, list[StreamRecord]] = {}
    at_s = 1000.0
    for name, (gap_s, xid, gpu, text) in events:
        at_s += gap_s
        records.setdefault(name, []).append(kmsg(at_s, name, xid, gpu, text))
    in_time = sorted((r for rs in records.values() for r in rs), key=lambda r: r.t_unix_s)
    left = {name: list(rs) for name, rs in records.items()}
    mixed = []
    while left:
        name = chance.choice(sorted(left))
        mixed.append(left[name].pop(0))
        if not left[name]:
            del left[name]

    def outputs(order: list[StreamRecord]) -> list[Output]:
        watch = Watch(POLICY, [WatchedNode(name=name) for name in NAMES])
        return [out for record in order for out in watch.feed(record)]

    assert own(outputs(in_time)) == own(outputs(mixed))


def test_a_recording_twice_is_the_same_to_the_byte_and_names_stand_for_nothing(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "recordings" / "ecc-storm.jsonl.gz"

    def replayed(rename: dict[str, str]) -> bytes:
        recording = Recording(path)
        nodes = [msgspec.structs.replace(n, name=rename.get(n.name, n.name)) for n in recording.header.nodes]
        playback = Playback(POLICY, nodes, {})
        lines = [
            msgspec.json.encode(line)
            for record in recording.records()
            for line in playback.feed(
                msgspec.structs.replace(record, node=rename.get(record.node, record.node))
            )
        ]
        recording.close()
        return b"\n".join(lines)

    once = replayed({})
    assert once == replayed({})
    renamed = replayed({"n1": "n3", "n3": "n1"})
    swapped = once.replace(b'"n1"', b'"x"').replace(b'"n3"', b'"n1"').replace(b'"x"', b'"n3"')
    assert sorted(renamed.splitlines()) == sorted(swapped.splitlines())


ACTION = st.sampled_from(ACTIONS) | st.text(max_size=3)


@given(ACTION, ACTION, ACTION)
def test_the_ladder_of_actions_is_a_total_order(a: str, b: str, c: str) -> None:
    assert stronger(a, b) in (a, b)
    assert stronger(a, b) == stronger(b, a), "of any two, one is the stronger, whoever comes first"
    assert stronger(stronger(a, b), c) == stronger(a, stronger(b, c))
    assert rung(stronger(a, b)) == max(rung(a), rung(b)), "more never asks for less"


def test_every_action_of_the_policy_has_a_rung() -> None:
    rows = [*POLICY.xids.values(), *POLICY.recovery.values(), *POLICY.devices.values()]
    rows += [*hardware().rules.values()]
    actions = {row.action for row in rows} | {row.action for rows in POLICY.levels.values() for row in rows}
    assert actions <= set(ACTIONS), actions - set(ACTIONS)
    assert len(set(ACTIONS)) == len(ACTIONS)


LEVELS = [
    (device, row)
    for device, rows in POLICY.levels.items()
    for row in rows
    if row.test in ("mask", "at_least")
]
SIGNAL = st.one_of(
    st.tuples(st.just("log"), EVENT),
    st.tuples(st.just("level"), st.sampled_from(LEVELS)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SIGNAL, min_size=1, max_size=6), st.data())
def test_a_second_layer_never_lowers_anything(signals: list[Any], data: st.DataObject) -> None:
    """What one signal said goes on while the next comes: a sample without it would say that it has ended."""
    kept = data.draw(st.lists(st.booleans(), min_size=len(signals), max_size=len(signals)))

    def known(keep: list[bool]) -> tuple[int, int, int]:
        watch, at_s, decided = Watch(POLICY, [WatchedNode(name="n0")]), 1000.0, 0
        told: list[Output] = []
        holds: dict[str, dict[str, float]] = {}
        for (what, signal), take in zip(signals, keep, strict=True):
            at_s += 20.0
            if not take:
                continue
            if what == "log":
                _, xid, gpu, text = signal
                told += watch.feed(kmsg(at_s, "n0", xid, gpu, text))
                continue
            device, row = signal
            values = holds.setdefault(device, {"util_pct": 99.0})
            before = values.get(row.metric, 0.0)
            bits = float(int(before) | int(row.value))
            values[row.metric] = bits if row.test == "mask" else max(before, row.value)
            for turn in range(row.of):
                v = {"device": f"{device}:0", "v": dict(values)}
                told += watch.feed(
                    StreamRecord(seq=1, boot="b1", t_unix_s=at_s + turn, node="n0", kind="sample", v=v)
                )
        decided = any(isinstance(out, Decision) for out in told)
        findings = watch.findings("n0")
        worst = max((SEVERITIES.index(f.severity) for f in findings), default=0)
        return decided, sum(f.preempt_job for f in findings) > 0, worst

    less, more = known(kept), known([True] * len(signals))
    assert all(b >= a for a, b in zip(less, more, strict=True)), (less, more)
