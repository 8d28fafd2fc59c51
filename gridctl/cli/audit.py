"""`gridctl audit`: is the journal whole, who did what, and the way to a SIEM. Needs no controller."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gridctl.cli.console import Console
from gridctl.cli.exits import Exit
from gridctl.cli.output import Column, Format, as_json, emit, say
from gridctl.cli.page import Output, Page, full, listing, local, present
from gridctl.cli.postmortem import history_of
from gridctl.errors import ConfigError, GridctlError
from gridctl.home import Home

if TYPE_CHECKING:
    from gridctl.history.audit import Audited
    from gridctl.trust.checkpoints import AuditKey

app = typer.Typer(no_args_is_help=True, help="Is the journal whole, and who did what?")

AUDITED = (
    Column("ok", lambda a: a.ok),
    Column("path", lambda a: a.path),
    Column("records", lambda a: a.records),
    Column("first_bad", lambda a: a.first_bad),
    Column("what", lambda a: a.what),
    Column("segment", lambda a: a.segment),
    Column("offset", lambda a: a.offset),
    Column("head", lambda a: a.head),
    Column("checkpoints", lambda a: a.checkpoints),
    Column("covered_seq", lambda a: a.covered_seq),
    Column("keys", lambda a: a.keys, " ".join),
    Column("notes", lambda a: a.notes, "; ".join),
)
ACTS = (
    Column("t_unix_s", lambda a: a["t_unix_s"], local),
    Column("what", lambda a: a["what"]),
    Column("who", lambda a: a["who"]),
    Column("node", lambda a: a["node"]),
    Column("to", lambda a: a["to_nodes"], lambda names: " ".join(names or [])),
    Column("incident", lambda a: a["incident"]),
    Column("run", lambda a: a["run"]),
    Column("state", lambda a: a["state"]),
    Column("text", lambda a: a["text"], wraps=True),
)
Folder = Annotated[Path | None, typer.Option("--path", help="A journal's folder; left out, this home's.")]
FOLLOW_S = 1.0


@app.command()
def verify(
    context: typer.Context,
    path: Folder = None,
    checkpoints: Annotated[
        list[Path] | None, typer.Option("--checkpoints", help="A file of checkpoints; may be given again.")
    ] = None,
    key: Annotated[str, typer.Option("--key", help="Only checkpoints of this public key count.")] = "",
    output: Output = Format.table,
) -> None:
    """Check every byte: each hash, the chain, the order, and against signed checkpoints its length.

    Names the first record that is not what it was, and ends with 7. Without a checkpoint a loss of the
    newest records cannot show. On another machine: --path with --checkpoints and --key (`audit key`).
    """
    from gridctl.history.audit import audit

    home = Console.of(context).home
    folder = path or home.journal
    if not folder.is_dir():
        raise ConfigError(f"there is no journal in {folder}")
    files = list(checkpoints or [])
    beside = folder.parent / home.checkpoints.name
    if not files and beside.exists():
        files = [beside]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"there is no file of checkpoints {file}")
    found = audit(folder, files, key)
    present(_audited(found), output)
    if not found.ok:
        raise typer.Exit(Exit.NOT_VERIFIED)


def _audited(found: "Audited") -> Page:
    return Page(data=full(found), columns=AUDITED, items=[found], upright=True)


@app.command()
def checkpoint(context: typer.Context) -> None:
    """Sign the chain as it is now, with the audit key in the keyring, which is made if there is none.

    The file lies beside the journal; a copy elsewhere is what proves something against who owns both.
    """
    from gridagent.journal import verify as chain
    from gridctl.trust.checkpoints import append

    console = Console.of(context)
    console.may_act("sign the journal")
    home = console.home
    if not home.journal.is_dir():
        raise ConfigError(f"there is no journal in {home.journal}: has a controller run in this home?")
    found = chain(home.journal)
    if not found.ok:
        say(f"record {found.first_bad}: {found.what}: a chain that is broken is not signed")
        raise typer.Exit(Exit.NOT_VERIFIED)
    signer = _key(home, make=True)
    assert signer is not None, "it is made where there is none"
    append(home.checkpoints, signer.sign(found.records, found.head, time.time()))
    say(f"record {found.records} is signed with {signer.id}: {home.checkpoints}")


@app.command()
def key(context: typer.Context) -> None:
    """Print the public audit key, for `audit verify --key` on another machine."""
    found = _key(Console.of(context).home, make=False)
    if found is None:
        raise ConfigError("there is no audit key yet: `gridctl audit checkpoint` makes one")
    emit(f"{found.public}\n")


def _key(home: Home, *, make: bool) -> "AuditKey | None":
    from gridctl.trust import TrustError
    from gridctl.trust.checkpoints import AuditKey, account

    try:
        return AuditKey.of(account(home.trust, home.journal), make=make)
    except TrustError as error:
        raise GridctlError(f"no audit key: {error}") from None


@app.command()
def show(
    context: typer.Context,
    actor: Annotated[str, typer.Option("--actor", help="Only what this person or program did.")] = "",
    node: Annotated[str, typer.Option("--node", help="Only what concerns this node.")] = "",
    incident: Annotated[str, typer.Option("--incident", help="Only what belongs to it.")] = "",
    what: Annotated[str, typer.Option("--what", help="Only acts of this kind, e.g. handover.")] = "",
    since: Annotated[str, typer.Option("--since", help="From then on: 7d, 12h, or a date (UTC).")] = "",
    until: Annotated[str, typer.Option("--until", help="Until then, likewise.")] = "",
    output: Output = Format.table,
) -> None:
    """Who did what: confirmations, hand-overs of state, resets, freezes, acts of trust, evidence.

    Of a hand-over json and yaml have the digests of what was moved, the same at both ends.
    """
    from gridctl.history.acts import Wish, acts
    from gridctl.history.ask import moment

    now_unix_s = time.time()
    wish = Wish(
        actor=actor,
        node=node,
        incident=incident,
        what=what,
        since_unix_s=moment(since, now_unix_s) if since else None,
        until_unix_s=moment(until, now_unix_s) if until else None,
    )
    present(listing(acts(history_of(context), wish), ACTS, "nothing of that kind"), output)


@app.command()
def export(
    context: typer.Context,
    after: Annotated[int, typer.Option("--after", min=0, help="Only records with a higher number.")] = 0,
    since: Annotated[str, typer.Option("--since", help="From then on: 7d, 12h, or a date (UTC).")] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until Ctrl-C.")] = False,
) -> None:
    """Print the journal as JSON lines with ECS names, for a SIEM.

    Goes on where it stopped with --after and the `event.sequence` of the last line that was taken.
    """
    from gridagent.journal import Tail
    from gridctl.history.ask import moment
    from gridctl.history.siem import ecs

    home = Console.of(context).home
    if not home.journal.is_dir():
        raise ConfigError(f"there is no journal in {home.journal}: has a controller run in this home?")
    from_unix_s = moment(since, time.time()) if since else float("-inf")
    tail = Tail(home.journal, after, damaged=True)
    while True:
        for found in tail.new():
            if found.t_unix_s >= from_unix_s:
                emit(as_json(ecs(found), indent=None))
        sys.stdout.flush()
        if not follow:
            return
        time.sleep(FOLLOW_S)
