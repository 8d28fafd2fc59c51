"""What every device has told of itself last, and what it is, as the nodes' streams have it."""

from gridagent.wire import StreamRecord
from gridctl.model.fleet import Sample

#: More devices than a node has are somebody's mistake.
DEVICES_MAX = 1024
#: What a device says of itself beside its values, now and then -> what it is called here.
_ABOUT = {"uuid": "uuid", "serial": "serial", "pci": "pci", "model": "name"}
_TEXT_CHARS_MAX = 80


class DeviceLog:
    """Fed by the followers, read by plans and runs that reset a device, and by what is journaled of nodes."""

    def __init__(self) -> None:
        self._newest: dict[str, dict[str, Sample]] = {}  #: node -> device -> its newest sample
        self._about: dict[str, dict[str, dict[str, str]]] = {}  #: node -> device -> what identifies it

    def feed(self, record: StreamRecord) -> None:
        """Takes a `sample` record; any other is passed over."""
        device, values = record.v.get("device"), record.v.get("v")
        if record.kind != "sample" or not isinstance(device, str) or not isinstance(values, dict):
            return
        known = self._newest.setdefault(record.node, {})
        if device in known or len(known) < DEVICES_MAX:
            known[device] = Sample(record.t_unix_s, values)
            if record.v.get("uuid") or record.v.get("serial"):
                self._about.setdefault(record.node, {})[device] = {
                    name: text[:_TEXT_CHARS_MAX]
                    for key, name in _ABOUT.items()
                    if isinstance(text := record.v.get(key), str) and text
                }

    def of(self, node: str) -> dict[str, Sample]:
        """The devices of a node, each with its newest sample."""
        return dict(self._newest.get(node, {}))

    def identities(self, node: str) -> dict[str, dict[str, str]]:
        """The devices of a node that have said what they are: uuid, serial, pci, name, as far as known."""
        return dict(self._about.get(node, {}))
