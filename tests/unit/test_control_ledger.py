"""What the controller folds from its journal, and what it reads from its files."""

import asyncio
import resource
from pathlib import Path

import msgspec
import pytest
from runbook_world import World, fleet, plan_for

from gridagent.journal import Record, read
from gridagent.wire import StreamRecord
from gridctl.control.devicelog import DEVICES_MAX, DeviceLog
from gridctl.control.ledger import Ledger
from gridctl.control.sentinel import close_incident
from gridctl.control.settings import load_fleet, load_policy
from gridctl.control.steplog import KEPT, StepLog
from gridctl.errors import ConfigError, GridctlError, Refused
from gridctl.home import Home
from gridctl.model.fleet import Sample
from gridctl.model.policy import Policy
from gridctl.runbook.events import Started

PLAN = plan_for(fleet())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path)


def filled(home: Home, records: int = 10**9) -> Ledger:
    """A ledger with a whole swap in it, or only its first records."""
    ledger = Ledger(home, "ann-1")
    about = {"incident": "i1", "state": "open", "kind": "manual", "node": "n2", "job": "lm", "title": "t"}
    ledger.append("incident", about)
    ledger.append("plan", {"incident": "i1", "plan": msgspec.to_builtins(PLAN)})
    world = World(PLAN)
    world.drive(Started("ann"))
    for kind, data in world.journal[:records]:
        ledger.append(kind, data)
    return ledger


def test_another_process_reads_the_same_out_of_the_journal(home: Home) -> None:
    ledger = filled(home)
    before = ledger.run("r1"), ledger.plan("p1"), ledger.incident("i1")
    ledger.close()
    again = Ledger(home, "ann-1")
    assert (again.run("r1"), again.plan("p1"), again.incident("i1")) == before
    run = before[0]
    assert (run.state, run.who, run.plan, {step.state for step in run.steps}) == (
        "done",
        "ann",
        "p1",
        {"done"},
    )
    assert all(0 < step.started_unix_s <= step.ended_unix_s for step in run.steps)
    assert run.started_unix_s <= run.ended_unix_s
    assert again.open_plan("i1", PLAN.created_unix_s) is None
    close_incident(again, "i1", "run r1 is done")
    close_incident(again, "i1", "and again")
    assert (again.incident("i1").state, again.incident("i1").timeline[-1].what) == (
        "closed",
        "incident closed: run r1 is done",
    )
    again.close()


def test_an_incident_whose_plans_were_never_applied_is_forgotten(home: Home) -> None:
    expiry = PLAN.expires_unix_s
    ledger = filled(home, 0)
    assert ledger.incidents.forgotten(expiry - 1, ledger.plans) == []
    later = msgspec.structs.replace(PLAN, id="p2", expires_unix_s=expiry + 100)
    ledger.append("plan", {"incident": "i1", "plan": msgspec.to_builtins(later)})
    assert ledger.incidents.forgotten(expiry + 1, ledger.plans) == [], "a newer plan can still be applied"
    assert [found.id for found in ledger.incidents.forgotten(expiry + 100, ledger.plans)] == ["i1"]
    assert ledger.incidents.open_for("n2", "lm") is not None
    assert ledger.incidents.open_for("n2", "other") is None
    close_incident(ledger, "i1", "expired")
    assert ledger.incidents.forgotten(expiry + 100, ledger.plans) == []
    assert ledger.incidents.open_for("n2", "lm") is None
    ledger.close()
    started = filled(Home.at(home.state / "started"))
    assert started.incidents.forgotten(expiry + 1, started.plans) == [], "one that was applied has its run"
    started.close()


