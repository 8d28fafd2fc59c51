"""`gridctl notify`: who is told of incidents, whether they were, and silence."""

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from gridctl.cli.console import Console, Reason, Yes, gate
from gridctl.cli.exits import Exit
from gridctl.cli.gate import consent
from gridctl.cli.output import Column, Format, say
from gridctl.cli.page import Output, Page, full, listing, local, present
from gridctl.errors import Refused
from gridctl.model.notices import NotifyStatus, SilenceWanted, in_words

if TYPE_CHECKING:
    from gridctl.notify.config import Receiver

app = typer.Typer(no_args_is_help=True, help="Who is told of incidents, and silence.")

RECEIVERS = (
    Column("name", lambda r: r.name),
    Column("kind", lambda r: r.kind),
    Column("incidents", lambda r: r.threads, " ".join),
)
LATE = (
    Column("receiver", lambda n: n.receiver),
    Column("event", lambda n: n.event),
    Column("incident", lambda n: n.thread),
    Column("attempts", lambda n: n.attempts),
    Column("next_unix_s", lambda n: n.next_unix_s, local),
    Column("why", lambda n: n.why, wraps=True),
)
SILENCES = (
    Column("id", lambda s: s.id),
    Column("of", lambda s: in_words(s.match)),
    Column("until_unix_s", lambda s: s.until_unix_s, local),
    Column("who", lambda s: s.who),
    Column("reason", lambda s: s.reason, wraps=True),
)
TOLD = (
    Column("receiver", lambda r: r["receiver"]),
    Column("kind", lambda r: r["kind"]),
    Column("answer", lambda r: r["answer"], wraps=True),
)
_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}


@app.command()
def status(context: typer.Context, output: Output = Format.table) -> None:
    """Receivers, notices that are late, and silences."""
    present(_status_page(Console.of(context).controller.notify()), output)


def _status_page(found: NotifyStatus) -> Page:
    below = [
        Page(data=None, columns=LATE, items=found.late, title="Not told yet"),
        Page(data=None, columns=SILENCES, items=found.silences, title="Silences"),
    ]
    facts = [("file", found.file), ("wrong", found.error), ("tells nobody", found.read_only)]
    empty = f"nobody is told of anything: {found.file} names no receiver"
    return Page(
        data=full(found), columns=RECEIVERS, items=found.receivers, facts=facts, below=below, empty=empty
    )


@app.command("test")
def try_out(
    context: typer.Context,
    receiver: Annotated[str, typer.Argument(help="A receiver of notify.toml; left out, all of them.")] = "",
    output: Output = Format.table,
) -> None:
    """Send a made-up incident to a receiver and end it again, from here and not by the controller.

    Secrets of env: are those of this shell. Ends with 1 where one of them does not take it.
    """
    from gridctl.notify.config import load

    console = Console.of(context)
    console.may_act("tell anybody")
    config = load(console.home.notify_file)
    chosen = [one for one in config.receiver if receiver in ("", one.name)]
    if not chosen:
        named = ", ".join(one.name for one in config.receiver) or "none"
        raise Refused("unknown-receiver", f"{console.home.notify_file} has no such receiver; it has: {named}")
    answers = [{"receiver": one.name, "kind": one.kind, "answer": _tried(one)} for one in chosen]
    present(listing(answers, TOLD, ""), output)
    if any(answer["answer"] != "ok" for answer in answers):
        raise typer.Exit(Exit.ERROR)


def _tried(receiver: "Receiver") -> str:
    import asyncio

    from gridctl.notify.duty import Notice, Subject
    from gridctl.notify.messages import write
    from gridctl.notify.post import NotTold, send

    now_unix_s = time.time()
    labels = {
        "incident": f"i-test-{now_unix_s:.0f}",
        "kind": "test",
        "severity": "info",
        "node": "",
        "rack": "",
    }
    labels |= {"job": "", "owner": ""}
    for event in ("opened", "closed"):
        subject = Subject(
            labels=labels,
            title="a test of `gridctl notify test`: nothing has happened",
            opened_unix_s=now_unix_s,
            closed=event == "closed",
        )
        notice = Notice(
            thread=subject.id, route="test", receiver=receiver.name, event=event, incidents=[subject.id]
        )
        try:
            asyncio.run(send(receiver, write(notice, [subject])))
        except NotTold as error:
            return str(error)
    return "ok"


@app.command()
def silence(
    context: typer.Context,
    of: Annotated[
        list[str], typer.Argument(help="LABEL=PATTERN, e.g. node=n3 or job='llm-*'; all must fit.")
    ],
    until: Annotated[
        str,
        typer.Option("--for", help="How long (30m, 4h, 2d), or until when (2026-12-24T18:00, local time)."),
    ],
    yes: Yes = False,
    reason: Reason = "",
    output: Output = Format.table,
) -> None:
    """Tell nobody of incidents that fit. What still holds when it ends is told then.

    Labels: incident, kind, severity, node, rack, job, owner.
    """
    console = Console.of(context)
    console.may_act("silence anything")
    match = dict(_pair(word) for word in of)
    until_unix_s = _moment(until, time.time())
    agreed = consent(in_words(match), yes=yes, reason=reason)
    wanted = SilenceWanted(match=match, until_unix_s=until_unix_s, who=agreed.who, reason=agreed.reason)
    found = console.controller.silence(wanted)
    present(listing([found], SILENCES, ""), output)
    say(f"{found.id}: nobody is told of {in_words(match)} until {local(until_unix_s)}")


@app.command()
def unsilence(
    context: typer.Context,
    silence: Annotated[str, typer.Argument(help="Its id, from `gridctl notify status`.")],
    yes: Yes = False,
    reason: Reason = "",
) -> None:
    """End a silence before its time."""
    console = Console.of(context)
    console.may_act("end a silence")
    found = console.controller.unsilence(silence, gate(consent(silence, yes=yes, reason=reason)))
    say(f"{found.id}: people are told of {in_words(found.match)} again")


def _pair(word: str) -> tuple[str, str]:
    name, equals, pattern = word.partition("=")
    if not (name and equals and pattern):
        raise typer.BadParameter(f"{word!r} is not LABEL=PATTERN")
    return name, pattern


def _moment(text: str, now_unix_s: float) -> float:
    if match := re.fullmatch(r"(\d{1,6})([mhd])", text):
        return now_unix_s + int(match[1]) * _UNITS_S[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise typer.BadParameter(
            f"{text!r} is neither 30m, 4h or 2d nor a time like 2026-12-24T18:00"
        ) from None
