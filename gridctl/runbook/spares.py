"""Which spares take the ranks. Pure."""

from collections.abc import Mapping, Sequence

from gridagent.wire import Blocker
from gridctl.model.fleet import Node, Rank, Spare, spares
from gridctl.model.policy import Policy
from gridctl.runbook.preflight import fatal, of_node, of_spare


def choose(
    ranks: Sequence[Rank], source: Node, nodes: Mapping[str, Node], policy: Policy, to: str = ""
) -> tuple[list[Spare], list[Blocker]]:
    """One spare for every rank, in their order, or none and why not.

    All on one node where that is possible, then near the source (rack, NVLink domain), then by name.
    """
    parked = [s for s in spares(nodes.values()) if s.state == "parked" and to in ("", s.node)]
    if not parked:
        return [], [_none(nodes, to)]
    objections: dict[str, list[Blocker]] = {
        spare.session: _objections(ranks, source, spare, nodes[spare.node], policy) for spare in parked
    }
    free = [spare for spare in parked if not objections[spare.session]]
    if not free:
        return [], [blocker for spare in parked for blocker in objections[spare.session]]
    if len(free) < len(ranks):
        text = f"{len(ranks)} ranks would move, but only {len(free)} usable spares are parked: park more"
        return [], [fatal("no-spare", text)]
    by_node: dict[str, list[Spare]] = {}
    for spare in free:
        by_node.setdefault(spare.node, []).append(spare)

    def order(name: str) -> tuple[bool, bool, bool, str]:
        there, here = nodes[name].status, source.status
        assert there is not None
        assert here is not None
        far = there.rack != here.rack
        other_domain = there.nvlink_domain != here.nvlink_domain
        return (len(by_node[name]) < len(ranks), far, other_domain, name)

    ordered = [spare for name in sorted(by_node, key=order) for spare in by_node[name]]
    return ordered[: len(ranks)], []


def _objections(
    ranks: Sequence[Rank], source: Node, spare: Spare, node: Node, policy: Policy
) -> list[Blocker]:
    assert source.status is not None
    found = list(of_node(node, ranks[0].job, policy))
    found += of_spare(source.status, len(ranks[0].gpus), spare, node, policy)
    return [blocker for blocker in found if blocker.fatal]


def _none(nodes: Mapping[str, Node], to: str) -> Blocker:
    silent = [node.name for node in nodes.values() if not node.reachable]
    where = f"on {to}" if to else "in the fleet"
    text = f"no spare is parked {where}: run `gridagent park` on a free node"
    if silent:
        text += f"; {', '.join(sorted(silent))} could not be asked"
    return fatal("no-spare", text)
