"""Lines of a stream: to pass over what changes nothing decides nothing else than to take in all of it."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.wire import StreamRecord
from gridctl.detect.ingest import Ingest
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Finding, Output, WatchedNode

POLICY = builtin()
START_S = 10_000.0
LOST = "NVRM: Xid (PCI:0000:1b:00): 79, pid=3, name=a, GPU has fallen off the bus."
GPU: dict[str, Any] = {
    "temp_c": 60, "throttle": 4, "util_pct": 97, "ecc_sbe_total": 0, "ecc_dbe_total": 0, "pcie_width": 16,
    "pcie_width_max": 16, "recovery_action": 0,
}  # fmt: skip
SLOW = {"remap_pending": 0, "remap_failed": 0, "nvlink_down": 0, "nvlink_recovery_total": 0}
ODD = st.sampled_from(
    [
        None,
        True,
        0,
        1,
        4,
        8,
        16,
        19,
        20,
        50,
        0x40,
        0x80,
        0x84,
        97.5,
        -1,
        2147483632,
        1e300,
        2**62,
        "97",
        "ERR!",
        [1],
    ]
)


def record(after_s: float, kind: str, told: dict[str, Any], boot: str = "b1") -> StreamRecord:
    return StreamRecord(seq=1, boot=boot, t_unix_s=START_S + after_s, node="n1", kind=kind, v=told)


@st.composite
def streams(draw: st.DrawFn) -> list[StreamRecord]:
    """Long rows of equal samples, with something odd in between."""
    made: list[StreamRecord] = []
    at_s, boot, gpu, errors = 0.0, 1, dict(GPU), 0
    for _ in range(draw(st.integers(1, 12))):
        change = draw(
            st.sampled_from(["", "value", "value", "errors", "boot", "log", "note", "mute", "port"])
        )
        if change == "value":
            gpu[draw(st.sampled_from([*GPU, *SLOW, "lost"]))] = draw(ODD)
        elif change == "errors":
            errors = draw(st.sampled_from([0, 1, 200, 9000]))
        elif change == "boot":
            boot += 1
        elif change == "mute":
            gpu = dict.fromkeys(GPU) if draw(st.booleans()) else dict(GPU)
        more: list[tuple[str, dict[str, Any]]] = []
        if change == "log":
            more.append(("log", {"source": "kmsg", "line": LOST}))
        if change == "note":
            more.append(("note", {"action": draw(st.sampled_from(["drain", "undrain", "reboot"]))}))
        state = draw(st.sampled_from([1, 0])) if change == "port" else 1
        for turn in range(draw(st.sampled_from([1, 3, 12]))):
            at_s += draw(st.sampled_from([1.0, 1.0, 1.0, 1.0, 70.0]))
            if errors:
                gpu["ecc_sbe_total"] = (
                    number if isinstance(number := gpu["ecc_sbe_total"], int) else 0
                ) + errors
            values = {**gpu, "power_w": at_s, **(SLOW if turn % 3 == 0 else {})}
            one = {"device": "gpu:0", "pci": "0000:1b:00.0", "v": values}
            other = {
                "device": "gpu:1",
                "pci": draw(st.sampled_from(["0000:1c:00.0"] * 9 + ["0000:1b:00.0"])),
                "v": GPU,
            }
            pauses = {"state": state}
            if turn % 2 == 0 or errors:
                pauses["tx_pause_total"] = at_s * (1000 + errors) if change in ("port", "errors") else 7
            free = {"mem_avail_mib": 1e6 - 9e5 * turn / 12, "oom_kill_total": 0}
            bodies = [
                *more,
                ("sample", {"device": "node", "v": free}),
                ("sample", {"device": "nic:b/1", "v": pauses}),
                ("sample", one),
                ("sample", other),
                ("sample", {"device": "nic:a/1", "v": {"state": state}}),
            ]
            if draw(st.booleans()):
                bodies.append(("beat", {"boot": f"b{boot}", "seq": turn}))
            made += [record(at_s, kind, v, f"b{boot}") for kind, v in bodies]
    return made


def state(watch: Watch) -> Any:
    node = watch.node("n1")
    return (
        watch.verdict("n1"),
        watch.findings("n1"),
        node.busy_unix_s,
        node.holds,
        node.silent_s(START_S + 1e6),
    )


@settings(max_examples=200, deadline=None)
@given(streams(), st.lists(st.integers(1, 40), min_size=1))
def test_lines_decide_what_records_decide(records: list[StreamRecord], cuts: list[int]) -> None:
    slow, fast = (Watch(POLICY, [WatchedNode(name="n1")]) for _ in range(2))
    ingest = Ingest(POLICY, fast)
    turn = 0
    while records:
        taken, records = records[: cuts[turn % len(cuts)]], records[cuts[turn % len(cuts)] :]
        turn += 1
        wanted: list[Output] = [out for one in taken for out in slow.feed(one)]
        assert ingest.feed("n1", b"".join(msgspec.json.encode(one) + b"\n" for one in taken)) == wanted
        assert state(fast) == state(slow)
        now_s = taken[-1].t_unix_s + 5.0
        assert fast.tick(now_s) == slow.tick(now_s)


def test_a_line_that_is_no_record_costs_no_other_line() -> None:
    ingest = Ingest(POLICY, Watch(POLICY, [WatchedNode(name="n1")]))
    good = msgspec.json.encode(record(0.0, "log", {"source": "kmsg", "line": LOST}))
    for bad in (b"{", b"[]", b'{"seq":1}', b"\xff", b'{"a":' * 5000, good + good):
        told = ingest.feed("n1", b"\n".join([b"", bad, good, b""]))
        assert ingest.unreadable == 1, bad
        ingest.unreadable = 0
        del told
    assert [out.kind for out in ingest._watch.findings("n1")] == ["gpu_lost"]


def test_the_connection_says_who_speaks() -> None:
    ingest = Ingest(POLICY, Watch(POLICY, [WatchedNode(name="n1"), WatchedNode(name="n2")]))
    line = msgspec.json.encode(record(0.0, "log", {"source": "kmsg", "line": LOST}))
    assert {out.node for out in ingest.feed("n2", line) if isinstance(out, Finding)} == {"n2"}


def test_equal_samples_are_passed_over_and_time_goes_on() -> None:
    watch = Watch(POLICY, [WatchedNode(name="n1")])
    ingest, full = Ingest(POLICY, watch), []
    feed = watch.feed
    watch.feed = lambda one, now=None: (full.append(one), feed(one, now))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    for second in range(60):
        values = {**GPU, "util_pct": 95 + second % 5, "throttle": 4 * (second % 2), "power_w": second}
        one = record(float(second), "sample", {"device": "gpu:0", "v": values})
        ingest.feed("n1", msgspec.json.encode(one))
    assert len(full) < 10
    assert watch.node("n1").busy_unix_s == START_S + 59


def test_what_was_passed_over_counts_for_the_time_of_the_next_rate() -> None:
    """Three seconds of 150 errors, eight of 1,500 pauses: just enough, if the first second counts as one."""
    ingest = Ingest(POLICY, Watch(POLICY, [WatchedNode(name="n1")]))
    told: list[Output] = []
    for second in range(90):
        gpu = {**GPU, "ecc_sbe_total": 150 * min(max(second - 59, 0), 3), "power_w": second}
        nic = {"state": 1, "tx_pause_total": 1500 * min(max(second - 59, 0), 8), "rx_bytes_total": second}
        for device, values in (("gpu:0", gpu), ("nic:a/1", nic)):
            one = record(float(second), "sample", {"device": device, "v": values})
            told += ingest.feed("n1", msgspec.json.encode(one))
    rules = {out.rule: out.t_unix_s - START_S for out in told if isinstance(out, Finding)}
    assert rules == {"device.ecc_corrected_rate.watch": 62.0, "level.pause-sent": 67.0}
