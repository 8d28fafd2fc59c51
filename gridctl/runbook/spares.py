"""Which spares take the ranks. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from gridagent.wire import Blocker
from gridctl.assess.spares import Candidate, rank
from gridctl.model.fleet import WAITING, Node, Rank, Spare, several, spares
from gridctl.model.plans import Plan
from gridctl.model.policy import Policy
from gridctl.runbook.preflight import fatal, of_node, of_spare


class Claims(msgspec.Struct, frozen=True):
    """Whose plans have chosen spares: a run's is gone, an open plan's may still be had, but by one only."""

    runs: Mapping[str, Plan] = {}  #: a run that has not ended -> its plan
    plans: Sequence[Plan] = ()  #: such as could still be applied

    def taken(self, spare: Spare) -> str:
        """The run that has the spare; "" for none."""
        return next(
            (_of(f"run {run}", plan) for run, plan in self.runs.items() if _moves_to(plan, spare)), ""
        )

    def wanted(self, spare: Spare, job: str) -> str:
        """Who else counts on the spare, or for now on its node, as a plan for `job` says; "": nobody."""
        for plan in self.plans:
            if plan.job != job and _moves_to(plan, spare):
                return f"{_of(f'plan {plan.id}', plan)} has chosen it too: whichever is applied first has it"
        for run, plan in self.runs.items():
            if any(move.target.node == spare.node for move in plan.moves):
                return f"{_of(f'run {run}', plan)} moves a rank to that node: wait for its end"
        return ""

    def notes(self, chosen: Iterable[Spare], job: str) -> list[str]:
        """What a plan for `job` says where no spare was left that nobody else counts on."""
        wanted = {f"the spare on {spare.node}": self.wanted(spare, job) for spare in chosen}
        return [f"no other spare is left than {which}, and {why}" for which, why in wanted.items() if why]


NOBODY = Claims()


def _moves_to(plan: Plan, spare: Spare) -> bool:
    return any(move.target.session == spare.session for move in plan.moves)


def _of(what: str, plan: Plan) -> str:
    return f"{what} ({plan.purpose})"


def choose(
    ranks: Sequence[Rank],
    source: Node,
    nodes: Mapping[str, Node],
    policy: Policy,
    to: str = "",
    claims: Claims = NOBODY,
) -> tuple[list[Spare], list[Blocker]]:
    """One spare for every rank, in their order, or none and why not.

    Such as nobody else has chosen, if there are enough; all on one node where that is possible, then in the
    order of `gridctl.assess.spares`, then by name.
    """
    parked = [s for s in spares(nodes.values()) if s.state in WAITING and to in ("", s.node)]
    if not parked:
        return [], [_none(nodes, to)]
    objections: dict[str, list[Blocker]] = {
        spare.session: [
            *_claimed(spare, claims),
            *_objections(ranks, source, spare, nodes[spare.node], policy),
        ]
        for spare in parked
    }
    free = [spare for spare in parked if not objections[spare.session]]
    if not free:
        return [], [blocker for spare in parked for blocker in objections[spare.session]]
    if len(free) < len(ranks):
        text = f"{len(ranks)} ranks would move, but only {len(free)} usable spares are parked: park more"
        return [], [fatal("no-spare", text)]
    unwanted = [spare for spare in free if not claims.wanted(spare, ranks[0].job)]
    by_node: dict[str, list[Spare]] = {}
    for spare in unwanted if len(unwanted) >= len(ranks) else free:
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


def _claimed(spare: Spare, claims: Claims) -> Iterator[Blocker]:
    if run := claims.taken(spare):
        yield fatal(
            "no-spare", f"the spare on {spare.node} is taken by {run}: wait for its end, or park more"
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
