"""`gridctl init`, `gridctl enroll` and `gridctl revoke`: whom the fleet trusts."""

import getpass
import json
import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console, Reason, Yes
from gridctl.cli.gate import consent
from gridctl.cli.output import Column, Format, emit, say
from gridctl.cli.page import Output, Page, present
from gridctl.errors import GridctlError

ENROLLED = tuple(Column(name, itemgetter(name)) for name in ("node", "url", "token"))


@contextmanager
def _trust_errors() -> Iterator[None]:
    from gridctl.trust import TrustError

    try:
        yield
    except TrustError as error:
        raise GridctlError(str(error)) from error


def init(
    context: typer.Context,
    fleet: Annotated[str, typer.Argument(help="The fleet's name; it stands in every certificate.")] = "fleet",
    renew_issuer: Annotated[
        bool, typer.Option("--renew-issuer", help="Replace the issuer of this fleet before its 90 days end.")
    ] = False,
) -> None:
    """Make a fleet: a private CA and your certificate.

    The root key goes into the keyring of this system. Where no keyring service runs, it
    goes to a file that only a passphrase opens.
    """
    console = Console.of(context)
    console.may_act("make a fleet")
    home = console.home
    ask = _ask if sys.stdin.isatty() else None
    with _trust_errors():
        from gridctl.trust import Authority

        if renew_issuer:
            Authority(home.trust).renew_issuer(ask)
            say(f"{home.trust}: the issuer is new")
            return
        made = Authority.init(home.trust, fleet, ask=ask, say=say)
    if not home.fleet_file.exists():
        _write(home.fleet_file, f"[fleet]\nname = {_toml(made.fleet)}\n")
    say(f"fleet {made.fleet}: {home.trust}, {home.fleet_file}. Next: gridctl enroll NODE")


def enroll(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="The node's name.")],
    address: Annotated[
        str, typer.Option(help="HOST or HOST:PORT of its agent; left out, the name and port 7443.")
    ] = "",
    rack: Annotated[str, typer.Option(help="The rack that it stands in.")] = "",
    controller: Annotated[
        str, typer.Option(help="URL where nodes join; left out, that of the controller that serves now.")
    ] = "",
    output: Output = Format.table,
) -> None:
    """Add a node: prints a one-time token for `gridagent join`.

    The node is written to fleet.toml. The token is good for an hour.
    """
    from gridctl.control.settings import load_fleet

    console = Console.of(context)
    console.may_act("enrol a node")
    known = {entry.name: entry.url for entry in load_fleet(console.home).node}
    with _trust_errors():
        from gridctl.trust import Authority

        token = Authority(console.home.trust).enroll(node, address, controller)
    url = f"https://{token.listen}"
    if known.get(node, url) != url:
        say(f"{console.home.fleet_file} has {node} at {known[node]}; if that is wrong now, edit it")
    if node not in known:
        entry = f"\n[[node]]\nname = {_toml(node)}\nurl = {_toml(url)}\nrack = {_toml(rack)}\n"
        _write(console.home.fleet_file, console.home.fleet_file.read_text(encoding="utf-8") + entry)
    found = {"node": node, "url": url, "token": token.encode()}
    if output is Format.table:
        emit(found["token"] + "\n")
    else:
        present(Page(data=found, columns=ENROLLED, items=[found]), output)
    say(f"On {node}: gridagent join TOKEN, then gridagent serve. The token works once, within an hour.")


def revoke(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(help="A node, operator/NAME, viewer/NAME or a serial.", autocompletion=complete.nodes),
    ],
    cause: Annotated[str, typer.Option(help="As in RFC 5280, e.g. keyCompromise.")] = "unspecified",
    yes: Yes = False,
    reason: Reason = "",
) -> None:
    """Revoke every certificate and open token of a party."""
    console = Console.of(context)
    console.may_act("revoke a certificate")
    agreed = consent(target, yes=yes, reason=reason)
    with _trust_errors():
        from gridctl.trust import Authority

        serials = Authority(console.home.trust).revoke(target, cause)
    say(f"{len(serials)} newly revoked by {agreed.who}: {agreed.reason}")
    emit("".join(f"{serial}\n" for serial in serials))


def _ask(prompt: str) -> str:
    try:
        return getpass.getpass(prompt)
    except EOFError:
        raise GridctlError("the input ended before a passphrase: nothing was made") from None


def _toml(text: str) -> str:
    """A basic string of TOML: JSON's escapes are the same, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write(path: Path, text: str) -> None:
    """Replaces the file at once, and never with something that is no TOML."""
    tomllib.loads(text)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
