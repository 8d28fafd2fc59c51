"""Which spares take the ranks. Pure."""

from collections.abc import Mapping, Sequence

from gridagent.wire import Blocker
from gridctl.assess.spares import Candidate, rank
from gridctl.model.fleet import WAITING, Node, Rank, Spare, several, spares
from gridctl.model.policy import Policy
from gridctl.runbook.preflight import fatal, of_node, of_spare


def choose(
    ranks: Sequence[Rank], source: Node, nodes: Mapping[str, Node], policy: Policy, to: str = ""
) -> tuple[list[Spare], list[Blocker]]:
    """One spare for every rank, in their order, or none and why not.

    All on one node where that is possible, then in the order of `gridctl.assess.spares`, then by name.
    """
    parked = [s for s in spares(nodes.values()) if s.state in WAITING and to in ("", s.node)]
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

    ranked = [found.node for found in rank(candidate(source), (candidate(nodes[name]) for name in by_node))]
    ranked.sort(key=lambda name: len(by_node[name]) < len(ranks))  # stable: the order within stays
    return [spare for name in ranked for spare in by_node[name]][: len(ranks)], []


def candidate(node: Node) -> Candidate:
    """A reachable node as the ranking sees it."""
    status = node.status
    assert status is not None
    return Candidate(
        node=node.name,
        driver=status.driver,
        rack=status.rack,
        nvlink_domain=status.nvlink_domain,
        cooling_zone=status.cooling_zone,
    )


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
    for spare in spares(nodes.values()):
        if spare.state in ("specialising", "warm") and to in ("", spare.node):
            status = nodes[spare.node].status
            steers = f", {status.lease_holder} steers there" if status and status.lease_holder else ""
            text += f"; the one on {spare.node} is {spare.state}{steers}"
    if silent:
        text += f"; {several(silent)} could not be asked"
    return fatal("no-spare", text)
