"""`gridctl freeze` and `gridctl thaw`: a stop that the agents themselves honour."""

from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console, DryRun, Reason, Yes, gate
from gridctl.cli.exits import Exit
from gridctl.cli.gate import Consent, consent
from gridctl.cli.output import Column, Format, say
from gridctl.cli.page import Output, listing, present
from gridctl.errors import GridctlError, Refused
from gridctl.model.fleet import Job, Node, several

FLEET = "fleet"

Scope = Annotated[str, typer.Argument(help="A job; left out, the whole fleet.", autocompletion=complete.jobs)]

REACHED = (Column("node", lambda r: r["node"]), Column("answer", lambda r: r["answer"]))


def freeze(
    context: typer.Context,
    scope: Scope = FLEET,
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    output: Output = Format.table,
) -> None:
    """Stop every action on the fleet or a job, at the agents.

    Training goes on, and a hand-over that is under way can still be aborted. Ends with 5 if a node
    was not reached, with 3 if all refuse it from your certificate. Works without a controller and
    with a full disk; then it is in no journal.
    """
    _set(context, scope, True, yes, reason, dry_run, output)


def thaw(
    context: typer.Context,
    scope: Scope = FLEET,
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    output: Output = Format.table,
) -> None:
    """End a freeze. Ends with 5 if a node was not reached, with 3 if all refuse it."""
    _set(context, scope, False, yes, reason, dry_run, output)


def _set(
    context: typer.Context, scope: str, frozen: bool, yes: bool, reason: str, dry_run: bool, form: Format
) -> None:
    console = Console.of(context)
    verb = "freeze" if frozen else "thaw"
    if dry_run:
        nodes = console.controller.view("nodes", Node)
        calls = [{"node": node.name, "answer": f"would POST {node.url}/v1/freeze"} for node in nodes]
        present(listing(calls, REACHED, "the fleet has no nodes"), form)
        return
    console.may_act(verb)
    agreed = consent(scope, yes=yes, reason=reason)
    later = "it is passed on once they answer"
    if frozen:
        answers, later = _stop(console, scope, agreed, later)
    else:
        answers = console.controller.thaw(scope, gate(agreed))
    present(listing(answers, REACHED, "the fleet has no nodes"), form)
    if code := _told(f"{scope}: {'frozen' if frozen else 'thawed'}", answers, later):
        raise typer.Exit(code)


def _told(done: str, answers: list[dict[str, str]], later: str) -> Exit:
    """Says what came of it, and returns how the command ends."""
    denied = [answer["node"] for answer in answers if "refused" in answer]
    lacking = [answer["node"] for answer in answers if answer["answer"] != "ok" and "refused" not in answer]
    if denied and len(denied) == len(answers):
        say(f"{done} NOWHERE: every node refuses it from this certificate, and is not asked again")
        return Exit.REFUSED
    if denied:
        say(f"{done}, but NOT on {several(denied)}: refused to this certificate, and not asked again")
    if lacking:
        say(f"{done}, but NOT on {several(lacking)}, or not for good: {later}")
    if lacking or denied:
        return Exit.UNKNOWN
    say(done)
    return Exit.OK


def _stop(console: Console, scope: str, agreed: Consent, later: str) -> tuple[list[dict[str, str]], str]:
    """Freezes through the controller, or without one: its home's disk may be full. What the agents answered,
    and what becomes of those that missed it: `later`, if there is a controller."""
    try:
        answers = console.controller.freeze(scope, gate(agreed))
        if console.controller.health()["journal_owed"]:
            say("the journal cannot be written now: the controller writes this down as soon as it can")
        if scope != FLEET and scope not in {job.name for job in console.controller.view("jobs", Job)}:
            say(f"no job named {scope} is known now: this holds for one that starts under that name")
        return answers, later
    except Refused:
        raise
    except (GridctlError, OSError) as error:
        noted = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
        lines = [str(error) or repr(error), *noted]
        why = " ".join(dict.fromkeys((lines[0], lines[-1])))  # what a controller said last ended it
        say(f"no controller passes this on: {why}")
        say("it goes from here to the agents instead, and is in no journal")

    from gridagent.wire import FreezeRequest
    from gridctl.control.freezes import freeze_directly

    request = FreezeRequest(scope=scope, frozen=True, who=agreed.who, reason=agreed.reason)
    return freeze_directly(console.home, request), "freeze again once they answer"
