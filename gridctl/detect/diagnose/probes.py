"""Probes of a node: a local one that does not come back is evidence on the node, a remote one is not."""

from collections.abc import Iterator, Mapping, Sequence

from gridctl.detect.diagnose.reading import key_of
from gridctl.detect.diagnose.saying import rule
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis

_PROBES_MAX = 1024
_FEW = 4
_LATE = ("deadlineexceeded", "deadline", "timeout", "timedout", "hung", "noanswer", "noreply", "unreachable")


class _Probe:
    def __init__(self) -> None:
        self.late = 0
        self.in_a_row = 0
        self.most_in_a_row = 0
        self.stuck = False
        self.evidence: list[str] = []


class Probes:
    """All probes that records tell of."""

    def __init__(self) -> None:
        self._probes: dict[tuple[str, str, bool], _Probe] = {}

    def feed(self, record: Mapping[str, object]) -> bool:
        """One record; False if it is none of a probe."""
        name = record.get("probe")
        state = key_of(str(record.get("state", record.get("status", record.get("result", "")))))
        if not isinstance(name, str) or not state:
            return False
        host = record.get("node", record.get("host"))
        key = (host if isinstance(host, str) else "", name[:80], _remote(record))
        if key not in self._probes and len(self._probes) >= _PROBES_MAX:
            return True
        probe = self._probes.setdefault(key, _Probe())
        if state in _LATE:
            probe.late += 1
            probe.in_a_row += 1
            probe.most_in_a_row = max(probe.most_in_a_row, probe.in_a_row)
            probe.stuck |= _stuck(record)
            if len(probe.evidence) < _FEW:
                told = ", ".join(
                    f"{k} {v}" for k, v in list(record.items())[:10] if isinstance(v, str | int | float)
                )
                probe.evidence.append(f"probe {name}: {told}")
        elif state not in ("start", "started", "running"):
            probe.in_a_row = 0
        return True

    @property
    def seen(self) -> bool:
        """Was any probe told of?"""
        return bool(self._probes)

    def findings(self, hung: Mapping[str, Sequence[str]]) -> Iterator[Diagnosis]:
        """`hung`: node -> what its kernel says of queries that hang."""
        local = {key: probe for key, probe in self._probes.items() if probe.late and not key[2]}
        for host in dict.fromkeys(key[0] for key in local):
            probes = [probe for key, probe in local.items() if key[0] == host]
            stuck = [probe for probe in probes if probe.stuck] or (probes if hung.get(host) else [])
            many = max(probe.most_in_a_row for probe in probes) >= hardware().limit("probe", "deadlines")
            name = "probe.stuck" if stuck else "probe.slow_many" if many else "probe.slow"
            seen = [line for probe in stuck or probes for line in probe.evidence]
            yield rule(name, [*seen[:3], *hung.get(host, ())], events=[{"node": host}] if host else [])
        if remote := [probe for key, probe in self._probes.items() if probe.late and key[2]]:
            yield rule(
                "probe.remote", [line for probe in remote for line in probe.evidence[:1]], count=len(remote)
            )


def _remote(record: Mapping[str, object]) -> bool:
    mode = str(record.get("mode", record.get("scope", ""))).lower()
    if mode in ("local", "remote"):
        return mode == "remote"
    return any(name in record for name in ("endpoint", "target", "peer", "url"))


def _stuck(record: Mapping[str, object]) -> bool:
    """In uninterruptible sleep, or alive after the signal that nothing survives."""
    state = str(record.get("proc_state", record.get("process_state", ""))).strip().upper()
    return state.startswith("D") or (record.get("sigkill_sent") is True and record.get("still_alive") is True)
