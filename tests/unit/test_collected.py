"""Evidence at the controller: kept only if it is what the node said, and known to its incident."""

import hashlib
import io
import resource
import tarfile
from pathlib import Path

import pytest

from gridagent.journal import Record
from gridagent.wire import Evidence, EvidenceItem
from gridctl.control.incidents import Incidents
from gridctl.model.runs import Incident
from gridctl.ports.archive import ArchiveFile, NotAsTold
from gridctl.runbook.evidence import LOST_BY, missing, taken

CONTENT = b"NVRM: Xid 79\n" * 100


def packed(name: str = "kernel.log", content: bytes = CONTENT) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return raw.getvalue()


def told(data: bytes, content: bytes = CONTENT) -> Evidence:
    item = EvidenceItem(name="kernel.log", bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    lacking = EvidenceItem(name="bmc-events.txt", note="ipmitool is not installed on this node")
    digest = hashlib.sha256(data).hexdigest()
    return Evidence(id="ev-1", bytes=len(data), sha256=digest, t_unix_s=1.0, items=[item, lacking])


def take(path: Path, about: Evidence, data: bytes) -> None:
    archive = ArchiveFile(path, about)
    try:
        for start in range(0, len(data), 100):
            archive.write(data[start : start + 100])
        archive.keep()
    finally:
        archive.drop()


def test_what_is_as_told_is_kept(tmp_path: Path) -> None:
    data = packed()
    take(tmp_path / "new" / "a.tar.gz", told(data), data)
    assert (tmp_path / "new" / "a.tar.gz").read_bytes() == data
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.tar.gz"]


@pytest.mark.parametrize(
    ("about", "data", "why"),
    [
        (told(packed()), packed()[:-1], "came, the node spoke of"),
        (told(packed()), packed() + b"x", "more than the"),
        (told(packed()), packed()[:-9] + b"123456789", "with digest"),
        (told(packed(), b"other"), packed(), "is another than"),
        (told(packed("x")), packed("x"), "kernel.log is not in it"),
        (told(b"no archive"), b"no archive", "it is no archive"),
    ],
)
def test_what_is_not_as_told_leaves_nothing(tmp_path: Path, about: Evidence, data: bytes, why: str) -> None:
    with pytest.raises(NotAsTold, match=why):
        take(tmp_path / "a.tar.gz", about, data)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_keeps_no_part(tmp_path: Path) -> None:
    data = packed()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) - 1, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            take(tmp_path / "a.tar.gz", told(data), data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_two_may_fetch_one_archive_at_once(tmp_path: Path) -> None:
    data = packed()
    both = [ArchiveFile(tmp_path / "a.tar.gz", told(data)) for _ in range(2)]
    for archive in both:
        archive.write(data)
    for archive in both:
        archive.keep()
        archive.drop()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [data]


def test_a_node_cannot_fill_this_disk(tmp_path: Path) -> None:
    with pytest.raises(NotAsTold, match="taken from nobody"):
        ArchiveFile(tmp_path / "a", Evidence(id="e", bytes=1 << 40, sha256="", t_unix_s=1.0))


def test_an_incident_knows_its_evidence_and_the_rule_asks_for_it() -> None:
    incidents = Incidents()

    def add(seq: int, kind: str, /, **data: object) -> Incident:
        incidents.take(
            Record(
                seq=seq,
                t_unix_s=float(seq),
                kind=kind,
                actor="c",
                data={"incident": "i-1", **data},
                prev="",
                hash="",
            )
        )
        found = incidents.get("i-1")
        assert found
        return found

    add(1, "incident", state="open", kind="gpu_lost", node="n2", title="t")
    asked = {"what": "evidence", "node": "n2", "id": "ev-1", "who": "ann", "text": "ann asks n2"}
    incident = add(2, "audit", **asked, state="asked")
    assert not taken(incident)
    problem = missing(incident, "evacuate_and_reboot")
    assert problem
    assert (problem.code, "gridctl collect i-1" in problem.text) == ("no-evidence", True)
    assert missing(incident, "observe") is None
    incident = add(3, "audit", **asked, state="collected", file="/x")
    assert taken(incident)
    assert [(e["id"], e["state"], e["t_unix_s"]) for e in incident.evidence] == [("ev-1", "collected", 3.0)]
    assert all(missing(incident, action) is None for action in LOST_BY)
    assert [moment.what for moment in incident.timeline][1:] == ["ann asks n2", "ann asks n2"]
