"""The gate on a real terminal (a pty), and where there is none."""

import os
import pty
import sys
from collections.abc import Iterator

import pytest
import typer

from gridctl.cli.exits import MEANINGS, Exit, code_for
from gridctl.cli.gate import consent
from gridctl.errors import ConfigError, GridctlError, Refused, Unanswered
from gridctl.model import refusals


class Terminal:
    """The person's side of stdin."""

    def __init__(self, master: int) -> None:
        self._master = master

    def types(self, text: str) -> None:
        os.write(self._master, text.encode())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    with open(slave, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield Terminal(master)
    os.close(master)


@pytest.fixture
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with open(os.devnull, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield


def test_the_right_name_and_a_reason_pass(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.types("node-b\necc storm\n")
    agreed = consent("node-b", yes=False, reason="")
    assert (agreed.typed, agreed.reason, agreed.yes) == ("node-b", "ecc storm", False)
    assert agreed.who.count("@") == 1
    assert capsys.readouterr().out == ""


def test_a_reason_on_the_command_line_is_not_asked_for_again(terminal: Terminal) -> None:
    terminal.types("node-b\n")
    assert consent("node-b", yes=False, reason="planned").reason == "planned"


@pytest.mark.parametrize(
    "typed", ["node-a\nwhy\n", "\n", "NODE-B\nwhy\n", "yes\nwhy\n", "node-b\n\n", "\x04"]
)
def test_anything_else_is_refused(terminal: Terminal, typed: str) -> None:
    terminal.types(typed)
    with pytest.raises(Refused) as caught:
        consent("node-b", yes=False, reason="")
    assert caught.value.code == "not-confirmed"
    assert code_for(caught.value) is Exit.REFUSED


def test_a_script_says_yes_and_why(no_terminal: None) -> None:
    agreed = consent("node-b", yes=True, reason=" drill ")
    assert (agreed.yes, agreed.reason, agreed.typed) == (True, "drill", "")


@pytest.mark.parametrize("reason", ["", "  "])
def test_yes_without_a_reason_is_wrong_usage(no_terminal: None, reason: str) -> None:
    with pytest.raises(typer.BadParameter):
        consent("node-b", yes=True, reason=reason)


def test_without_a_terminal_nobody_is_asked(no_terminal: None) -> None:
    with pytest.raises(Refused, match="--yes --reason"):
        consent("node-b", yes=False, reason="drill")


def test_every_refusal_has_an_exit_code_that_fits() -> None:
    codes = {code: code_for(Refused(code, "")) for code in refusals.MEANINGS}
    assert {code for code, end in codes.items() if end is Exit.NOT_FOUND} == {
        "unknown-node",
        "unknown-job",
        "unknown-plan",
        "unknown-run",
        "unknown-incident",
        "unknown-device",
        "unknown-party",
        "unknown-kind",
    }
    assert {code for code, end in codes.items() if end is Exit.UNKNOWN} == {
        "node-unreachable",
        "rank-silent",
        "outcome-unknown",
    }
    assert set(codes.values()) == {Exit.NOT_FOUND, Exit.UNKNOWN, Exit.REFUSED}


def test_other_errors_have_their_exit_codes() -> None:
    assert code_for(ConfigError("")) is Exit.USAGE
    assert code_for(Unanswered("")) is Exit.UNKNOWN
    assert code_for(GridctlError("")) is Exit.ERROR


def test_every_exit_code_has_a_meaning() -> None:
    assert list(MEANINGS) == list(Exit)
    assert all(MEANINGS.values())
