"""Errors of many nodes: what they have in common is looked at before any of them is acted on.

Same second and one NVLink domain or rack: its switch. Same minute, many kinds of errors, several racks:
the site. Same second and one job over many domains: the job. The same fault address under one driver
version: the driver. Errors that a node has because another one failed come second and count for nothing.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import msgspec

from gridagent.signals.bursts import Bursts
from gridagent.signals.nvidia import KernelParser, Xid
from gridctl.detect.diagnose.reading import Row, rows_of
from gridctl.detect.diagnose.ruling import limits, rule_says
from gridctl.detect.policy import builtin, xid_row
from gridctl.model.diagnosis import Diagnosis, Material

#: Kind of an error, by what its text says; the first that fits.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (
            "consequence",
            r"\bnccl|remote (?:process|peer)|\bexited|aborted|sigabrt|sigterm|watchdog|teardown|collective"
            r"|connection (?:closed|reset)|broken pipe|status ?= ?5\b",
        ),
        ("power", r"power|psu|\bups\b|voltage|brown|breaker|\bpdu\b"),
        ("heat", r"therm|temperature|overheat|cooling|inlet|\bfan\b|coolant|\bcdu\b|leak"),
        ("storage", r"nvme|storage|filesystem|lustre|\bnfs\b|gpfs|weka|i/o error|mount"),
        (
            "node",
            r"unreachable|heartbeat|node (?:down|lost)|not responding|\bno answer\b|rebooted|\boffline\b",
        ),
        (
            "network",
            r"link (?:down|flap)|port (?:down|error)|\bnic\b|carrier|infiniband|\bib\b|mlx5|roce|status=?12",
        ),
        ("gpu", r"."),
    )
)
#: Xids of an application, by which no hardware is judged.
_XID = re.compile(r"\W{0,3}xid\W{1,3}(\d{1,4})\b", re.IGNORECASE)
_APP_XIDS = {13, 31, 43, 45, 68, 69}
_ROOTS = "error fault failure exception cause symptom status xid line message event reason code what detail"
_EVENTS_MAX = 65_536
_BAD = re.compile(
    r"err|fail|fault|lost|dead|down|exit|abort|crash|contained|xid|timeout|timed out", re.IGNORECASE
)
_PLACED_FIELDS = ("status", "event", "reason", "code", "what", "detail")
_ERROR_FIELDS = (
    *("error", "err", "error_text", "status_text", "fault", "failure", "exception", "cause", "symptom"),
    *("cuda_error", "error_code", "cuda_status"),
)
_DOMAIN_FIELDS = (
    "nvl_domain",
    "nvlink_domain",
    "domain",
    "nvlinkdomain",
    "fabric_domain",
    "clique",
    "nvl",
    "cluster_uuid",
)
_RACK_FIELDS = ("rack", "rack_id", "cabinet", "row", "zone", "tor", "leaf", "switch")


class Error(msgspec.Struct, frozen=True):
    """One node's error."""

    t_s: float
    host: str
    text: str
    kind: str
    xid: int | None
    domain: str
    rack: str
    job: str
    driver: str
    address: str


