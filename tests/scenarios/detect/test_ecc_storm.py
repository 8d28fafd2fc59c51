"""The demo's recording through the watchdog: the whole trace, compared with a text that people can read."""

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gridagent.wire import StreamRecord
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Decision, Finding, Output, Suppressed, Verdict, WatchedNode

RECORDINGS = Path(__file__).parents[3] / "recordings"
GOLDEN = Path(__file__).with_name("ecc-storm.txt")


def records(path: Path) -> Iterator[StreamRecord]:
    boots: dict[str, str] = {}
    with gzip.open(path, "rt") as lines:
        next(lines)
        for seq, line in enumerate(lines, start=1):
            fields: dict[str, Any] = json.loads(line)
            t_s, node, kind = fields.pop("t"), fields.pop("node"), fields.pop("kind")
            if kind == "beat":
                boots[node] = fields["boot"]
            yield StreamRecord(seq=seq, boot=boots[node], t_unix_s=t_s, node=node, kind=kind, v=fields)


def watch(path: Path) -> Watch:
    with gzip.open(path, "rt") as lines:
        nodes = json.loads(next(lines))["nodes"]
    return Watch(builtin(), [msgspec.convert(node, WatchedNode) for node in nodes])


def trace(path: Path) -> list[Output]:
    watchdog = watch(path)
    return [out for record in records(path) for out in watchdog.feed(record)]


def as_text(out: Output) -> str:
    """One output as a few lines."""
    kind = f"{out.decision}: {out.kind}" if isinstance(out, Decision) else out.kind
    head = f"{out.t_unix_s:7.4f}  {out.node}  {out.device:5}  {type(out).__name__.lower()}: {kind}"
    if isinstance(out, Finding | Decision):
        preempt = "preempt" if out.preempt_job else "stay"
        head += f" [{out.severity}, {out.action}, {preempt}, {out.when}]"
    rules = out.rules if isinstance(out, Decision) else [out.rule]
    return "\n".join(
        [head, f"         by {', '.join(rules) or '-'}", *(f"         - {why}" for why in out.why)]
    )


@pytest.fixture(scope="module")
def outputs() -> list[Output]:
    return trace(RECORDINGS / "ecc-storm.jsonl.gz")


def test_the_whole_trace(outputs: list[Output]) -> None:
    assert "\n".join(map(as_text, outputs)) + "\n" == GOLDEN.read_text()


def test_one_node_is_to_be_swapped_and_nothing_else(outputs: list[Output]) -> None:
    truth = json.loads((RECORDINGS / "ecc-storm.truth.json").read_text())
    (fault,) = truth["faults"]
    (decision,) = [out for out in outputs if isinstance(out, Decision)]
    assert (decision.decision, decision.node, decision.device, decision.kind) == (
        "swap_now",
        fault["node"],
        fault["device"],
        fault["kind"],
    )
    assert fault["decisive_t"] <= decision.t_unix_s < fault["decisive_t"] + 1.0
    assert {out.node for out in outputs if isinstance(out, Finding | Suppressed)} == {"n2"}
    assert {out.device for out in outputs if isinstance(out, Finding)} == {"gpu:3"}
    kinds = {out.kind for out in outputs if isinstance(out, Finding)}
    assert kinds == {fault["kind"], *fault["also"]}
    assert not any(out.preempt_job for out in outputs if out.node in truth["must_not_preempt"])
    last = {out.node: out.kind for out in outputs if isinstance(out, Verdict)}
    assert last == {"n1": "healthy", "n2": "faulty", "n3": "healthy", "n4": "healthy"}


def test_time_of_the_trace_never_goes_back(outputs: list[Output]) -> None:
    times = [out.t_unix_s for out in outputs]
    assert times == sorted(times)


def test_twice_the_same_to_the_byte(outputs: list[Output]) -> None:
    again = trace(RECORDINGS / "ecc-storm.jsonl.gz")
    assert msgspec.json.encode(again) == msgspec.json.encode(outputs)


def test_the_script_makes_these_very_bytes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_ecc_storm", RECORDINGS / "make_ecc_storm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    for name in ("ecc-storm.jsonl.gz", "ecc-storm.truth.json"):
        made, kept = (tmp_path / name).read_bytes(), (RECORDINGS / name).read_bytes()
        if name.endswith(".gz"):  # another zlib may pack the same text differently
            made, kept = gzip.decompress(made), gzip.decompress(kept)
        assert made == kept


def test_order_between_nodes_changes_nothing(outputs: list[Output]) -> None:
    """All of one node first, then all of the next: the same outputs for every node."""
    path = RECORDINGS / "ecc-storm.jsonl.gz"
    watchdog = watch(path)
    ordered = sorted(records(path), key=lambda record: (record.node, record.seq))
    apart = [out for record in ordered for out in watchdog.feed(record)]
    assert sorted(map(as_text, apart)) == sorted(map(as_text, outputs))
