"""How good the watchdog was: the lines of a replay against what really happened.

Found: a line of an accepted kind on the fault's node (for a fault of many nodes also one of no node) at or
after its begin, not a suppressed one; where the job must move, a line that moves it. Delay: the first such
line less the moment it could be known. False: a node that is moved and has no fault for which it must.
Premature: moved before such a fault began. All these as others score recordings, too.

Beyond that a preemption is a decision that moves a job; it is unnecessary where no fault that asks for it
holds on its node at that time, so that a second one on a node that had a fault before counts as well.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gridctl.model.truth import Fault, Truth

MONTH_S = 30 * 86400.0
_EARLY_S = 0.001

Line = Mapping[str, Any]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one fault."""

    fault: Fault
    delay_s: float | None  #: nothing: missed
    device_named: bool = False


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One recording, or several together."""

    name: str
    node_months: float
    faults: list[Found]
    false_nodes: list[str]
    premature_nodes: list[str]
    preemptions: int
    unnecessary: list[str]  #: "node at 123 s: kind", with what happened there if the truth says it
    evicted: int
    evicted_max: int | None
    incidents: int
    blind_node_s: float
    node_s: float

    def delays_s(self, **members: object) -> list[float]:
        """The delays of the faults found whose members are these, the shortest first."""
        found = (one for one in self.faults if one.delay_s is not None)
        chosen = (one for one in found if all(getattr(one.fault, m) == v for m, v in members.items()))
        return sorted(one.delay_s for one in chosen if one.delay_s is not None)

    def missed(self) -> list[Fault]:
        return [one.fault for one in self.faults if one.delay_s is None]


class Judge:
    """Takes the lines of a replay, keeps those that count, and scores them."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._rows: list[Line] = []
        self._blind: dict[str, float] = {}
        self._blind_s = 0.0

    def feed(self, line: Line) -> None:
        """Takes one line."""
        if line["type"] == "verdict":
            self._seen(line["node"], line["t"], line["kind"] == "blind" or line["rule"].startswith("blind."))
        if line["type"] != "suppressed" and (line["type"] != "verdict" or line["preempt_job"]):
            self._rows.append(line)

    def _seen(self, node: str, t_s: float, blind: bool) -> None:
        if blind:
            self._blind.setdefault(node, t_s)
        elif (since_s := self._blind.pop(node, None)) is not None:
            self._blind_s += max(0.0, t_s - since_s)

    def score(self, name: str, nodes: int, seconds: float) -> Score:
        """The score of a recording of so many nodes and so long."""
        rows = sorted(self._rows, key=lambda row: row["t"])
        truth = self._truth
        decisions = [row for row in rows if row["type"] == "decision" and row["preempt_job"] and row["node"]]
        still_s = sum(max(0.0, seconds - since_s) for since_s in self._blind.values())
        false, premature = _wrong_nodes(rows, truth)
        return Score(
            name=name,
            node_months=nodes * seconds / MONTH_S,
            faults=[_found(rows, fault, truth.faults) for fault in truth.faults],
            false_nodes=false,
            premature_nodes=premature,
            preemptions=len(decisions),
            unnecessary=[self._told(row) for row in decisions if not _called_for(row, truth.faults)],
            evicted=len({row["node"] for row in decisions}),
            evicted_max=truth.counts.evictions_max,
            incidents=sum(row["type"] == "incident" for row in rows),
            blind_node_s=self._blind_s + still_s,
            node_s=nodes * seconds,
        )

    def _told(self, row: Line) -> str:
        node, t_s = row["node"], row["t"]
        before = [(n.t, n.cause) for n in self._truth.noise if n.node == node and n.t <= t_s]
        before += [(f.t, f.cause or f.kind) for f in self._truth.faults if node in f.members() and f.t <= t_s]
        after = f", after {max(before)[1]} at {max(before)[0]:.0f} s" if before else ""
        return f"{node} at {t_s:.0f} s: {row['kind']} [{row['rule']}]{after}"


