"""The text that a Prometheus server scrapes: OpenMetrics where it asks for that, else its own format."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gridagent.telemetry import metric_names
from gridagent.wire import NodeStatus

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
#: Values of more devices than a node has are somebody's mistake and are not kept.
SAMPLES_MAX = 10_000

#: Longer labels are somebody's mistake; a page has thousands of them.
LABEL_CHARS_MAX = 256

_NAME = re.compile(r"[a-z][a-z0-9_]{0,99}")
_GPU = re.compile(r"gpu:(\d{1,4})")
#: What a sample of a GPU tells of the GPU itself.
_ABOUT = ("pci", "uuid", "serial", "model")


def wants_openmetrics(accept: str) -> bool:
    """Whether a reader's Accept header asks for OpenMetrics at least as much as for plain text."""
    openmetrics = plain = 0.0
    for choice in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        weight = _weight(given.get("q", "1"))
        if kind == "application/openmetrics-text" and given.get("version", "1.0.0").strip('"') == "1.0.0":
            openmetrics = max(openmetrics, weight)
        elif kind in ("text/plain", "text/*", "*/*"):
            plain = max(plain, weight)
    return openmetrics > 0 and openmetrics >= plain


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0


class Samples:
    """The newest value of every metric of every device that passed by."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = {}  #: device -> metric -> value
        self._about: dict[str, dict[str, str]] = {}
        self._count = 0

    def take(self, v: Mapping[str, Any]) -> None:
        """Keeps the values of one `sample` record; a null takes the old value away."""
        device, values = v.get("device"), v.get("v")
        if not isinstance(device, str) or not isinstance(values, dict):
            return
        if (known := self._values.get(device)) is None:
            if self._count >= SAMPLES_MAX or not _NAME.fullmatch(device.partition(":")[0]):
                return
            known = self._values[device] = {}
        for metric, value in values.items():
            number = _finite(value)
            if number is None:
                self._count -= known.pop(metric, None) is not None
            elif metric in known:
                known[metric] = number
            elif self._count < SAMPLES_MAX and isinstance(metric, str) and _NAME.fullmatch(metric):
                known[metric] = number
                self._count += 1
        if not known:
            del self._values[device]
        if _GPU.fullmatch(device) and any(name in v for name in _ABOUT):
            about = self._about.setdefault(device, dict.fromkeys(_ABOUT, ""))
            about.update({name: text for name in _ABOUT if isinstance(text := v.get(name), str) and text})

    def about(self, device: str) -> dict[str, str]:
        """What was told of the GPU itself: its pci, uuid, serial and model, "" each where it was not."""
        return dict.fromkeys(_ABOUT, "") | self._about.get(device, {})

    def families(self, node: str) -> list["Family"]:
        """One family a metric, in the order of names; those with DCGM's names last."""
        neutral: dict[str, Family] = {}
        dcgm: dict[str, Family] = {}
        for device, values in sorted(self._values.items(), key=lambda item: _in_order(item[0])):
            kind = device.partition(":")[0]
            labels = self._as_dcgm(device, node)
            for metric, value in values.items():
                named = metric_names.neutral(kind, metric)
                if (family := neutral.get(named.name)) is None:
                    family = neutral[named.name] = Family.of(named)
                family.add(value * named.factor, device=device)
                if labels and (named_there := metric_names.dcgm(metric)):
                    dcgm.setdefault(named_there.name, Family.of(named_there)).add(value, **labels)
        return [found[name] for found in (neutral, dcgm) for name in sorted(found)]

    def gpus(self) -> "Family":
        """Which GPU stands behind a device's name."""
        info = Family("gridagent_gpu_info", "gauge", "Always 1; the labels say which GPU it is.")
        for device, about in sorted(self._about.items(), key=lambda item: _in_order(item[0])):
            info.add(1.0, device=device, **about)
        return info

    def _as_dcgm(self, device: str, node: str) -> dict[str, str]:
        """The labels of DCGM's exporter, always all of them; none for what is no GPU."""
        match = _GPU.fullmatch(device)
        if match is None:
            return {}
        about = self._about.get(device, {})
        domain, _, rest = about.get("pci", "").upper().partition(":")
        return {
            "gpu": match[1],
            "UUID": about.get("uuid", ""),
            "pci_bus_id": f"{domain:0>8}:{rest}" if rest else "",
            "device": f"nvidia{match[1]}",
            "modelName": about.get("model", ""),
            "Hostname": node,
        }


def _finite(value: object) -> float | None:
    """A number; None for what is none, or none that can be told."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _in_order(device: str) -> tuple[str, int, str]:
    """gpu:9 stands before gpu:10."""
    match = _GPU.fullmatch(device)
    return ("gpu", int(match[1]), "") if match else (device.partition(":")[0], -1, device)


class Family:
    """One metric: name, type ("gauge", "counter" or "unknown"), help, unit, and values with their labels."""

    def __init__(self, name: str, kind: str, text: str, unit: str = "") -> None:
        self.name, self.kind, self.text, self.unit = name, kind, text, unit
        self.points: dict[str, float] = {}  #: labels as text -> value: no series may come twice

    @classmethod
    def of(cls, named: metric_names.Named) -> "Family":
        """A family for this name, without values yet."""
        return cls(named.name, named.kind, named.text, named.unit)

    @property
    def title(self) -> str:
        """The family's name in OpenMetrics: a counter's is without `_total`."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name

    def add(self, value: float, **labels: str) -> None:
        """Sets one value."""
        self.points[_labels(labels)] = value

    def lines(self, *, openmetrics: bool) -> list[str]:
        """The family as text. Plain text has no units, and calls "untyped" what is of no known type."""
        title = self.title if openmetrics else self.name
        kind = self.kind if openmetrics or self.kind != "unknown" else "untyped"
        head = [f"# HELP {title} {_escaped(self.text)}", f"# TYPE {title} {kind}"]
        if openmetrics and self.unit:
            head.append(f"# UNIT {title} {self.unit}")
        return head + [f"{self.name}{labels} {_number(value)}" for labels, value in self.points.items()]


def render(status: NodeStatus, samples: Samples, *, openmetrics: bool) -> str:
    """The whole page for this node."""
    families = [*_of_node(status), *_of_ranks(status), samples.gpus(), *samples.families(status.node)]
    lines = [line for family in _distinct(families) for line in family.lines(openmetrics=openmetrics)]
    return "\n".join([*lines, "# EOF"] if openmetrics else lines) + "\n"


def _distinct(families: Iterable[Family]) -> Iterator[Family]:
    """Families that have values. Where two would have one name, as a sample may wish, the first counts."""
    taken: set[str] = set()
    for family in families:
        names = {family.name, family.title}
        if family.points and not names & taken:
            taken |= names
            yield family


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
    pace = Family(
        "gridagent_rank_step_duration_seconds", "gauge", "Median time of the last steps.", "seconds"
    )
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
    """A label's value or a help as both formats want it; what is no text stays visible as "?"."""
    value = value[:LABEL_CHARS_MAX].encode(errors="replace").decode()
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
