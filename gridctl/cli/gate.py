"""The gate in front of an effect: a person types a name and a reason, or a script gives --yes --reason."""

import getpass
import socket
import sys
from dataclasses import dataclass

import typer

from gridctl.cli.output import say
from gridctl.errors import Refused


@dataclass(frozen=True)
class Consent:
    """How somebody agreed. Whether it is enough is the controller's to say."""

    who: str
    reason: str
    typed: str = ""
    yes: bool = False


def who() -> str:
    """The person at this keyboard, for the journal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def refuse_unaskable(*, yes: bool, reason: str) -> None:
    """Raises what `consent` would raise without asking; for who has much to do before it asks."""
    if yes and not reason.strip():
        raise typer.BadParameter("--yes needs --reason: the journal keeps why")
    if not yes and not sys.stdin.isatty():
        raise Refused(
            "not-confirmed", "nobody to ask: stdin is no terminal; pass --yes --reason TEXT instead"
        )


def consent(name: str, *, yes: bool, reason: str) -> Consent:
    """Asks for `name` and a reason on the terminal, unless `yes` says that it was decided elsewhere.

    Raises `typer.BadParameter` for --yes without a reason, `Refused` where nobody can be asked.
    """
    refuse_unaskable(yes=yes, reason=reason)
    if yes:
        return Consent(who=who(), reason=reason.strip(), yes=True)
    say(f"To confirm, type {name} (anything else changes nothing).")
    typed = asked("name: ")
    if typed != name:
        raise Refused("not-confirmed", f"{typed!r} is not {name!r}; nothing was changed")
    reason = reason.strip() or asked("reason: ")
    if not reason:
        raise Refused("not-confirmed", "a reason is needed, the journal keeps it; nothing was changed")
    return Consent(who=who(), reason=reason, typed=typed)


def asked(prompt: str) -> str:
    """Reads one line. The prompt goes to stderr: stdout is for data."""
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise Refused("not-confirmed", "the input ended before an answer; nothing was changed")
    return line.strip()
