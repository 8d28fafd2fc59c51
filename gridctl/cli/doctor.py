"""`gridctl doctor`: looks at everything that must be right before it is needed, and says what to do."""

import contextlib
import time
from collections.abc import Callable, Iterator

import msgspec
import typer

import gridctl
from gridctl.cli.console import Console
from gridctl.cli.exits import Exit
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, listing, present
from gridctl.errors import GridctlError, Unanswered
from gridctl.model.fleet import Node

EXPIRY_WARN_S = 14 * 86400.0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `state`: ok, warn, fail (put it right), unknown (no answer)."""

    what: str
    state: str
    text: str


CHECKS = (
    Column("state", lambda c: c.state),
    Column("what", lambda c: c.what),
    Column("text", lambda c: c.text, wraps=True),
)


def doctor(context: typer.Context, output: Output = Format.table) -> None:
    """Check home, certificates, journal, who is told of incidents, controller and nodes.

    Ends with 7 if something must be put right.
    """
    console = Console.of(context)
    checks = [
        check for part in (_home, _trust, _journal, _people, _live) for check in _guarded(part, console)
    ]
    present(listing(checks, CHECKS, ""), output)
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(Exit.NOT_VERIFIED)


def _guarded(part: Callable[[Console], Iterator[Check]], console: Console) -> Iterator[Check]:
    """An error of a part is a finding; the other parts are looked at all the same."""
    try:
        yield from part(console)
    except (GridctlError, OSError) as error:
        yield Check(what=part.__name__.strip("_"), state="fail", text=str(error))


def _home(console: Console) -> Iterator[Check]:
    from gridctl.control.settings import load_fleet, load_policy

    home = console.home
    if home.fleet_file.is_file():
        load_fleet(home)
        load_policy(home)
        yield Check(what="home", state="ok", text=str(home.fleet_file))
    else:
        yield Check(what="home", state="fail", text=f"{home.fleet_file} is missing: run `gridctl init`")
    with contextlib.suppress(FileNotFoundError):
        if home.state.stat().st_mode & 0o077:
            yield Check(
                what="home", state="warn", text=f"others can look into {home.state}: run chmod 700 on it"
            )


def _trust(console: Console) -> Iterator[Check]:
    from gridctl.trust import Authority, TrustError, expiry_warnings, permission_warnings

    folder = console.home.trust
    fleet = "of somebody else: this home can neither enrol nor revoke"
    if (folder / "issuer.crt").exists() or not (folder / "operator.crt").exists():
        try:
            fleet = Authority(folder).fleet
        except TrustError as error:
            yield Check(what="trust", state="fail", text=str(error))
            return
    now = time.time()
    expired = [(line, "warn" if " expires in " in line else "fail") for line in expiry_warnings(folder, now)]
    readable = [(line, "fail") for line in permission_warnings(folder)]
    for line, state in [*expired, *readable]:
        yield Check(what="trust", state=state, text=line)
    if not expired and not readable:
        yield Check(what="trust", state="ok", text=f"fleet {fleet}, certificates and keys in {folder}")


def _journal(console: Console) -> Iterator[Check]:
    from gridagent.journal import verify

    folder = console.home.journal
    if not folder.is_dir():
        yield Check(what="journal", state="warn", text=f"none yet in {folder}; a controller makes it")
        return
    found = verify(folder)
    if not found.ok:
        yield Check(what="journal", state="fail", text=f"record {found.first_bad}: {found.what}")
    else:
        note = f", {found.clock_back} records older than the one before" if found.clock_back else ""
        yield Check(what="journal", state="ok", text=f"{found.records} records, head {found.head[:16]}{note}")


def _people(console: Console) -> Iterator[Check]:
    from gridctl.notify.config import load

    file = console.home.notify_file
    config = load(file)
    if config.route:
        text = f"{len(config.receiver)} receivers, {len(config.route)} routes in {file}"
    else:
        text = f"nobody is told of incidents: no route in {file} (docs/notify.md)"
    yield Check(what="people", state="ok", text=text)


def _live(console: Console) -> Iterator[Check]:
    from gridctl.control import connect

    try:
        controller = connect(console.home)
    except Unanswered as error:
        yield Check(what="controller", state="unknown", text=str(error))
        return
    with contextlib.closing(controller):
        health = controller.health()
        text = f"process {health['pid']}, {health['mode']}, version {health['version']}"
        same = health["version"] == gridctl.__version__
        yield Check(what="controller", state="ok" if same else "warn", text=text)
        for late in controller.notify().late:
            text = f"{late.receiver} was not told of {late.thread} in {late.attempts} attempts: {late.why}"
            yield Check(what="people", state="warn", text=text)
        for node in controller.view("nodes", Node):
            yield from _node(node)


def _node(node: Node) -> Iterator[Check]:
    from gridctl.trust import skew_warning, version_warnings

    what = f"node {node.name}"
    if not node.reachable or node.status is None:
        yield Check(what=what, state="unknown", text=f"does not answer: {node.error or 'not asked yet'}")
        return
    now = time.time()
    status = node.status
    warnings = version_warnings(gridctl.__version__, {node.name: status.version})
    if skew := skew_warning(now, now + node.skew_s):
        warnings.append(skew)
    left_s = status.cert_not_after_unix_s - now
    if status.cert_not_after_unix_s and left_s < EXPIRY_WARN_S:
        warnings.append(f"its certificate ends in {left_s / 86400:.1f} days and it did not renew it")
    if status.cordoned:
        warnings.append(f"cordoned by {status.cordon_owner}: {status.cordon_reason}")
    for warning in warnings:
        yield Check(what=what, state="warn", text=warning)
    if not warnings:
        yield Check(what=what, state="ok", text=f"gridagent {status.version}, {status.attestation}")
