"""InfiniBand and Ethernet ports: counters over time, single readings, and states.

A counter since boot says nothing about today: what counts is its increase in time, and a decrease is a
reset. A port that drops for seconds looks well at every poll, so only its counter tells. Waiting for
credits (xmit wait) is congestion and no fault. A port that was never up is not in use.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from gridagent.signals.values import number
from gridctl.detect.diagnose.nic_text import read_text
from gridctl.detect.diagnose.reading import Row, key_of, rows_in_order
from gridctl.detect.diagnose.ruling import limits, rule_says
from gridctl.model.diagnosis import Diagnosis, Material

#: Meaning of a counter -> its names without case and punctuation: sysfs, perfquery, ethtool, exporters.
COUNTERS: dict[str, str] = {
    "downed": "linkdowned linkdownedcounter linkdown linkdowneventsphy linkdowncount linkdowns "
    "carrierdowncount",
    "carrier": "carrierchanges",
    "symbol": "symbolerror symbolerrorcounter symbolerrors symbolerr rxsymbolerrphy",
    "recovery": "linkerrorrecovery linkerrorrecoverycounter",
    "receive": "portrcverrors rcverrors rcverr portrcverr rxerrors portreceiveerrors",
    "integrity": "locallinkintegrityerrors localintegrity locallinkintegrity",
    "overrun": "excessivebufferoverrunerrors excessivebufferoverrun",
    "discards": "portxmitdiscards xmitdiscards txdiscards txdiscardsphy porttransmitdiscarded",
    "wait": "portxmitwait xmitwait xmitwaits porttransmitwait",
    "pause": "txpause rxpause txpausectrlphy rxpausectrlphy ecnmarked cnp rxprio3pause",
    "cqe": "reqcqeerror respcqeerror reqcqeerrors respcqeerrors cqeerror cqeerrors",
    "flushed": "reqcqeflusherror respcqeflusherror",
}
_MEANING = {name: meaning for meaning, names in COUNTERS.items() for name in names.split()}
_STATES = ("state", "port_state", "link_state", "operstate", "oper_state", "status", "link_status")
_UP = {
    "active",
    "up",
    "linkup",
    "armed",
    "init",
    "initialize",
    "1",
    "4active",
    "5linkup",
    "portactive",
    "true",
}
_DOWN = {
    "down",
    "linkdown",
    "disabled",
    "polling",
    "sleep",
    "0",
    "1down",
    "3disabled",
    "2polling",
    "lowerlayerdown",
}
_DEVICE = (
    "hca",
    "ib_device",
    "ibdev",
    "rdma_device",
    "nic",
    "adapter",
    "ca",
    "interface",
    "iface",
    "netdev",
    "dev",
)
_CABLE = ("integrity", "overrun", "symbol")  #: what a bad cable or transceiver raises
_ROOTS = "link carrier symbol rcv integrity overrun xmit discards pause ecn cnp cqe state status oper"
_KEYS_MAX = 100_000
_DROPS_MAX = 1024
_SATURATED = {0xFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF}


class Port(msgspec.Struct):
    """One port's history, in bounded memory."""

    host: str
    device: str
    port: str
    last: dict[str, float] = {}  #: counter -> value
    risen: dict[str, float] = {}  #: meaning -> increase so far
    saturated: dict[str, float] = {}  #: counters that stand at the end of their range
    drops: deque[tuple[float | None, float]] = msgspec.field(default_factory=lambda: deque(maxlen=_DROPS_MAX))
    changes: deque[tuple[float | None, float]] = msgspec.field(
        default_factory=lambda: deque(maxlen=_DROPS_MAX)
    )
    first_s: float | None = None
    last_s: float | None = None
    up: bool | None = None
    was_up: bool = False
    down_since_s: float | None = None
    readings: int = 0
    resets: int = 0

    def name(self) -> str:
        """Where it is, for people."""
        place = f"{self.host} {self.device}".strip() or "a port"
        return f"{place} port {self.port}" if self.port else place

    def feed(self, t_s: float | None, counters: dict[str, float], up: bool | None) -> None:
        """One reading; counters by the name under which they came. One that comes late is left out."""
        if t_s is not None and self.last_s is not None and t_s < self.last_s:
            return
        self.readings += 1
        if t_s is not None:
            self.first_s = t_s if self.first_s is None else self.first_s
            self.last_s = t_s
        for name, value in counters.items():
            if value in _SATURATED and value > 0xFF:
                self.saturated[name] = value
            before = self.last.get(name)
            self.last[name] = value
            if before is None or value == before:
                continue
            self.resets += value < before
            rise = value if value < before else value - before
            meaning = _MEANING[key_of(name.removesuffix("_total"))]
            self.risen[meaning] = self.risen.get(meaning, 0.0) + rise
            if meaning == "downed" and rise > 0:
                self.drops.append((t_s, rise))
            elif meaning == "carrier" and rise > 0:
                self.changes.append((t_s, (rise + 1) // 2))  # down and up again are two changes
        self._state(t_s, up)

    def _state(self, t_s: float | None, up: bool | None) -> None:
        if up is None:
            return
        if self.up and not up:
            self.changes.append((t_s, 1.0))
            self.down_since_s = t_s
        self.up = up
        self.was_up = self.was_up or up

    def flaps(self) -> list[tuple[float | None, float]]:
        """Times and sizes of drops: by the counter, or where there is none by the states."""
        return list(self.drops if any(_meaning(name) == "downed" for name in self.last) else self.changes)


def nic(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: port counters and states as telemetry or as text."""
    ports: dict[tuple[str, str, str], Port] = {}
    for row in rows_in_order(materials, _ROOTS):
        _row(ports, row)
    for material in materials:
        for place, counters, up in read_text(material):
            _feed(ports, place, None, {n: v for n, v in counters.items() if _meaning(n)}, up)
    yield from _judged(ports)


def _meaning(name: str) -> str | None:
    return _MEANING.get(key_of(name.removesuffix("_total")))


def _row(ports: dict[tuple[str, str, str], Port], row: Row) -> None:
    counters = {name: value for name, raw in _named(row) if (value := number(raw)) is not None}
    device = row.text(*_DEVICE)
    told = row.text("device")
    if not device and (
        "/" in told or told.startswith(("nic:", "mlx", "ib", "eth", "rocep", "bnxt", "irdma"))
    ):
        device = told.removeprefix("nic:")
    if not device and row.get("gpu", "gpu_index", "gpu_id", "gpu_uuid") is not None:
        return  # a GPU's links have counters of the same names
    if not device and not row.text("host", "port", "port_num") and row.time_s() is None:
        return  # a number of nothing in particular
    up = _state_of(row.text(*_STATES)) if device else None
    if counters or (device and up is not None):
        device, _, port = device.partition("/")
        place = (row.text("host"), device, row.text("port", "port_num") or port)
        _feed(ports, place, row.time_s(), counters, up)


def _named(row: Row) -> Iterator[tuple[str, object]]:
    for key, value in row.values.items():
        name = key.removesuffix("total")
        if name in _MEANING:
            yield name, value


def _state_of(text: str) -> bool | None:
    key = key_of(text)
    return True if key in _UP else False if key in _DOWN else None


def _feed(
    ports: dict[tuple[str, str, str], Port],
    place: tuple[str, str, str],
    t_s: float | None,
    counters: dict[str, float],
    up: bool | None,
) -> None:
    port = ports.get(place)
    if port is None:
        if len(ports) >= _KEYS_MAX:
            return
        port = ports[place] = Port(*place)
    port.feed(t_s, counters, up)


def _judged(ports: dict[tuple[str, str, str], Port]) -> Iterator[Diagnosis]:
    quiet: list[Port] = []
    for port in ports.values():
        said = False
        for diagnosis in (_state_says(port, ports), _drops_say(port), _errors_say(port)):
            if diagnosis is not None:
                yield diagnosis
                said = True
        if not said:
            quiet.append(port)
    waiting = [port for port in ports.values() if _congested(port)]
    if waiting:
        names = sorted({name for port in waiting for name in port.saturated if _meaning(name) == "wait"})
        what = f"{', '.join(port.name() for port in waiting[:4])} waited for credits"
        more = [f"saturated: {', '.join(names)}"] if names else []
        events = [{"host": p.host, "hca": p.device, "port": p.port, "saturated": names} for p in waiting]
        yield rule_says("nic.congestion", [what, *more], events=events, event_count=0)
    single = [port for port in quiet if port.readings == 1 and _counted(port)]
    if single:
        yield rule_says("nic.one-reading", [_standing(single[0])], event_count=0)
    elif quiet and len(quiet) == len(ports) and not waiting:
        yield rule_says("nic.well", [f"{len(quiet)} ports, no counter of errors rises"], event_count=0)


def _congested(port: Port) -> bool:
    waits = [value for name, value in port.last.items() if _meaning(name) == "wait"]
    single = port.readings == 1 and any(waits)
    return single or port.risen.get("wait", 0) > 0 or port.risen.get("pause", 0) > 0


def _counted(port: Port) -> bool:
    worrying = {"downed", "symbol", "recovery", "receive", "integrity", "overrun", "discards", "cqe"}
    return any(value > 0 and _meaning(name) in worrying for name, value in port.last.items())


def _standing(port: Port) -> str:
    values = ", ".join(f"{name} {value:g}" for name, value in port.last.items() if value)
    return f"{port.name()}: {values} since boot, and no second reading to compare with"


def _state_says(port: Port, ports: dict[tuple[str, str, str], Port]) -> Diagnosis | None:
    if port.up is not False:
        return None
    event = {"host": port.host, "hca": port.device, "port": port.port}
    if port.was_up:
        since = "" if port.down_since_s is None else f" since {port.down_since_s:g} s"
        return rule_says("nic.port-down", [f"{port.name()} was up and is down{since}"], events=[event])
    siblings = [other for other in ports.values() if other.host == port.host and other is not port]
    if port.readings == 1 and len(siblings) >= 3 and all(other.up for other in siblings):
        what = f"{port.name()} is down while the {len(siblings)} other ports of the host are up"
        return rule_says("nic.port-down-alone", [what], events=[event])
    return rule_says("nic.port-unused", [f"{port.name()} was never up"], events=[event], event_count=0)


def _drops_say(port: Port) -> Diagnosis | None:
    flaps = port.flaps()
    count = int(sum(size for _, size in flaps))
    if not count:
        return None
    limit = limits().nic
    short = _most_within(flaps, limit["flaps_window_s"])
    day = _most_within(flaps, limit["flaps_day_s"])
    last_s = max((t_s for t_s, _ in flaps if t_s is not None), default=None)
    event = {"host": port.host, "hca": port.device, "port": port.port, "flaps": count, "resets": port.resets}
    if short > limit["flaps_in_window_max"] or day > limit["flaps_in_day_max"]:
        what = (
            f"{port.name()} went down {count} times, {short:g} of them within {limit['flaps_window_s']:g} s"
        )
        return rule_says("nic.flaps-often", [what], events=[event])
    over = last_s is not None and port.last_s is not None and port.last_s - last_s > limit["flap_sticky_s"]
    rule = "nic.flap-over" if over else "nic.flap"
    sticky_s = limit["flap_sticky_s"]
    what = f"{port.name()} went down {count} times and came back; it is remembered for {sticky_s:g} s"
    return rule_says(rule, [what], events=[{**event, "sticky_for_s": sticky_s}])


def _most_within(flaps: list[tuple[float | None, float]], window_s: float) -> float:
    """The most drops within a window; those without a time are rated by nothing."""
    timed = sorted((t_s, size) for t_s, size in flaps if t_s is not None)
    most, total, begin = 0.0, 0.0, 0
    for t_s, size in timed:
        total += size
        while t_s - timed[begin][0] > window_s:
            total -= timed[begin][1]
            begin += 1
        most = max(most, total)
    return most


def _errors_say(port: Port) -> Diagnosis | None:
    """Error counters by their increase in an hour, where the readings have times."""
    event = {"host": port.host, "hca": port.device, "port": port.port}
    if cqe := port.risen.get("cqe", 0.0):
        flushed = port.risen.get("flushed", 0.0)
        what = f"{port.name()}: {cqe:g} completions in error, {flushed:g} of them flushed"
        rule = "nic.cqe-flushed" if flushed >= cqe else "nic.cqe-errors"
        return rule_says(rule, [what], events=[{**event, "cqe_errors": cqe}])
    span_s = (port.last_s or 0.0) - (port.first_s or 0.0)
    if span_s <= 0:
        return None
    for meaning in (*_CABLE, "receive", "recovery", "discards"):
        rise = port.risen.get(meaning, 0.0)
        per_h = rise * 3600 / max(span_s, 60.0)
        if rise and per_h > limits().nic[f"{meaning}_per_h_max"]:
            what = f"{port.name()}: {meaning} errors rose by {rise:g} in {span_s:g} s ({per_h:.0f} an hour)"
            rule = "nic.errors-act" if meaning in _CABLE else "nic.errors-watch"
            return rule_says(rule, [what], events=[{**event, "counter": meaning, "rise": rise}])
    return None