def fleet(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: error telemetry of several nodes."""
    errors, lines = read(materials)
    hosts = {error.host for error in errors}
    if len(hosts) < 2:
        return
    for judge in (_site, _driver, _fabric, _app, _job):
        if (diagnosis := judge(errors, lines)) is not None:
            yield diagnosis
            return
    seen = [f"{error.host}: {error.text}" for error in errors[:3]]
    events = [{"node": error.host, "error": error.text} for error in errors]
    yield rule_says(
        "fleet.unrelated",
        [f"errors of {len(hosts)} nodes with nothing in common", *seen],
        events=events,
        event_count=len(errors),
        raw_lines=lines,
    )


def read(materials: Sequence[Material]) -> tuple[list[Error], int]:
    """The first error of each burst by host and text, in the order of time; and how many rows there were."""
    found: list[Error] = []
    bursts = Bursts(gap_s=limits().fleet["burst_gap_s"])
    lines = 0
    for material in materials:
        for row in rows_of(material, _ROOTS):
            error = _error(row)
            if error is None:
                continue
            lines += 1
            if bursts.add((error.host, error.text[:160]), error.t_s) and len(found) < _EVENTS_MAX:
                found.append(error)
    return sorted(found, key=lambda error: error.t_s), lines


def _error(row: Row) -> Error | None:
    host, t_s = row.text("host"), row.time_s()
    if not host or t_s is None:
        return None
    text, xid = row.text(*_ERROR_FIELDS), row.number("xid")
    placed = row.get(*_DOMAIN_FIELDS, *_RACK_FIELDS) is not None
    if not text and (line := row.text("line") or (row.text(*_PLACED_FIELDS) if placed else "")):
        events = [event for event in KernelParser().feed(line) if isinstance(event, Xid)]
        bad = row.text("level", "severity").lower() in ("error", "critical", "fatal", "err")
        if not events and not bad and not (placed and _BAD.search(line)):
            return None
        text, xid = line, events[0].xid if events else None
    if not text and xid is None:
        return None
    if xid is None and (told := _XID.match(text)):
        xid = float(told[1])
    number = int(xid) if xid is not None and 0 < xid < 100_000 else None
    kind = "gpu" if number else next(kind for kind, pattern in _KINDS if pattern.search(text or "-"))
    return Error(
        t_s=t_s,
        host=host,
        text=text or f"Xid {number}",
        kind="app" if number in _APP_XIDS else kind,
        xid=number,
        domain=row.text(*_DOMAIN_FIELDS),
        rack=row.text(*_RACK_FIELDS),
        job=row.text("job"),
        driver=row.text("driver", "driver_version", "nvidia_driver"),
        address=row.text("address", "fault_address", "addr", "pc"),
    )


def _place(error: Error) -> str:
    return error.domain or error.rack


def _windows(errors: list[Error], window_s: float) -> Iterator[list[Error]]:
    """Errors within a window; windows overlap, so that one of them holds nearly all of a burst."""
    end, next_s = 0, float("-inf")
    for begin, error in enumerate(errors):
        if error.t_s < next_s:
            continue
        next_s = error.t_s + window_s / 4  # each error is in five windows at most
        while end < len(errors) and errors[end].t_s - error.t_s <= window_s:
            end += 1
        yield errors[begin:end]


def _by(errors: list[Error], key: Callable[[Error], str]) -> dict[str, set[str]]:
    hosts: dict[str, set[str]] = {}
    for error in errors:
        hosts.setdefault(key(error), set()).add(error.host)
    return hosts


def _site(errors: list[Error], lines: int) -> Diagnosis | None:
    """Many kinds of errors in several racks within a minute; or power, or heat, of several racks."""
    limit = limits().fleet
    own = [error for error in errors if error.kind not in ("consequence", "app")]
    best: list[Error] = []
    for group in _windows(own, limit["site_window_s"]):
        kinds, racks = _by(group, lambda error: error.kind), set(_by(group, lambda error: error.rack)) - {""}
        hosts = {error.host for error in group}
        supply = kinds.get("power", set()) | kinds.get("heat", set())
        many = len(kinds) >= limit["site_kinds_min"] or 2 * len(supply) > len(hosts)
        if many and len(hosts) >= limit["site_hosts_min"] and len(racks) != 1 and len(group) > len(best):
            best = group
    if not best:
        return None
    by_kind, by_rack = _by(best, lambda error: error.kind), _by(best, lambda error: error.rack)
    hosts = {error.host for error in best}
    what = f"{len(hosts)} nodes of {len(by_rack)} racks within {best[-1].t_s - best[0].t_s:.0f} s: "
    what += ", ".join(f"{kind} {len(of)}" for kind, of in sorted(by_kind.items()))
    events = [{"node": error.host, "error": error.text, "rack": error.rack} for error in best]
    return rule_says("fleet.site", [what, best[0].text], events=events, raw_lines=lines)


def _driver(errors: list[Error], lines: int) -> Diagnosis | None:
    """The same Xid at the same address under the same driver on several nodes of several places."""
    same: dict[tuple[str, str, int], list[Error]] = {}
    for error in errors:
        if error.driver and error.address and error.xid is not None:
            same.setdefault((error.driver, error.address, error.xid), []).append(error)
    others = {error.driver for error in errors if error.driver}
    for (driver, address, xid), group in same.items():
        hosts = {error.host for error in group}
        if len(hosts) >= limits().fleet["driver_hosts_min"]:
            what = f"Xid {xid} at {address} on {len(hosts)} nodes, all with driver {driver}"
            what += f" of {len(others)} versions"
            events = [{"node": host, "driver": driver} for host in sorted(hosts)]
            found = rule_says("fleet.driver", [what], events=events, raw_lines=lines)
            return msgspec.structs.replace(found, kind=xid_row(builtin(), xid).kind, xid=xid)
    return None


def _fabric(errors: list[Error], lines: int) -> Diagnosis | None:
    """The nodes of one domain fail in the same second, and nobody else does."""
    limit = limits().fleet
    own = [error for error in errors if error.kind not in ("consequence", "app")]
    own = own or [
        error for error in errors if error.kind != "app"
    ]  # nothing but consequences: the first of them
    best: tuple[int, str, list[Error]] = (0, "", [])
    for group in _windows(own, limit["domain_window_s"]):
        places = {name: hosts for name, hosts in _by(group, _place).items() if name}
        place = max(sorted(places), key=lambda name: len(places[name]), default="")
        count = len(places.get(place, ()))
        share = count / len({error.host for error in group})
        if count >= max(limit["domain_hosts_min"], best[0] + 1) and share >= limit["domain_share_min"]:
            best = (count, place, group)
    _, place, group = best
    if not group:
        return None
    primary = {error.host for error in group if _place(error) == place}
    begin_s = group[0].t_s
    later = [e for e in errors if 0 <= e.t_s - begin_s <= limit["consequence_s"] and e.host not in primary]
    return _domain(place, group, primary, later, lines)


def _domain(place: str, group: list[Error], primary: set[str], later: list[Error], lines: int) -> Diagnosis:
    secondary = {error.host for error in later}
    span_s = group[-1].t_s - group[0].t_s
    what = f"{len(primary)} nodes of {place} failed within {span_s:.2f} s, {len(secondary)} others followed"
    events: list[dict[str, object]] = [
        {"node": host, "domain": place, "role": "primary"} for host in sorted(primary)
    ]
    events += [{"node": host, "role": "secondary"} for host in sorted(secondary)]
    return rule_says("fleet.shared-fabric", [what, group[0].text], events=events, raw_lines=lines)


def _app(errors: list[Error], lines: int) -> Diagnosis | None:
    """Nothing but Xids of applications and consequences: a job has ended."""
    xids = sorted({error.xid for error in errors if error.kind == "app" and error.xid is not None})
    if not xids or any(error.kind not in ("app", "consequence") for error in errors):
        return None
    hosts = {error.host for error in errors}
    what = f"{len(hosts)} nodes printed only Xids of applications: {', '.join(map(str, xids))}"
    found = rule_says("fleet.app-teardown", [what], raw_lines=lines)
    kind = xid_row(builtin(), xids[0]).kind if len(xids) == 1 else found.kind
    return msgspec.structs.replace(found, kind=kind, xid=xids[0] if len(xids) == 1 else None)


def _job(errors: list[Error], lines: int) -> Diagnosis | None:
    """One job's nodes fail in the same second over several places: the job, not the nodes."""
    limit = limits().fleet
    for group in _windows(errors, limit["domain_window_s"]):
        jobs = _by(group, lambda error: error.job)
        jobs.pop("", None)
        hosts = {error.host for error in group}
        if len(jobs) == 1 and len(hosts) >= limit["domain_hosts_min"] and hosts == next(iter(jobs.values())):
            what = f"{len(hosts)} nodes of job {next(iter(jobs))} failed together"
            events = [{"node": host} for host in sorted(hosts)]
            return rule_says("fleet.job", [what, group[0].text], events=events, raw_lines=lines)
    return None