def test_a_changed_journal_is_noticed(home: Home) -> None:
    ledger = filled(home)
    assert ledger.damage == ""
    ledger.close()
    (segment,) = home.journal.glob("*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"actor":"ann-1"', b'"actor":"eve-1"')
    segment.write_bytes(b"".join(lines))
    again = Ledger(home, "ann-1")
    assert "record 4" in again.damage
    again.close()


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"no record\n", b"another form"])
def test_what_is_left_of_a_damaged_journal_is_shown(home: Home, damage: bytes) -> None:
    filled(home).close()
    (segment,) = home.journal.glob("*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    for number in range(len(lines) - 1):
        form = msgspec.json.decode(lines[number]) | {"data": {"run": 1, "incident": "i1", "plan": "p1"}}
        put = msgspec.json.encode(form) + b"\n" if damage == b"another form" else damage
        segment.write_bytes(b"".join([*lines[:number], put, *lines[number + 1 :]]))
        ledger = Ledger(home, "ann-1")
        assert f"record {number + 1}" in ledger.damage
        assert len(ledger.plans) == (number != 1)
        assert len(ledger.all_runs()) <= 1
        ledger.incidents.forgotten(1e12, ledger.plans)
        ledger.open_plan("i1", PLAN.created_unix_s)
        ledger.cut_rates()
        assert asyncio.run(first_event(ledger)).seq >= 1
        ledger.close()


async def first_event(ledger: Ledger) -> Record:
    return await anext(ledger.events(0))


def test_a_run_in_nobody_s_hand_is_interrupted(home: Home) -> None:
    ledger = filled(home, 9)
    assert ledger.run("r1").state == "interrupted"
    ledger.driven.add("r1")
    assert ledger.run("r1").state == "running"
    ledger.close()


def test_unknown_names_are_refused(home: Home) -> None:
    ledger = Ledger(home, "ann-1")
    for call, code in (
        (ledger.run, "unknown-run"),
        (ledger.plan, "unknown-plan"),
        (ledger.incident, "unknown-incident"),
    ):
        with pytest.raises(Refused) as caught:
            call("x")
        assert caught.value.code == code
    ledger.close()


def test_a_journal_has_one_writer(home: Home) -> None:
    ledger = Ledger(home, "ann-1")
    with pytest.raises(GridctlError, match="being written by process"):
        Ledger(home, "bob-1")
    ledger.close()


def test_a_freeze_and_whom_it_missed_are_remembered(home: Home) -> None:
    ledger = Ledger(home, "ann-1")
    ledger.append("audit", {"what": "freeze", "scope": "fleet", "who": "ann", "reason": "r"})
    ledger.append("audit", {"what": "relayed", "scope": "fleet", "missed": ["n3"]})
    ledger.close()
    again = Ledger(home, "ann-1")
    assert (again.freezes["fleet"]["what"], again.missed) == ("freeze", {"fleet": {"n3"}})
    again.append("audit", {"what": "thaw", "scope": "fleet", "who": "ann", "reason": "r"})
    assert again.freezes["fleet"]["what"] == "thaw"
    again.close()


def test_a_freeze_that_cannot_be_written_is_in_force_and_written_before_anything_else(home: Home) -> None:
    ledger = Ledger(home, "ann-1")
    ledger.append("note", {"text": "before"})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        ledger.insist({"what": "freeze", "scope": "fleet", "who": "ann", "reason": "r"})
        ledger.insist({"what": "relayed", "scope": "fleet", "missed": ["n3"]})
        with pytest.raises(Refused):
            ledger.append("note", {"text": "lost"})
        with pytest.raises(Refused):
            ledger.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (ledger.freezes["fleet"]["what"], ledger.missed) == ("freeze", {"fleet": {"n3"}})
    ledger.append("note", {"text": "after"})
    assert ledger.owed == []
    ledger.close()
    written = [record.data.get("what", record.data.get("text")) for record in read(home.journal)]
    assert written == ["before", "freeze", "relayed", "after"]


def test_events_are_told_from_any_point_and_as_they_come(home: Home) -> None:
    async def told() -> list[int]:
        ledger = filled(home, 3)
        seen: list[int] = []

        async def listen() -> None:
            async for record in ledger.events(2):
                seen.append(record.seq)
                if len(seen) == 4:
                    return

        listener = asyncio.create_task(listen())
        await asyncio.sleep(0)
        ledger.append("note", {"text": "late"})
        await asyncio.wait_for(listener, 60)
        ledger.close()
        return seen

    assert asyncio.run(told()) == [3, 4, 5, 6]


def test_the_newest_steps_are_kept_apart_by_epoch() -> None:
    log = StepLog()
    for step in range(KEPT + 5):
        v = {"job": "lm", "rank": 1, "epoch": int(step >= KEPT), "step": step, "loss": 1.0, "step_s": 0.1}
        log.feed(StreamRecord(seq=step + 1, boot="b", t_unix_s=1.0, node="n2", kind="progress", v=v))
    log.feed(StreamRecord(seq=9999, boot="b", t_unix_s=1.0, node="n2", kind="beat"))
    assert [e.step for e in log.after("lm", [1], 1)[1]] == list(range(KEPT, KEPT + 5))
    assert [e.step for e in log.before("lm", [1], 1, 3)[1]] == [KEPT - 3, KEPT - 2, KEPT - 1]
    assert log.after("lm", [0], 1) == {0: []}


FLEET = '[fleet]\nname = "f"\n[[node]]\nname = "n1"\nurl = "https://h:1"\n'


def test_files_are_checked_and_named(home: Home) -> None:
    with pytest.raises(ConfigError, match=r"fleet.toml is missing: run `gridctl init` first"):
        load_fleet(home)
    home.fleet_file.write_text(FLEET)
    assert [node.name for node in load_fleet(home).node] == ["n1"]
    home.fleet_file.write_text(FLEET + '[[node]]\nname = "n1"\nurl = "https://h:2"\n')
    with pytest.raises(ConfigError, match="node n1 stands in it twice"):
        load_fleet(home)
    assert load_policy(home) == Policy()
    home.policy_file.write_text("require_same_rack = true\n")
    assert load_policy(home).require_same_rack
    for wrong in ("requires_same_rack = true\n", "watch_steps = 'many'\n", "=\n"):
        home.policy_file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"policy\.toml"):
            load_policy(home)


