"""The session in a training script: without an agent, before a hand-over, and where it cannot take part."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from agents import Refused, free_port, wait_for
from driver import OpRefused
from fleet import Job, Run, TrainingFleet, assert_same
from forkserver import JOBS

from gridctl.runbook import preflight

AGENT = Path(__file__).parents[2] / "agent"


def log(run: Run, rank: int) -> str:
    return Path(run.folder, f"rank-{rank}.log").read_text()


def test_without_an_agent_a_script_runs_as_before_with_one_warning(trained: TrainingFleet) -> None:
    run = trained.start_alone(Job("ddp"))
    assert_same(run, run.finish(), trained.control(run.job))
    for rank in range(3):
        assert log(run, rank).splitlines() == [
            "no gridagent here (GRIDAGENT_SOCKET is not set): training runs without hand-over"
        ]


def test_a_job_whose_name_is_none_trains_alone_and_says_so() -> None:
    script = """
import torch, torch.distributed as dist
from gridagent.train import Session
dist.init_process_group("grid")
session = Session(model=torch.nn.Linear(2, 2))
session.end_step()
session.close()
dist.destroy_process_group()
"""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    named = {"GRIDAGENT_JOB": "a\nb", "GRIDAGENT_SOCKET": "/nowhere/agent.sock"}
    environment = {**os.environ, **alone, **named}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "GRIDAGENT_JOB" in line)
    assert line.startswith("GRIDAGENT_JOB: 'a\\nb' is no name of a job")
    assert line.endswith("Training runs without hand-over")


def test_a_preflight_finds_all_that_stands_in_the_way(trained: TrainingFleet) -> None:
    run = trained.start(Job("blocked", ("loose",)))
    handover = trained.handover(run, [1])
    handover.describe()
    found = {blocker.code: blocker for blocker in handover.reports[1].blockers}
    assert found.keys() == {
        "unregistered-tensor", "gradient-at-boundary", "unregistered-loader", "state-cannot-move",
        "foreign-group",
    }  # fmt: skip
    assert all(blocker.fatal for blocker in found.values())
    assert (
        "model/anchor is a tensor that is neither parameter nor buffer" in found["unregistered-tensor"].text
    )
    assert "own.seen: set cannot be moved" in found["state-cannot-move"].text
    assert "reads something of the kind Loader that is not registered" in found["unregistered-loader"].text
    assert found["foreign-group"].text.startswith(
        "a process group of the backend gloo: a spare cannot join it"
    )
    run.discard(handover.targets[1])
    handover.end()
    run.finish()


@pytest.mark.parametrize("args", [(), ("torchdata",)], ids=["own", "torchdata"])
def test_the_loader_ends_exactly_at_the_boundary(trained: TrainingFleet, args: tuple[str, ...]) -> None:
    """Eleven batches an epoch, boundary 22: the target opens the next epoch of the data."""
    run = trained.start(Job("ddp", args))
    handover = trained.handover(run, [1], lead_steps=8)
    report = handover.swap()
    assert (report.outcome, report.boundary_step) == ("commit", 22), report
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_take_over_is_told_where_it_happened_and_a_callback_that_fails_ends_nothing(
    trained: TrainingFleet,
) -> None:
    run = trained.start(Job("takeover"))
    handover = trained.handover(run, [1])
    report = handover.swap()
    assert report.outcome == "commit", (report, run.logs())
    target = run.ranks[1].process.pid
    assert_same(run, run.finish(), trained.control(run.job))
    assert [path.name for path in run.folder.glob("owner-*")] == ["owner-1"]
    assert (run.folder / "owner-1").read_text() == f"{target} True 1"
    assert "no folder for logs on this node" in run.logs()


def test_the_boundary_is_after_the_last_step(trained: TrainingFleet) -> None:
    """The target has the rank and nothing left to train."""
    run = trained.start(Job("ddp", steps=17))
    report = trained.handover(run, [1]).swap()
    assert (report.outcome, report.boundary_step) == ("commit", 17), report
    assert_same(run, run.finish(), trained.control(run.job))


def test_the_job_ends_before_the_boundary(trained: TrainingFleet) -> None:
    run = trained.start(Job("ddp", steps=16))
    report = trained.handover(run, [1]).swap()
    assert report.outcome == "abort"
    assert "come to its end" in report.reason or "is gone" in report.reason
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_spare_whose_job_is_nearly_over_says_so(trained: TrainingFleet) -> None:
    run = trained.start(Job("ddp", steps=16))
    handover = trained.handover(run, [1])
    handover.describe()
    handover.reports[1] = msgspec.structs.replace(handover.reports[1], step=15)
    with pytest.raises(OpRefused, match="came to its end within"):
        handover.specialise()
    handover.end()
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_script_that_fails_in_the_spare_says_why(
    trained: TrainingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's folder of arguments does not exist on the spare's node, say."""
    run = trained.start(Job("ddp"))
    handover = trained.handover(run, [1])
    handover.describe()
    launch = handover.launch(1)
    moved = msgspec.structs.replace(launch, cwd="/nowhere")
    monkeypatch.setattr(handover, "launch", lambda _rank: moved)
    with pytest.raises(OpRefused, match=r"FileNotFoundError.*/nowhere"):
        handover.specialise()
    handover.end()
    (spare,) = handover.spares
    assert spare.process.wait(60) != 0
    run.left.remove(spare)
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_collective_in_flight_in_a_side_thread_forbids_the_boundary(trained: TrainingFleet) -> None:
    """Rank 2 never takes part in it before the boundary: abort, and then it completes."""
    run = trained.start(Job("side_thread"))
    report = trained.handover(run, [1]).swap()
    assert report.outcome == "abort"
    assert "1 collectives are still in flight" in report.reason
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_source_that_nobody_releases_ends_by_itself(trained: TrainingFleet) -> None:
    """The controller died after the commit, say, and none came back."""
    run = trained.start(Job("ddp"))
    handover = trained.handover(run, [1], frozen_s=0.5)
    handover.prepare()
    source = run.ranks[1]
    assert handover.cut().outcome == "commit"
    assert source.process.wait(60) == 0
    assert "rank 1 trains elsewhere, and nobody released its old process within 0.5 s" in log(run, 1)
    gone = f"its agent does not show session {source.session} any more"
    wait_for(gone, lambda: source.session not in {r.session for r in source.agent.client().status().ranks})
    with pytest.raises(Refused, match="not-found"):  # which a controller that comes back takes for done
        handover.op(source, "handover.release", {"handover": handover.id})
    handover.op(source, "run.end", {})
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_stray_variable_does_not_spoil_a_transfer(trained: TrainingFleet) -> None:
    """GRIDAGENT_DAMAGE is set, but the agent was not started to allow damage."""
    agent = trained.node(2)
    agent.end(signal.SIGTERM)
    agent.start()
    run = trained.start(Job("ddp", env=(("GRIDAGENT_DAMAGE", "bit"),)))
    try:
        report = trained.handover(run, [1]).swap()
        assert report.outcome == "commit", report
        assert "GRIDAGENT_DAMAGE='bit' is not heeded" in log(run, 1)
        assert "--allow-damage" in log(run, 1)
        assert_same(run, run.finish(), trained.control(Job("ddp")))
    finally:
        agent.end(signal.SIGTERM)
        agent.start("--allow-damage")


