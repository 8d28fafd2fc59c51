"""The stream of a node, as its agent writes it: bytes of lines in, findings out.

Lines are decoded many at once, and of a sample only what a rule looks at; a sample that changes nothing is
passed over. All else goes the whole way through `Watch.feed`; outputs are the same as if everything did.
"""

import msgspec

from gridagent.wire import StreamRecord
from gridctl.detect.policy import DetectPolicy
from gridctl.detect.still import Shape
from gridctl.detect.watch import Watch
from gridctl.model.findings import Output


class Ingest:
    """Feeds a `Watch` with lines. `unreadable` counts those that are no record."""

    def __init__(self, policy: DetectPolicy, watch: Watch) -> None:
        self.unreadable = 0
        self._watch = watch
        self.shape = Shape(policy)
        self._lines = msgspec.json.Decoder(self.shape.line).decode_lines
        self._record = msgspec.json.Decoder(StreamRecord).decode

    def feed(self, node: str, lines: bytes, now_unix_s: float | None = None) -> list[Output]:
        """Takes whole lines of one node's stream. `now_unix_s` as in `Watch.feed`.

        The connection says who speaks, not the record.
        """
        try:
            brief = self._lines(lines)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            brief = []
        watched, shape = self._watch.node(node), self.shape
        outputs: list[Output] = []
        texts: list[bytes] = []
        for index, line in enumerate(brief):
            sample = line.kind == "sample" and line.v is not None and line.v.v is not None
            at_unix_s = line.t_unix_s if now_unix_s is None else now_unix_s
            if sample:
                passes = watched.passes(line, at_unix_s, shape)
            else:
                passes = line.kind == "beat" and watched.beats(line.boot, at_unix_s)
            if passes:
                continue
            if not texts:
                texts = _texts(lines)
                if len(texts) != len(brief):
                    break
            outputs += self._whole(node, texts[index], now_unix_s)
            if sample:
                watched.learn(line, shape)
        else:
            if brief:
                return outputs
            index = 0
        for text in _texts(lines)[index:]:
            outputs += self._whole(node, text, now_unix_s)
        return outputs

    def record(self, record: StreamRecord, now_unix_s: float | None = None) -> list[Output]:
        """The same for one record that is decoded already."""
        watched = self._watch.node(record.node)
        at_unix_s = record.t_unix_s if now_unix_s is None else now_unix_s
        if record.kind == "beat":
            return [] if watched.beats(record.boot, at_unix_s) else self._watch.feed(record, now_unix_s)
        line = self.shape.of(record) if record.kind == "sample" else None
        if line is None:
            return self._watch.feed(record, now_unix_s)
        if watched.passes(line, at_unix_s, self.shape):
            return []
        outputs = self._watch.feed(record, now_unix_s)
        watched.learn(line, self.shape)
        return outputs

    def _whole(self, node: str, text: bytes, now_unix_s: float | None) -> list[Output]:
        try:
            record = self._record(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.unreadable += 1
            return []
        if record.node != node:
            record = msgspec.structs.replace(record, node=node)
        return self._watch.feed(record, now_unix_s)


def _texts(lines: bytes) -> list[bytes]:
    return [text for text in lines.split(b"\n") if text.strip()]
