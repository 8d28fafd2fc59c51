"""What a plan relies on, as a flat table of facts, and what has changed in it since.

The fence is not in it: that another controller acts is noticed by the agents, who refuse the older one.
"""

from collections.abc import Iterable, Mapping

from gridagent.wire import Member, SessionReport
from gridctl.model.fleet import Node, ranks_of, spares


def of_nodes(members: Iterable[Member], nodes: Mapping[str, Node]) -> dict[str, str]:
    """Sessions, epochs and states of all members, and what their nodes allow."""
    facts: dict[str, str] = {}
    for member in members:
        facts |= of_node(member.node, nodes)
        node = nodes.get(member.node)
        if node and node.status and node.reachable:
            facts[f"{member.role} of rank {member.rank}"] = _process(member, node)
    return facts


def of_node(name: str, nodes: Mapping[str, Node]) -> dict[str, str]:
    """Which machine it is, in which boot, and what it allows."""
    node = nodes.get(name)
    if node is None or node.status is None or not node.reachable:
        return {f"node {name}": "no answer"}
    status = node.status
    return {
        f"node {name}": f"serial {status.serial}, boot {status.boot_id}, {node.url}",
        f"cordon of {name}": f"{status.cordon_owner or 'somebody'}" if status.cordoned else "no",
        f"quarantine of {name}": "yes" if status.quarantined else "no",
        f"freeze on {name}": ", ".join(sorted(status.frozen)) or "no",
    }


def of_report(report: SessionReport) -> dict[str, str]:
    """What a rank says of itself and what must stay so until the boundary."""
    facts = {f"rank {report.rank} fact {key}": value for key, value in sorted(report.facts.items())}
    return {
        **facts,
        f"rank {report.rank} inventory": report.inventory,
        f"rank {report.rank} buckets": report.buckets,
        f"rank {report.rank} groups": " | ".join(report.groups),
    }


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line for every fact of `before` that is another one in `now`."""
    return [
        f"{key}: was {value or 'none'}, is {now.get(key, '') or 'none'}"
        for key, value in before.items()
        if now.get(key, "") != value
    ]


def _process(member: Member, node: Node) -> str:
    for rank in ranks_of(node):
        if rank.session == member.session:
            return f"session {rank.session} of {rank.job}, epoch {rank.epoch}, {rank.state}"
    for spare in spares([node]):
        if spare.session == member.session:
            return f"session {spare.session}, {spare.state}"
    return "gone"
