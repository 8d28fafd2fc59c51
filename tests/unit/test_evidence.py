"""What a collection gathers: bounded, hashed, without secrets, whatever the node lacks or says."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.evidence import Order, Outcome, RankProcess, collect, tools
from gridagent.evidence.collect import collect as gather
from gridagent.redact import GONE, redacted, redacted_argv, redacted_text

NOW_UNIX_S = 1_000_000.0
HIDDEN = "hunter2zz"


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Order]:
    """An order for a node without any tool; its files lie below `tmp_path`."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    for folder in ("bin", "dev", "var/log", "spool"):
        (tmp_path / folder).mkdir(parents=True)

    def make(**fields: Any) -> Order:
        about = {"node": "n1", "who": "ann", "incident": "i-1"}
        made = Order(
            id="ev-1",
            folder=str(tmp_path / "evidence"),
            sysroot=str(tmp_path),
            spool=str(tmp_path / "spool"),
            about=about,
            status={"node": "n1"},
            ranks=[],
            logs=[],
            t_unix_s=NOW_UNIX_S,
            deadline_s=60.0,
        )
        return msgspec.structs.replace(made, **fields)

    return make


def program(tmp_path: Path, name: str, body: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{body}\n")
    path.chmod(0o755)


def unpacked(order: Order, outcome: Outcome) -> dict[str, bytes]:
    """The archive's files, once every digest was found to be right."""
    assert outcome.error == ""
    packed = (Path(order.folder) / f"{order.id}.tar.gz").read_bytes()
    assert (len(packed), hashlib.sha256(packed).hexdigest()) == (outcome.bytes, outcome.sha256)
    with tarfile.open(Path(order.folder) / f"{order.id}.tar.gz") as archive:
        found = {m.name: file.read() for m in archive if (file := archive.extractfile(m))}
    for item in outcome.items:
        if item.sha256:
            assert hashlib.sha256(found[item.name]).hexdigest() == item.sha256
    return found


def notes(outcome: Outcome) -> dict[str, str]:
    return {item.name: item.note for item in outcome.items}


def spooled(kind: str, t_unix_s: float, **v: Any) -> str:
    record = {"seq": 1, "boot": "b", "t_unix_s": t_unix_s, "node": "n1", "kind": kind, "v": v}
    return json.dumps(record, separators=(",", ":")) + "\n"


def test_a_bare_node_gives_what_it_has_and_names_what_is_missing(order: Callable[..., Order]) -> None:
    asked = order()
    outcome = gather(asked)
    found = unpacked(asked, outcome)
    assert {"status.json", "ranks.json", "devices.json", "manifest.json"} == set(found)
    manifest = json.loads(found["manifest.json"])
    assert (manifest["incident"], manifest["who"], manifest["node"]) == ("i-1", "ann", "n1")
    missing = notes(outcome)
    assert "ipmitool is not installed" in missing["bmc-events.txt"]
    assert "nvidia-bug-report.sh is not installed" in missing["nvidia-bug-report.log"]
    assert "/dev/kmsg" in missing["kernel.log"]
    assert [p.name for p in sorted(Path(asked.folder).iterdir())] == ["ev-1.tar.gz", "lock"]


def test_logs_spool_and_devices(tmp_path: Path, order: Callable[..., Order]) -> None:
    (tmp_path / "dev/kmsg").write_text(f"6,1,2,-;NVRM: Xid 79\n6,2,3,-;start api_key={HIDDEN} x\n")
    (tmp_path / "var/log/fm.log").write_text("y" * 100 + "\nlast line\n")
    lines = [spooled("log", NOW_UNIX_S - 4000, line="too old")]
    lines.append(spooled("sample", NOW_UNIX_S - 20, device="gpu:0", uuid="GPU-1", v={"ecc": 2, "temp_c": 40}))
    lines.append(spooled("sample", NOW_UNIX_S - 10, device="gpu:0", v={"temp_c": 70}))
    lines.append(spooled("log", NOW_UNIX_S - 5, line=f'run --password "{HIDDEN}" now', token=HIDDEN))
    key = ["-----BEGIN RSA PRIVATE KEY-----", *["app: " + HIDDEN * 4] * 3, "-----END RSA PRIVATE KEY-----"]
    between = "NVRM: Xid 79"
    lines += [spooled("log", NOW_UNIX_S - 4, source="a", line=line) for line in [*key[:2], between, *key[2:]]]
    lines.append(spooled("log", NOW_UNIX_S - 4, source="b", line="sha1 " + "a" * 40))
    (tmp_path / "spool/00000000000000000001.jsonl").write_text("".join(lines) + '{"torn')
    asked = order(logs=["/var/log/fm.log", "/var/log/none.log"])
    outcome = gather(asked)
    found = unpacked(asked, outcome)
    assert b"Xid 79" in found["kernel.log"]
    assert found["logs/0-var_log_fm.log"].endswith(b"last line\n")
    assert "No such file" in notes(outcome)["logs/1-var_log_none.log"]
    assert len(found["spool.jsonl"].splitlines()) == 10
    assert between.encode() in found["spool.jsonl"]
    assert b"a" * 40 in found["spool.jsonl"]
    assert all(json.loads(line) for line in found["spool.jsonl"].splitlines())
    device = json.loads(found["devices.json"])["gpu:0"]
    assert (device["uuid"], device["v"]) == ("GPU-1", {"ecc": 2, "temp_c": 70})
    assert HIDDEN.encode() not in b"".join(found.values())


def test_the_end_of_a_kernel_log_file_where_the_ring_may_not_be_read(
    tmp_path: Path, order: Callable[..., Order], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "LOG_BYTES", 64)
    (tmp_path / "var/log/messages").write_text("".join(f"kernel: line {n:04}\n" for n in range(100)))
    asked = order()
    outcome = gather(asked)
    assert unpacked(asked, outcome)["kernel.log"].splitlines()[-1] == b"kernel: line 0099"
    assert "cut: the last 64 of" in notes(outcome)["kernel.log"]


def test_a_rank_has_its_stacks_and_its_flight_recorder(tmp_path: Path, order: Callable[..., Order]) -> None:
    argv = [sys.orig_argv[0], "-c", "import sys; sys.stdin.read()", "--api-key", HIDDEN]
    dump = tmp_path / "fr_3"
    dump.write_bytes(b"\x80\x02]q\x00.")
    (tmp_path / "link_3").symlink_to(dump)
    env = {
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "fr_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "link_"),
    }
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        rank = RankProcess(job="j", rank=3, pid=process.pid, state="training", argv=argv, env=env)
        gone = RankProcess(job="j", rank=4, pid=2**22 + 1, state="lost")
        asked = order(ranks=[rank, gone])
        outcome = gather(asked)
        process.communicate(b"")
    found, told = unpacked(asked, outcome), notes(outcome)
    stack = found[f"stacks/j-3-{process.pid}.txt"].decode()
    assert f"-- thread {process.pid}" in stack
    assert "wchan" in stack
    assert "py-spy is not installed" in told[f"stacks/j-3-{process.pid}.txt"]
    assert "No such" in told[f"stacks/j-4-{gone.pid}.txt"]
    assert found[f"flight-recorder/j-3-{process.pid}-torch_fr_dump_temp_file"] == dump.read_bytes()
    assert f"flight-recorder/j-3-{process.pid}-torch_nccl_debug_info_temp_file" not in found, (
        "links are not followed"
    )
    assert HIDDEN.encode() not in b"".join(found.values())


def test_a_jobs_name_leads_nowhere_in_the_archive(order: Callable[..., Order]) -> None:
    rank = RankProcess(job="../../etc/x\n", rank=0, pid=os.getpid(), state="training")
    over = RankProcess(job="j", rank=1, pid=os.getpid(), state="finished")
    asked = order(ranks=[rank, over])
    stacks = [name for name in unpacked(asked, gather(asked)) if name.startswith("stacks/")]
    assert stacks == [f"stacks/.._.._etc_x_-0-{os.getpid()}.txt"]


def test_py_spy_is_asked_without_stopping_the_process(tmp_path: Path, order: Callable[..., Order]) -> None:
    program(tmp_path, "py-spy", 'echo "frames of $@"')
    rank = RankProcess(job="j", rank=0, pid=os.getpid(), state="training")
    asked = order(ranks=[rank])
    outcome = gather(asked)
    name = f"stacks/j-0-{os.getpid()}.txt"
    assert f"frames of dump --nonblocking --pid {os.getpid()}".encode() in unpacked(asked, outcome)[name]
    assert notes(outcome)[name] == ""


def test_programs_of_the_node(tmp_path: Path, order: Callable[..., Order]) -> None:
    program(tmp_path, "ipmitool", f'echo "1 | PSU lost | $1 $2"; echo "password: {HIDDEN}"')
    report = f'printf "report\\nAWS_SECRET={HIDDEN}\\n" | gzip > "$3.gz"'
    program(tmp_path, "nvidia-bug-report.sh", report)
    asked = order()
    found = unpacked(asked, gather(asked))
    assert found["bmc-events.txt"] == f"1 | PSU lost | sel elist\npassword: {GONE}\n".encode()
    assert found["nvidia-bug-report.log"] == f"report\nAWS_SECRET={GONE}\n".encode()


def test_a_program_that_hangs_or_floods_is_killed_and_named(
    tmp_path: Path, order: Callable[..., Order], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "BMC_S", 0.3)
    monkeypatch.setattr(collect, "LARGE_BYTES", 100_000)
    program(tmp_path, "ipmitool", "echo begun; sleep 1000 & sleep 1000")
    program(tmp_path, "nvidia-bug-report.sh", "exec yes > $3")
    asked = order()
    outcome = gather(asked)
    found, told = unpacked(asked, outcome), notes(outcome)
    assert found["bmc-events.txt"] == b"begun\n"
    assert "did not end within" in told["bmc-events.txt"]
    assert "told more than 100000 bytes" in told["nvidia-bug-report.log"]
    assert len(found["nvidia-bug-report.log"]) == 100_000
    assert not tools._running


def test_the_whole_has_bounds_too(tmp_path: Path, order: Callable[..., Order]) -> None:
    (tmp_path / "var/log/messages").write_text("kernel: a line\n" * 1000)
    late = notes(gather(order(deadline_s=0.0)))
    assert set(late.values()) == {"left out: the whole had no time left"}
    asked = order(bytes_max=1000, status={"node": "n" * 986})
    outcome = gather(asked)
    assert sum(item.bytes for item in outcome.items) <= 1000
    assert notes(outcome)["bmc-events.txt"] == "left out: the whole had no room left"


def test_one_at_a_time_leftovers_go_and_eight_archives_stay(order: Callable[..., Order]) -> None:
    folder = Path(order().folder)
    (folder / "work-old").mkdir(parents=True)
    (folder / "old.part").touch()
    for number in range(10):
        assert gather(order(id=f"ev-{number}")).error == ""
    kept = sorted(path.name for path in folder.glob("*"))
    assert kept == [*(f"ev-{number}.tar.gz" for number in range(2, 10)), "lock"]
    (folder / "ev-y.tar.gz").mkdir()
    assert "cannot be written" in gather(order(id="ev-y")).error
    (folder / "ev-y.tar.gz").rmdir()
    assert sorted(path.name for path in folder.glob("*")) == kept, "nothing goes for one that did not come"
    os.utime(folder / "ev-5.tar.gz", (1, 1))
    os.utime(folder / "ev-9.tar.gz", (2**33, 2**33))  # made before the clock was set back
    assert gather(order(id="ev-z")).error == ""
    assert {path.name for path in folder.glob("*")} == {*kept, "ev-z.tar.gz"} - {"ev-5.tar.gz"}
    holder = (
        "import fcntl,sys; f=open(sys.argv[1]); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"
    )
    argv = [sys.orig_argv[0], "-c", holder, str(folder / "lock")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        assert "another collection is at work" in gather(order(id="ev-x")).error
        other.communicate(b"")


def test_what_a_program_hides_in_a_folder_counts(tmp_path: Path, order: Callable[..., Order]) -> None:
    program(tmp_path, "ipmitool", 'mkdir "$TMPDIR/a"; yes > "$TMPDIR/a/big"')
    outcome = gather(order())
    assert "told more than" in notes(outcome)["bmc-events.txt"]


def test_a_folder_that_is_none_is_a_clear_refusal(tmp_path: Path, order: Callable[..., Order]) -> None:
    (tmp_path / "evidence").write_text("in the way")
    assert "cannot be written" in gather(order()).error


def test_a_torn_bug_report_is_kept_as_far_as_it_goes(tmp_path: Path, order: Callable[..., Order]) -> None:
    whole = gzip.compress(os.urandom(50_000).hex().encode())
    (tmp_path / "torn.gz").write_bytes(whole[:-2000])
    program(tmp_path, "nvidia-bug-report.sh", f'cp {tmp_path}/torn.gz "$3.gz"')
    asked = order()
    outcome = gather(asked)
    assert notes(outcome)["nvidia-bug-report.log"] == "torn"
    assert len(unpacked(asked, outcome)["nvidia-bug-report.log"]) > 50_000


@pytest.mark.parametrize(
    "text",
    [
        "API_KEY={}",
        "export WANDB_API_KEY='{}'",
        '"hf_token": "{}"',
        r'{{"line":"password=\"{}\""}}',
        "--api-key {}",
        "--db.password={}",
        "Authorization: Bearer {}",
        "curl -H 'X: Bearer {}'",
        "Authorization: Token {}",
        'Authorization: Digest username="bob", response="{}"',
        "https://bob:{}@host/x",
        "redis://:{}@host:6379/0",
        "https://{}@host/x",
        "postgres://bob:a@{}@host/x",
        "postgres://bob:a/{}@host/x",
        "PASSWORD=a,{}",
        "PASSWORD=a;{}",
        "password='a''{}'",
        'password: "a\\"{}"',
        "password => '{}'",
        "PASSWORD=$'{}'",
        "password:\n  {}",
        "PASSWORD=\\\n  {}",
        "--api-key -{}",
        "https://host/x?X-Amz-Signature={}&y=1",
        "ASIA0123456789ABCDEF, ghp_012345678901234567890123{0}, eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{0}",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n{}\n-----END PGP PRIVATE KEY BLOCK-----",
        "{0}\nx: AAAABBBBCCCCDDDDEEEEFFFF\n{0}\n-----END EC PRIVATE KEY-----",
        'PASSPHRASE="{} and more',
        "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_is_taken_out(text: str) -> None:
    told = redacted_text(text.format(HIDDEN))
    assert HIDDEN not in told
    assert GONE in told


def test_what_is_no_secret_stays() -> None:
    for text in (
        "NVRM: Xid (PCI:0000:4e:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
        "usb 1-1: new device at https://host:8080/x",
        "pcieport 0000:00:1c.0: AER: Corrected error received",
        "mail to bob@host from https://host:8080/a@b or //host",
        "Xid 79\n-----END CERTIFICATE-----",
    ):
        assert redacted_text(text) == text
    assert redacted({"password": "x", "n": 3, "deep": [{"k": "token=x"}]}) == {
        "password": GONE,
        "n": 3,
        "deep": [{"k": f"token={GONE}"}],
    }
    assert redacted({"keys": ["x"], "auth": {"a": "x"}, "tokens": 7, "pass": None}) == {
        "keys": GONE, "auth": GONE, "tokens": 7, "pass": None,
    }  # fmt: skip
    assert redacted_text("password=x,xid=79 key: 'a', next") == f"password={GONE},xid=79 key: {GONE}, next"
    assert redacted_argv(["train", "--auth-token", "x", "--lr", "1", "--key", "--flag"]) == [
        "train", "--auth-token", GONE, "--lr", "1", "--key", "--flag",
    ]  # fmt: skip
    assert redacted_argv(["x", "--password=a b", "API_KEY=a b", "--token", "-a"]) == [
        "x", f"--password={GONE}", f"API_KEY={GONE}", "--token", GONE,
    ]  # fmt: skip


@given(st.text(max_size=200), st.sampled_from(["KEY=", "token: ", "--my-secret ", "PASSWD=", "creds='"]))
def test_no_surroundings_bring_a_secret_back(around: str, name: str) -> None:
    assert HIDDEN not in redacted_text(f"{around}\n{name}{HIDDEN}\n{around}")


@given(st.integers(0, 200_000), st.integers(0, 200_000))
@settings(max_examples=20)
def test_a_long_text_is_searched_whole(before: int, after: int) -> None:
    lines = "a line of a log\n"
    text = f"{lines * (before // 16)}token={HIDDEN}\n{'x' * after}\n"
    assert redacted_text(text) == text.replace(HIDDEN, GONE)
    endless = f"{'x' * before} token={HIDDEN} {'y' * after}"
    assert redacted_text(endless) == endless.replace(HIDDEN, GONE)
