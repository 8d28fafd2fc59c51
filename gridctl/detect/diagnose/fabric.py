"""The NVLink fabric: registration of GPUs, the fabric manager, IMEX, links that are up and carry nothing.

What is normal depends on the board: without an NVSwitch there is nothing to manage and every field is N/A.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from gridagent.signals.lines import KernelLine, unwrap
from gridagent.signals.values import number
from gridctl.detect.diagnose.gauges import Gpu
from gridctl.detect.diagnose.reading import key_of
from gridctl.detect.diagnose.ruling import clean
from gridctl.detect.diagnose.saying import rule
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis

_FEW = 4
_LINKS_MAX = 4096
_PLAIN = re.compile(
    r"(?:gpu|GPU) ?(?P<index>\d{1,3}): state ?= ?(?P<state>[\w ]{1,40}?),? "
    r"status ?= ?(?P<status>[\w /]{1,60}?)\s*$"
)
_SERVICE = re.compile(
    r"nvidia-fabricmanager\.service: (?:Main process exited|Control process exited|Failed with result|"
    r"Deactivated successfully|A process of this unit has been killed)"
)
_START = re.compile(
    r"(?P<word>Failed to start|Started|Stopped|Stopping) "
    r"(?:nvidia-fabricmanager\.service|NVIDIA fabric manager)",
    re.IGNORECASE,
)
_ACTIVE = re.compile(r"\s{1,20}Active: (?P<state>[a-z]{4,20}) \(")
_IS = re.compile(
    r"nvidia-fabricmanager(?:\.service)?(?: is|:|=)? ?"
    r"(?P<state>active|inactive|failed|dead|activating|running)\b"
)
_STATES = ("active", "inactive", "failed", "activating", "deactivating", "unknown")
_IMEX = re.compile(r"(?:.{0,200})\bIMEX (?:daemon )?status is (?P<status>-?\d{1,4})\b")
_LINK = re.compile(
    r"\s{1,20}Link (?P<link>\d{1,3}): (?P<state><inactive>|inactive|disabled|[\d.]{1,12} GB/s)"
)
_GPU = re.compile(r"GPU (?P<index>\d{1,3}): (?P<product>.{1,100}?) \(UUID")
_MANAGERS = ("", "nv-fabricmanager", "nvidia-fabricmanager", "nvidia-fabricmanager-start.sh")
_NOTHING = "NV_WARN_NOTHING_TO_DO"
#: Racks whose nodes share one NVLink domain, so that IMEX and the fabric matter beyond the node.
_RACKS = ("GB200", "GB300", "NVL72", "NVL36", "VR200")
_MULTI_NODE = re.compile(rf"\b(?:{'|'.join(_RACKS)})\b")
WORDS = ("fabricmanager", "fabric manager", "state=", "state =", "IMEX", "Active: ", _NOTHING)


class Fabric:
    """All that materials say of the fabric. One node: where several speak, the worst counts."""

    def __init__(self) -> None:
        self.manager = ""  #: up, down or nothing (to do): the last word
        self.evidence: list[str] = []
        self.states: dict[int, tuple[str, str]] = {}  #: index -> state and status, where no sample tells them
        self.imex: list[str] = []
        self.multi_node = False
        self.links: dict[str, dict[int, bool]] = {}  #: GPU -> link -> is it up
        self.topology: list[dict[str, object]] = []
        self._service = False  #: the lines that follow are about the fabric manager's service
        self._gpu = ""
        self._words: Sequence[str] = WORDS  #: those that may be in the lines that follow

    def command(self, command: str) -> None:
        """The command whose output follows."""
        self._service = "fabricmanager" in command and "systemctl" in command
        self._gpu = ""

    def look(self, text: str) -> None:
        """What follows, as a whole: is there anything for `feed` in it, and does it name a rack of nodes?"""
        self._words = [word for word in WORDS if word in text]
        if not self.multi_node and any(word in text for word in _RACKS):
            self.multi_node = _MULTI_NODE.search(text) is not None

    def feed(self, line: str) -> bool:
        """One line; False if it says nothing of the fabric."""
        if self._service and line.strip() in _STATES:
            self._say("up" if line.strip() == "active" else "down", f"nvidia-fabricmanager is {line.strip()}")
            return True
        if line.startswith("GPU ") and (match := _GPU.match(line)):
            self._gpu = match["index"]
            return False
        if self._gpu and (link := _LINK.match(line)):
            links = self.links.setdefault(self._gpu, {})
            if len(links) < _LINKS_MAX:
                links[int(link["link"])] = link["state"].endswith("GB/s")
            return True
        return any(word in line for word in self._words) and self._worded(line[:1000])

    def _worded(self, line: str) -> bool:
        if match := _PLAIN.match(line):
            if len(self.states) < _LINKS_MAX:
                self.states[int(match["index"])] = (match["state"], match["status"])
        elif _NOTHING in line and unwrap(line).program in _MANAGERS:
            self._say("nothing", line)
        elif (imex := _IMEX.match(line)) and int(imex["status"]) < 0:
            self.imex = [*self.imex, clean(line)][:_FEW]
        elif self._service and (active := _ACTIVE.match(line)):
            self._say("up" if active["state"] == "active" else "down", line)
        elif state := _IS.match(line):
            self._say("up" if state["state"] in ("active", "running") else "down", line)
        elif not self._system(unwrap(line), line):
            return False
        return True

    def _system(self, record: KernelLine, line: str) -> bool:
        """What the service manager says of the fabric manager; other programs may say what they like."""
        if record.program not in ("", "systemd"):
            return False
        started = _START.match(record.message)
        if started and started["word"].lower() == "started":
            self._say("up", line)
        elif started or _SERVICE.match(record.message):
            if self.manager != "nothing":
                self._say("down", line)
        elif "nvidia-fabricmanager.service" in record.message[:80]:
            self._service = True
        else:
            return False
        return True

    def document(self, document: Mapping[str, object]) -> bool:
        """A JSON document about fabric and links; False if it is none."""
        keys = {key_of(str(name)): value for name, value in document.items()}
        about = [key for key in keys if "nvlink" in key or "fabric" in key or "p2p" in key]
        if not any(isinstance(keys[key], list | bool | int) or "manager" in key for key in about):
            return False  # the name of a domain says nothing of its health
        if len(self.topology) < _LINKS_MAX:
            self.topology.append(dict(document))
        manager = next((v for k, v in keys.items() if "fabricmanager" in k and isinstance(v, str)), None)
        if manager is not None:
            self._say(
                "up" if manager.lower() in ("active", "running", "ok") else "down",
                f"fabric manager: {manager}",
            )
        states, statuses = keys.get("fabricstate"), keys.get("fabricstatus")
        if isinstance(states, list) and isinstance(statuses, list):
            for index, (state, status) in enumerate(zip(states[:64], statuses[:64], strict=False)):
                self.states[index] = (str(state)[:60], str(status)[:60])
        return True

    def findings(self, gpus: Sequence[Gpu]) -> Iterator[Diagnosis]:
        """All findings; `gpus` tell of their registration, too."""
        states = [_State(gpu.index, gpu.pci, *_told(gpu)) for gpu in gpus if "fabric_state" in gpu.last]
        states += [_State(index, "", *told) for index, told in self.states.items()]
        known = [state for state in states if state.means != "unknown"]
        multi_node = self.multi_node or any(_clustered(gpu) for gpu in gpus)
        if self.manager in ("down", "nothing"):
            yield self._manager(states, known)
        elif states and (bad := [state for state in states if state.means != "ok"]):
            yield _registration(bad, known)
        if self.imex:
            yield rule("imex.down" if multi_node else "imex.not_applicable", self.imex)
        yield from self._fallback()
        yield from self._links_down()

    @property
    def seen(self) -> bool:
        """Was anything said of the fabric?"""
        return bool(self.manager or self.states or self.topology or self.links or self.imex)

    def _manager(self, states: list["_State"], known: list["_State"]) -> Diagnosis:
        if self.manager == "nothing":
            return rule("fabric.nothing_to_do" if known else "fabric.not_applicable", self.evidence)
        if states and not known:
            return rule("fabric.not_applicable", [*self.evidence, "no GPU tells of a fabric"])
        bad = [state for state in states if state.means != "ok"]
        seen = [*self.evidence, *(state.text for state in bad)]
        return rule("fabric.manager_down", seen, events=[state.event for state in bad])

    def _fallback(self) -> Iterator[Diagnosis]:
        for document in self.topology:
            seen = list(_unreached(document)) + list(_slow(document))
            if seen:
                host = document.get("host") or document.get("node")
                events: list[dict[str, object]] = [{"node": str(host)[:255]}] if host else []
                yield rule("fabric.fallback", seen, events=events)

    def _links_down(self) -> Iterator[Diagnosis]:
        links = {name: list(links.values()) for name, links in self.links.items()}
        for document in self.topology:
            active = next(
                (v for k, v in document.items() if "link" in key_of(str(k)) and isinstance(v, list)), []
            )
            counts = [number(value) for value in active[:64]]
            most = max((count for count in counts if count is not None), default=0)
            for index, count in enumerate(counts):
                if count is not None and most:
                    links[str(index)] = [True] * int(min(count, 64)) + [False] * int(min(most - count, 64))
        any_up = any(any(states) for states in links.values())
        down = {name: states.count(False) for name, states in links.items() if not all(states)}
        if down and any_up:
            events: list[dict[str, object]] = [{"gpu": name, "links_down": n} for name, n in down.items()]
            seen = [f"GPU {name}: {n} NVLinks are down" for name, n in down.items()]
            yield rule("fabric.links_down", seen, count=len(down), events=events)

    def _say(self, manager: str, line: str) -> None:
        if manager != self.manager:
            self.evidence = []
        self.manager = manager
        if len(self.evidence) < _FEW:
            self.evidence.append(clean(line))


class _State:
    """The registration of one GPU. State alone says nothing: Status must be Success."""

    def __init__(self, index: int | None, pci: str, state: str, status: str) -> None:
        words = key_of(state), key_of(status)
        if words[1] == "success" and words[0] in ("completed", "na", ""):
            self.means = "ok"
        elif words[0] == "completed":
            self.means = "failed" if words[1] not in ("na", "") else "unknown"
        elif words[0] in ("inprogress", "notstarted"):
            self.means = "not_ready"
        else:
            self.means = "unknown" if words[0] in ("na", "notsupported", "") else "failed"
        self.pci = pci
        name = f"GPU {index}" if index is not None else f"GPU {pci}"
        self.text = f"{name}: state {state or '-'}, status {status or '-'}"
        self.event: dict[str, object] = {"index": index, "pci": pci or None, "registration": self.means}


def _told(gpu: Gpu) -> tuple[str, str]:
    return str(gpu.last.get("fabric_state", ""))[:60], str(gpu.last.get("fabric_status", ""))[:60]


def _clustered(gpu: Gpu) -> bool:
    """Does the GPU belong to a cluster of nodes? It has an identity then, which is not all zeros."""
    cluster = key_of(str(gpu.last.get("fabric_cluster", ""))[:60])
    return len(cluster) >= 32 and bool(cluster.strip("0"))


def _registration(bad: list[_State], known: list[_State]) -> Diagnosis:
    if not known:
        return rule("fabric.not_applicable", [bad[0].text])
    failed = [state for state in bad if state.means == "failed"] or [s for s in bad if s.means == "unknown"]
    name = "fabric.registration" if failed else "fabric.not_ready"
    head = (failed or bad)[0]
    return rule(
        name, [state.text for state in bad], pci=head.pci, count=len(bad), events=[s.event for s in bad]
    )


def _unreached(document: Mapping[str, object]) -> Iterator[str]:
    for name, value in document.items():
        key = key_of(str(name))
        if "p2p" not in key and "peer" not in key:
            continue
        if value is False or (isinstance(value, list) and _holds_false(value)):
            yield f"{str(name)[:60]} is false"


def _holds_false(values: list[object]) -> bool:
    return any(v is False or (isinstance(v, list) and any(w is False for w in v[:256])) for v in values[:256])


def _slow(document: Mapping[str, object]) -> Iterator[str]:
    """Measured values far below what the document itself expects."""
    part = hardware().limit("fabric", "bandwidth_part")
    keys = {key_of(str(name)): number(value) for name, value in document.items()}
    for key, expected in keys.items():
        if "expected" not in key or not expected or not ("bw" in key or "bandwidth" in key or "gb" in key):
            continue
        rest = key.replace("expected", "")
        measured = keys.get(rest) or next(
            (v for k, v in keys.items() if v and k != key and k.replace("measured", "") == rest), None
        )
        if measured is not None and measured < part * expected:
            times = expected / max(measured, 1e-9)
            yield f"{measured:g} measured, {expected:g} expected: {times:.0f} times slower"
