"""Port counters and states as tools print them: perfquery, ibstat, rdma link, ethtool -S, grep of sysfs."""

import re
from collections.abc import Iterator

from gridagent.signals.values import number
from gridctl.detect.diagnose.texts import all_lines, holds, lines_with
from gridctl.model.diagnosis import Material

Place = tuple[str, str, str]  #: host, device, port
Reading = tuple[Place, dict[str, float], bool | None]

_PERFQUERY = re.compile(r"\s*#? ?Port (?:extended )?counters: (?P<lid>Lid \d{1,6}) port (?P<port>\d{1,3})")
_DOTTED = re.compile(
    r"\s*(?P<name>[A-Za-z][A-Za-z0-9]{2,60}) ?:\.{2,60}(?P<value>(?:0x)?[0-9a-fA-F]{1,20})\s*"
)
_CA = re.compile(r"\s*CA '(?P<device>[\w.-]{1,64})'\s*")
_CA_PORT = re.compile(r"\s*Port (?P<port>\d{1,3}):\s*")
_CA_STATE = re.compile(r"\s*State: (?P<state>\w{2,20})\s*")
_IBSTATUS = re.compile(r"\s*Infiniband device '(?P<device>[\w.-]{1,64})' port (?P<port>\d{1,3}) status:\s*")
_IBSTATUS_STATE = re.compile(r"\s*state:\s+\d: (?P<state>\w{2,20})\s*")
_RDMA_LINK = re.compile(
    r"\s*(?:\d+/\d+: )?link (?P<device>[\w.-]{1,64})/(?P<port>\d{1,3}) state (?P<state>\w{2,20})\b"
)
_ETHTOOL = re.compile(r"\s*NIC statistics(?: for (?P<device>[\w.-]{1,64}))?:\s*")
_INDENTED = re.compile(r"\s+(?P<name>[a-z][\w]{2,60}): (?P<value>\d{1,20})\s*")
_SYSFS = re.compile(
    r"(?:(?P<host>[\w.-]{1,100}): ?)?/?sys/class/"
    r"(?:infiniband/(?P<device>[\w.-]{1,64})/ports/(?P<port>\d{1,3})"
    r"|net/(?P<netdev>[\w.-]{1,64}))/(?:\w{1,20}/)?(?P<name>\w{1,60})[:= ] ?(?P<value>[^\n]{1,40})"
)
_QUERY_ERRORS = re.compile(r"\s*GUID (?P<guid>0x[0-9a-f]{4,16}) port (?P<port>\d{1,3}|ALL):\s*(?P<rest>\[.*)")
_BRACKET = re.compile(r"\[(?P<name>[A-Za-z]\w{2,60}) == (?P<value>\d{1,20})\b")
_METRIC = re.compile(
    r"(?:node_)?(?:infiniband|ib|rdma|hw)_(?P<name>\w{3,80})\{(?P<labels>[^{}]{1,500})\} "
    r"(?P<value>[\d.e+]{1,24})\b"
)
_LABEL = re.compile(r'(\w{1,30})="([^"]{0,100})"')
_WORDS = (
    "ounters: Lid",
    "CA '",
    "Infiniband device",
    "link ",
    "NIC statistics",
    "sys/class/",
    "GUID ",
    "_infiniband_",
)
_NAMES_MAX = 256
_PLACES_MAX = 100_000
_UP = {"active": True, "armed": True, "up": True, "down": False}


def read_text(material: Material) -> Iterator[Reading]:
    """The readings of ports in a text; a section that begins anew is another reading."""
    if holds(material, *_WORDS):
        yield from _sections(material)
        yield from _lines(material)


def _sections(material: Material) -> Iterator[Reading]:
    """Tools that print a heading for each port, in their order."""
    place: Place | None = None
    device = ""
    counters: dict[str, float] = {}
    up: bool | None = None
    for line in all_lines(material):
        if place is None and not device and not any(word in line for word in _WORDS):
            continue
        begun = _begins(line, device)
        if begun is not None:
            if place is not None and (counters or up is not None):
                yield place, counters, up
            place, device, up = begun
            counters = {}
        elif place is not None and (counter := _DOTTED.fullmatch(line) or _INDENTED.fullmatch(line)):
            if (value := _number(counter["value"])) is not None and len(counters) < _NAMES_MAX:
                counters[counter["name"]] = value
        elif place is not None and (state := _CA_STATE.fullmatch(line) or _IBSTATUS_STATE.fullmatch(line)):
            up = _UP.get(state["state"].lower(), up)
    if place is not None and (counters or up is not None):
        yield place, counters, up


def _lines(material: Material) -> Iterator[Reading]:
    """Tools that print everything of a counter, or of a port, on one line."""
    found: dict[Place, tuple[dict[str, float], list[bool]]] = {}
    for line in lines_with(material, "sys/class/", "GUID ", "{"):
        if match := _SYSFS.match(line):
            _sysfs(found, match)
        elif match := _METRIC.match(line):
            _metric(found, match)
        elif match := _QUERY_ERRORS.match(line):
            counters = {m["name"]: float(m["value"]) for m in _BRACKET.finditer(match["rest"])}
            yield ("", f"GUID {match['guid']}", match["port"]), counters, None
    for place, (values, states) in found.items():
        yield place, values, states[0] if states else None


def _begins(line: str, device: str) -> tuple[Place | None, str, bool | None] | None:
    """A heading: the port that begins, the device that later headings belong to, its state."""
    if match := _PERFQUERY.match(line):
        return ("", match["lid"], match["port"]), "", None
    if match := _CA.fullmatch(line):
        return None, match["device"], None
    if (match := _CA_PORT.fullmatch(line)) and device:
        return ("", device, match["port"]), device, None
    if match := _IBSTATUS.fullmatch(line):
        return ("", match["device"], match["port"]), "", None
    if match := _RDMA_LINK.match(line):
        return ("", match["device"], match["port"]), "", _UP.get(match["state"].lower())
    if match := _ETHTOOL.fullmatch(line):
        return ("", match["device"] or "", ""), "", None
    return None


def _sysfs(found: dict[Place, tuple[dict[str, float], list[bool]]], match: re.Match[str]) -> None:
    place = (match["host"] or "", match["device"] or match["netdev"], match["port"] or "")
    if place not in found and len(found) >= _PLACES_MAX:
        return
    values, states = found.setdefault(place, ({}, []))
    text = match["value"].strip()
    if match["name"] in ("state", "operstate"):
        state = _UP.get(text.rpartition(" ")[2].lower())
        if state is not None and not states:
            states.append(state)
    elif (value := _number(text)) is not None and len(values) < _NAMES_MAX:
        values[match["name"]] = value


def _metric(found: dict[Place, tuple[dict[str, float], list[bool]]], match: re.Match[str]) -> None:
    """A line of an exporter: node_infiniband_link_downed_total{device="mlx5_0",port="1"} 4."""
    labels = dict(_LABEL.findall(match["labels"]))
    host = labels.get("node") or labels.get("host") or labels.get("instance", "")
    place = (
        host,
        labels.get("device") or labels.get("hca") or labels.get("guid", ""),
        labels.get("port", ""),
    )
    if place not in found and len(found) >= _PLACES_MAX:
        return
    values, _ = found.setdefault(place, ({}, []))
    if (value := number(match["value"])) is not None and len(values) < _NAMES_MAX:
        values[match["name"].removesuffix("_total")] = value


def _number(text: str) -> float | None:
    if text.lower().startswith("0x"):
        try:
            return float(int(text, 16))
        except ValueError:
            return None
    return number(text)
