"""The layer for hardware: kernel logs, tools, samples, fabric and probes of GPU nodes, judged together.

Sources disagree and complete each other: a gauge repeats what the log says, a recovery action advises on an
Xid, a fatal switch error explains a GPU without a handle. So all materials are read first, line by line and
each once, and judged then. "Healthy" from one source takes back nothing that another one says.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from gridagent.signals.host import HostEvent
from gridagent.signals.lines import LINE_CHARS_MAX, unwrap
from gridagent.signals.nvidia import Xid
from gridctl.detect.diagnose import gpus as gpu_findings
from gridctl.detect.diagnose import nvml
from gridctl.detect.diagnose.clocks import When
from gridctl.detect.diagnose.fabric import Fabric
from gridctl.detect.diagnose.gauges import Gpus
from gridctl.detect.diagnose.history import Past, past_of
from gridctl.detect.diagnose.kernel import WORDS, KernelLogs
from gridctl.detect.diagnose.probes import Probes
from gridctl.detect.diagnose.reading import key_of
from gridctl.detect.diagnose.samples import Columns, Sample, Sections, Table, exported, record_sample
from gridctl.detect.diagnose.saying import rule
from gridctl.detect.diagnose.texts import all_lines, lines_of_piece, pieces_of
from gridctl.detect.diagnose.tools import Tools
from gridctl.detect.meaning import mean
from gridctl.detect.policy import DetectPolicy, builtin
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis, Material

_PROMPT = re.compile(r"(?:\[?[\w.-]{1,64}@[\w.-]{1,64}[^$#]{0,80})?[$#] (?P<command>[a-z./].{0,4000})")
#: The first node that a material names, in the wrapper of a kernel line or in an exporter's label.
_HOST = re.compile(
    r"^(?:<\d{1,3}>)?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})?|\d{4}-\d\d-\d\d[T ]\S{8,24}) "
    r"(?P<wrapper>\S{1,255}) kernel: |\bHostname=\"(?P<label>[^\"\n]{1,255})\"",
    re.MULTILINE,
)
_DECODER = json.JSONDecoder()
_UNNAMED_MAX = 4096
_PASTS_MAX = 65_536
_FEW = 8
_DEPTH_MAX = 4
_HEAD_LINES = 50
#: Sources whose records hold lines of the kernel.
_KERNEL_SOURCES = ("kmsg", "kernel", "dmesg", "journal", "syslog", "")
#: How records call a loss of records.
_GAPS = ("gap", "cursorlost", "recordslost", "overrun")
_LINE_KEYS = ("line", "MESSAGE", "message", "msg", "log")


def devices(materials: Sequence[Material], policy: DetectPolicy | None = None) -> Iterator[Diagnosis]:
    """All findings on hardware, and what is between it and the jobs. `policy`: default as delivered."""
    reader = Reader(policy or builtin(), node_of(materials))
    for material in materials:
        reader.read(material)
    return reader.findings()


def node_of(materials: Iterable[Material]) -> str:
    """The node that is named, if it is one only: what names none is of this one, too."""
    found = (_first_host(material) for material in materials)
    hosts = {host for host in found if host is not None}
    return hosts.pop() if len(hosts) == 1 else ""


def _first_host(material: Material) -> str | None:
    for piece in pieces_of(material):
        if (" kernel: " in piece or 'Hostname="' in piece) and (match := _HOST.search(piece)):
            return match["wrapper"] or match["label"]
    return None


class Reader:
    """Reads materials one after the other; remembers what they say, not what they are.

    `node` is the one that lines and samples are of that name none.
    """

    def __init__(self, policy: DetectPolicy, node: str = "") -> None:
        self._policy = policy
        self._node = node
        self._kernel = KernelLogs(policy)
        self._gpus = Gpus(policy)
        self._fabric = Fabric()
        self._probes = Probes()
        self._tools = Tools()
        self._past: dict[str, Past] = {}
        self._unhealthy: list[str] = []
        self._unnamed: list[tuple[float | None, Mapping[str, object]]] = []
        self._restart()

    def _restart(self) -> None:
        self._table, self._columns, self._sections = Table(), Columns(), Sections()

    def read(self, material: Material) -> None:
        """One material, whole."""
        self._restart()
        if _begins_as_json(material) and (text := material.whole()) is not None and self._document(text):
            return
        self._kernel.lines += any(_of_kernel(line) for line in islice(all_lines(material), _HEAD_LINES))
        for piece in pieces_of(material):
            words = [word for word in WORDS if word in piece]
            self._fabric.look(piece)
            for line in lines_of_piece(piece):
                self._line(line[:LINE_CHARS_MAX].rstrip("\r"), words)
        self._sample(self._sections.end())

    def _line(self, line: str, words: Sequence[str]) -> None:
        if line.startswith("{") and (record := _decoded(line)) is not None:
            self._record(record)
        elif words and self._kernel.feed(line, self._node, words=words):
            pass
        elif ("$ " in line or "# " in line) and (prompt := _PROMPT.match(line)):
            self._restart_at(prompt["command"])
        elif self._tools.feed(line) or self._fabric.feed(line):
            pass
        else:
            self._values(line)

    def _restart_at(self, command: str) -> None:
        self._sample(self._sections.end())
        self._restart()
        self._table.begin(command)
        self._fabric.command(command)

    def _values(self, line: str) -> None:
        inside, ended = self._sections.feed(line)
        self._sample(ended)
        if inside:
            return
        if "{" in line:
            self._sample(exported(line[:4096]))
        elif "," in line or ";" in line or "\t" in line:
            self._sample(self._table.feed(line[:4096]))
        elif line.startswith(("#Entity", "GPU ")):
            self._sample(self._columns.feed(line[:4096]))

    def _sample(self, sample: Sample | None) -> None:
        if sample is not None:
            self._gpus.feed(sample if sample.host else msgspec.structs.replace(sample, host=self._node))

    def _document(self, text: str) -> bool:
        """The whole material as one JSON document; False if it is none."""
        document = _decoded(text)
        if document is None:
            return False
        for record in document if isinstance(document, list) else [document]:
            if isinstance(record, dict):
                self._record(record)
        self._remember(document)
        return True

    def _remember(self, document: object) -> None:
        for name, past in past_of(document):
            if name in self._past or len(self._past) < _PASTS_MAX:
                self._past[name] = past

    def _record(self, record: object, depth: int = 0) -> None:
        """A JSON object: a line of a log, a sample, a probe, about the fabric or the past of a GPU."""
        if not isinstance(record, dict):
            return
        if (line := _logged(record)) is not None:
            host = record.get("host", record.get("node", record.get("_HOSTNAME", "")))
            self._kernel.feed(line, (host if isinstance(host, str) else "") or self._node, _time_s(record))
        elif self._probes.feed(record):
            pass
        elif key_of(str(record.get("kind", record.get("event", "")))[:40]) in _GAPS:
            host = record.get("node", record.get("host"))
            seen = f"records were lost: {record.get('records', 'nobody knows how many')}"
            gap = HostEvent(says="gap")
            self._kernel.machine.take(host if isinstance(host, str) else self._node, When(), gap, seen)
        elif sample := record_sample(record):
            self._sample(sample)
            self._remember(record)
            self._inner(record, depth)
        elif record.get("source") == "dcgm" and "value" in record:
            if len(self._unnamed) < _UNNAMED_MAX:
                self._unnamed.append((_time_s(record), record))
        elif not self._fabric.document(record):
            self._remember(record)
            self._unhealthy = [*self._unhealthy, *_unhealthy(record)][:_FEW]
            self._inner(record, depth)

    def _inner(self, record: Mapping[str, object], depth: int) -> None:
        """Records and lines in the lists of a record."""
        around = {name: value for name, value in record.items() if name in ("host", "node", "hostname")}
        lists = [value for value in record.values() if isinstance(value, list)]
        for item in (item for value in lists for item in value if depth < _DEPTH_MAX):
            if isinstance(item, dict):
                self._record({**around, **item}, depth + 1)
            elif isinstance(item, str):
                self._kernel.feed(item, self._node)

    def findings(self) -> Iterator[Diagnosis]:
        """What it all means, taken together. Ask once, at the end."""
        self._name_unnamed()
        self._gauges()
        advised = self._advise()
        incidents = self._kernel.incidents
        incidents.close()
        window_s = self._policy.thresholds.chain.window_s
        found = list(gpu_findings.findings(incidents, self._past, window_s))
        found += nvml.findings(list(self._gpus), self._policy, advised)
        found += self._fabric.findings(list(self._gpus))
        found += self._around(found)
        if self._unhealthy:
            found.append(rule("dcgm.unhealthy", self._unhealthy))
        return iter(found or self._quiet())

    def _around(self, found: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
        """Findings on what is around the GPUs, less those that a finding on a GPU explains."""
        machine = self._kernel.machine
        hosts = machine.hosts()
        hung = {host: machine.hung(host) for host in hosts}
        around = list(self._kernel.around(self._tools.suspect))
        probes = list(self._probes.findings(hung))
        stuck = any(d.kind == "driver_unresponsive" for d in probes) and any(hung.values())
        decisive = any(d.preempt_job and d.fault != "fabric" for d in found)
        for diagnosis in around:
            name = diagnosis.why.rule
            if name == "query.hung" and (stuck or decisive):
                continue
            if name == "driver.reset_required" and (
                stuck or decisive or any(d.why.rule == "query.hung" for d in around)
            ):
                continue
            yield diagnosis
        yield from probes
        fatal_switch = any(d.kind == "nvswitch_fatal" for d in around)
        known = {d.pci: True for d in found if d.pci and d.preempt_job}
        yield from self._tools.findings(fatal_switch, known)

    def _quiet(self) -> Iterator[Diagnosis]:
        """Nothing is wrong in what was understood; nothing at all if nothing was."""
        if len(self._gpus):
            yield from nvml.quiet(list(self._gpus))
        if self._fabric.seen and not len(self._gpus):
            yield rule("fabric.healthy", self._fabric.evidence, count=0)
        if self._kernel.lines or self._kernel.incidents.historic:
            yield gpu_findings.quiet(self._kernel.incidents, self._kernel.lines)
        if self._probes.seen:
            yield rule("probe.healthy", ["no probe missed its deadline"], count=0)

    def _name_unnamed(self) -> None:
        """A record of DCGM with a value and no field is one of the Xid gauge, if the kernel tells of Xids."""
        if not self._kernel.incidents.said:
            return
        for t_s, record in self._unnamed:
            sample = record_sample({**record, "xid": record.get("value")})
            if sample is not None:
                self._sample(msgspec.structs.replace(sample, t_s=t_s))

    def _gauges(self) -> None:
        """Takes the changes of Xid gauges as events, unless the kernel has told of them."""
        incidents = self._kernel.incidents
        window_s = hardware().limit("incident", "gauge_window_s")
        for gpu in self._gpus:
            for t_s, xid in gpu.onsets:
                when = When(unix_s=t_s)
                if incidents.was_said(gpu.pci, xid, when, window_s):
                    continue
                event = Xid(pci=gpu.pci or gpu.name, xid=xid, text="")
                told = mean(self._policy, event)
                if told is not None and told.preempt and gpu.recovery == 0:
                    # The gauge keeps what is over: the driver itself asks for nothing now.
                    told = msgspec.structs.replace(
                        told, severity="warning", action="observe", preempt=False, when="none"
                    )
                message = f"the gauge of the last Xid went to {xid} on {gpu.label}"
                incidents.feed(gpu.host, when, event, message, cause=told)

    def _advise(self) -> list[str]:
        """Takes the recovery that the driver asks for as advice on what befell the GPU; names those GPUs."""
        incidents = self._kernel.incidents
        advised = []
        for gpu in self._gpus:
            name = gpu.pci or gpu.name
            if gpu.recovery and incidents.befallen(gpu.host, name):
                event = Xid(pci=name, xid=154, recovery_action=gpu.recovery)
                self._kernel.event(
                    gpu.host, When(), event, f"recovery action {gpu.last.get('recovery_action')}"
                )
                advised.append(gpu.name)
        return advised


def _begins_as_json(material: Material) -> bool:
    """May the whole be one JSON document? "[ 12.5] x" of the kernel begins like one and ends too early."""
    begins = (text for piece in material.pieces() if (text := piece.lstrip()))
    text = next(begins, "")
    if text[:1] not in ("{", "["):
        return False
    line = text.partition("\n")[0]
    try:
        _, end = _DECODER.raw_decode(line)
    except (ValueError, RecursionError):
        return True
    return not line[end:].strip()


def _of_kernel(line: str) -> bool:
    """Does the line look like one of a kernel log, whatever it says?"""
    record = unwrap(line)
    return record.uptime_s is not None or record.program == "kernel"


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _logged(record: Mapping[str, object]) -> str | None:
    """The line of the kernel's log that a record holds, or None."""
    source = record.get("source", record.get("SYSLOG_IDENTIFIER", record.get("_TRANSPORT", "")))
    if not isinstance(source, str) or source.lower() not in _KERNEL_SOURCES:
        return None
    return next((value for name in _LINE_KEYS if isinstance(value := record.get(name), str)), None)


def _time_s(record: Mapping[str, object]) -> float | None:
    sample = record_sample(
        {**{k: v for k, v in record.items() if isinstance(v, str | int | float)}, "gpu": 0, "xid": 0}
    )
    micros = record.get("__REALTIME_TIMESTAMP")
    if isinstance(micros, str) and micros.isdecimal() and len(micros) < 20:
        return int(micros) / 1e6
    return sample.t_s if sample else None


def _unhealthy(record: Mapping[str, object]) -> Iterable[str]:
    """What a health check of DCGM finds wrong; its "Healthy" says nothing."""
    body = record.get("body")
    overall = body.get("Overall Health") if isinstance(body, dict) else None
    value = overall.get("value") if isinstance(overall, dict) else None
    if isinstance(value, str) and key_of(value) in ("failure", "warning", "fail", "unhealthy"):
        yield f"Overall Health: {value}"
