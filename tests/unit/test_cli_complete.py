"""Completion: live names within a bound, the last answer where nobody answers, and never an error."""

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gridctl.cli import complete


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="g"))
    monkeypatch.setenv("GRIDCTL_HOME", str(folder))
    yield folder
    shutil.rmtree(folder)


class Answering:
    """A Unix socket that gives every caller the same bytes, then closes; `None` never answers."""

    def __init__(self, home: Path, answer: bytes | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(home / "controller.sock"))
        self._socket.listen()
        self._answer = answer
        self._open: list[socket.socket] = []
        self.asked: list[bytes] = []
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Answering":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for connection in self._open:
            connection.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            self.asked.append(connection.recv(4096))
            if self._answer is not None:
                connection.sendall(self._answer)
                connection.close()


def answer(items: object) -> bytes:
    return b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + json.dumps(items).encode()


def grow_old(path: Path, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(path, (then, then))


def test_names_come_from_the_controller_then_from_the_last_answer(home: Path) -> None:
    with Answering(home, answer([{"name": "node-a"}, {"name": "node-b"}, {"name": "other"}])) as controller:
        assert complete.nodes("node") == ["node-a", "node-b"]
        assert controller.asked[0].startswith(b"GET /v1/view/nodes HTTP/1.0\r\n")
    cache = home / "completion-nodes.json"
    grow_old(cache, 60)
    assert complete.nodes("o") == ["other"]
    grow_old(cache, complete.STALE_S + 60)
    assert complete.nodes("o") == []


def test_a_second_tab_does_not_ask_again(home: Path) -> None:
    (home / "completion-runs.json").write_text('["r1"]')
    assert complete.runs("") == ["r1"]


def test_names_that_a_shell_would_read_as_something_else_are_left_out(home: Path) -> None:
    names = ["ok-1", "a b", "$(reboot)", "x;y", "\x1b[2J", "`id`", ""]
    with Answering(home, answer([{"id": name} for name in names])):
        assert complete.plans("") == ["ok-1"]


@pytest.mark.parametrize(
    "garbage",
    [b"", b"HTTP/1.0 500 no\r\n\r\n[]", b"HTTP/1.0 200 OK\r\n\r\n{]", answer({"x": 1}), answer([1])],
)
def test_garbage_is_silence(home: Path, garbage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with Answering(home, garbage):
        assert complete.jobs("") == []
    assert capfd.readouterr() == ("", "")


def test_a_controller_that_does_not_answer_is_not_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    settimeout = socket.socket.settimeout

    def noted(self: socket.socket, value: float) -> None:
        waits_s.append(value)
        settimeout(self, value)

    monkeypatch.setattr(socket.socket, "settimeout", noted)
    with Answering(home, None):
        assert complete.incidents("") == []
    assert waits_s
    assert max(waits_s) <= complete.BOUND_S


def test_without_a_home_there_is_nothing_and_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRIDCTL_HOME", "/nonexistent/" + "x" * 200)
    assert complete.nodes("") == []
