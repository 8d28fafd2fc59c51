"""What a training process tells its agent of its steps: each once, in the epoch that it ended in."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gridagent import wire
from gridagent.framing import Unframer
from gridagent.train.link import Link


def entry(step: int) -> wire.StepEntry:
    return wire.StepEntry(step, 1.0 + step, 0.5, None, None)


class Heard:
    """An agent that only listens."""

    def __init__(self, path: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._server.settimeout(30)

    def until_closed(self) -> list[wire.Message]:
        connection, _ = self._server.accept()
        connection.settimeout(30)
        unframer, messages = Unframer(at_agent=True), []
        with connection:
            while data := connection.recv(1 << 16):
                messages += unframer.feed(data)
        return messages

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    made = Heard(tmp_path / "agent.sock")
    yield made
    made.close()


def hello() -> wire.Hello:
    return wire.Hello(role="rank", session="s", pid=1, job="j", rank=3, epoch=9)


def progress(messages: list[wire.Message]) -> list[tuple[int, list[int]]]:
    return [(m.epoch, [e.step for e in m.entries]) for m in messages if isinstance(m, wire.Progress)]


def test_a_step_is_told_in_the_epoch_that_it_ended_in(heard: Heard, tmp_path: Path) -> None:
    link = Link(str(tmp_path / "agent.sock"), hello)
    for epoch, step in ((8, 0), (8, 1), (9, 2)):
        link.step(epoch, entry(step))
    link.flush()  # nobody is there yet: they are kept
    link.start()
    assert link.connected.wait(30)
    link.flush()
    link.flush()
    link.close(wire.Farewell(reason="finished", step=3, epoch=9))
    assert progress(heard.until_closed()) == [(8, [0, 1]), (9, [2])]


def test_no_step_is_lost_or_told_twice_while_the_training_goes_on(heard: Heard, tmp_path: Path) -> None:
    link = Link(str(tmp_path / "agent.sock"), hello)
    link.start()
    assert link.connected.wait(30)
    messages: list[wire.Message] = []
    reader = threading.Thread(target=lambda: messages.extend(heard.until_closed()))
    reader.start()
    count = 5_000
    trains = threading.Thread(target=lambda: [link.step(9, entry(step)) for step in range(count)])
    trains.start()
    while trains.is_alive():
        link.flush()
    link.close(wire.Farewell(reason="finished", step=count, epoch=9))
    reader.join(30)
    assert [step for _, steps in progress(messages) for step in steps] == list(range(count))


def test_a_defect_of_what_the_rank_says_of_itself_does_not_silence_it(heard: Heard, tmp_path: Path) -> None:
    asked: list[int] = []

    def stumbles() -> wire.Hello:
        asked.append(1)
        if len(asked) == 2:  # the first flush
            raise RuntimeError("changed size during iteration")
        return hello()

    link = Link(str(tmp_path / "agent.sock"), stumbles)
    link.step(9, entry(0))
    link.start()
    assert progress(heard.until_closed()) == []
    told: list[wire.Message] = []
    reader = threading.Thread(target=lambda: told.extend(heard.until_closed()))
    reader.start()
    while len(asked) < 3 or not link.connected.wait(30):
        time.sleep(0.01)
    link.close(wire.Farewell(reason="finished", step=1, epoch=9))
    reader.join(30)
    assert progress(told) == [(9, [0])]