@pytest.mark.parametrize("edited", ["", "train.py", "beside.py"], ids=["moved only", "script", "module"])
def test_a_script_that_is_another_one_at_the_spare_shows_once_it_is_warm(
    trained: TrainingFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str
) -> None:
    """The spare's node has the files at other paths; only what they say counts."""
    here, there = tmp_path / "here", tmp_path / "there" / "deep"
    here.mkdir()
    text = f"import sys\nsys.path.append({str(JOBS)!r})\nimport beside, zoo\nzoo.main()\n"
    (here / "train.py").write_text(text)
    (here / "beside.py").write_text("")
    shutil.copytree(here, there)
    run = trained.start(Job(script=str(here / "train.py")))
    handover = trained.handover(run, [1])
    handover.describe()
    launch = handover.launch(1)
    moved = msgspec.structs.replace(
        launch, argv=[launch.argv[0], str(there / "train.py"), *launch.argv[2:]], cwd=str(there)
    )
    monkeypatch.setattr(handover, "launch", lambda _rank: moved)
    if edited:
        with (there / edited).open("a") as file:
            file.write("# changed\n")
    handover.specialise()
    scripts = [reports[1].facts["script"] for reports in (handover.reports, handover.warm)]
    assert (scripts[0] != scripts[1]) == bool(edited)
    retire = {"handover": handover.id, "reason": "not needed"}
    with pytest.raises(Refused, match=f"specialised for hand-over {handover.id}") as caught:
        handover.op(handover.targets[1], "handover.retire", {**retire, "handover": "another"})
    assert caught.value.code == "not-taken"
    handover.op(handover.targets[1], "handover.retire", retire)
    handover.end()
    run.finish()


def test_a_spare_with_other_code_of_the_same_version_is_refused_before_anything_begins(
    trained: TrainingFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(AGENT, tmp_path / "agent")
    with (tmp_path / "agent" / "gridagent" / "train" / "park.py").open("a") as file:
        file.write("# a hot fix, the same version\n")
    run = trained.start(Job("ddp"))
    with monkeypatch.context() as changed:
        changed.setenv("PYTHONPATH", str(tmp_path / "agent"))
        odd = trained.park(run, execute=True)
    even = trained.park(run)
    run.left.append(odd)
    handover = trained.handover(run, [1], spares=[even])
    handover.describe()
    facts = {s.session: s.facts for s in even.agent.client().status().spares}
    blockers = {
        spare.session: list(preflight.of_reports(handover.reports[1], facts[spare.session], "n5"))
        for spare in (odd, even)
    }
    assert not blockers[even.session]
    assert [(b.code, b.fatal) for b in blockers[odd.session]] == [("agent-code-differs", True)]
    for spare in (odd, even):
        run.discard(spare)
    handover.end()
    run.finish()