def test_a_home_follows_the_environment(tmp_path: Path) -> None:
    assert Home.find({"GRIDCTL_HOME": str(tmp_path)}) == Home.at(tmp_path)
    found = Home.find({"HOME": "/h", "XDG_STATE_HOME": "/s"})
    assert (found.fleet_file, found.journal) == (
        Path("/h/.config/gridctl/fleet.toml"),
        Path("/s/gridctl/journal"),
    )
    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        _ = Home.at(tmp_path / ("x" * 100)).socket


def test_the_newest_sample_of_each_device_is_kept_and_a_node_cannot_fill_the_memory() -> None:
    log = DeviceLog()

    def tell(t_unix_s: float, device: object, values: object, kind: str = "sample") -> None:
        v = {"device": device, "v": values}
        log.feed(StreamRecord(seq=1, boot="b", t_unix_s=t_unix_s, node="n1", kind=kind, v=v))

    tell(1.0, "gpu:0", {"lost": 0})
    tell(2.0, "gpu:0", {"lost": 1})
    tell(3.0, "gpu:0", {"lost": 2}, kind="log")
    tell(3.0, ["gpu:0"], {})
    tell(3.0, "gpu:1", None)
    assert log.of("n1") == {"gpu:0": Sample(2.0, {"lost": 1})}
    assert log.of("n2") == {}
    card = {"device": "gpu:0", "pci": "0000:1a:00.0", "v": {}}
    for more, about in (
        ({"uuid": "GPU-0", "serial": ""}, {"uuid": "GPU-0"}),
        ({}, {"uuid": "GPU-0"}),
        ({"pci": "0000:2a:00.0"}, {"pci": "0000:2a:00.0"}),
    ):
        v = {**card, **more}
        log.feed(StreamRecord(seq=1, boot="b", t_unix_s=3.0, node="n1", kind="sample", v=v))
        assert log.of("n1")["gpu:0"].about == {"pci": "0000:1a:00.0", **about}
    for number in range(2 * DEVICES_MAX):
        tell(4.0, f"x:{number}", {})
    tell(5.0, "gpu:0", {"lost": 0})
    assert (len(log.of("n1")), log.of("n1")["gpu:0"].t_unix_s) == (DEVICES_MAX, 5.0)
