"""The sources of logs: the kernel's ring and files that rotate."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent.telemetry import Reading, kmsg, logfile
from gridagent.telemetry.kmsg import FIRST_S, LATE_S, Kmsg
from gridagent.telemetry.logfile import GRACE_S, OLD_MAX, LogFile
from gridagent.telemetry.logs import LINE_BYTES_MAX, LogProbe
from gridagent.telemetry.tree import Tree

#: A deadline for what takes milliseconds on a machine at rest.
PATIENCE_S = 30.0
UPTIME_S = 5000.0


def lines(readings: list[Reading]) -> list[str]:
    return [reading.v["line"] for reading in readings if reading.kind == "log"]


def states(readings: list[Reading]) -> list[str]:
    return [reading.v["state"] for reading in readings if reading.kind == "note"]


class Clock:
    def __init__(self) -> None:
        self.now_s = UPTIME_S

    def __call__(self) -> float:
        return self.now_s


# ---- the kernel's ring; a file stands for it


def record(seq: int, text: str, at_s: float = UPTIME_S) -> str:
    return f"4,{seq},{int(at_s * 1e6)},-;{text}\n SUBSYSTEM=pci\n"


class Ring:
    """A root with a kernel log and a boot, and agents that come and go."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, Clock()
        (root / "dev").mkdir()
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        self.device = root / "dev/kmsg"
        self.boot("b-1")

    def boot(self, name: str) -> None:
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"{name}\n")
        self.device.write_text("")

    def print(self, *texts: str) -> None:
        with self.device.open("a") as file:
            file.write("".join(texts))

    def agent(self) -> Kmsg:
        return Kmsg(Tree(self.root, "kmsg"), self.root / "cursors/k.json", self.clock)


def taken(probe: LogProbe) -> list[Reading]:
    return [*probe.read(), *probe.taken()]


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path)


def test_records_come_as_the_kernel_gives_them(ring: Ring) -> None:
    ring.print(record(7, "pcieport 0000:00:01.0: AER: ..."), record(8, "second"))
    agent = ring.agent()
    found = taken(agent)
    assert lines(found) == ["4,7,5000000000,-;pcieport 0000:00:01.0: AER: ...", "4,8,5000000000,-;second"]
    assert {reading.v["source"] for reading in found} == {"kmsg"}
    assert taken(agent) == []
    ring.print("4,9,5000000000,-;in two")
    assert taken(agent) == []
    ring.print(" parts\n")
    assert lines(taken(agent)) == ["4,9,5000000000,-;in two parts"]


def test_a_restarted_agent_goes_on_behind_what_was_told(ring: Ring) -> None:
    ring.print(record(1, "one"), record(2, "two"))
    agent = ring.agent()
    taken(agent)
    ring.print(record(3, "three"))
    agent.read()  # given, but the agent died before the spool had it
    agent.close()
    ring.print(record(4, "four"))
    again = ring.agent()
    assert [line[-5:] for line in lines(taken(again))] == ["three", ";four"]
    again.close()
    assert taken(ring.agent()) == []


def test_records_that_were_overwritten_meanwhile_are_told_as_lost(ring: Ring) -> None:
    ring.print(record(1, "one"))
    agent = ring.agent()
    taken(agent)
    agent.close()
    ring.device.write_text(record(41, "after a storm"))
    found = taken(ring.agent())
    assert (states(found), found[0].v["lost"]) == (["lost"], 39)
    assert len(lines(found)) == 1


