"""NCCL's own log: ports that fail, peers that do not answer.

Victims shout and culprits are silent: whoever reports an error is rarely the cause. A completion with
status 12 (retries exhausted) names the peer that did not answer, status 5 (flushed) only says that the
queue pair had failed before. So reports are edges between a reporter and a peer, and the end that most
others have in common is the suspect. A port error in the log of the reporter explains its reports.

A line counts only where NCCL's prefix "host:pid:tid [gpu]" stands at its beginning.
"""

import re
from collections.abc import Iterator, Sequence

import msgspec

from gridctl.detect.diagnose.reading import bare, log_lines
from gridctl.detect.diagnose.ruling import SHOWN_CHARS_MAX, limits, rule_says
from gridctl.model.diagnosis import Diagnosis, Material

_PREFIX = re.compile(
    r"(?P<host>[\w.-]{1,255}):\d{1,10}:\d{1,10}(?: ?\[[^\[\]]{0,60}\]){1,3} "
    r"(?:(?P<file>[\w./+-]{1,200}:\d{1,6}) )?NCCL (?:WARN|INFO|ERROR|TRACE) (?P<text>.*)"
)
_ASYNC = re.compile(
    r"NET/IB ?: ?(?P<hca>[\w.-]{1,64}):(?P<port>\d{1,3}) (?:unknown )?Got (?:[\w-]{1,12} ){0,4}"
    r"event ?: ?(?P<event>[^(\n]{1,80})"
)
_COMPLETION = re.compile(
    r"NET/IB ?: ?(?:[\w.:-]{1,70} )?Got completion (?:from peer (?P<peer>[^\s<]{1,100})(?:<\d{1,6}>)? )?"
    r"with (?:status|error)[ =](?:IBV_WC_[A-Z_]{1,40} ?\()?(?P<status>\d{1,4})\)?(?P<rest>.*)"
)
_VENDOR = re.compile(r"vendor[ _]err[ =](\d{1,6})")
_LOCAL = re.compile(r"local_?G[iI][dD] ::ffff:(\d{1,3}(?:\.\d{1,3}){3})\b")
_HCA = re.compile(r"\bhca (?:name )?([\w.-]{1,64})")
_SOCKET = re.compile(
    r"(?:NET/Socket ?: ?|Net ?: ?)?(?:socket\w{0,40} ?: |sock\w{0,40} ?: )?"
    r"(?:Connection closed by (?:remote )?peer (?P<closed>[^\s<]{1,100})(?:<\d{1,6}>)?"
    r"|(?:Call to \w{1,20}(?: from| to)?|[Cc]onnect to|Connect to) (?P<failed>[^\s<]{1,100})<\d{1,6}> "
    r"(?:failed|returned))"
)
#: One of these is in each line that any of the patterns fits; most lines of NCCL have none.
_WORDS = ("Got ", "Connection closed by ", "Call to ", "onnect to ")
#: ibverbs work completion states (rdma-core, enum ibv_wc_status).
_RETRY_EXCEEDED, _FLUSHED = 12, 5
_VENDOR_FLUSHED = 249
_FATAL_EVENT = "local catastrophic error"
_HOSTS_MAX = 65_536
_PORTS_MAX = 256


class _Port(msgspec.Struct):
    errors: int = 0
    lines: int = 0
    last: str = ""
    line: str = ""


class Reports(msgspec.Struct):
    """What the lines of a log told: counts and sets, nothing that grows with a storm."""

    ports: dict[tuple[str, str, str], _Port] = {}  #: by host, adapter, port
    silent: dict[tuple[str, str], str] = {}  #: (reporter, peer) of status 12 -> first line
    closed: dict[tuple[str, str], str] = {}  #: (reporter, peer) whose connection ended
    other: dict[str, tuple[int, str]] = {}  #: other status -> lines, first line
    host_of: dict[str, str] = {}  #: address -> the host whose lines call it their own
    flushed: int = 0
    retried: int = 0


