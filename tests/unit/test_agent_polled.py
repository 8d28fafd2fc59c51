"""What asks a source: with a deadline, in a thread, and what it tells where a read hangs or fails."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gridagent.errors import ConfigError
from gridagent.home import Home
from gridagent.telemetry import Reading, open_source
from gridagent.telemetry.files import open_files
from gridagent.telemetry.polled import Polled, Probe
from gridagent.telemetry.tree import Tree, sample

#: A deadline for what takes milliseconds on a machine at rest.
PATIENCE_S = 30.0


def states(readings: list[Reading]) -> list[str]:
    return [reading.v["state"] for reading in readings if reading.kind == "note"]


async def following(source: AsyncIterator[Reading], enough: Callable[[Reading], bool]) -> list[Reading]:
    found = []
    async with asyncio.timeout(PATIENCE_S):
        async for reading in source:
            found.append(reading)
            if enough(reading):
                break
    return found


def test_a_read_that_hangs_is_told_and_not_repeated_and_the_loop_goes_on(tmp_path: Path) -> None:
    net = tmp_path / "sys/class/net/e0"
    (net / "device").mkdir(parents=True)
    (net / "operstate").write_text("up\n")
    drops = net / "carrier_down_count"
    drops.write_text("3\n")
    source = open_source(f"ethernet?root={tmp_path}&interval=0.1&deadline=0.2", Home(tmp_path), "n")

    async def main() -> None:
        stream = source.__aiter__()
        first = await following(stream, lambda reading: True)
        assert first[0].v["v"]["link_downed_total"] == 3
        drops.unlink()
        os.mkfifo(drops)  # opening it waits for a writer
        found = await following(stream, lambda reading: reading.v.get("v", {}).get("state", 0) is None)
        assert states(found) == ["hang"]
        hang = next(reading for reading in found if reading.kind == "note")
        assert hang.v["path"] == "/sys/class/net/e0/carrier_down_count"
        assert set(found[-1].v["v"].values()) == {None}
        waiting = asyncio.ensure_future(following(stream, lambda reading: reading.kind == "sample"))
        await asyncio.wait([waiting], timeout=0.5)  # five intervals: it is not asked again, nothing is told
        assert not waiting.done()
        descriptor = os.open(drops, os.O_WRONLY)
        drops.unlink()
        drops.write_text("4\n")
        os.close(descriptor)
        after = await waiting
        assert states(after) == ["answers"]
        assert after[-1].v["v"]["link_downed_total"] == 4
        await stream.aclose()

    asyncio.run(main())


def test_the_end_of_the_agent_does_not_wait_for_a_read_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    os.mkfifo(tmp_path / "proc/loadavg")
    source = open_source(f"system?root={tmp_path}&deadline=0.05", Home(tmp_path), "n")

    async def main() -> list[Reading]:
        return await following(source.__aiter__(), lambda reading: True)

    assert states(asyncio.run(main())) == ["hang"]
    os.close(os.open(tmp_path / "proc/loadavg", os.O_RDWR | os.O_NONBLOCK))  # lets the thread go


class Script(Probe):
    """Gives what it is told to give, one entry a read."""

    INTERVAL_MIN_S = 0.0

    def __init__(self, tree: Tree, answers: list[list[Reading] | Exception]) -> None:
        super().__init__(tree)
        self.answers = answers

    def read(self) -> list[Reading]:
        answer = self.answers.pop(0) if self.answers else [Reading("note", {"state": "end"})]
        if isinstance(answer, Exception):
            raise answer
        return answer


def told_by(tmp_path: Path, *answers: list[Reading] | Exception) -> list[Reading]:
    source = Polled(Script(Tree(tmp_path, "script"), list(answers)), 0.001)

    async def main() -> list[Reading]:
        return await following(source.__aiter__(), lambda reading: reading.v.get("state") == "end")

    return asyncio.run(main())[:-1]


def test_a_device_that_vanishes_has_no_values_any_more(tmp_path: Path) -> None:
    both = [sample("nic:a", {"state": 1}), sample("nic:b", {"state": 1, "rate_gbps": 5})]
    found = told_by(tmp_path, both, [sample("nic:a", {"state": 1})], [sample("nic:a", {"state": 1})])
    gone = [reading.v["v"] for reading in found if reading.v["device"] == "nic:b"]
    assert gone == [{"state": 1, "rate_gbps": 5}, {"state": None, "rate_gbps": None}]


def test_a_read_that_fails_is_told_once_and_tried_again(tmp_path: Path) -> None:
    found = told_by(tmp_path, OSError(5, "I/O"), OSError(5, "I/O"), [sample("node", {"load1": 1})])
    assert states(found) == ["failed"]
    assert found[-1].v["v"] == {"load1": 1}


def test_the_stream_of_a_log_keeps_its_place_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("b-1\n")
    now_us = int(time.monotonic() * 1e6)
    records = f"4,1,{now_us},-;one\n4,2,{now_us},-;two\n"
    (tmp_path / "dev/kmsg").write_text(f"plain text, as a stand-in may have\n{records}")

    async def main() -> list[Reading]:
        source = open_source(f"kmsg?root={tmp_path}&interval=0.05", Home(tmp_path), "n")
        found: list[Reading] = []

        async def play() -> None:
            async for reading in source:
                found.append(reading)
                if len(found) == 3:
                    complete.set()

        complete = asyncio.Event()
        task = asyncio.ensure_future(play())
        async with asyncio.timeout(PATIENCE_S):
            await complete.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    assert [reading.kind for reading in asyncio.run(main())] == ["log"] * 3
    [cursor] = (tmp_path / "cursors").iterdir()
    assert cursor.read_bytes() == b'{"boot":"b-1","seq":2}'


def test_the_place_in_a_log_is_kept_at_once_and_never_ahead_of_the_spool(tmp_path: Path) -> None:
    """Else an end without notice loses lines, or has them told twice."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("b-1\n")
    (tmp_path / "dev/kmsg").write_text(f"4,1,{int(time.monotonic() * 1e6)},-;one\n")
    cursors = tmp_path / "cursors"

    async def main() -> None:
        source = open_source(f"kmsg?root={tmp_path}&interval=3600", Home(tmp_path), "n")
        assert isinstance(source, Polled)
        asked, stored = asyncio.Event(), asyncio.Event()

        async def store() -> None:
            asked.set()
            await stored.wait()

        async def play() -> None:
            async for _ in source:
                pass

        source.stored = store
        task = asyncio.ensure_future(play())
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()
            assert not cursors.exists()
            stored.set()
            while not list(cursors.glob("*.json")):
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


# ---- entries of agent.toml


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ethernet?intervall=1", "intervall"),
        ("ethernet?interval=0", "interval"),
        ("rapl?interval=soon", "interval"),
        ("edac?deadline=nan", "deadline"),
        ("aer?root=sys", "absolute"),
        ("log:syslog", "absolute"),
        ("kmsg?as=x", "as"),
        ("kmesg", "known: kmsg, log:FILE"),
    ],
)
def test_a_wrong_source_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_source(text, Home(tmp_path), "n1")


def test_options_of_a_source(tmp_path: Path) -> None:
    home = Home(tmp_path)
    source = open_files("ethernet?interval=3&deadline=2&root=/a:b", home, "/host")
    assert source is not None
    assert (source.interval_s, source.deadline_s, source.probe.tree.root) == (3, 2, Path("/a:b"))
    paced = open_files("nvme?interval=1", home, "/host")
    assert paced is not None
    assert (paced.interval_s, paced.probe.tree.root) == (10, Path("/host"))
    assert open_files("replay:x.jsonl", home) is None
