"""The command tree. Every command is a function of its group's file; nothing heavy is imported here."""

import os
import sys
from typing import Annotated, NoReturn

import typer

from gridctl.cli import (
    about,
    acts,
    ask,
    audit,
    collect,
    cordons,
    demo,
    detect,
    diagnose,
    doctor,
    freeze,
    history,
    incidents,
    journal,
    notify,
    policy,
    postmortem,
    record,
    replay,
    reset,
    review,
    risk,
    run,
    simulate,
    swap,
    trust,
    views,
    watch,
)
from gridctl.cli.console import READ_ONLY, Console
from gridctl.cli.exits import Exit, code_for
from gridctl.cli.output import open_streams, say
from gridctl.errors import GridctlError, Refused
from gridctl.home import Home

root = typer.Typer(
    name="gridctl",
    no_args_is_help=True,
    rich_markup_mode=None,  # help is plain text: it costs no import of rich, and reads the same everywhere
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Keep long GPU training runs alive: a degraded node leaves a live job, and no step is lost.",
    epilog="Exit codes: gridctl help exit-codes. Everything else: docs/cli.md.",
)


@root.callback()
def _root(
    context: typer.Context,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse whatever would change something.", envvar=READ_ONLY)
    ] = False,
) -> None:
    context.obj = Console(Home.find(), read_only=read_only)
    context.call_on_close(context.obj.close)


def _tree() -> None:
    root.command()(trust.init)
    root.command()(trust.enroll)
    root.command()(trust.grant)
    root.command()(trust.revoke)
    root.command()(views.fleet)
    root.command()(views.nodes)
    root.command()(views.jobs)
    root.command()(views.spares)
    root.add_typer(swap.app, name="swap")
    root.add_typer(reset.app, name="reset")
    root.add_typer(run.app, name="run")
    root.command()(freeze.freeze)
    root.command()(freeze.thaw)
    root.command()(cordons.uncordon)
    root.command()(incidents.incidents)
    for verb in (*acts.VERBS, *postmortem.VERBS):
        incidents.app.command()(verb)
    root.add_typer(incidents.app, name="incident")
    root.add_typer(journal.app, name="journal")
    root.add_typer(audit.app, name="audit")
    root.add_typer(notify.app, name="notify")
    root.add_typer(history.app, name="history")
    root.command()(ask.ask)
    root.command()(ask.sql)
    root.command()(diagnose.diagnose)
    root.command()(risk.risk)
    root.command()(review.review)
    root.command()(collect.collect)
    root.command()(record.record)
    root.command()(replay.replay)
    root.add_typer(policy.app, name="policy")
    root.command()(simulate.simulate)
    root.add_typer(detect.app, name="detect")
    root.command()(demo.demo)
    root.command()(watch.watch)
    root.command()(doctor.doctor)
    root.command()(about.version)
    root.add_typer(about.app, name="help")


_tree()


def invoke() -> NoReturn:
    """Runs the command line of this process and ends it with a documented exit code."""
    open_streams()
    # Bytes that are no text stay visible and harm nothing: a freeze must not fail over its reason.
    sys.argv[1:] = [os.fsencode(word).decode(errors="replace") for word in sys.argv[1:]]
    try:
        root(prog_name="gridctl")
    except GridctlError as error:
        say(f"gridctl: {error}")  # one line, whatever somebody has typed
        for note in getattr(error, "__notes__", ()):
            for line in note.splitlines():
                say(line)
        if isinstance(error, Refused):
            for line in dict.fromkeys(
                f"  {b.code}: {b.text}" for b in error.blockers if b.text != error.text
            ):
                say(line)
        sys.exit(code_for(error))
    except OSError as error:
        say(f"gridctl: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        sys.exit(Exit.ERROR)
    sys.exit(Exit.OK)