def total(scores: Iterable[Score]) -> Score:
    """Several recordings as one."""
    scores = list(scores)
    caps = [score.evicted_max for score in scores if score.evicted_max is not None]
    return Score(
        name="total",
        node_months=sum(score.node_months for score in scores),
        faults=[found for score in scores for found in score.faults],
        false_nodes=[f"{score.name}/{node}" for score in scores for node in score.false_nodes],
        premature_nodes=[f"{score.name}/{node}" for score in scores for node in score.premature_nodes],
        preemptions=sum(score.preemptions for score in scores),
        unnecessary=[f"{score.name}: {text}" for score in scores for text in score.unnecessary],
        evicted=sum(score.evicted for score in scores),
        evicted_max=sum(caps) if len(caps) == len(scores) else None,
        incidents=sum(score.incidents for score in scores),
        blind_node_s=sum(score.blind_node_s for score in scores),
        node_s=sum(score.node_s for score in scores),
    )


def _accepted(row: Line, fault: Fault) -> bool:
    if row["kind"] in (None, "none", "not_applicable") or row["t"] < fault.t - _EARLY_S:
        return False
    if not row["node"]:
        if not fault.nodes:
            return False
    elif row["node"] not in fault.members():
        return False
    if fault.preempt_job and not fault.group_cap and not row["preempt_job"]:
        return False
    if not (
        row["kind"] == fault.kind or row["kind"] in fault.also or (fault.any_kind and row["preempt_job"])
    ):
        return False
    device = row["device"] or ""
    other = device.startswith(("gpu:", "nic:")) and device != fault.device
    return not (other and fault.device not in ("", "node"))


def _found(rows: list[Line], fault: Fault, faults: list[Fault]) -> Found:
    """The first line that tells of the fault, before the same comes again on its node."""
    same = [
        other.t
        for other in faults
        if other is not fault and (other.node, other.kind) == (fault.node, fault.kind) and other.t > fault.t
    ]
    end_s = min(same, default=math.inf)
    for row in rows:
        if row["t"] < end_s and _accepted(row, fault):
            named = fault.device in ("", "node") or row["device"] in (fault.device, fault.pci)
            return Found(fault=fault, delay_s=max(0.0, row["t"] - fault.decisive_t), device_named=named)
    return Found(fault=fault, delay_s=None)


def _wrong_nodes(rows: list[Line], truth: Truth) -> tuple[list[str], list[str]]:
    """Nodes that are moved and must not be, and nodes that are moved too early."""
    begin_s: dict[str, float] = {}
    for fault in truth.faults:
        if fault.preempt_job:
            for node in fault.members():
                begin_s[node] = min(begin_s.get(node, math.inf), _from_s(fault))
    first: dict[str, float] = {}
    for row in rows:
        if row["preempt_job"] and row["node"]:
            first.setdefault(row["node"], row["t"])
    spared = set(truth.must_not_preempt)
    false = sorted(node for node in first if node in spared or node not in begin_s)
    early = sorted(n for n, t in first.items() if n not in false and t < begin_s[n] - _EARLY_S)
    return false, early


def _from_s(fault: Fault) -> float:
    return fault.t if fault.preempt_from is None else fault.preempt_from


def _called_for(row: Line, faults: list[Fault]) -> bool:
    """Does a fault that asks for a preemption hold on this node now?"""
    return any(
        fault.preempt_job
        and row["node"] in fault.members()
        and _from_s(fault) - _EARLY_S <= row["t"] <= (math.inf if fault.until_t is None else fault.until_t)
        for fault in faults
    )


def quantile(ordered: list[float], share: float) -> float | None:
    """The value that this share of the values does not exceed (nearest rank); None where there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def upper_bound(events: int, trials: int, confidence: float = 0.95) -> float | None:
    """The exact one-sided bound of a share (Clopper and Pearson): not more, with this confidence.

    The share p at which so few events are as unlikely as 1 - confidence.
    """
    if not trials:
        return None
    if events >= trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(events, trials, middle) > 1 - confidence else (low, middle)
    return high


def _at_most(events: int, trials: int, p: float) -> float:
    """The probability of at most so many events, binomial."""
    if p <= 0 or p >= 1:
        return float(p <= 0)
    whole = math.lgamma(trials + 1)
    terms = (
        whole
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(p)
        + (trials - k) * math.log1p(-p)
        for k in range(events + 1)
    )
    return math.fsum(math.exp(term) for term in terms)
