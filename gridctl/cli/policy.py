"""`gridctl policy`: what a number or a kind means here, by whose word, and which rules look at it."""

import difflib
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gridctl.cli.console import Console
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, full, listing, present
from gridctl.errors import Refused

if TYPE_CHECKING:
    from gridctl.detect.policy import DetectPolicy

app = typer.Typer(no_args_is_help=True, help="What detection makes of numbers and kinds, and why.")

ROWS = (
    Column("rule", lambda r: r.rule),
    Column("kind", lambda r: r.kind),
    Column("severity", lambda r: r.severity),
    Column("action", lambda r: r.action),
    Column("preempt", lambda r: r.preempt),
    Column("when", lambda r: r.when),
    Column("fault", lambda r: r.fault),
    Column("table", lambda r: r.table),
    Column("meaning", lambda r: f"{r.meaning} [{r.source}]", wraps=True),
)
USES = (
    Column("rule", lambda u: u.rule),
    Column("table", lambda u: u.table),
    Column("says", lambda u: u.says, wraps=True),
)
_XID = re.compile(r"(?:xid[. ]?)?(\d{1,5})", re.IGNORECASE)


@app.command("list")
def list_(context: typer.Context, output: Output = Format.table) -> None:
    """Show every row of every table, with the site's own word from policy.toml on top."""
    from gridctl.detect.policy.rows import all_rows

    present(listing(all_rows(_policy(context)), ROWS, ""), output)


@app.command()
def show(
    context: typer.Context,
    what: Annotated[
        str, typer.Argument(metavar="XID|KIND", help="A number like 79, or a kind like gpu_lost.")
    ],
    output: Output = Format.table,
) -> None:
    """Show what an Xid or a kind means: its row, the row's source, the site's word, the rules that use it."""
    policy = _policy(context)
    match = _XID.fullmatch(what.strip())
    present(_of_xid(policy, int(match[1])) if match else _of_kind(policy, what), output)


def _policy(context: typer.Context) -> "DetectPolicy":
    from gridctl.control.settings import detect_policy, load_policy

    return detect_policy(load_policy(Console.of(context).home))


def _of_xid(policy: "DetectPolicy", xid: int) -> Page:
    from gridctl.detect.policy import builtin
    from gridctl.detect.policy.rows import uses, xid_entry

    row, delivered, override = xid_entry(policy, xid), xid_entry(builtin(), xid), policy.overrides.get(xid)
    looking = uses(policy, xid)
    facts: list[tuple[str, Any]] = [
        (column.heading, column.text(row)) for column in ROWS if column.title != "meaning"
    ]
    facts += [("meaning", row.meaning), ("source", row.source)]
    if override:
        changed = [
            f"{name} {getattr(delivered, name)} -> {getattr(row, name)}"
            for name in ("severity", "action", "preempt", "when")
            if getattr(delivered, name) != getattr(row, name)
        ]
        facts += [("the site says", ", ".join(changed) or "the same as delivered")]
        facts += [("delivered source", delivered.source)]
    data = {
        "xid": xid,
        "in_force": full(row),
        "delivered": full(delivered),
        "site": full(override) if override else None,
        "uses": full(looking),
    }
    return Page(data=data, columns=USES, items=looking, facts=facts, title="Rules that look at it")


def _of_kind(policy: "DetectPolicy", kind: str) -> Page:
    from gridctl.detect.policy.rows import all_rows

    every = list(all_rows(policy))
    rows = [row for row in every if row.kind == kind]
    if not rows:
        near = difflib.get_close_matches(kind, sorted({row.kind for row in every}), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`gridctl policy list` shows all"
        raise Refused("unknown-kind", f"no row is of kind {kind!r}: {hint}")
    return Page(data={"kind": kind, "rows": full(rows)}, columns=ROWS, items=rows)
