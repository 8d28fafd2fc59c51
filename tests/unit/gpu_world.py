"""A node with one GPU that tells something, under the watchdog."""

from typing import Any

from gridagent.wire import StreamRecord
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Output, WatchedNode


class GpuNode:
    """Node n1; a record comes each second."""

    def __init__(self, device: str, pci: str) -> None:
        self.watch = Watch(builtin(), [WatchedNode(name="n1", gpus=2)])
        self.at = 100.0
        self._about = {"device": device, "pci": pci}

    def feed(self, kind: str, **v: Any) -> list[Output]:
        self.at += 1
        return self.watch.feed(StreamRecord(seq=1, boot="b", t_unix_s=self.at, node="n1", kind=kind, v=v))

    def sample(self, **values: Any) -> list[Output]:
        return self.feed("sample", **self._about, v=values)