def test_the_kernel_says_that_records_were_lost(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ring.agent()
    ring.print(record(1, "one"))
    taken(agent)
    answers: list[bytes | int] = [errno.EPIPE, record(6, "six").encode(), errno.EAGAIN]

    def read(_descriptor: int, _length: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer

    monkeypatch.setattr(kmsg.os, "read", read)
    found = taken(agent)
    assert (states(found), found[0].v["lost"], len(lines(found))) == (["lost"], 4, 1)


def test_how_old_a_record_is_is_not_said_by_a_clock_that_nothing_corrects(ring: Ring) -> None:
    """Months after the boot the time in a record is minutes off; what the last look did not find is new."""
    agent = ring.agent()
    ring.print(record(1, "first"))
    taken(agent)
    ring.clock.now_s += 1
    ring.print(record(2, "one", at_s=UPTIME_S - 900))
    ring.clock.now_s += LATE_S * 2
    ring.print(record(3, "two", at_s=UPTIME_S - 900))
    assert [found.v.get("late_s") for found in taken(agent)] == [LATE_S * 2 + 1] * 2
    ring.clock.now_s += 1
    ring.print(record(4, "three", at_s=UPTIME_S - 900))
    assert [found.v.get("late_s") for found in taken(agent)] == [None]


def test_after_a_reboot_everything_is_new(ring: Ring) -> None:
    ring.print(record(900, "the boot before"))
    agent = ring.agent()
    taken(agent)
    taken(agent)
    ring.boot("b-2")
    ring.print(record(0, "Linux version", at_s=1.0), record(1, "next", at_s=2.0))
    found = taken(ring.agent())
    assert len(lines(found)) == 2
    assert found[0].v["late_s"] == UPTIME_S - 1.0


def test_the_first_agent_tells_of_the_last_minutes(ring: Ring) -> None:
    ring.print(record(5, "long ago", at_s=UPTIME_S - FIRST_S - 1), record(6, "lately", at_s=UPTIME_S - 60))
    found = taken(ring.agent())
    assert [line[-6:] for line in lines(found)] == ["lately"]
    assert found[0].v["late_s"] == 60.0


def test_without_a_kernel_log_it_says_so_once_and_finds_it_later(ring: Ring) -> None:
    ring.device.unlink()
    agent = ring.agent()
    assert states(taken(agent)) == ["absent"]
    ring.clock.now_s += 60
    assert taken(agent) == []
    ring.print(record(1, "there"))
    ring.clock.now_s += 60
    assert len(lines(taken(agent))) == 1


def test_a_terminal_in_the_place_of_the_ring(ring: Ring) -> None:
    master, slave = os.openpty()
    try:
        ring.device.unlink()
        ring.device.symlink_to(os.ttyname(slave))
        agent = ring.agent()
        assert taken(agent) == []
        os.write(master, b"4,1,5000000000,-;typed\n")
        found: list[Reading] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while not found and time.monotonic() < deadline_s:
            found = taken(agent)
        assert [line.strip() for line in lines(found)] == ["4,1,5000000000,-;typed"]
        agent.close()
    finally:
        os.close(master)
        os.close(slave)


def test_the_real_ring(tmp_path: Path) -> None:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be opened here: {error.strerror}")
    probe = Kmsg(Tree("/", "kmsg"), tmp_path / "k.json", lambda: 0.0)  # so that no record is too old
    found = taken(probe)
    while probe.more:
        found += taken(probe)
    assert all(line.split(";", 1)[0].count(",") >= 3 for line in lines(found))
    probe.close()
    again = Kmsg(Tree("/", "kmsg"), tmp_path / "k.json", lambda: 0.0)
    news = taken(again)
    again.close()
    assert set(lines(news)).isdisjoint(lines(found))


def test_a_full_disk_costs_no_line(ring: Ring) -> None:
    (ring.root / "cursors").write_text("in the way")
    agent = ring.agent()
    ring.print(record(1, "one"))
    found = taken(agent)
    assert (len(lines(found)), states(found)) == (1, ["no-cursor"])
    ring.print(record(2, "two"))
    assert len(lines(taken(agent))) == 1
    assert taken(agent) == []


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_no_byte_breaks_the_kernel_log(tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]) -> None:
    ring = Ring(tmp_path_factory.mktemp("ring"))
    agent = ring.agent()
    for chunk in chunks:
        with ring.device.open("ab") as file:
            file.write(chunk)
        assert all(len(line) <= LINE_BYTES_MAX for line in lines(taken(agent)))
    agent.close()


def test_a_device_that_fails_is_opened_again_and_told_once(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = ring.agent()
    ring.print(record(1, "one"))
    found = taken(agent)
    with monkeypatch.context() as broken:
        broken.setattr(kmsg.os, "read", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        for _ in range(3):
            found += taken(agent)
            ring.clock.now_s += 60
    ring.print(record(2, "two", at_s=UPTIME_S - 2 * FIRST_S))  # old, but no more than the agent's own absence
    found += taken(agent)
    assert (states(found), len(lines(found))) == (["failed"], 2)


# ---- log files


class Log:
    """A log file with its writer, and agents that come and go."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, Clock()
        (root / "var/log").mkdir(parents=True)
        self.file = root / "var/log/fabric.log"

    def write(self, text: str) -> None:
        with self.file.open("a") as file:
            file.write(text)

    def agent(self) -> LogFile:
        tree = Tree(self.root, "log:/var/log/fabric.log")
        return LogFile(tree, "var/log/fabric.log", "fabric", self.root / "cursors/f.json", self.clock)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_a_file_is_followed_from_its_end_by_whole_lines(log: Log) -> None:
    log.write("old\n")
    agent = log.agent()
    assert taken(agent) == []
    log.write("new\nhal")
    found = taken(agent)
    assert (lines(found), found[0].v["source"]) == (["new"], "fabric")
    log.write("f\n")
    assert lines(taken(agent)) == ["half"]


def test_a_file_that_comes_later_is_read_from_its_begin(log: Log) -> None:
    agent = log.agent()
    assert states(taken(agent)) == ["absent"]
    assert taken(agent) == []
    log.write("first\n")
    assert lines(taken(agent)) == ["first"]


def test_rotation_loses_no_line_of_a_writer_that_learns_late(log: Log) -> None:
    log.write("")
    agent = log.agent()
    taken(agent)
    with log.file.open("a") as writer:
        writer.write("a\n")
        writer.flush()
        log.file.rename(log.file.with_suffix(".log.1"))
        assert lines(taken(agent)) == ["a"]  # no new file yet
        log.write("c\n")
        writer.write("b\n")
        writer.flush()
        found = taken(agent)
        assert (lines(found), states(found)) == (["b", "c"], ["rotated"])
        writer.write("late, and without an end")
    taken(agent)
    log.clock.now_s += GRACE_S
    assert lines(taken(agent)) == ["late, and without an end"]
    log.write("d\n")
    assert (lines(taken(agent)), states(taken(agent))) == (["d"], [])


@pytest.mark.parametrize("after", ["x\n", "longer than what was there before\n", ""])
def test_truncation_is_noticed_also_where_the_file_has_grown_again(log: Log, after: str) -> None:
    log.write("begin\n")
    agent = log.agent()
    taken(agent)
    log.write("told before\n")
    taken(agent)
    log.file.write_text(after)
    found = taken(agent)
    assert (lines(found), states(found)) == (after.splitlines(), ["truncated"])
    assert taken(agent) == []


def test_zeros_before_the_first_line_after_a_truncation(log: Log) -> None:
    log.write("begin\n")
    agent = log.agent()
    taken(agent)
    log.file.write_bytes(b"\0" * 6 + b"goes on\n")
    assert lines(taken(agent)) == ["goes on"]


def restarted(log: Log, meanwhile: Callable[[], None]) -> list[Reading]:
    log.write("begin\n")
    agent = log.agent()
    taken(agent)
    log.write("told\n")
    taken(agent)
    agent.close()
    log.write("untold\n")
    meanwhile()
    return taken(log.agent())


def test_a_restarted_agent_goes_on_where_it_was(log: Log) -> None:
    assert lines(restarted(log, lambda: None)) == ["untold"]


def test_a_rotation_while_no_agent_ran(log: Log) -> None:
    def rotate() -> None:
        log.file.rename(log.file.with_name("fabric.log-20330401"))
        log.write("fresh\n")

    found = restarted(log, rotate)
    assert (lines(found), states(found)) == (["untold", "fresh"], ["rotated"])


def test_rotations_while_no_agent_ran_and_a_file_that_was_packed(log: Log) -> None:
    def rotate() -> None:
        now_s = time.time()
        for number, text in enumerate(["second\n", "third\n", "fourth\n", "fresh\n"]):
            old = log.file.with_name(f"fabric.log-2033040{number}")
            log.file.rename(old)
            os.utime(old, (now_s + number, now_s + number))
            log.write(text)
        packed = log.file.with_name("fabric.log-20330402")
        packed.rename(packed.with_name(f"{packed.name}.gz"))
        log.file.with_name("fabric.log.err").write_text("another's\n")

    found = restarted(log, rotate)
    assert lines(found) == ["untold", "second", "fourth", "fresh"]
    assert states(found) == ["rotated", "lost"]


def test_rotations_between_two_looks(log: Log) -> None:
    log.write("")
    agent = log.agent()
    taken(agent)
    count = OLD_MAX + 3
    for number in range(count):  # more than are read on
        log.write(f"{number}\n")
        old = log.file.with_name(f"fabric.log.{number}")
        log.file.rename(old)
        os.utime(old, (number + 1, number + 1))
    log.write("fresh\n")
    found = taken(agent)
    assert lines(found) == ["0", *map(str, range(3, count)), "fresh"]
    assert states(found) == ["rotated", "lost"]


def test_late_lines_of_the_file_of_before_come_also_after_a_restart(log: Log) -> None:
    log.write("")
    agent = log.agent()
    taken(agent)
    with log.file.open("a") as writer:
        log.file.rename(log.file.with_name("fabric.log.1"))
        log.write("fresh\n")
        assert lines(taken(agent)) == ["fresh"]
        agent.close()
        writer.write("late\n")
        writer.flush()
        again = log.agent()
        assert lines(taken(again)) == ["late"]
        again.close()


def test_a_rotated_file_that_is_gone_is_told_as_lost(log: Log) -> None:
    def replace() -> None:
        log.file.rename(log.root / "elsewhere")
        log.write("fresh\n")

    found = restarted(log, replace)
    assert (lines(found), states(found)) == (["fresh"], ["lost"])


def test_a_truncation_while_no_agent_ran(log: Log) -> None:
    found = restarted(log, lambda: log.file.write_text("z\n") and None)
    assert (lines(found), states(found)) == (["z"], ["truncated"])


def test_what_is_no_file_is_told_once(log: Log) -> None:
    os.mkfifo(log.file)
    agent = log.agent()
    for _ in range(3):
        assert taken(agent) == []
    assert states(agent.tree.troubles()) == ["unreadable"]


def test_the_rest_of_a_line_never_passes_for_a_line(log: Log) -> None:
    """Whoever may write a long line could else make one that looks like a driver's."""
    log.write("begun before the agent came, ")
    agent = log.agent()
    taken(agent)
    log.write("NVRM: not a line\n")
    long = "x" * logfile.READ_BYTES + "NVRM: neither, " + "y" * logfile.READ_BYTES
    log.write(long)
    found = taken(agent)
    while agent.more:
        found += taken(agent)
    agent.close()
    log.write("NVRM: nor this\nnext\n")
    again = log.agent()
    found += taken(again)
    assert [line[:9] for line in lines(found)] == ["xxxxxxxxx", "next"]
    assert max(map(len, lines(found))) == LINE_BYTES_MAX
    again.close()


@given(st.lists(st.sampled_from(["write", "read", "rotate", "restart"]), max_size=30))
def test_every_line_comes_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    log = Log(tmp_path_factory.mktemp("log"))
    log.write("")
    agent = log.agent()
    told: list[str] = []
    taken(agent)
    count = rotations = 0
    for step in [*steps, "read"]:
        match step:
            case "write":
                count += 1
                log.write(f"line {count}\n")
            case "read":
                told += lines(taken(agent))
            case "rotate":
                rotations += 1
                log.file.rename(log.file.with_suffix(f".{rotations}"))
                log.write("")
                told += lines(taken(agent))
            case "restart":
                agent.close()
                agent = log.agent()
    agent.close()
    assert told == [f"line {i + 1}" for i in range(count)]


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_come_as_the_lines_that_they_are(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    log = Log(tmp_path_factory.mktemp("log"))
    log.write("")
    agent = log.agent()
    found = taken(agent)
    for chunk in chunks:
        with log.file.open("ab") as file:
            file.write(chunk)
        found += taken(agent)
    agent.close()
    whole = [line.strip(b"\0\r") for line in b"".join(chunks).split(b"\n")[:-1]]
    assert lines(found) == [line.decode(errors="replace") for line in whole if line]
