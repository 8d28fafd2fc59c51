"""Whatever somebody does to a journal is found, and the first bad record is named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.journal import Journal, verify
from gridctl.history.audit import audit
from gridctl.history.siem import ecs
from gridctl.trust.checkpoints import AuditKey, append, sound

RECORDS = 24
SEGMENT_BYTES = 1500
KEY = AuditKey("lab", Ed25519PrivateKey.from_private_bytes(b"k" * 32))
OTHER = AuditKey("lab", Ed25519PrivateKey.from_private_bytes(b"o" * 32))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of several segments, and a checkpoint of all of it beside it."""
    folder = tmp_path_factory.mktemp("whole") / "journal"
    clock = iter(range(1000, 2000))
    with Journal(folder, lambda: float(next(clock)), segment_bytes=SEGMENT_BYTES) as log:
        for number in range(RECORDS):
            log.append("step", "x", {"number": number, "filler": "y" * (number * 37 % 90)})
        append(folder.parent / "checkpoints.jsonl", KEY.sign(log.last_seq, log.head, 5.0))
    return folder


@pytest.fixture
def journal(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole.parent, tmp_path / "copy")
    return tmp_path / "copy" / "journal"


class Lines:
    """All lines of a journal, wherever they lie, to be changed and put back."""

    def __init__(self, journal: Path) -> None:
        self.paths = sorted(journal.glob("*.jsonl"))
        self.lines = [line for path in self.paths for line in path.read_bytes().splitlines(keepends=True)]
        self._counts = [path.read_bytes().count(b"\n") for path in self.paths]

    def borders(self) -> list[int]:
        """The first record of each segment but the first."""
        return [sum(self._counts[:n]) + 1 for n in range(1, len(self._counts))]

    def put(self, lines: list[bytes]) -> None:
        """Back into segments of as many lines as before; what is too much goes into the last."""
        for number, path in enumerate(self.paths):
            last = number == len(self.paths) - 1
            some, lines = (
                (lines, []) if last else (lines[: self._counts[number]], lines[self._counts[number] :])
            )
            path.write_bytes(b"".join(some))


Change = Callable[[list[bytes], int], list[bytes]]


def altered(line: bytes) -> bytes:
    return line.replace(b'"number":', b'"number":1')


