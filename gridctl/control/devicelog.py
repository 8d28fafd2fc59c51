"""What every device has told of itself last, and what it is, as the nodes' streams have it."""

from gridagent.wire import StreamRecord
from gridctl.model.fleet import Sample

#: More devices than a node has are somebody's mistake.
DEVICES_MAX = 1024
#: What says which device it is. Not every sample tells it.
_ABOUT = ("pci", "uuid", "serial", "model")
#: What the journal calls otherwise.
_NAMES = {"model": "name"}
_TEXT_CHARS_MAX = 80


class DeviceLog:
    """Fed by the followers, read by plans and runs that reset a device, and by what is journaled of nodes."""

    def __init__(self) -> None:
        self._newest: dict[str, dict[str, Sample]] = {}  #: node -> device -> its newest sample

    def feed(self, record: StreamRecord) -> None:
        """Takes a `sample` record; any other is passed over."""
        device, values = record.v.get("device"), record.v.get("v")
        if record.kind != "sample" or not isinstance(device, str) or not isinstance(values, dict):
            return
        known = self._newest.setdefault(record.node, {})
        if device in known or len(known) < DEVICES_MAX:
            about = {name: text for name in _ABOUT if isinstance(text := record.v.get(name), str) and text}
            before = known[device].about if device in known else {}
            if all(about[n] == before[n] for n in ("pci", "uuid") if n in about and n in before):
                about = before | about  # the same device
            known[device] = Sample(record.t_unix_s, values, about)

    def of(self, node: str) -> dict[str, Sample]:
        """The devices of a node, each with its newest sample."""
        return dict(self._newest.get(node, {}))

    def identities(self, node: str) -> dict[str, dict[str, str]]:
        """The devices of a node that have said what they are: uuid, serial, pci, name, as far as known."""
        known = self._newest.get(node, {})
        told = {device: sample.about for device, sample in known.items()}
        return {
            device: {_NAMES.get(key, key): text[:_TEXT_CHARS_MAX] for key, text in about.items()}
            for device, about in told.items()
            if about.get("uuid") or about.get("serial")
        }
