"""The simulator: the same bytes for the same seed, recordings as others read them, a truth that fits."""

from pathlib import Path

import msgspec
import pytest

from gridctl.errors import ConfigError
from gridctl.ports.recording import Recording, truth_of
from gridctl.simulate.emit import play
from gridctl.simulate.files import write
from gridctl.simulate.hardware import GPU_FAULTS
from gridctl.simulate.layout import fleet
from gridctl.simulate.machine import NODE_FAULTS
from gridctl.simulate.noise import NOISE
from gridctl.simulate.plan import life
from gridctl.simulate.settings import causes, settings
from gridctl.simulate.story import Story

HOURS = 1.0
TIMES = 1500.0


def story(seed: int = 1) -> Story:
    return life(fleet(12, str(seed), gpus=2), HOURS, TIMES)


def written(path: Path, seed: int = 1) -> Path:
    told = story(seed)
    write(path, told.fleet.header("x"), play(told, HOURS), told.truth())
    return path


def test_twice_the_same_to_the_byte_and_another_seed_is_another_fleet(tmp_path: Path) -> None:
    first, again = written(tmp_path / "a.jsonl.gz"), written(tmp_path / "b.jsonl.gz")
    assert first.read_bytes() == again.read_bytes()
    assert (tmp_path / "a.truth.json").read_bytes() == (tmp_path / "b.truth.json").read_bytes()
    assert written(tmp_path / "c.jsonl.gz", seed=2).read_bytes() != first.read_bytes()


def test_a_reader_gets_the_very_records_that_were_played(tmp_path: Path) -> None:
    recording = Recording(written(tmp_path / "a.jsonl"))
    read = list(recording.records())
    recording.close()
    assert recording.unreadable == 0
    assert msgspec.to_builtins(read) == msgspec.to_builtins(list(play(story(), HOURS)))
    assert [node.name for node in recording.header.nodes] == [node.name for node in story().fleet.nodes]


def test_time_never_goes_back_on_a_node_and_a_boot_begins_with_a_beat() -> None:
    last: dict[str, float] = {}
    boots: dict[str, str] = {}
    for record in play(story(), HOURS):
        assert record.t_unix_s >= last.get(record.node, 0.0)
        last[record.node] = record.t_unix_s
        if boots.get(record.node) != record.boot:
            assert record.kind in ("beat", "note")
            boots[record.node] = record.boot
    assert max(last.values()) < HOURS * 3600.0


def test_the_truth_names_every_node_once() -> None:
    told = story()
    truth = told.truth()
    moved = {node for fault in truth.faults if fault.preempt_job for node in fault.members()}
    assert moved
    assert moved.isdisjoint(truth.must_not_preempt)
    assert moved | set(truth.must_not_preempt) == {node.name for node in told.fleet.nodes}
    assert all(fault.decisive_t >= fault.t for fault in truth.faults)


def test_every_class_has_a_rate_with_a_source_and_something_that_it_does() -> None:
    assert set(causes()) == {*GPU_FAULTS, *NODE_FAULTS, *NOISE}
    assert all(cause.source and cause.per_1000_gpu_years > 0 for cause in causes().values())


def test_as_many_faults_as_the_rates_say() -> None:
    """Without bursts and repeats, which are taken off the base rate and come on top of it."""
    nodes, hours, times = 256, 24.0 * 30, 30.0
    told = life(fleet(nodes, "rates"), hours, times)
    gpu_years = nodes * settings().layout.gpus * hours / (24 * 365.25)
    expected = causes()["bus-loss"].per_1000_gpu_years / 1000 * gpu_years * times
    seen = sum(fault.cause == "bus-loss" for fault in told.faults)
    assert 0.5 * expected < seen < 1.5 * expected


def test_no_faults_without_a_rate() -> None:
    told = life(fleet(16, "quiet"), 24.0, 0.0)
    assert (told.faults, told.noise) == ([], [])


def test_a_recording_without_truth_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.truth\.json"):
        truth_of(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.truth.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no truth"):
        truth_of(tmp_path / "a.jsonl.gz")
