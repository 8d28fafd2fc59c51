"""The watchdog: what all nodes tell, in; what it means and what ought to be done, out.

A node is `blind` while nothing is heard of it, `faulty` after a decisive signal or two independent
layers, `suspect` with anything else that weighs, and else `healthy`. Only `faulty` asks for a swap.
What several nodes share (a job, a rack, an NVLink domain) is the fault of none of them, and a breaker
bounds how many are given up within an hour.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush

import msgspec

from gridagent.wire import StreamRecord
from gridctl.detect.breaker import Breaker
from gridctl.detect.causes import Causes
from gridctl.detect.device import Cleared
from gridctl.detect.fate import Fate
from gridctl.detect.node import NodeWatch
from gridctl.detect.policy import DetectPolicy
from gridctl.detect.progress import Jobs
from gridctl.detect.steps import Steps
from gridctl.model.findings import Finding, Output, Suppressed, WatchedNode

_OPERATOR = "operator"
#: Kinds of records that say nothing of the node that tells them.
_OF_OTHERS = ("probe", "progress")


class Watch:
    """Feeds on stream records. Equal inputs give equal outputs.

    A node's findings and verdict depend on its own records, and on who can reach it; what other nodes say
    may only hold back a decision.
    """

    def __init__(
        self,
        policy: DetectPolicy,
        fleet: Iterable[WatchedNode] = (),
        jobs: Mapping[str, set[str]] | None = None,
    ) -> None:
        """`jobs`: node -> the jobs that have a rank on it, where that is known; may change later."""
        self._policy = policy
        self._jobs = {} if jobs is None else jobs
        self._nodes: dict[str, NodeWatch] = {}
        self._fate = Fate(policy.thresholds.shared_fate, self._jobs)
        self._breaker = Breaker(policy.thresholds.breaker)
        self._progress = Jobs(policy.thresholds.progress)
        self._steps = Steps(policy.thresholds.straggler, policy.thresholds.loss_spike)
        self._causes = Causes(policy.thresholds.shared_cause, policy.thresholds.shared_fate, self._nodes)
        self._silent: set[str] = set()
        self._together_unix_s: dict[str, float] = {}  #: node -> when its silence was last one of many
        self._due: list[
            tuple[float, str]
        ] = []  #: heap: when each node that is not silent can be at the earliest
        for node in fleet:
            self.update(node)

    def feed(self, record: StreamRecord, now_unix_s: float | None = None) -> list[Output]:
        """Takes one record. `now_unix_s`: the reader's clock (default: the record's own time).

        The reader's clock decides who is silent, the record's own time everything else.
        """
        node = self.node(record.node)
        now_unix_s = record.t_unix_s if now_unix_s is None else now_unix_s
        if not node.heard:
            self._ask_after(node.facts.name, now_unix_s)
        target = record.v.get("target")
        if record.kind == "probe" and isinstance(target, str) and target in self._nodes:
            answered = record.v.get("rtt_us") is not None
            self._nodes[target].observers.probe(record.node, answered, now_unix_s)
        outputs: list[Output] = []
        if record.kind not in _OF_OTHERS or not node.hears(record.boot, now_unix_s):
            outputs += self._noted(node, list(node.feed(record, now_unix_s)))
        if record.kind == "progress":
            if self._jobs:
                outputs += self._progress.feed(now_unix_s, record.node, record.v)
            for name, found in list(self._steps.feed(record.t_unix_s, record.node, record.v)):
                outputs += self._told(name, found, record.t_unix_s)
        elif record.kind == "phase":
            self._steps.pause(record.v)
        return outputs

    def tick(self, now_unix_s: float) -> list[Output]:
        """Lets time pass: nodes that have been silent for too long become blind."""
        self._look_for_silence(now_unix_s)
        self._note_who_is_silent_together(now_unix_s)
        outputs: list[Output] = [
            out
            for name in sorted(self._silent)
            for out in self._noted(self._nodes[name], list(self._nodes[name].tick(now_unix_s)))
        ]
        for name, found in list(self._causes.tick(now_unix_s)):
            outputs += self._told(name, found, now_unix_s)
        return outputs + list(self._progress.tick(now_unix_s, self._runs, self._reason, self._busy))

    def _look_for_silence(self, now_unix_s: float) -> None:
        """Who is silent now; of those that were not, none is asked before it can be."""
        asked = set(self._silent)
        while self._due and self._due[0][0] < now_unix_s:
            asked.add(heappop(self._due)[1])
        self._silent = {name for name in asked if self._nodes[name].silent_s(now_unix_s)}
        for name in asked - self._silent:
            self._ask_after(name, self._nodes[name].heard_unix_s)

    def _ask_after(self, name: str, heard_unix_s: float) -> None:
        heappush(self._due, (heard_unix_s + self._policy.thresholds.heartbeat.silent_s, name))

    def _told(self, name: str, found: Finding | Cleared, t_unix_s: float) -> list[Output]:
        """What is known of a node from more than its own records; without a name, of a job or a place."""
        if name:
            node = self.node(name)
            return self._noted(node, list(node.tell(found, t_unix_s)))
        return [found] if isinstance(found, Finding) else []

    def _runs(self, job: str, names: set[str]) -> bool:
        return any(name not in self._jobs or job in self._jobs[name] for name in names)

    def _busy(self, names: set[str], since_unix_s: float) -> bool:
        return any(self._nodes[name].busy(since_unix_s) for name in names if name in self._nodes)

    def _reason(self, names: set[str], since_unix_s: float) -> str:
        """Why a job may have stopped: what is known of its nodes."""
        for name in sorted(names & self._nodes.keys()):
            node = self._nodes[name]
            if node.verdict in ("faulty", "blind") or node.holds:
                return f"{name} is {'held' if node.holds else node.verdict}"
            if node.explained_unix_s >= since_unix_s:
                return f"{name} has told of the end of a process"
        return ""

    def update(self, node: WatchedNode) -> None:
        """A node is new, or something about it has changed (a spare took a rank)."""
        self.node(node.name).update(node)

    def follow(self, policy: DetectPolicy) -> None:
        """What Xids mean from now on; what was found stays, and so do thresholds."""
        self._policy = policy
        for node in self._nodes.values():
            node.follow(policy)

    def hold(self, node: str, reason: str) -> None:
        """No decision about this node until `release`: it is drained, or was decided on before."""
        self.node(node).holds[_OPERATOR] = reason

    def release(self, node: str) -> None:
        """Ends a `hold`."""
        self.node(node).holds.pop(_OPERATOR, None)
        self._breaker.forget(node)

    def verdict(self, node: str) -> str:
        """healthy, suspect, faulty or blind; a node that was never heard of is blind."""
        return self._nodes[node].verdict if node in self._nodes else "blind"

    def findings(self, node: str) -> list[Finding]:
        """What holds for a node at present, the first cause first."""
        return list(self._nodes[node].findings.values()) if node in self._nodes else []

    def node(self, name: str) -> NodeWatch:
        """The watch of one node; a new one where the name is new."""
        if name not in self._nodes:
            self._nodes[name] = NodeWatch(self._policy, WatchedNode(name=name), self._gate)
        return self._nodes[name]

    def _noted(self, node: NodeWatch, outputs: list[Output]) -> list[Output]:
        """Remembers what others may share, and says so when it is plain that they do."""
        shared: list[Output] = []
        for out in outputs:
            if out.kind == "healthy":
                self._breaker.forget(node.facts.name)
            elif isinstance(out, Finding):
                self._fate.add(out.t_unix_s, node.facts, out.kind, out.device)
                shared += list(self._causes.feed(out, node.facts))
            elif isinstance(out, Suppressed) and out.rule.startswith("xid.") and self._jobs:
                shared += self._of_the_job(node.facts, out)
        return outputs + shared

    def _of_the_job(self, facts: WatchedNode, out: Suppressed) -> list[Output]:
        """The same on several nodes of a job is one event; told with the node that makes it plain."""
        kind = f"{out.kind} {out.rule}"
        before = self._fate.sharers(out.t_unix_s, facts, kind)[1]
        self._fate.add(out.t_unix_s, facts, kind)
        group, after = self._fate.sharers(out.t_unix_s, facts, kind)
        if len(after) != self._policy.thresholds.shared_fate.nodes or len(before) == len(after):
            return []
        why = f"the same on {', '.join(after)} of {group}: one event, and of none of them"
        return [msgspec.structs.replace(out, node="", device="node", why=[why], rule="shared-fate")]

    def _note_who_is_silent_together(self, now_unix_s: float) -> None:
        limits = self._policy.thresholds.shared_fate
        places = {name: self._places(self._nodes[name].facts) for name in self._silent}
        silent = Counter(place for its in places.values() for place in its)
        many = len(places) >= max(limits.nodes, limits.silent_share * len(self._nodes))
        for name, its in places.items():
            if many or any(silent[place] >= limits.nodes for place in its):
                self._together_unix_s[name] = now_unix_s

    def _places(self, facts: WatchedNode) -> set[str]:
        """What a node shares with others beside its jobs."""
        return {group for group in self._fate.groups(facts) if not group.startswith("job ")}

    def _comes_back(self, now_unix_s: float, name: str) -> str:
        """Why a node that fell silent with others, of whom most are back, is given time to follow them."""
        together_unix_s = self._together_unix_s.get(name, float("-inf"))
        ago_s = now_unix_s - together_unix_s
        if (
            self._nodes[name].heard_unix_s > together_unix_s
            or ago_s > self._policy.thresholds.shared_fate.return_s
        ):
            return ""
        return f"it fell silent together with others, who are back since {ago_s:.0f} s: it may follow"

    def _gate(
        self, t_unix_s: float, facts: WatchedNode, grounds: list[Finding], rule: str
    ) -> tuple[str, str] | None:
        """The fleet's rules about a decision: shared fate first, then the breaker."""
        if rule == "heartbeat.two-observers":
            if why := self._cut_off(facts):
                return "shared-fate.silent", why
            if why := self._comes_back(t_unix_s, facts.name):
                return "shared-fate.returns", why
        elif rule == "two-layers":
            for finding in grounds:
                if why := self._fate.shared(t_unix_s, facts, finding.kind, finding.device):
                    return "shared-fate", f"{finding.kind}: {why}"
        if facts.spare:
            return None
        return self._breaker.refuses(t_unix_s, facts, len(self._nodes))

    def _cut_off(self, facts: WatchedNode) -> str:
        """Why a silence is not the node's own: its rack, or much of the fleet, is silent too."""
        limits = self._policy.thresholds.shared_fate
        if len(self._silent) >= max(limits.nodes, limits.silent_share * len(self._nodes)):
            return f"{len(self._silent)} of {len(self._nodes)} nodes are silent: the network, or this reader"
        mine = self._places(facts)
        also = [name for name in sorted(self._silent) if mine & self._places(self._nodes[name].facts)]
        if len(also) >= limits.nodes:
            return f"{', '.join(also[:8])} share a rack, domain or cooling zone and are silent, too"
        return ""
