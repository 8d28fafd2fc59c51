"""agent.toml, launches and sources: clear words, and nothing kept by mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent import cli
from gridagent.enrolment import JoinToken
from gridagent.environment import carried
from gridagent.errors import ConfigError
from gridagent.home import Home, boot_id, chassis_serial
from gridagent.launch import LaunchError, Launches
from gridagent.redact import SECRET_NAMES
from gridagent.script import script_of
from gridagent.telemetry import open_source
from gridagent.wire import LaunchSpec

WHOLE = 'node = "n1"\nlisten = "10.0.0.7:7443"\n'


def home_with(folder: Path, text: str) -> Home:
    (folder / "agent.toml").write_text(text)
    return Home(folder)


def test_a_small_configuration_is_enough(tmp_path: Path) -> None:
    config = home_with(tmp_path, WHOLE).config()
    assert (config.node, config.host, config.port, config.rack) == ("n1", "10.0.0.7", 7443, "")
    assert home_with(tmp_path, 'node = "n"\nlisten = "[fd00::7]:0"').config().host == "fd00::7"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "node"),
        ('node = "n1"', "listen"),
        ('node = "n1"\nlisten = "10.0.0.7"', "host:port"),
        ('node = "n1"\nlisten = "10.0.0.7:99999"', "host:port"),
        ('node = "n1"\nlisten = "10.0.0.7:1"\nreset_gpu = ["nvidia-smi", "-r"]', "which GPU: write {uuid}"),
        ('node = "n1"\nlisten = "10.0.0.7:1"\nreboot = "systemctl reboot"', "reboot"),
        ('node = "n1"\nlisten = "0.0.0.0:7443"', "names no address"),
        ('node = ""\nlisten = "h:1"', "node is empty"),
        (WHOLE + "gpus = 'eight'", "gpus"),
        (WHOLE + "= 3", "cannot be read"),
    ],
)
def test_a_wrong_one_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        home_with(tmp_path, text).config()
    assert "agent.toml" in str(caught.value)


def test_a_missing_one_and_an_unknown_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="gridagent join"):
        Home(tmp_path).config()
    home_with(tmp_path, WHOLE + "lisen = 1").config()
    assert "'lisen'" in capsys.readouterr().err


def test_serial_and_boot_id_are_read_below_the_system_root(tmp_path: Path) -> None:
    config = home_with(tmp_path, WHOLE + f'sysroot = "{tmp_path}"').config()
    assert (chassis_serial(config), boot_id(config.sysroot)) == ("", "")
    for name, text in (
        ("sys/class/dmi/id/product_serial", "SN-9\n"),
        ("proc/sys/kernel/random/boot_id", "b-1\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert (chassis_serial(config), boot_id(config.sysroot)) == ("SN-9", "b-1")


WORDS = [pattern.strip("*") for pattern in SECRET_NAMES]


@given(
    word=st.sampled_from(WORDS),
    before=st.sampled_from(["HF_", "TORCH_", "CUDA_", "X", ""]),
    after=st.text("ABC_", max_size=3),
    case=st.sampled_from([str.upper, str.lower, str.title]),
)
def test_no_name_of_a_secret_is_kept(word: str, before: str, after: str, case: object) -> None:
    assert callable(case)
    name = before + case(word) + after
    assert carried({name: "v", "RANK": "1"}, ["*"]) == {"RANK": "1"}


def test_what_is_kept_is_a_short_list() -> None:
    kept = {"RANK": "0", "MASTER_ADDR": "a", "OMP_NUM_THREADS": "1", "HF_HOME": "/x", "PYTHONPATH": "/p"}
    assert carried({**kept, "AWS_REGION": "r", "HOME": "/h", "XRANK": "1"}, []) == kept
    assert carried({"AWS_REGION": "r", "AWS_SECRET": "s"}, ["AWS_*"]) == {"AWS_REGION": "r"}


def test_launches_follow_the_rank(tmp_path: Path) -> None:
    launches = Launches(tmp_path)
    spec = LaunchSpec(job="j", rank=2, world_size=3, argv=["python", "t.py"], cwd="/", gpus=[5])
    assert launches.get("j", 2) is None
    launches.promise("s1", spec)
    assert (launches.promised("s1"), launches.get("j", 2)) == (True, None)
    taken = launches.take("s1", [7])
    assert taken is not None
    assert taken.gpus == [7]
    assert launches.get("j", 2) == taken
    assert (launches.promised("s1"), launches.take("s1", [])) == (False, None)
    launches.drop("j", 2)
    launches.drop("j", 2)
    assert launches.get("j", 2) is None
    for job in ("j.1", "-", "llm:70b_x", "x" * 64):
        assert launches.get(job, 0) is None
    for job in ("../j", "", ".j", "a/b", "j\n", "j\0", "é", "a b", "x" * 65, "x" * 10_000):
        with pytest.raises(LaunchError, match="may hold"):
            launches.get(job, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nvlm", "is no source"),
        ("nvml:all", "takes nothing"),
        ("amdsmi:all", "takes nothing"),
        ("replay:none.jsonl", "no recording"),
        ("replay:agent.toml", "no recording"),
        ("replay:r.jsonl?speed=0", "speed"),
        ("replay:r.jsonl?speed=nan", "speed"),
        ("replay:r.jsonl?start=later", "start"),
        ("replay:r.jsonl?nod=x", "nod"),
    ],
)
def test_a_wrong_source_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.jsonl").touch()
    with pytest.raises(ConfigError, match=words):
        open_source(text, home_with(tmp_path, WHOLE), "n1")


@pytest.mark.parametrize("home", ["/dev/null", "/dev/null/home"])
@pytest.mark.parametrize("command", ["serve", "join", "park", "status", "exec"])
def test_a_home_that_cannot_be_is_an_error_and_no_accident(
    command: str, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    token = JoinToken(
        url="https://127.0.0.1:9", node="n1", listen="127.0.0.1:7443", ca_sha256="0" * 64, secret="s" * 43
    )
    more = {"join": [token.encode()], "exec": ["--job", "j", "--", "true"]}.get(command, [])
    assert cli.main([command, "--home", home, *more]) == cli.EXIT_FAILED
    said = capsys.readouterr().err
    assert said.startswith("gridagent: ")
    assert "/dev/null" in said


def test_a_spare_without_an_agent_says_what_it_waits_for(tmp_path: Path) -> None:
    home_with(tmp_path, WHOLE)
    command = [sys.executable, "-m", "gridagent", "park", "--home", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ}) as spare:
        assert spare.stderr is not None
        said = spare.stderr.readline()
        spare.kill()
    assert "spare of node n1" in said
    assert f"gridagent serve --home {tmp_path}" in said


def test_a_relative_home_is_measured_as_sessions_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are told the absolute path of the socket, and could never connect."""
    deep = tmp_path / ("x" * 110)
    deep.mkdir()
    home_with(deep, WHOLE)
    monkeypatch.chdir(deep)
    assert cli.main(["serve", "--home", "."]) == cli.EXIT_FAILED
    assert "is too long for a Unix socket; use a shorter --home" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python train.py --lr 3", "train.py --lr 3"),
        ("/opt/python3 -u -B -m pkg.train -u", "-m pkg.train -u"),
        ("python -q train.py", "train.py"),
        ("python -O train.py", ""),
        ("python -c pass", ""),
        ("python -m", ""),
        ("python -u", ""),
        ("torchrun", ""),
    ],
)
def test_which_command_lines_a_spare_can_run(line: str, words: str) -> None:
    assert script_of(line.split()) == words.split()
