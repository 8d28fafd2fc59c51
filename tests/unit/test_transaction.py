"""The hand-over's machines one by one: bounds, messages, records. All orders: test_transaction_model.py."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gridagent.train.transaction as transaction
from gridagent.train import transaction_events as ev
from gridagent.train import transaction_messages as ms
from gridagent.train.transaction import Chair, Member
from gridagent.train.transaction_events import Phase
from gridagent.train.transaction_messages import Entry, Party, Plan, TransactionError, fold_records

SURVIVOR, SOURCE, TARGET = Party("survivor", 0), Party("source", 1), Party("target", 1)


def plan(*members: Party, **changes: Any) -> Plan:
    bounds: dict[str, Any] = {"arm_deadline_s": 20.0, "cut_deadline_s": 10.0, "resume_deadline_s": 5.0}
    given = {"handover": "h", "epoch_from": 4, "lead_steps": 3, **bounds, **changes}
    return Plan(members=members or (SURVIVOR, SOURCE, TARGET), **given)


def member(party: Party, *events: ev.MemberEvent) -> Member:
    made = Member(plan(), party)
    for event in events:
        made.on(event, 100.0)
    return made


ARM = ev.Received(ms.Arm("h", 13), begun=9)
GO = ev.Received(ms.Go("h"))
COMMIT = ev.Received(ms.Commit("h", 5, ((1, "target:1"),)))


# --------------------------------------------------------------------------------------------------
# Plan


@pytest.mark.parametrize(
    ("members", "changes"),
    [
        ((SOURCE, TARGET), {}),
        ((SURVIVOR,), {}),
        ((SURVIVOR, SOURCE), {}),
        ((SURVIVOR, SOURCE, Party("target", 2)), {}),
        ((SURVIVOR, SOURCE, TARGET, TARGET), {}),
        ((SURVIVOR, Party("source", 0), Party("target", 0)), {}),
        ((SURVIVOR, SOURCE, TARGET, Party("spectator", 3)), {}),
        ((), {"lead_steps": 0}),
        ((), {"arm_deadline_s": 0.0}),
        ((), {"cut_deadline_s": -1.0}),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(members: tuple[Party, ...], changes: dict[str, Any]) -> None:
    with pytest.raises(TransactionError):
        plan(*members, **changes)


def test_a_stranger_is_refused() -> None:
    with pytest.raises(TransactionError):
        Member(plan(), Party("target", 7))
    with pytest.raises(TransactionError):
        Chair(plan()).on(ev.Received(ms.Armed("h"), "survivor:7"), 0.0)


# --------------------------------------------------------------------------------------------------
# Bounds and single rules


def test_boundary_is_lead_steps_ahead_and_the_stop_stands_before_the_vote() -> None:
    sends = Chair(plan()).on(ev.Start(10), 0.0)
    assert {send.msg for send in sends if isinstance(send, ev.Send)} == {ms.Arm("h", 13)}
    assert member(SURVIVOR).on(ARM, 0.0) == [ev.StopAt(13), ev.Send(ms.Armed("h"))]
    assert member(TARGET).on(ARM, 0.0) == [ev.Send(ms.Armed("h"))]


@pytest.mark.parametrize(("begun", "late"), [(9, False), (12, False), (13, True), (14, True)])
def test_too_late_is_who_was_let_into_the_boundary_step(begun: int, late: bool) -> None:
    armed = member(SURVIVOR)
    sends = [
        e.msg for e in armed.on(ev.Received(ms.Arm("h", 13), begun=begun), 0.0) if isinstance(e, ev.Send)
    ]
    assert isinstance(sends[0], ms.TooLate if late else ms.Armed)
    assert armed.phase == (Phase.LEFT if late else Phase.ARMED)


def test_earlier_steps_pass_and_a_later_one_leaves() -> None:
    on_its_way = member(SURVIVOR, ARM, GO)
    assert on_its_way.on(ev.ReachedBoundary(12), 0.0) == []
    effects = on_its_way.on(ev.ReachedBoundary(14), 0.0)
    assert isinstance(effects[0], ev.Send)
    assert isinstance(effects[0].msg, ms.TooLate)
    assert effects[1] == ev.ContinueOld(13)


@pytest.mark.parametrize(
    ("party", "events", "due_s"),
    [
        (SURVIVOR, (), None),
        (SURVIVOR, (ARM,), 120.0),
        (SURVIVOR, (ARM, GO), 120.0),
        (SURVIVOR, (ARM, GO, ev.ReachedBoundary(13)), 115.0),
        (SURVIVOR, (ARM, GO, ev.ReachedBoundary(13), COMMIT), 110.0),
        (SURVIVOR, (ARM, GO, ev.ReachedBoundary(13), COMMIT, ev.GatherDone()), 110.0),
        (SOURCE, (ARM, GO, ev.ReachedBoundary(13), COMMIT), 110.0),
        (SOURCE, (ARM, GO, ev.ReachedBoundary(13), COMMIT, ev.Received(ms.Run("h"))), None),
        (TARGET, (ARM, GO), 135.0),
        (TARGET, (ARM, GO, ev.RestoreDone("d"), COMMIT), 110.0),
    ],
)
def test_deadlines_of_a_member(party: Party, events: tuple[ev.MemberEvent, ...], due_s: float | None) -> None:
    assert member(party, *events).deadline() == due_s


def test_deadlines_of_the_chair() -> None:
    chair = Chair(plan())
    chair.on(ev.Start(10), 0.0)
    assert chair.deadline() == 20.0
    for party in chair.plan.roles:
        chair.on(ev.Received(ms.Armed("h"), party), 1.0)
    chair.on(ev.Received(ms.AtBoundary("h", 13), "source:1"), 15.0)
    assert chair.deadline() == 20.0, "the cut may not outlast the arm deadline while a rank is missing"
    chair.on(ev.Received(ms.AtBoundary("h", 13), "survivor:0"), 16.0)
    assert chair.deadline() == 25.0, "the cut deadline counts from the first rank at S"
    chair.on(ev.Received(ms.Captured("h", "d"), "source:1"), 17.0)
    written = chair.on(ev.Received(ms.Restored("h", "d"), "target:1"), 17.0)
    assert isinstance(written[0], ev.Record)
    assert chair.deadline() is None, "what is being written cannot be taken back"
    chair.on(ev.Recorded(written[0].entry), 18.0)
    assert chair.deadline() == 23.0


def test_a_tick_before_the_deadline_changes_nothing() -> None:
    armed = member(SURVIVOR, ARM)
    assert armed.on(ev.Tick(), 119.9) == []
    assert armed.phase == Phase.ARMED


def test_messages_of_another_handover_are_ignored() -> None:
    armed = member(SURVIVOR, ARM)
    assert armed.on(ev.Received(ms.Abort("other", "-")), 0.0) == []
    chair = Chair(plan())
    chair.on(ev.Start(10), 0.0)
    assert chair.on(ev.Received(ms.TooLate("other", "-"), "source:1"), 0.0) == []
    assert chair.phase == Phase.ARMED


@pytest.mark.parametrize(
    ("party", "msg"),
    [
        ("survivor:0", ms.Captured("h", "d")),
        ("source:1", ms.Restored("h", "d")),
        ("target:1", ms.AtBoundary("h", 13)),
        ("survivor:0", ms.AtBoundary("h", 12)),
        ("survivor:0", ms.Go("h")),
    ],
)
def test_a_message_that_its_sender_cannot_mean_aborts(party: str, msg: ms.Message) -> None:
    chair = Chair(plan())
    chair.on(ev.Start(10), 0.0)
    effects = chair.on(ev.Received(msg, party), 0.0)
    assert [e.entry.kind for e in effects if isinstance(e, ev.Record)] == ["abort"]


def test_a_capture_that_ends_twice_is_said_once() -> None:
    source = member(SOURCE, ARM, GO, ev.ReachedBoundary(13))
    assert source.on(ev.CaptureDone("d"), 0.0) == [ev.Send(ms.Captured("h", "d"))]
    assert source.on(ev.CaptureDone("e"), 0.0) == []


# --------------------------------------------------------------------------------------------------
# Messages on the wire

TEXT = st.text(max_size=8)
COUNT = st.integers(-1, 2**63 - 1)
OWNERS = st.dictionaries(st.integers(0, 99), TEXT, max_size=3).map(lambda d: tuple(sorted(d.items())))
LINES = st.lists(TEXT, max_size=3).map(tuple)
MESSAGES = st.one_of(
    *(st.builds(kind, TEXT) for kind in (ms.Go, ms.Run, ms.Armed)),
    *(st.builds(kind, TEXT, TEXT) for kind in (ms.Abort, ms.Dead, ms.TooLate, ms.NotReady)),
    *(st.builds(kind, TEXT, TEXT) for kind in (ms.Captured, ms.Restored)),
    *(st.builds(kind, TEXT, COUNT) for kind in (ms.Arm, ms.AtBoundary, ms.Ready, ms.Return)),
    st.builds(ms.Commit, TEXT, COUNT, OWNERS),
    st.builds(ms.Failed, TEXT, LINES),
    st.builds(Entry, TEXT, TEXT, COUNT, COUNT, TEXT, LINES, OWNERS),
)
JSON = st.recursive(
    st.none() | st.booleans() | COUNT | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(MESSAGES)
def test_a_message_survives_json(msg: ms.Message) -> None:
    assert ms.from_wire(json.loads(json.dumps(ms.to_wire(msg)))) == msg


@given(MESSAGES, st.data())
def test_a_message_with_one_wrong_field_is_refused(msg: ms.Message, data: st.DataObject) -> None:
    wire = ms.to_wire(msg)
    name = data.draw(st.sampled_from(sorted(wire)))
    value = data.draw(JSON)
    try:
        read = ms.from_wire({**wire, name: value})
    except TransactionError:
        pass
    else:
        assert ms.to_wire(read) == {**wire, name: value}, "what is accepted means exactly what was sent"
    with pytest.raises(TransactionError):
        ms.from_wire({key: kept for key, kept in wire.items() if key != name})
    with pytest.raises(TransactionError):
        ms.from_wire({**wire, "more": value})


@given(JSON)
def test_garbage_is_refused(garbage: Any) -> None:
    with pytest.raises(TransactionError):
        ms.from_wire(garbage)


# --------------------------------------------------------------------------------------------------
# Records


def entry(kind: str, epoch: int = 4, reason: str = "") -> Entry:
    return Entry("h", kind, epoch, 13, reason, (), ())


@pytest.mark.parametrize(
    ("entries", "outcome", "epoch"),
    [
        ([], "abort", 4),
        ([entry("abort")], "abort", 4),
        ([entry("commit", 5)], "dead", ms.NO_EPOCH),
        ([entry("commit", 5), entry("run", 5)], "commit", 5),
        ([entry("commit", 5), entry("return", 6)], "returned", 6),
        ([entry("commit", 5), entry("dead", -1)], "dead", ms.NO_EPOCH),
        ([entry("abort"), entry("commit", 5)], "abort", 4),
        ([entry("commit", 5), entry("run", 5), entry("return", 6)], "commit", 5),
    ],
)
def test_what_the_records_say(entries: list[Entry], outcome: str, epoch: int) -> None:
    report = fold_records(entries, 4)
    assert (report.outcome, report.epoch) == (outcome, epoch)


@pytest.mark.parametrize(
    "entries", [[entry("run")], [entry("abort"), entry("run")], [entry("commit"), entry("maybe")]]
)
def test_records_out_of_place_are_refused(entries: list[Entry]) -> None:
    with pytest.raises(TransactionError):
        fold_records(entries, 4)


def test_the_machines_import_nothing_that_acts() -> None:
    allowed = {"collections", "dataclasses", "enum", "functools", "typing", "gridagent"}
    folder = Path(transaction.__file__).parent
    imported = set()
    for path in folder.glob("transaction*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    assert {name.partition(".")[0] for name in imported} <= allowed
    inside = {name for name in imported if name.startswith("gridagent")}
    assert all(name.startswith("gridagent.train.transaction") for name in inside)
