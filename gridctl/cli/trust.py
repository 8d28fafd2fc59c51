"""`gridctl init`, `enroll`, `grant` and `revoke`: whom the fleet trusts."""

import getpass
import json
import os
import stat
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console, Reason, Yes
from gridctl.cli.gate import consent, who
from gridctl.cli.output import Column, Format, emit, say
from gridctl.cli.page import Output, Page, local, present
from gridctl.errors import GridctlError, Refused, UsageError
from gridctl.home import Home

if TYPE_CHECKING:
    from gridctl.trust.acts import What

ENROLLED = tuple(Column(name, itemgetter(name)) for name in ("node", "url", "token"))


class Role(StrEnum):
    """What a person's certificate allows."""

    operator = "operator"
    viewer = "viewer"


PassphraseFile = Annotated[
    str,
    typer.Option(
        help="Where no keyring runs: a file, or - for stdin, whose first line is the passphrase.",
        show_default=False,
    ),
]


@contextmanager
def _trust_errors() -> Iterator[None]:
    from gridctl.trust import NotIssued, NotUsable, TrustError

    try:
        yield
    except NotUsable as error:
        raise UsageError(str(error)) from error
    except NotIssued as error:
        raise Refused("unknown-party", str(error)) from error
    except TrustError as error:
        raise GridctlError(str(error)) from error


def init(
    context: typer.Context,
    fleet: Annotated[str, typer.Argument(help="The fleet's name; it stands in every certificate.")] = "fleet",
    renew_issuer: Annotated[
        bool, typer.Option("--renew-issuer", help="Replace the issuer of this fleet before its 90 days end.")
    ] = False,
    passphrase_file: PassphraseFile = "",
) -> None:
    """Make a fleet: a private CA and your certificate.

    The root key goes into the keyring of this system. Where no keyring service runs, it
    goes to a file that only a passphrase opens.
    """
    console = Console.of(context)
    console.may_act("make a fleet")
    home = console.home
    ask = _from_file(passphrase_file) if passphrase_file else _ask if sys.stdin.isatty() else None
    with _trust_errors():
        from gridctl.trust import Authority

        if renew_issuer:
            authority = Authority(home.trust)
            authority.renew_issuer(ask)
            _note(home, "renew-issuer", authority.fleet, serials=authority.serials())
            say(f"{home.trust}: the issuer is new")
            return
        made = Authority.init(home.trust, fleet, ask=ask, say=say)
        _note(home, "init", made.fleet, serials=made.serials())
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
        _note(console.home, "enroll", node)
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


def grant(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The colleague's name; it stands in the certificate.")],
    folder: Annotated[Path, typer.Argument(help="A new folder, for the colleague to use as trust/.")],
    role: Annotated[Role, typer.Option(help="What it allows: to act, or only to look.")] = Role.viewer,
    days: Annotated[float, typer.Option(help="How long it is good for: 7 to 90.")] = 30.0,
    yes: Yes = False,
    reason: Reason = "",
) -> None:
    """Give a colleague a certificate: fills a folder with a key of his own.

    Carry the folder over on a safe way and delete it here.
    """
    console = Console.of(context)
    console.may_act("give a certificate")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GridctlError(f"{folder} is there already: name a new folder")
    agreed = consent(name, yes=yes, reason=reason)
    with _trust_errors():
        from gridctl.trust import Authority, own_identity

        authority = Authority(console.home.trust)
        own = own_identity(console.home.trust)
        if (own.role, own.name) == (role, name):
            raise GridctlError(f"{role}/{name} is you: to revoke it later would take both; give another name")
        serial = authority.write_identity(folder, role.value, name, days=days)
        _note(console.home, "grant", f"{role}/{name}", agreed.who, agreed.reason, [serial])
        end = local(own_identity(folder).not_after_unix_s)
    say(
        f"{folder}: {role} {name}, until {end}. It becomes ~/.config/gridctl/trust of the colleague,"
        f" beside a copy of {console.home.fleet_file}. Delete it here."
        f" `gridctl revoke {role}/{name}` takes it back."
    )
    emit(f"{serial}\n")


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
        _note(console.home, "revoke", target, agreed.who, f"{agreed.reason} ({cause})", serials)
    say(f"{len(serials)} newly revoked by {agreed.who}: {agreed.reason}")
    emit("".join(f"{serial}\n" for serial in serials))


def _ask(prompt: str) -> str:
    try:
        return getpass.getpass(prompt)
    except EOFError:
        raise GridctlError("the input ended before a passphrase: nothing was made") from None


def _from_file(path: str) -> Callable[[str], str]:
    """Answers every question with the first line of a file that nobody else can read."""
    if path == "-" and sys.stdin.isatty():
        return _ask  # which does not show what is typed
    if path == "-":
        line = sys.stdin.buffer.readline()
    else:
        with open(path, "rb") as file:
            if stat.S_ISREG(mode := os.fstat(file.fileno()).st_mode) and mode & 0o077:
                raise GridctlError(f"others can read {path}: chmod 600 it, and think of another passphrase")
            line = file.readline()
    try:
        passphrase = line.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise GridctlError(f"the first line of {path} is no UTF-8 text, which a passphrase is") from None
    if not passphrase:
        raise GridctlError(f"the first line of {path} is empty: it is to be the passphrase")
    return lambda prompt: passphrase


def _note(
    home: Home, what: "What", target: str, by: str = "", reason: str = "", serials: Sequence[str] = ()
) -> None:
    """Leaves what was done for the journal: the controller takes it from the trust folder."""
    from gridctl.trust.acts import Act, note

    act = Act(
        what=what,
        target=target,
        who=by or who(),
        reason=reason,
        serials=list(serials),
        t_unix_s=time.time(),
    )
    note(home.trust, act)


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
