"""`gridctl incident note|link|ack|assign|close|reopen|merge`: what people make of an incident."""

import enum
import sys
from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console, Reason, Yes
from gridctl.cli.gate import asked, refuse_unaskable, who
from gridctl.cli.output import say
from gridctl.model.runs import Act, Incident

Id = Annotated[str, typer.Argument(metavar="ID", help="The incident.", autocompletion=complete.incidents)]

#: More than a note may have: the controller says so then.
_READ_BYTES_MAX = 1 << 17


class Verdict(enum.StrEnum):
    """What an incident was, in a person's words."""

    true_fault = "true-fault"
    false_alarm = "false-alarm"
    unknown = "unknown"


def note(
    context: typer.Context,
    incident: Id,
    text: Annotated[str, typer.Argument(help="The words; - reads them from stdin.")],
) -> None:
    """Write a note into the incident's timeline."""
    console = _acting(context)
    if text == "-":
        text = sys.stdin.buffer.read(_READ_BYTES_MAX).decode(errors="replace")
    console.controller.act(incident, "note", Act(who=who(), reason=text.strip()))
    say(f"{incident}: noted")


def link(
    context: typer.Context,
    incident: Id,
    address: Annotated[str, typer.Argument(metavar="URL", help="https://...")],
    yes: Yes = False,
    reason: Reason = "",
) -> None:
    """Link a ticket, a dashboard, a document."""
    _act(context, incident, "link", yes, reason, address)
    say(f"{incident}: linked")


def ack(context: typer.Context, incident: Id, yes: Yes = False, reason: Reason = "") -> None:
    """Say that you have it in hand: nobody else is called for it.

    Detection goes on adding to it.
    """
    found = _act(context, incident, "ack", yes, reason)
    say(f"{incident}: in the hands of {found.acked_by}")


def assign(
    context: typer.Context,
    incident: Id,
    person: Annotated[str, typer.Argument(help="Whose it is from now on.")],
    yes: Yes = False,
    reason: Reason = "",
) -> None:
    """Make it somebody's."""
    found = _act(context, incident, "assign", yes, reason, person)
    say(f"{incident}: assigned to {found.assigned_to}")


def close(
    context: typer.Context,
    incident: Id,
    verdict: Annotated[Verdict, typer.Option("--verdict", help="What it was.")],
    yes: Yes = False,
    reason: Reason = "",
) -> None:
    """Close it, and say what it was; also of one that has closed by itself.

    What is found on the node after that opens another incident.
    """
    _act(context, incident, "close", yes, reason, verdict.name)
    say(f"{incident}: closed, {verdict}")


def reopen(context: typer.Context, incident: Id, yes: Yes = False, reason: Reason = "") -> None:
    """Open a closed or merged one again."""
    _act(context, incident, "reopen", yes, reason)
    say(f"{incident}: open")


def merge(
    context: typer.Context,
    incident: Id,
    into: Annotated[
        str, typer.Option("--into", help="The one that stays.", autocompletion=complete.incidents)
    ],
    yes: Yes = False,
    reason: Reason = "",
) -> None:
    """Close it as a part of another one; it stays readable and points there."""
    _act(context, incident, "merge", yes, reason, into)
    say(f"{incident}: closed, a part of {into}")


def _act(
    context: typer.Context, incident: str, verb: str, yes: bool, reason: str, value: str = ""
) -> Incident:
    """Does it. A reason is asked for where there is somebody to ask; no name is typed: it can be undone."""
    console = _acting(context)
    refuse_unaskable(yes=yes, reason=reason)
    why = reason.strip() or asked("reason: ")
    return console.controller.act(incident, verb, Act(who=who(), reason=why, value=value.strip()))


def _acting(context: typer.Context) -> Console:
    console = Console.of(context)
    console.may_act("change an incident")
    return console


VERBS = (note, link, ack, assign, close, reopen, merge)
