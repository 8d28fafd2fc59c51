"""What every node is, journaled whenever something of it changes: history asks by rack, class and driver."""

from collections.abc import Iterable
from typing import Any

from gridagent.wire import NodeStatus
from gridctl.control.devicelog import DeviceLog
from gridctl.control.ledger import Ledger
from gridctl.model.fleet import Node

#: States of a rank whose job runs on the node.
_ON = ("training", "standing")
#: Each is a write that waits for the disk, and all else waits with it: a large fleet takes several turns.
WRITTEN_A_TURN = 64


def journal_facts(ledger: Ledger, devices: DeviceLog, nodes: Iterable[Node]) -> None:
    """Writes down what is new of the nodes that answer, of so many at a time as `WRITTEN_A_TURN`.

    Raises `Refused` if the journal cannot be written.
    A silent node stays what it was, and so does one whose agent still waits for sessions: what runs there is
    not known yet.
    """
    written = 0
    for node in nodes:
        if written < WRITTEN_A_TURN and node.reachable and node.status and node.status.complete:
            before = ledger.facts.get(node.name, {})
            told = {**before.get("devices", {}), **devices.identities(node.name)}
            now = _facts(node, node.status, told)
            if now != before:
                ledger.append("facts", now)
                written += 1


def _facts(node: Node, status: NodeStatus, devices: dict[str, dict[str, str]]) -> dict[str, Any]:
    jobs: dict[str, list[int]] = {}
    for rank in status.ranks:
        if rank.state in _ON:
            jobs.setdefault(rank.job, []).append(rank.rank)
    return {
        "node": node.name,
        "rack": node.rack,
        "node_class": f"{status.gpu_model} x {status.gpus}" if status.gpu_model else "",
        "nvlink_domain": status.nvlink_domain,
        "cooling_zone": status.cooling_zone,
        "driver": status.driver,
        "gpu_model": status.gpu_model,
        "gpus": status.gpus,
        "serial": status.serial,
        "boot_id": status.boot_id,
        "version": status.version,
        "spare": any(spare.state != "taken" for spare in status.spares),
        "jobs": {job: sorted(jobs[job]) for job in sorted(jobs)},
        "devices": devices,
    }