CHANGES: dict[str, Change] = {
    "change": lambda lines, at: [*lines[: at - 1], altered(lines[at - 1]), *lines[at:]],
    "drop": lambda lines, at: [*lines[: at - 1], *lines[at:]],
    "insert": lambda lines, at: [*lines[: at - 1], lines[(at + 5) % RECORDS], *lines[at - 1 :]],
    "repeat": lambda lines, at: [*lines[: at - 1], lines[at - 2], *lines[at - 1 :]],
    "swap": lambda lines, at: [*lines[: at - 1], lines[at], lines[at - 1], *lines[at + 1 :]],
    "truncate": lambda lines, at: lines[: at - 1],
    "garbage": lambda lines, at: [*lines[: at - 1], b"\xff{[\n", *lines[at:]],
    "empty line": lambda lines, at: [*lines[: at - 1], b"\n", *lines[at - 1 :]],
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_first_bad_record_is_named(journal: Path, kind: str) -> None:
    lines = Lines(journal)
    before = list(lines.lines)
    places = {2, 12, RECORDS - 1, *lines.borders()}
    if kind not in ("repeat",):
        places.add(1)
    if kind != "swap":
        places.add(RECORDS)
    for at in sorted(places):
        lines.put(CHANGES[kind](before, at))
        found = audit(journal, [journal.parent / "checkpoints.jsonl"])
        assert (found.ok, found.first_bad) == (False, at), (kind, at, found.what)
        assert found.what
    lines.put(before)
    assert audit(journal, [journal.parent / "checkpoints.jsonl"]).ok


def test_a_loss_at_the_end_shows_only_against_a_checkpoint(journal: Path) -> None:
    lines = Lines(journal)
    lines.put(lines.lines[:-3])
    alone = audit(journal, [])
    assert (alone.ok, alone.records) == (True, RECORDS - 3)
    assert "no checkpoint is known: a loss at the end would not show" in alone.notes
    found = audit(journal, [journal.parent / "checkpoints.jsonl"])
    assert (found.ok, found.first_bad) == (False, RECORDS - 2)
    assert f"records {RECORDS - 2} to {RECORDS} are missing at the end" in found.what


@pytest.mark.parametrize("gone", ["first", "middle", "last", "all"])
def test_a_segment_that_is_gone(journal: Path, gone: str) -> None:
    paths = Lines(journal).paths
    borders = [1, *Lines(journal).borders()]
    number = {"first": 0, "middle": len(paths) // 2, "last": len(paths) - 1, "all": 0}[gone]
    for path in paths if gone == "all" else [paths[number]]:
        path.unlink()
    found = audit(journal, [journal.parent / "checkpoints.jsonl"])
    assert (found.ok, found.first_bad) == (False, borders[number])


def test_a_chain_that_was_forged_anew_is_not_the_one_that_was_signed(journal: Path) -> None:
    shutil.rmtree(journal)
    with Journal(journal, lambda: 1000.0) as log:
        for number in range(RECORDS + 5):
            log.append("step", "x", {"number": number})
    assert verify(journal).ok
    found = audit(journal, [journal.parent / "checkpoints.jsonl"])
    assert (found.ok, found.first_bad) == (False, RECORDS)


def test_only_the_key_that_is_asked_for_counts(journal: Path) -> None:
    file = journal.parent / "checkpoints.jsonl"
    forged = OTHER.sign(3, "0" * 64, 7.0)
    assert sound(forged)
    assert not sound(forged, KEY.public)
    assert not sound(msgspec.structs.replace(forged, seq=4)), "another number"
    assert not sound(msgspec.structs.replace(forged, public=KEY.public)), "in another name"
    append(file, forged)
    assert audit(journal, [file]).first_bad == 3
    found = audit(journal, [file], KEY.public)
    assert (found.ok, found.checkpoints, found.covered_seq, found.keys) == (True, 1, RECORDS, [KEY.id])
    assert any("do not count" in note for note in found.notes)
    nobody = AuditKey("lab", Ed25519PrivateKey.from_private_bytes(b"n" * 32))
    assert "no checkpoint is signed by the key" in " ".join(audit(journal, [file], nobody.public).notes)


def test_what_is_no_damage_is_a_note(tmp_path: Path) -> None:
    clock = iter([1000.0, 900.0, 901.0, 9_000_000.0])
    journal = tmp_path / "journal"
    with Journal(journal, lambda: next(clock)) as log:
        for number in range(4):
            log.append("step", "x", {"number": number})
    (journal / "notes.txt").write_text("mine")
    with (journal / "00000001.jsonl").open("ab") as file:
        file.write(b'{"seq":5,"t_un')
    found = audit(journal, [])
    assert (found.ok, found.records) == (True, 4)
    said = " ".join(found.notes)
    for word in ("14 bytes of an unfinished line", "went back at record 2", "before record 4", "notes.txt"):
        assert word in said


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_byte_that_is_changed_is_found(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(whole.parent, folder / "copy")
    journal = folder / "copy" / "journal"
    path = data.draw(st.sampled_from(sorted(journal.glob("*.jsonl"))))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    before = content[at]
    content[at] = data.draw(st.integers(0, 255).filter(lambda value: value != before))
    path.write_bytes(content)
    found = audit(journal, [journal.parent / "checkpoints.jsonl"])
    whole_lines = b"".join(p.read_bytes() for p in sorted(journal.glob("*.jsonl"))[: int(path.stem) - 1])
    expected = whole_lines.count(b"\n") + bytes(content[:at]).count(b"\n") + 1
    assert (found.ok, found.first_bad) == (False, expected)
    shutil.rmtree(folder)


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_bytes_of_any_kind_are_no_crash(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    journal = folder / "journal"
    journal.mkdir()
    (journal / "00000001.jsonl").write_bytes(content)
    (folder / "checkpoints.jsonl").write_bytes(content)
    found = audit(journal, [folder / "checkpoints.jsonl"])
    assert found.records == 0


def test_records_have_ecs_names(journal: Path) -> None:
    from gridagent.journal import read

    records = list(read(journal))
    first = ecs(records[0])
    assert first["@timestamp"] == "1970-01-01T00:16:40.000000Z"
    assert (first["event"]["sequence"], first["event"]["hash"]) == (1, records[0].hash)
    gate = msgspec.structs.replace(
        records[0], kind="gate", data={"who": "ann", "reason": "it burns", "plan": "p-1", "node": "n1"}
    )
    found = ecs(gate)
    assert (found["user"]["name"], found["event"]["reason"], found["host"]["name"]) == (
        "ann",
        "it burns",
        "n1",
    )
    assert found["event"]["type"] == ["allowed"]
    odd = msgspec.structs.replace(records[0], t_unix_s=1e300, data={"plan": 5, "why": "x", "granted": 3})
    assert ecs(odd)["related"]["hosts"] == []
