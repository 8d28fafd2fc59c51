"""Whom to tell of what, and when: a day of incidents played through `duty`, and what it writes."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridctl.errors import ConfigError
from gridctl.notify import messages
from gridctl.notify.config import Config, load
from gridctl.notify.duty import Notice, Past, Subject, due

CONFIG = msgspec.convert(
    {
        "receiver": [
            {"name": "page", "kind": "webhook", "url": "http://127.0.0.1:1"},
            {"name": "lead", "kind": "webhook", "url": "http://127.0.0.1:1"},
            {"name": "chat", "kind": "slack", "url": "http://127.0.0.1:1"},
        ],
        "route": [
            {
                "name": "rack",
                "match": {"rack": "r9*"},
                "receivers": ["page"],
                "group_by": ["rack"],
                "wait_s": 30.0,
                "again_s": 100.0,
            },
            {
                "name": "grave",
                "severity_min": "critical",
                "receivers": ["page", "chat"],
                "escalate": [{"after_s": 900.0, "receivers": ["lead"]}],
            },
            {"name": "rest", "receivers": ["chat"]},
        ],
        "owner": [{"job": "llm-*", "owner": "team-a"}],
    },
    Config,
)


class World:
    """Incidents, and receivers that take everything unless they are down."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.subjects: dict[str, Subject] = {}
        self.past = Past()
        self.sent: list[str] = []
        self.down: set[str] = set()

    def opens(self, name: str, severity: str = "critical", node: str = "n1", rack: str = "r1") -> None:
        labels = {"incident": name, "kind": "ecc", "severity": severity, "node": node, "rack": rack}
        self.subjects[name] = Subject(
            labels={**labels, "job": "", "owner": ""}, title=f"ecc on {node}", opened_unix_s=self.now_s
        )

    def change(self, name: str, **members: Any) -> None:
        self.subjects[name] = msgspec.structs.replace(self.subjects[name], **members)

    def silence(self, until_s: float, **match: str) -> None:
        about = {"what": "silence", "id": "s1", "match": match, "until_unix_s": until_s}
        self.past.take("audit", {**about, "who": "ann", "reason": "work"}, self.now_s)

    def run(self, seconds: float = 1.0) -> list[str]:
        """Lets time pass; what was told meanwhile."""
        before, end_s = len(self.sent), self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            for notice in due(self.now_s, self.subjects, CONFIG, self.past):
                if notice.receiver in self.down:
                    continue
                level = f"+{notice.escalation}" if notice.escalation else ""
                self.sent.append(f"{notice.receiver}: {notice.event}{level} {' '.join(notice.incidents)}")
                self.past.take("notice", {**msgspec.to_builtins(notice), "state": "sent"}, self.now_s)
        return self.sent[before:]


def test_one_notice_an_incident_and_one_at_its_end() -> None:
    world = World()
    world.opens("i1")
    assert world.run(600) == ["page: opened i1", "chat: opened i1"]
    world.change("i1", title="ecc on n1 and more symptoms", why=["a", "b"])
    assert world.run(100) == []
    world.change("i1", closed=True)
    assert world.run(600) == ["chat: closed i1", "page: closed i1"]
    assert (world.past.threads, world.past.known) == ({}, set())
    world.change("i1", closed=False)
    assert world.run(10) == ["page: opened i1", "chat: opened i1"], "it was opened again"


def test_who_acknowledges_stops_it_for_everybody_and_nobody_is_escalated_to() -> None:
    world = World()
    world.opens("i1")
    world.run(800)
    world.change("i1", acked_by="ann")
    assert world.run(5000) == ["chat: acked i1", "page: acked i1"]
    world.change("i1", closed=True)
    assert world.run(10) == ["chat: closed i1", "page: closed i1"]


def test_without_an_acknowledgement_the_next_level_is_told() -> None:
    world = World()
    world.opens("i1")
    world.run(899)
    assert world.run(10) == ["lead: opened+1 i1"]
    world.change("i1", acked_by="ann")
    assert world.run(10) == ["chat: acked i1", "lead: acked i1", "page: acked i1"]


def test_a_receiver_that_is_down_is_told_later_and_holds_nobody_up() -> None:
    world = World()
    world.down = {"page"}
    world.opens("i1")
    assert world.run(100) == ["chat: opened i1"]
    world.down = set()
    assert world.run(100) == ["page: opened i1"]


def test_whoever_was_never_told_of_it_is_not_told_that_it_is_over() -> None:
    world = World()
    world.down = {"page"}
    world.opens("i1")
    world.run(100)
    world.change("i1", closed=True)
    world.down = set()
    assert world.run(100) == ["chat: closed i1"]


def test_what_is_over_before_anybody_was_told_is_not_told() -> None:
    world = World()
    world.opens("i1", rack="r9")
    world.run(10)
    world.change("i1", closed=True)
    world.opens("i2")
    world.change("i2", acked_by="ann")
    assert world.run(100) == []


def test_a_rack_is_one_notice_and_one_more_when_it_grows() -> None:
    world = World()
    world.opens("i1", node="n1", rack="r9")
    world.run(20)
    world.opens("i2", node="n2", rack="r9")
    assert world.run(60) == ["page: opened i1 i2"], "the first is waited on for 30 s"
    world.opens("i3", node="n3", rack="r9")
    world.opens("i4", node="n4", rack="r9b")
    assert world.run(300) == ["page: opened i4", "page: grown i1 i2 i3"]
    world.change("i1", closed=True)
    assert world.run(100) == []
    world.change("i2", closed=True)
    world.change("i3", acked_by="ann")
    assert world.run(100) == ["page: acked i1 i2 i3"]


