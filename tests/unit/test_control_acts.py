"""What people do to an incident, and what becomes of it in the fold."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runbook_world import World, fleet, plan_for

from gridagent.journal import read
from gridagent.wire import StreamRecord
from gridctl.control.acts import REASON_BYTES_MAX, VERBS, act
from gridctl.control.ledger import Ledger
from gridctl.control.sentinel import Sentinel, close_incident
from gridctl.control.steplog import StepLog
from gridctl.errors import Refused
from gridctl.home import Home
from gridctl.model.runs import Act, Incident
from gridctl.runbook.events import Started

HOSTILE = "\x1b[2J\r\nok </script><img src=x onerror=1> [/red] | `x` \u202e\x00"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(Home.at(tmp_path), "ctl")
    for name in ("i1", "i2", "i3"):
        opened(made, name)
    yield made
    made.close()


def opened(ledger: Ledger, name: str, node: str = "n1") -> None:
    about = {
        "incident": name,
        "state": "open",
        "kind": "ecc",
        "node": node,
        "job": "",
        "title": f"ecc on {node}",
    }
    ledger.append("incident", about)


def do(
    ledger: Ledger, name: str, verb: str, value: str = "", who: str = "ann", reason: str = "why"
) -> Incident:
    """Does it twice: the second time nothing is written."""
    found = act(ledger, name, verb, Act(who=who, reason=reason, value=value))
    seq = ledger.seq
    assert act(ledger, name, verb, Act(who=who, reason=reason, value=value)) == found
    assert ledger.seq == seq, "the same again writes nothing"
    return found


def again(ledger: Ledger, tmp_path: Path) -> list[Incident]:
    """What another controller makes of the same journal."""
    ledger.close()
    other = Ledger(Home.at(tmp_path), "ctl")
    try:
        return other.incidents.all()
    finally:
        other.close()


def refused(
    ledger: Ledger, name: str, verb: str, value: str = "", who: str = "ann", reason: str = "why"
) -> Refused:
    seq = ledger.seq
    with pytest.raises(Refused) as told:
        act(ledger, name, verb, Act(who=who, reason=reason, value=value))
    assert ledger.seq == seq, "nothing was written"
    return told.value


def test_every_verb_is_in_the_journal_and_in_the_incident(ledger: Ledger, tmp_path: Path) -> None:
    do(ledger, "i1", "note", reason="the fan was loud")
    do(ledger, "i1", "link", "https://tickets.example/1", reason="the RMA")
    do(ledger, "i1", "ack")
    found = do(ledger, "i1", "assign", "bob", reason="his rack")
    assert (found.acked_by, found.assigned_to, found.state) == ("ann", "bob", "open")
    assert [(note["who"], note["reason"]) for note in found.notes] == [("ann", "the fan was loud")]
    assert [link["value"] for link in found.links] == ["https://tickets.example/1"]
    found = do(ledger, "i1", "close", "true_fault", reason="DIMM swapped")
    assert (found.state, found.verdict) == ("closed", "true_fault")
    assert [moment.what for moment in found.timeline][1:] == [
        "ann notes: the fan was loud",
        "ann links https://tickets.example/1: the RMA",
        "ann has it in hand: why",
        "ann assigns it to bob: his rack",
        "ann closed it as true fault: DIMM swapped",
    ]
    found = do(ledger, "i1", "reopen", reason="it is back")
    assert (found.state, found.verdict, found.acked_by, found.closed_unix_s) == ("open", "", "", 0.0)
    assert found.assigned_to == "bob"
    people = [r for r in read(tmp_path / "journal") if "who" in r.data]
    assert len(people) == 6
    assert all(record.data["who"] == "ann" and record.data["reason"] for record in people)
    assert again(ledger, tmp_path)[0] == found


def test_two_people_at_once_are_both_written(ledger: Ledger) -> None:
    do(ledger, "i1", "ack", who="ann")
    do(ledger, "i1", "ack", who="bob")
    do(ledger, "i1", "note", who="ann", reason="same words")
    found = do(ledger, "i1", "note", who="bob", reason="same words")
    assert found.acked_by == "bob"
    assert [note["who"] for note in found.notes] == ["ann", "bob"]
    told = [moment.what for moment in found.timeline]
    assert {"ann has it in hand: why", "bob has it in hand: why"} <= set(told)


def test_what_closed_by_itself_gets_its_verdict_later_and_stays_closed_since_then(ledger: Ledger) -> None:
    close_incident(ledger, "i1", "run r-1 is done")
    since = ledger.incident("i1").closed_unix_s
    found = do(ledger, "i1", "close", "false_alarm", reason="a loose cable")
    assert (found.closed_unix_s, found.verdict) == (since, "false_alarm")
    assert do(ledger, "i1", "close", "true_fault", reason="not the cable").verdict == "true_fault"


def test_a_merged_one_stays_readable_and_both_say_so(ledger: Ledger, tmp_path: Path) -> None:
    found = do(ledger, "i1", "merge", "i2", reason="one switch")
    assert (found.state, found.merged_into) == ("closed", "i2")
    do(ledger, "i2", "merge", "i3")
    assert ledger.incident("i2").merged == ["i1"]
    assert ledger.incident("i3").merged == ["i2"]
    assert "itself" in refused(ledger, "i3", "merge", "i1").text, "no cycle"
    assert "itself" in refused(ledger, "i3", "merge", "i3").text
    assert "i2" in refused(ledger, "i1", "merge", "i3").text, "it is a part of one"
    do(ledger, "i1", "close", "unknown")
    assert ledger.incident("i1").merged_into == "i2", "a verdict later changes nothing about that"
    found = do(ledger, "i1", "reopen")
    assert (found.merged_into, ledger.incident("i2").merged) == ("", [])
    before = ledger.incidents.all()
    assert again(ledger, tmp_path) == before


@pytest.mark.parametrize(
    ("verb", "value", "who", "reason", "code", "word"),
    [
        ("note", "", "ann", " \n", "not-confirmed", "words"),
        ("ack", "", "ann", "", "not-confirmed", "reason"),
        ("ack", "", " ", "x", "bad-request", "who"),
        ("note", "", "ann", "x" * (1 << 20), "bad-request", "65536 bytes"),
        ("note", "", "ann", "é" * (REASON_BYTES_MAX // 2 + 1), "bad-request", "too much"),
        ("assign", "", "ann", "x", "bad-request", "to whom"),
        ("assign", "b" * 3000, "ann", "x", "bad-request", "2000"),
        ("close", "", "ann", "x", "bad-request", "true_fault"),
        ("close", "true-fault", "ann", "x", "bad-request", "verdict"),
        ("merge", "i9", "ann", "x", "unknown-incident", "i9"),
        ("merge", "", "ann", "x", "unknown-incident", ""),
        ("link", "javascript:alert(1)", "ann", "x", "bad-request", "https"),
        ("link", "https://a b", "ann", "x", "bad-request", "address"),
        ("link", "https://a\x1b[2J", "ann", "x", "bad-request", "address"),
    ],
)
def test_a_no_writes_nothing_and_says_why(
    ledger: Ledger, verb: str, value: str, who: str, reason: str, code: str, word: str
) -> None:
    no = refused(ledger, "i1", verb, value, who, reason)
    assert no.code == code
    assert word in no.text


def test_unknown_ids_and_closed_ones(ledger: Ledger) -> None:
    for verb in VERBS:
        assert refused(ledger, "i9", verb).code == "unknown-incident"
    do(ledger, "i1", "close", "unknown")
    assert refused(ledger, "i1", "ack").code == "not-now"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["i1", "i2", "i3"]),
            st.sampled_from(sorted(VERBS)),
            st.sampled_from(["i1", "i2", "i3", "unknown", "true_fault", "https://a.b"]),
            st.sampled_from(["ann", "bob"]),
        ),
        max_size=25,
    )
)
def test_whatever_people_do_the_journal_tells_it_again_and_nothing_is_a_part_of_itself(
    deeds: list[tuple[str, str, str, str]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Home.at(folder), "ctl")
        for name in ("i1", "i2", "i3"):
            opened(ledger, name)
        for name, verb, value, who in deeds:
            with contextlib.suppress(Refused):
                act(ledger, name, verb, Act(who=who, reason="why", value=value))
        found = {incident.id: incident for incident in ledger.incidents.all()}
        for incident in found.values():
            whole = incident
            for _ in found:
                whole = found.get(whole.merged_into, whole)
            assert not whole.merged_into, "the way up ends"
            assert not incident.merged_into or incident.state == "closed"
            for other in found.values():
                assert (incident.id in other.merged) == (incident.merged_into == other.id)
        assert again(ledger, Path(folder)) == list(found.values())


def test_what_a_person_reopened_is_not_closed_because_nobody_applied_a_plan(tmp_path: Path) -> None:
    ledger = Ledger(Home.at(tmp_path), "ctl")
    about = {"incident": "i1", "kind": "manual", "node": "n1", "job": "lm", "title": "t"}
    ledger.append("incident", {**about, "state": "open"})
    assert [i.id for i in ledger.incidents.forgotten(2e9, {})] == ["i1"]
    close_incident(ledger, "i1", "no plan of it was applied")
    assert do(ledger, "i1", "reopen").reopened_by == "ann"
    assert ledger.incidents.forgotten(2e9, {}) == []
    assert do(ledger, "i1", "close", "unknown").reopened_by == ""
    ledger.close()


def test_hostile_text_is_kept_as_it_is(ledger: Ledger, tmp_path: Path) -> None:
    do(ledger, "i1", "note", who=HOSTILE, reason=HOSTILE)
    do(ledger, "i1", "assign", HOSTILE)
    found = again(ledger, tmp_path)[0]
    assert (found.notes[0]["reason"], found.assigned_to) == (HOSTILE, HOSTILE)


def test_an_incident_whose_run_has_not_ended_is_neither_closed_nor_merged(tmp_path: Path) -> None:
    plan = plan_for(fleet())
    ledger = Ledger(Home.at(tmp_path), "ctl")
    opened(ledger, plan.incident, plan.node)
    opened(ledger, "i2")
    ledger.append("plan", {"incident": plan.incident, "plan": msgspec.to_builtins(plan)})
    world = World(plan)
    world.drive(Started("ann"))
    for kind, data in world.journal[:4]:
        ledger.append(kind, data)
    assert refused(ledger, plan.incident, "close", "unknown").code == "not-now"
    assert refused(ledger, plan.incident, "merge", "i2").code == "not-now"
    for kind, data in world.journal[4:]:
        ledger.append(kind, data)
    assert do(ledger, plan.incident, "close", "unknown").state == "closed"
    ledger.close()


def test_detection_adds_to_an_acked_one_and_a_closed_one_swallows_nothing(tmp_path: Path) -> None:
    async def propose(*_: Any) -> bool:
        return True

    ledger = Ledger(Home.at(tmp_path), "ctl")
    watching = Sentinel(ledger, StepLog(), propose)
    seqs = iter(range(1, 100))

    def fails(gpu: int, t: float) -> None:
        line = f"NVRM: Xid (PCI:0000:{gpu:02x}:00): 63, pid=1, name=x, Row remapping event: x"
        v = {"source": "kmsg", "line": f"4,1,{t * 1e6:.0f},-;{line}"}
        watching.feed(StreamRecord(seq=next(seqs), boot="b", t_unix_s=t, node="n1", kind="log", v=v))

    fails(1, 1000.0)
    (first,) = ledger.incidents.all()
    do(ledger, first.id, "ack")
    fails(2, 2000.0)
    (found,) = ledger.incidents.all()
    assert len(found.findings) > len(first.findings)
    assert found.acked_by == "ann"
    do(ledger, first.id, "close", "false_alarm")
    fails(3, 3000.0)
    closed, fresh = ledger.incidents.all()
    assert (closed.state, fresh.state) == ("closed", "open")
    assert closed.findings == found.findings
    assert fresh.findings
    do(ledger, closed.id, "reopen")
    assert ledger.incidents.open_on("n1") == ledger.incidents.get(fresh.id), "the newest goes on"
    ledger.close()
