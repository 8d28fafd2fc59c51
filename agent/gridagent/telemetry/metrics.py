"""The text that a Prometheus server scrapes: OpenMetrics where it asks for that, else its own format."""

import math
import re
from collections.abc import Mapping
from typing import Any

from gridagent.wire import NodeStatus

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
#: Values of more devices than a node has are somebody's mistake and are not kept.
SAMPLES_MAX = 10_000

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Samples:
    """The newest value of every metric of every device that passed by."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], float] = {}

    def take(self, v: Mapping[str, Any]) -> None:
        """Keeps the values of one `sample` record; a null takes the old value away."""
        device, values = v.get("device"), v.get("v")
        if not isinstance(device, str) or not isinstance(values, dict):
            return
        kind = device.partition(":")[0]
        for name, value in values.items():
            key = (f"gridagent_{kind}_{name}", device)
            if isinstance(value, int | float) and _NAME.fullmatch(key[0]) and len(self._values) < SAMPLES_MAX:
                self._values[key] = float(value)
            else:
                self._values.pop(key, None)

    def families(self) -> list["Family"]:
        """One family a metric, in the order of names."""
        found: dict[str, Family] = {}
        for (name, device), value in sorted(self._values.items()):
            kind = "counter" if name.endswith("_total") else "gauge"
            family = found.setdefault(name, Family(name, kind, "As the node's sources reported it last."))
            family.add(value, device=device)
        return list(found.values())


class Family:
    """One metric: name, type ("gauge" or "counter"), help, and values with their labels."""

    def __init__(self, name: str, kind: str, text: str) -> None:
        self.name, self.kind, self.text = name, kind, text
        self.points: dict[str, float] = {}  #: labels as text -> value: no series may come twice

    def add(self, value: float, **labels: str) -> None:
        """Sets one value."""
        self.points[_labels(labels)] = value

    def lines(self, *, openmetrics: bool) -> list[str]:
        """The family as text. OpenMetrics names a counter's family without `_total`."""
        title = self.name.removesuffix("_total") if openmetrics and self.kind == "counter" else self.name
        head = [f"# HELP {title} {self.text}", f"# TYPE {title} {self.kind}"]
        return head + [f"{self.name}{labels} {_number(value)}" for labels, value in self.points.items()]


def render(status: NodeStatus, samples: Samples, *, openmetrics: bool) -> str:
    """The whole page for this node."""
    families = [*_of_node(status), *_of_ranks(status), *samples.families()]
    lines = [line for family in families if family.points for line in family.lines(openmetrics=openmetrics)]
    return "\n".join([*lines, "# EOF"] if openmetrics else lines) + "\n"


def _of_node(status: NodeStatus) -> list[Family]:
    info = Family("gridagent_info", "gauge", "Always 1; the labels say which agent this is.")
    info.add(1.0, node=status.node, version=status.version, boot=status.boot_id)
    cordoned = Family("gridagent_cordoned", "gauge", "1 while the node is cordoned.")
    cordoned.add(float(status.cordoned))
    frozen = Family("gridagent_frozen_scopes", "gauge", "Scopes in which operations are frozen.")
    frozen.add(float(len(status.frozen)))
    seq = Family("gridagent_stream_records_total", "counter", "Records that this node has told so far.")
    seq.add(float(status.stream_seq))
    spares = Family("gridagent_spares", "gauge", "Spare processes by state.")
    states = [spare.state for spare in status.spares]
    for state in sorted({"parked", *states}):
        spares.add(float(states.count(state)), state=state)
    return [info, cordoned, frozen, seq, spares]


def _of_ranks(status: NodeStatus) -> list[Family]:
    step = Family("gridagent_rank_step", "gauge", "The newest training step that the rank has finished.")
    epoch = Family("gridagent_rank_epoch", "gauge", "The job's membership in which the rank trains.")
    loss = Family("gridagent_rank_loss", "gauge", "Loss of the newest step that reported one.")
    pace = Family("gridagent_rank_step_duration_seconds", "gauge", "Median time of the last steps.")
    up = Family("gridagent_rank_connected", "gauge", "1 while the rank's process is connected to the agent.")
    for rank in sorted(status.ranks, key=lambda rank: rank.connected):  # the live one has the last word
        labels = {"job": rank.job, "rank": str(rank.rank)}
        step.add(float(rank.step), **labels)
        epoch.add(float(rank.epoch), **labels)
        pace.add(rank.step_s_median, **labels)
        up.add(float(rank.connected), **labels)
        if rank.loss is not None:
            loss.add(rank.loss, **labels)
    return [step, epoch, loss, pace, up]


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else f"{value:+}".title()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