def test_an_incident_that_becomes_worse_is_told_to_its_new_route() -> None:
    world = World()
    world.opens("i1", severity="warning")
    assert world.run(10) == ["chat: opened i1"]
    world.change("i1", labels={**world.subjects["i1"].labels, "severity": "fatal"})
    assert world.run(10) == ["page: opened i1", "chat: opened i1"]
    world.change("i1", closed=True)
    assert sorted(world.run(10)) == ["chat: closed i1", "chat: closed i1", "page: closed i1"]


def test_a_silence_ends_and_what_still_holds_is_told_then() -> None:
    world = World()
    world.silence(world.now_s + 100.0, node="n1 n7")
    world.opens("i1")
    world.opens("i2", node="n2")
    assert world.run(99) == ["page: opened i2", "chat: opened i2"]
    assert world.run(10) == ["page: opened i1", "chat: opened i1"]
    world.silence(world.now_s + 5000.0, node="n*")
    assert world.run(2000) == [], "nobody is escalated to"
    world.change("i1", closed=True)
    assert world.run(10) == ["chat: closed i1", "page: closed i1"], "an end is told in any case"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "ack", "close", "reopen", "worse", "down", "up", "wait"]), st.integers(0, 3)
    ),
    max_size=40,
)


@given(STEPS)
@settings(deadline=None)
def test_nobody_is_told_the_same_twice_and_all_come_to_rest(steps: list[tuple[str, int]]) -> None:
    world = World()
    for what, number in steps:
        name = f"i{number}"
        known = name in world.subjects
        if what == "open" and not known:
            world.opens(name, severity="warning", node=f"n{number}", rack=("r1", "r9")[number % 2])
        elif what == "ack" and known:
            world.change(name, acked_by="ann")
        elif what in ("close", "reopen") and known:
            world.change(name, closed=what == "close", acked_by="")
        elif what == "worse" and known:
            world.change(name, labels={**world.subjects[name].labels, "severity": "fatal"})
        elif what in ("down", "up"):
            world.down = {"page"} if what == "down" else set()
        world.run(40)
        assert due(world.now_s, world.subjects, CONFIG, world.past) == due(
            world.now_s, world.subjects, CONFIG, world.past
        )
    world.down = set()
    for name in world.subjects:
        world.change(name, closed=True)
    world.run(400)
    assert world.past.threads == {}, "whoever was told of something knows that it is over"
    assert world.run(3000) == []
    opened = sum("opened" in line for line in world.sent)
    assert opened >= sum("closed" in line for line in world.sent)


HOSTILE = "\x1b]0;x\x07<!channel> <b>&\r\nSubject: forged\u202e"


def message(event: str = "opened") -> messages.Message:
    labels = {"incident": "i1", "kind": "ecc", "severity": "critical", "node": HOSTILE, "rack": "r1"}
    subject = Subject(
        labels={**labels, "job": "llm", "owner": ""}, title=HOSTILE, why=[HOSTILE * 50], opened_unix_s=0.0
    )
    notice = Notice(thread="i1", route="grave", receiver="page", event=event, incidents=["i1"])
    return messages.write(notice, [subject])


def test_text_from_outside_is_one_line_and_no_markup() -> None:
    told = message()
    assert "\n" not in told.subject
    assert all("\n" not in line and "\x1b" not in line and "\u202e" not in line for line in told.lines)
    assert all(len(line) <= messages.LINE_CHARS_MAX * 4 for line in told.lines)
    slack = messages.slack(told)["text"]
    assert "<" not in slack
    assert "&lt;!channel&gt;" in slack


def test_each_kind_has_its_form() -> None:
    told = message()
    event = messages.pagerduty(told, "KEY")
    assert (event["event_action"], event["dedup_key"]) == ("trigger", "gridctl/grave/i1")
    assert event["payload"]["severity"] == "error"
    acked, closed = messages.pagerduty(message("acked"), "KEY"), messages.pagerduty(message("closed"), "KEY")
    assert [acked["event_action"], closed["event_action"]] == ["acknowledge", "resolve"]
    assert acked["dedup_key"] == closed["dedup_key"] == event["dedup_key"]
    (alert,) = messages.alerts(told, 100.0)
    (over,) = messages.alerts(message("closed"), 100.0)
    assert alert["labels"] == over["labels"], "the same alert"
    assert (over["endsAt"], alert["startsAt"]) == ("1970-01-01T00:01:40Z", "1970-01-01T00:00:00Z")
    json.dumps(messages.webhook(told))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[receiver]]\nname='a'\nkind='slack'\nurl='ftp://x'", "url must begin with"),
        ("[[receiver]]\nname='a'\nkind='mail'\nurl='smtp://x'", "needs sender and to"),
        ("[[receiver]]\nname='a'\nkind='pagerduty'\nurl='https://x'", "routing key"),
        ("[[receiver]]\nname='a'\nkind='fax'\nurl='https://x'", "fax"),
        ("[[route]]\nname='a'\nreceivers=['b']", "no receiver b"),
        ("[[route]]\nname='a'\nmatch={colour='red'}", "no label colour"),
        ("[[route]]\nname='a'\nseverity_min='bad'", "severity_min"),
        ("[[route]]\nname='a'\n[[route]]\nname='a'", "stands in it twice"),
        ("[[route]]\nname='a'\nreceiver=['b']", "receiver"),
        ("[[", "end of document"),
    ],
)
def test_a_wrong_file_is_refused_and_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "notify.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"notify\.toml") as refused:
        load(path)
    assert says in str(refused.value)


def test_without_a_file_nobody_is_told(tmp_path: Path) -> None:
    world = World()
    world.opens("i1")
    assert due(world.now_s, world.subjects, load(tmp_path / "notify.toml"), world.past) == []
    assert CONFIG.owner_of("llm-7") == "team-a"
    assert CONFIG.owner_of("") == ""
