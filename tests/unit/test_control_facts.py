"""What a node is stands in the journal once, and again whenever something of it changes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from runbook_world import rank, spare, status

from gridagent.journal import read
from gridagent.wire import StreamRecord
from gridctl.control.devicelog import DeviceLog
from gridctl.control.facts import WRITTEN_A_TURN, journal_facts
from gridctl.control.ledger import Ledger
from gridctl.home import Home
from gridctl.model.fleet import Node


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path)


def node(**more: Any) -> Node:
    its = status("n1", gpus=8, gpu_model="H100", **more)
    return Node(name="n1", url=its.url, rack="r1", reachable=True, status=its)


def facts(home: Home) -> list[dict[str, Any]]:
    return [record.data for record in read(home.journal) if record.kind == "facts"]


def about(device: str, **more: Any) -> StreamRecord:
    v = {"device": device, "v": {}, **more}
    return StreamRecord(seq=1, boot="b", t_unix_s=1.0, node="n1", kind="sample", v=v)


def test_facts_are_written_once_and_when_they_change(home: Home) -> None:
    ledger, devices = Ledger(home, "ann-1"), DeviceLog()
    at_work = node(ranks=[rank(1), rank(0), rank(2, state="frozen")])
    for _ in range(3):
        journal_facts(ledger, devices, [at_work])
    ledger.close()
    ledger = Ledger(home, "ann-1")  # the next controller knows what was written
    journal_facts(ledger, devices, [at_work])
    assert facts(home) == [
        {
            "node": "n1",
            "rack": "r1",
            "node_class": "H100 x 8",
            "nvlink_domain": "",
            "cooling_zone": "",
            "driver": "555",
            "gpu_model": "H100",
            "gpus": 8,
            "serial": "SN1",
            "boot_id": "boot1",
            "version": "0.1.0",
            "spare": False,
            "jobs": {"lm": [0, 1]},
            "devices": {},
        }
    ]
    journal_facts(ledger, devices, [node(spares=[spare()], driver="560")])
    journal_facts(ledger, devices, [node(spares=[spare(state="taken")], driver="560", now_unix_s=5.0)])
    assert [(its["driver"], its["spare"], its["jobs"]) for its in facts(home)[1:]] == [
        ("560", True, {}),
        ("560", False, {}),
    ]


def test_a_node_of_which_nothing_certain_is_known_stays_what_it_was(home: Home) -> None:
    ledger, devices = Ledger(home, "ann-1"), DeviceLog()
    silent = msgspec.structs.replace(node(driver="1"), reachable=False)
    journal_facts(ledger, devices, [silent, node(complete=False), Node(name="n2", url="https://h:1")])
    assert facts(home) == []


def test_a_large_fleet_takes_several_turns(home: Home) -> None:
    ledger, devices = Ledger(home, "ann-1"), DeviceLog()
    nodes = [msgspec.structs.replace(node(), name=f"n{number}") for number in range(WRITTEN_A_TURN + 5)]
    journal_facts(ledger, devices, nodes)
    assert len(facts(home)) == WRITTEN_A_TURN
    journal_facts(ledger, devices, nodes)
    assert {its["node"] for its in facts(home)} == {its.name for its in nodes}


def test_devices_say_what_they_are_now_and_then_and_are_not_forgotten(home: Home) -> None:
    ledger, devices = Ledger(home, "ann-1"), DeviceLog()
    devices.feed(
        about("gpu:0", uuid="GPU-1", pci="0000:9b:00.0", model="H100 \x1b[31m" + "x" * 100, serial=7)
    )
    devices.feed(about("gpu:0", pci="0000:9b:00.0"))
    devices.feed(about("gpu:1", uuid=["no text"]))
    journal_facts(ledger, devices, [node()])
    known = {"gpu:0": {"uuid": "GPU-1", "pci": "0000:9b:00.0", "name": "H100 \x1b[31m" + "x" * 70}}
    assert facts(home)[-1]["devices"] == known
    journal_facts(ledger, DeviceLog(), [node()])
    assert len(facts(home)) == 1
    devices.feed(about("gpu:0", uuid="GPU-2"))
    journal_facts(ledger, devices, [node()])
    assert facts(home)[-1]["devices"]["gpu:0"] == {"uuid": "GPU-2"}