def nccl(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: NCCL's log lines."""
    reports = read(materials)
    yield from _ports(reports)
    yield from _peers(reports, {host for (host, _, _), port in reports.ports.items() if port.errors})
    for status, (count, line) in sorted(reports.other.items()):
        what = f"{count} completions with status {status}"
        yield rule_says("nccl.completion-error", [what, line], raw_lines=count)


def read(materials: Sequence[Material]) -> Reports:
    """Takes up all lines that NCCL wrote."""
    reports = Reports()
    for material in materials:
        for line in log_lines(material, *_WORDS):
            message = bare(line) if "NCCL " in line else ""
            if match := _PREFIX.match(message):
                _line(reports, match["host"], match["text"], message[:SHOWN_CHARS_MAX])
    return reports


def _line(reports: Reports, host: str, text: str, message: str) -> None:
    if event := _ASYNC.match(text):
        key = (host, event["hca"], event["port"])
        if len(reports.ports) < _PORTS_MAX or key in reports.ports:
            _async(reports, key, event["event"].strip().lower(), message)
    elif done := _COMPLETION.match(text):
        _completion(reports, host, done, message)
    elif (ended := _SOCKET.match(text)) and len(reports.closed) < _HOSTS_MAX:
        reports.closed.setdefault((host, ended["closed"] or ended["failed"]), message)


def _async(reports: Reports, key: tuple[str, str, str], event: str, message: str) -> None:
    if not event.startswith(("port ", _FATAL_EVENT)):
        return
    port = reports.ports.setdefault(key, _Port(line=message))
    port.lines += 1
    port.last = event
    port.errors += event != "port active"


def _completion(reports: Reports, host: str, done: re.Match[str], message: str) -> None:
    status, rest = int(done["status"]), done["rest"]
    if (local := _LOCAL.search(rest)) and len(reports.host_of) < _HOSTS_MAX:
        reports.host_of.setdefault(local[1], host)
    vendor = _VENDOR.search(rest)
    if status == _FLUSHED or (vendor and int(vendor[1]) == _VENDOR_FLUSHED):
        reports.flushed += 1
    elif status == _RETRY_EXCEEDED:
        reports.retried += 1
        if len(reports.silent) < _HOSTS_MAX:
            hca = _HCA.search(rest)
            peer = done["peer"] or f"unknown peer of {hca[1] if hca else host}"
            reports.silent.setdefault((host, peer), message)
    else:
        name = str(status)
        count, first = reports.other.get(name, (0, message))
        reports.other[name] = (count + 1, first)


def _ports(reports: Reports) -> Iterator[Diagnosis]:
    peers: dict[str, list[str]] = {}
    for host, peer in sorted(reports.silent):
        peers.setdefault(host, []).append(peer)
    for (host, hca, number), port in reports.ports.items():
        if not port.errors:
            continue
        seen = f"{port.errors} port errors on {host} {hca} port {number}, last state: {port.last}"
        rule = "nccl.nic-fatal" if port.last == _FATAL_EVENT else "nccl.port-error"
        unit = {"host": host, "hca": hca, "port": int(number), "errors": port.errors, "last": port.last}
        yield rule_says(
            rule,
            [seen, port.line],
            events=[{**unit, "peers_not_answering": peers.get(host, [])[:64]}],
            raw_lines=port.lines + len(peers.get(host, [])),
        )


def _peers(reports: Reports, explained: set[str]) -> Iterator[Diagnosis]:
    """Who did not answer, of reports that no port error at either end explains."""
    host_of = reports.host_of
    edges = {
        (reporter, peer): line
        for (reporter, peer), line in reports.silent.items()
        if reporter not in explained and host_of.get(peer, peer) not in explained
    }
    if edges:
        what = f"{reports.retried} completions with status 12, {reports.flushed} flushed ones"
        yield from _suspects(edges, host_of, what, reports.retried)
    elif reports.closed and not reports.ports and not reports.silent:
        events = [{"reporter": reporter, "peer": peer} for reporter, peer in reports.closed]
        what = f"{len(events)} pairs lost their connection"
        yield rule_says("nccl.peer-closed", [what, *_first(reports.closed)], events=events)


def _suspects(
    edges: dict[tuple[str, str], str], host_of: dict[str, str], what: str, raw_lines: int
) -> Iterator[Diagnosis]:
    named = {host_of.get(peer, peer): peer for _, peer in edges}
    found = _in_common({(reporter, host_of.get(peer, peer)) for reporter, peer in edges})
    if not found or len(found) > limits().fleet["suspects_max"]:
        rule = "nccl.peers-many" if found else "nccl.peer-ambiguous"
        events = [{"reporter": reporter, "peer": peer} for reporter, peer in edges]
        yield rule_says(rule, [what, *_first(edges)], events=events, raw_lines=raw_lines)
        return
    for end, others in found.items():
        rule = "nccl.peer-silent" if end in named else "nccl.reporter-alone"
        suspect = named.get(end, end)
        seen = f"{suspect} and {len(others)} others ({', '.join(others[:8])}) do not reach each other"
        yield rule_says(
            rule,
            [seen, what, *_first(edges)],
            events=[{"suspect": suspect, "victims": others[:1024]}],
            raw_lines=raw_lines,
        )


def _first(lines: dict[tuple[str, str], str]) -> list[str]:
    return list(lines.values())[:2]


def _in_common(edges: set[tuple[str, str]]) -> dict[str, list[str]]:
    """The ends that several others have in common, each with those; the most widely reported first.

    A vote over the peers that are named. Of those with as many votes, the ones that report nothing
    themselves. Where no peer is named twice, one reporter may have several peers to itself.
    """
    reporters = {reporter for reporter, _ in edges}
    left, found = edges, dict[str, list[str]]()
    while left and len(found) <= limits().fleet["suspects_max"]:
        votes: dict[str, set[str]] = {}
        for reporter, peer in left:
            votes.setdefault(peer, set()).add(reporter)
        most = max(len(by) for by in votes.values())
        best = [peer for peer, by in votes.items() if len(by) == most]
        best = best if len(best) == 1 else [peer for peer in best if peer not in reporters]
        if most < 2 or not best:
            break
        found |= {peer: sorted(votes[peer]) for peer in sorted(best)}
        left = {edge for edge in left if not set(best).intersection(edge)}
    if not found and len(reporters) == 1 and len(edges) > 1:
        return {next(iter(reporters)): sorted(peer for _, peer in edges)}
    return found
