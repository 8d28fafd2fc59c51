"""Evidence that was taken of a node, as the controller has it."""

import msgspec

from gridagent.wire import EvidenceItem


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/evidence"""

    target: str  #: a node, or an incident
    folder: str  #: where the archive is to lie, absolute
    who: str


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """An archive of a node, fetched and found to be what the node said it is."""

    id: str
    node: str
    incident: str
    who: str
    file: str
    bytes: int
    sha256: str
    taken_unix_s: float  #: by the node's clock
    items: list[EvidenceItem] = []

    @property
    def lacking(self) -> list[EvidenceItem]:
        """What could not be had."""
        return [item for item in self.items if not item.sha256]
