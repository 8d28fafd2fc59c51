"""What several devices or nodes have in common is the cause: cooling, a power feed, a switch, a driver.

Heat of many has its cause in the cooling, heat of one alone in the silicon. All of this only warns; what it
says of a node, another layer says already.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gridctl.detect.device import Cleared
from gridctl.detect.fate import rail
from gridctl.detect.policy import SharedCause, SharedFate
from gridctl.model.findings import SEVERITIES, Finding, WatchedNode

if TYPE_CHECKING:
    from gridctl.detect.node import NodeWatch

_HEAT, _BRAKE = "thermal_throttle", "hw_power_brake"
_LAYER = "cause"
#: kind -> what nodes share it by, in this order
_PLACES = {_HEAT: ("cooling_zone", "rack"), _BRAKE: ("rack", "cooling_zone")}
_KEPT_MAX = 4096
_WEIGHS = SEVERITIES.index("warning")

Told = tuple[str, Finding | Cleared]  #: the node it is about ("": a place), and what


class Causes:
    """Looks at the findings that all nodes have at present; `nodes` is the watchdog's own table."""

    def __init__(self, limits: SharedCause, fate: SharedFate, nodes: "Mapping[str, NodeWatch]") -> None:
        self._limits = limits
        self._window_s = fate.window_s
        self._nodes = nodes
        self._warm: dict[str, dict[str, None]] = {_HEAT: {}, _BRAKE: {}}  #: kind -> nodes that have it
        self._places: dict[
            tuple[str, str], set[str]
        ] = {}  #: (kind, place) that was told of -> its nodes then
        self._ports: deque[tuple[float, str, str, str]] = deque(maxlen=_KEPT_MAX)
        self._rails: dict[tuple[str, str], float] = {}
        self._drivers: dict[str, deque[tuple[float, str, str]]] = {}  #: kind -> time, node, driver
        self._blamed: dict[tuple[str, str], None] = {}

    def feed(self, found: Finding, facts: WatchedNode) -> Iterator[Finding]:
        """Takes a finding of a node as it is told; what it makes plain about others."""
        if found.kind in self._warm and found.layer != _LAYER:
            self._warm[found.kind][facts.name] = None
        elif port := rail(found.device):
            yield from self._rail(found, facts, port)
        elif found.layer == "kernel" and SEVERITIES.index(found.severity) >= _WEIGHS and facts.driver:
            yield from self._driver(found, facts)

    def tick(self, now_s: float) -> Iterator[Told]:
        """Lets time pass: who is hot, or brakes, with whom."""
        for kind, names in self._warm.items():
            devices = {name: self._having(name, kind) for name in sorted(names)}
            yield from self._shared_places(now_s, kind, {n: found for n, found in devices.items() if found})
            for name, found in devices.items():
                if name in self._nodes:
                    yield from self._of_node(now_s, kind, name, found)
                if not found:
                    del names[name]

    def _having(self, name: str, kind: str) -> list[Finding]:
        if name not in self._nodes:
            return []
        findings = self._nodes[name].findings
        return [
            found for (_, its_kind, layer), found in findings.items() if its_kind == kind and layer != _LAYER
        ]

    def _place(self, kind: str, name: str) -> str:
        facts = self._nodes[name].facts
        return next((f"{what} {place}" for what in _PLACES[kind] if (place := getattr(facts, what))), "")

    def _shared_places(self, now_s: float, kind: str, devices: dict[str, list[Finding]]) -> Iterator[Told]:
        places: dict[str, set[str]] = {}
        for name in devices:
            if place := self._place(kind, name):
                places.setdefault(place, set()).add(name)
        for place, names in sorted(places.items()):
            if len(names) >= self._limits.nodes and (kind, place) not in self._places:
                self._places[kind, place] = names
                several = f"{len(names)} nodes of {place} at once: {', '.join(sorted(names)[:16])}"
                yield "", _cause(now_s, "", kind, f"{several}: not the nodes themselves", "cause.place")
        for key in [key for key in self._places if key[0] == kind and key[1] not in places]:
            del self._places[key]

    def _of_node(self, now_s: float, kind: str, name: str, found: list[Finding]) -> Iterator[Told]:
        node = self._nodes[name]
        told = [
            f for (_, its_kind, layer), f in node.findings.items() if its_kind == kind and layer == _LAYER
        ]
        devices = sorted({one.device for one in found})
        many = len(devices) >= max(2, self._limits.gpu_share * node.facts.gpus)
        for one in told:
            if (one.device == "node" and not many) or (one.device != "node" and devices != [one.device]):
                yield name, Cleared(kind, one.device, _LAYER)
        if many and not any(one.device == "node" for one in told):
            several = f"{len(devices)} of {node.facts.gpus or 'its'} GPUs together"
            why = f"{several}: what they share, not their silicon"
            yield name, _cause(now_s, name, kind, why, "cause.node")
        alone = len(devices) == 1 and not told and self._alone(kind, name)
        if alone and now_s - found[0].t_unix_s >= self._limits.alone_s:
            alone_for = f"{devices[0]} alone for {self._limits.alone_s:.0f} s"
            why = f"{alone_for}: its neighbours have the same air and power"
            yield name, _cause(now_s, name, kind, why, "cause.device", devices[0])

    def _alone(self, kind: str, name: str) -> bool:
        place = self._place(kind, name)
        others = (other for other in self._warm[kind] if other != name and other in self._nodes)
        return not place or not any(self._place(kind, other) == place for other in others)

    def _rail(self, found: Finding, facts: WatchedNode, port: str) -> Iterator[Finding]:
        self._ports.append((found.t_unix_s, found.kind, port, facts.name))
        near = sorted(
            {
                name
                for at, kind, its_port, name in self._ports
                if (kind, its_port) == (found.kind, port) and abs(found.t_unix_s - at) <= self._window_s
            }
        )
        told_s = self._rails.get((found.kind, port), float("-inf"))
        if len(near) < self._limits.rail_nodes or abs(found.t_unix_s - told_s) <= self._window_s:
            return
        self._rails[found.kind, port] = found.t_unix_s
        if len(self._rails) > _KEPT_MAX:
            del self._rails[next(iter(self._rails))]
        nodes = f"{len(near)} nodes within {self._window_s:.0f} s ({', '.join(near[:16])})"
        why = f"port {port} of {nodes}: their switch"
        yield _shared(found, "manual_review", "fabric", why, "shared-fate.rail", f"nic:{port}")

    def _driver(self, found: Finding, facts: WatchedNode) -> Iterator[Finding]:
        seen = self._drivers.setdefault(found.kind, deque(maxlen=_KEPT_MAX))
        seen.append((found.t_unix_s, facts.name, facts.driver))
        while seen and found.t_unix_s - seen[0][0] > self._limits.driver_window_s:
            seen.popleft()
        having = {name: driver for _, name, driver in seen}
        if (found.kind, facts.driver) in self._blamed or len(having) < self._limits.nodes:
            return
        if set(having.values()) != {facts.driver}:
            return
        known = [node.facts.driver for node in self._nodes.values() if node.facts.driver]
        share = known.count(facts.driver) / len(known)
        if share ** len(having) > self._limits.driver_chance:
            return
        self._blamed[found.kind, facts.driver] = None
        if len(self._blamed) > _KEPT_MAX:
            del self._blamed[next(iter(self._blamed))]
        why = (
            f"{len(having)} nodes within a day, all with driver {facts.driver}, as {share:.0%} of the fleet"
            f" ({', '.join(sorted(having)[:16])})"
        )
        yield _shared(found, "rollback_driver", "driver", why, "shared-fate.driver", "node")


def _shared(found: Finding, action: str, fault: str, why: str, rule: str, device: str) -> Finding:
    return Finding(
        t_unix_s=found.t_unix_s,
        node="",
        device=device,
        kind=found.kind,
        severity="warning",
        action=action,
        why=[why],
        rule=rule,
        layer=_LAYER,
        fault=fault,
    )


def _cause(t_s: float, node: str, kind: str, why: str, rule: str, device: str = "node") -> Finding:
    """Heat or a power brake, by its cause."""
    own = device != "node"
    return Finding(
        t_unix_s=t_s,
        node=node,
        device=device,
        kind=kind,
        severity="warning",
        action="drain_and_diagnose" if own else "check_cooling" if kind == _HEAT else "check_power",
        when="after_job",
        why=[why],
        rule=rule,
        layer=_LAYER,
        fault="node" if own else "environment",
    )
