"""A log that is larger than memory: read in pieces it means what it means as a whole."""

import ast
import io
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_diagnose_checkpoint import JSON as CHECKPOINTS
from test_diagnose_fleet import JSON as FLEETS
from test_diagnose_slurm import JSON as NODES

from gridctl.detect.diagnose import LAYERS, diagnose, documents
from gridctl.detect.diagnose.texts import all_lines, lines_of, lines_with
from gridctl.errors import ConfigError
from gridctl.model import diagnosis
from gridctl.model.diagnosis import Material
from gridctl.ports import materials as opened
from gridctl.ports.materials import materials, whole_lines

FORMS = (
    "{}",
    "[ 17.25] {}",
    "Feb 22 16:24:18 n7 kernel: {}",
    "12: {}",
    '{{"t": 5, "host": "n7", "line": "{}"}}',
)
NOISE = (
    '[   12.5] audit: type=1400 audit(1.1:4): apparmor="ALLOWED" operation="open" pid=5',
    "3: iteration 7/ 500 | lm loss: 2.1 | grad norm: 0.3 | link rank state, gpu",
    "",
    "   ",
    "a,b,c",
)


def literals() -> list[str]:
    """All lines that the tests of the layers write out: a real one of every kind that is read."""
    found: dict[str, None] = {}
    for path in sorted(Path(__file__).parent.glob("test_diagnose_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "7" for part in node.values]
                found |= dict.fromkeys("".join(map(str, parts)).split("\n"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= dict.fromkeys(node.value.split("\n"))
    return [line for line in found if len(line) > 12]


LITERALS = [
    *literals(),
    "3: iteration 7/ 500 | lm loss: nan | grad norm: 0.3",
    "[ 1.0] infiniband mlx5_2: dump_cqe:273:(pid 7): WC error: 12, Message: transport retry counter exceeded",
]
records = st.one_of(CHECKPOINTS, FLEETS, NODES)
json_lines = st.builds(json.dumps, records, indent=st.sampled_from((None, None, 1)))
log_lines = st.builds(
    lambda form, line, n: form.format(line.replace("{n}", str(n))),
    st.sampled_from(FORMS),
    st.sampled_from(LITERALS),
    st.integers(0, 99),
)
lines = st.one_of(log_lines, log_lines, json_lines, st.sampled_from(NOISE), st.text(max_size=20))
texts = st.lists(lines, max_size=40).map("\n".join)


def in_pieces(text: str, cuts: set[int]) -> Callable[[], Iterator[str]]:
    """The text, cut after the lines of these numbers."""
    *before, last = text.split("\n")
    ended = [*(f"{line}\n" for line in before), last]

    def pieces() -> Iterator[str]:
        held = ""
        for number, line in enumerate(ended):
            held += line
            if number in cuts and held.endswith("\n"):
                yield held
                held = ""
        if held:
            yield held

    return pieces


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(texts, st.sets(st.integers(0, 60))), min_size=1, max_size=3))
def test_in_pieces_every_layer_says_what_it_says_of_the_whole(inputs: list[tuple[str, set[int]]]) -> None:
    whole = [Material(f"rank_{n}.quarantine", text) for n, (text, _) in enumerate(inputs)]
    cut = [msgspec.structs.replace(m, text=in_pieces(t, c)) for m, (t, c) in zip(whole, inputs, strict=True)]
    assert msgspec.json.encode(diagnose(cut)) == msgspec.json.encode(diagnose(whole))


def test_the_lines_above_wake_every_layer_that_reads_lines() -> None:
    """What no line wakes would be compared for nothing."""
    texts = ["\n".join(LITERALS), *LITERALS]
    awake = {layer.__name__ for layer in LAYERS for text in texts if list(layer([Material("m", text)]))}
    assert awake >= {"nccl", "nic", "rdma", "torch_log", "flight_recorder", "slurm", "slurmstepd"}
    assert awake >= {"progress", "checkpoint_files", "checkpoint_facts"}


@given(st.text(alphabet="ab\n\r\ufeff{é"), st.sets(st.integers(0, 20)))
def test_the_lines_are_those_of_the_whole(text: str, cuts: set[int]) -> None:
    material = Material("m", in_pieces(text, cuts))
    assert list(all_lines(material)) == list(lines_of(text))
    assert list(lines_with(material, "a", "é")) == [n for n in lines_of(text) if "a" in n or "é" in n]
    assert material.head(5) == text[:5]
    assert material.whole() == text


@given(st.binary(max_size=200) | st.text(alphabet="aé€😀\n\ufeff").map(str.encode), st.integers(1, 40))
def test_blocks_of_bytes_are_the_text_of_them_all(raw: bytes, size: int) -> None:
    pieces = list(whole_lines(raw[at : at + size] for at in range(0, len(raw), size)))
    assert "".join(pieces) == raw.decode("utf-8-sig", errors="replace")
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert all(pieces)


class Inputs:
    """Files and a standard input, with hardly any room to hold them whole."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.setattr(opened, "HELD_BYTES", 10)
        monkeypatch.setattr(opened, "_BLOCK_BYTES", 64)

    def file(self, text: str) -> Path:
        path = self._folder / "large.log"
        path.write_text(text, encoding="utf-8")
        return path


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    return Inputs(tmp_path, monkeypatch)


STORM = "\n".join(f"[ {n}.5] NVRM: Xid (PCI:0000:41:00): 31, pid={n}, name=é, Ch {n}" for n in range(40))


def test_large_files_and_pipes_are_read_as_often_as_asked(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inputs.file(STORM)
    with path.open("rb") as redirected:
        for stdin in (io.BytesIO(STORM.encode()), redirected):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin))
            with materials([path, Path("-")]) as given:
                for material in given:
                    both = zip(material.pieces(), material.pieces(), strict=True)
                    assert "".join(one for one, other in both if one == other) == STORM
                assert len(list(given[1].pieces())) > 10
                assert diagnose(given[:1])[0].event_count == 40
            sys.stdin.detach()


def test_a_file_that_grows_is_read_as_far_as_it_went(inputs: Inputs) -> None:
    path = inputs.file(STORM)
    with materials([path]) as given, path.open("a") as file:
        file.write("\nmore")
        file.flush()
        assert "".join(given[0].pieces()) == STORM


def test_a_pipe_that_finds_no_room_is_refused_with_what_to_do(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(opened.tempfile, "TemporaryFile", full)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(STORM.encode())))
    with pytest.raises(ConfigError, match="TMPDIR"), materials([Path("-")]):
        pass


@pytest.mark.parametrize("indent", [None, 1])
def test_a_document_that_cannot_be_cut_is_refused_with_what_to_do(
    indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (diagnosis, documents, opened):
        monkeypatch.setattr(module, "WHOLE_CHARS_MAX", 2000)
    rows = [{"t": n, "step": n, "loss": 1.5} for n in range(300)]
    text = json.dumps(rows, indent=indent)
    for form in (text, lambda: whole_lines([text.encode()])):
        (said,) = diagnose([Material("rows.json", form)])
        assert (said.kind, said.why.rule) == ("missing_data", "reading.too-large")
        assert "one a line" in said.why.evidence[-1]
    lines = "\n".join(json.dumps(row) for row in rows)
    assert [one.why.rule for one in diagnose([Material("rows.jsonl", lines)])] == ["progress.well"]


@pytest.mark.parametrize("noise", [*NOISE[:2], LITERALS[-1], *STORM.split("\n")[:1]])
def test_memory_does_not_grow_with_the_log(noise: str) -> None:
    """Of a log four times as long the peak is the same: nothing but counts and examples is kept."""

    def peak_bytes(lines: int) -> int:
        piece = f"{noise}\n" * 500
        tracemalloc.start()
        diagnose([Material("m", lambda: (piece for _ in range(lines // 500)))])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(500)  # tables are loaded once
    assert peak_bytes(20_000) < peak_bytes(5_000) + 500_000
