"""Everything that is assessed of one node, in one value: index, forecast, choice."""

import msgspec

from gridctl.assess.decide import Case, Choice, decide
from gridctl.assess.forecast import Forecast, NodeHistory
from gridctl.assess.risk import Index, Known, Weights, indices


class NodeRisk(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node. `indices` has the node's own first."""

    node: str
    verdict: str
    indices: list[Index]
    forecast: Forecast
    history: NodeHistory
    faults_30d: int
    choice: Choice


def outlook(case: Case, history: NodeHistory, faults_30d: int, by: Weights) -> NodeRisk:
    """Puts it together; the case has findings, verdict and forecast."""
    known = Known(verdict=case.verdict, faults_30d=faults_30d, repaired_h_ago=history.repaired_h_ago)
    return NodeRisk(
        node=case.node,
        verdict=case.verdict,
        indices=indices(case.findings, known, by),
        forecast=case.forecast,
        history=history,
        faults_30d=faults_30d,
        choice=decide(case),
    )
