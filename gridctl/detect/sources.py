"""What an agent's sources say of their own reading: a driver that does not answer, a read that hangs, a loss.

The rows stand in policy/sources.tsv. None is decisive: what cannot be read is unknown. A row that is
reached `count` times within `window_s` holds until the source says that it is over, or, for a driver, until
a GPU gives a value again: the word that it is over may be lost itself.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping

from gridagent.signals.values import number
from gridctl.detect.device import Cleared
from gridctl.detect.kernel import suppressed
from gridctl.detect.policy import SourceRow
from gridctl.model.findings import Finding, Suppressed

_DEVICE = re.compile(r"gpu:\d{1,4}\b")
_TEXT_CHARS_MAX = 200
_PLACES_MAX = 256
_COUNT_MAX = 32


class Sources:
    """The sources of one node."""

    def __init__(self, rows: list[SourceRow], node: str) -> None:
        self._rows = rows
        self._node = node
        self._seen: dict[
            tuple[str, str, str], deque[float]
        ] = {}  #: (kind, device, layer) -> when, the newest last

    def line(self, t_unix_s: float, source: str, line: str) -> Iterator[Finding | Suppressed | Cleared]:
        """Takes a log line that a source has written itself."""
        rows = [row for row in self._rows if row.record == "log" and row.from_ == source]
        device = match[0] if (match := _DEVICE.search(line[:_TEXT_CHARS_MAX])) else "node"
        said = [row for row in rows if line.startswith(row.says)]
        ended = [] if said else [row for row in rows if row.ends and line.endswith(row.ends)]
        yield from self._take(t_unix_s, said, ended, device, source, line)

    def note(self, t_unix_s: float, v: Mapping[str, object]) -> Iterator[Finding | Suppressed | Cleared]:
        """Takes a note of a source on itself."""
        source, state = v.get("source"), v.get("state")
        if not isinstance(source, str) or not isinstance(state, str):
            return
        rows = [row for row in self._rows if row.record == "note" and row.from_ in ("*", source)]
        said = [row for row in rows if row.says == state]
        ended = [row for row in rows if row.ends == state]
        yield from self._take(t_unix_s, said, ended, "node", source, str(v.get("text", "")))

    def sample(self, device: str, values: Mapping[str, object]) -> Iterator[Cleared]:
        """A GPU that gives a value has a driver that answers."""
        if self._seen and any(number(value) is not None for value in values.values()):
            for kind, place, layer in [key for key in self._seen if key[1] in (device, "node")]:
                if layer == "driver":
                    yield from self._end((kind, place, layer))

    def _take(
        self,
        t_unix_s: float,
        said: list[SourceRow],
        ended: list[SourceRow],
        device: str,
        source: str,
        text: str,
    ) -> Iterator[Finding | Suppressed | Cleared]:
        keys = {(row.kind, device, _layer(row, source)): row for row in said}
        for key, row in keys.items():
            if key not in self._seen and len(self._seen) >= _PLACES_MAX:
                continue
            times = self._seen.setdefault(key, deque(maxlen=_COUNT_MAX))
            times.append(t_unix_s)
            reached = [row for row in said if _count(times, t_unix_s, row.window_s) >= row.count]
            if reached:
                yield self._finding(t_unix_s, reached[-1], device, source, text)
            if not row.ends:
                del self._seen[key]
        for row in ended:
            yield from self._end((row.kind, device, _layer(row, source)))

    def _end(self, key: tuple[str, str, str]) -> Iterator[Cleared]:
        if self._seen.pop(key, None) is not None:
            yield Cleared(*key)

    def _finding(
        self, t_unix_s: float, row: SourceRow, device: str, source: str, text: str
    ) -> Finding | Suppressed:
        found = Finding(
            t_unix_s=t_unix_s,
            node=self._node,
            device=device,
            kind=row.kind,
            severity=row.severity,
            action=row.action,
            when=row.when,
            why=[f"{row.meaning}: {text[:_TEXT_CHARS_MAX]!r}"],
            rule=f"source.{row.rule}",
            layer=_layer(row, source),
            fault=row.fault,
        )
        if row.severity == "info":
            return suppressed(found, "nothing can be concluded from what is not known")
        return found


def _layer(row: SourceRow, source: str) -> str:
    """Sources that hang are findings of their own each; the driver is one, whoever asks it."""
    return row.layer if row.record == "log" else f"{row.layer}.{source[:40]}"


def _count(times: deque[float], t_unix_s: float, window_s: float) -> int:
    return sum(t_unix_s - at <= window_s for at in times)
