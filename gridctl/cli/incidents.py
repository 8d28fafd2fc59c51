"""`gridctl incidents` and `gridctl incident show`: what went wrong, what was decided, what was done."""

from typing import Annotated, Any

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, Watch, age, full, listing, local, read
from gridctl.model.runs import Incident

app = typer.Typer(no_args_is_help=True, help="One incident.")

INCIDENTS = (
    Column("id", lambda i: i.id),
    Column("state", lambda i: i.state),
    Column("kind", lambda i: i.kind),
    Column("node", lambda i: i.node),
    Column("job", lambda i: i.job),
    Column("opened_unix_s", lambda i: i.opened_unix_s, lambda t: f"{age(t)} ago"),
    Column("runs", lambda i: i.runs),
    Column("acked_by", lambda i: i.acked_by),
    Column("assigned_to", lambda i: i.assigned_to),
    Column("title", lambda i: i.title),
)
TIMELINE = (
    Column("t_unix_s", lambda m: m.t_unix_s, local),
    Column("kind", lambda m: m.kind),
    Column("what", lambda m: m.what, wraps=True),
)
ALTERNATIVES = (
    Column("action", lambda a: a["action"]),
    Column("gpu_h", lambda a: a["cost"]["gpu_h"], lambda gpu_h: f"{gpu_h:.3g}"),
    Column("usd", lambda a: a["cost"]["usd"], lambda usd: "" if usd is None else f"{usd:.2f}"),
    Column("refused", lambda a: a.get("refused", "")),
    Column("parts", lambda a: _parts(a["cost"]), wraps=True),
)


def incidents(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Closed ones too.")] = False,
    output: Output = Format.table,
    watch: Watch = False,
) -> None:
    """Open incidents, the oldest first."""
    console = Console.of(context)
    read(
        lambda: console.controller.view("incidents" if everything else "open-incidents", Incident),
        lambda found: listing(found, INCIDENTS, "no incidents" if everything else "no open incidents"),
        output,
        watch,
    )


def _evidence(incident: Incident) -> str:
    """When evidence was taken and where it lies; if none was, what an action that is due would destroy."""
    from gridctl.runbook.evidence import missing

    told = [
        f"{found['node']}, taken {local(found['taken_unix_s'])} by {found['who']}: {found['file']}"
        for found in incident.evidence
        if found["state"] == "collected"
    ]
    if told:
        return "; ".join(told)
    actions = [str(found.get("action")) for found in (incident.decision, *incident.findings)]
    lacking = next((problem.text for action in actions if (problem := missing(incident, action))), "")
    return lacking or f"none was taken: gridctl collect {incident.id}"


def _command(incident: Incident) -> str:
    """What resets or reboots, where that is what the decision or a finding asks for."""
    from gridctl.runbook.reset import command_for

    asking = (found for found in (incident.decision, *incident.findings) if found)
    told = [command_for(str(f.get("action")), incident.node, str(f.get("device"))) for f in asking]
    found = next(filter(None, told), "")
    return f"once nobody runs there: {found}" if found else ""


def _page(incident: Incident) -> Page:
    facts: list[tuple[str, object]] = [
        ("incident", incident.id),
        ("state", incident.state),
        ("title", incident.title),
        ("kind", incident.kind),
        ("node", incident.node),
        ("job", incident.job),
        ("opened", local(incident.opened_unix_s)),
        ("closed", local(incident.closed_unix_s) if incident.closed_unix_s else ""),
        ("verdict", incident.verdict.replace("_", " ")),
        ("part of", incident.merged_into),
        ("parts", " ".join(incident.merged)),
        ("in hand", incident.acked_by),
        ("assigned to", incident.assigned_to),
        *(("links" if not place else "", link["value"]) for place, link in enumerate(incident.links)),
        ("plans", " ".join(incident.plans)),
        ("runs", " ".join(incident.runs)),
        ("evidence", _evidence(incident)),
        ("command", _command(incident)),
    ]
    choice = incident.choice
    if choice:
        facts += choice_facts(choice, choice["p_24h"], choice["basis"])
    below = [alternatives(choice.get("alternatives", []))]
    return Page(data=full(incident), columns=TIMELINE, items=incident.timeline, facts=facts, below=below)


def choice_facts(choice: dict[str, Any], p_24h: float, basis: str) -> list[tuple[str, object]]:
    """What ought to be done, as facts of a page."""
    wanted = choice["wanted"]
    asked = "" if wanted == choice["action"] else f" (wanted: {wanted})"
    armed = ", by itself" if choice["automatic"] else ""
    close = "; a close call" if choice["uncertain"] else ""
    return [
        ("ought to be done", f"{choice['action']}{armed}{asked}"),
        *(("" if place else "because", line) for place, line in enumerate(choice["why"])),
        ("forecast", f"P(fault in 24 h) {p_24h:.2g}: {basis}"),
        ("cheapest", f"{choice['cheapest']}{close}"),
    ]


def alternatives(items: list[dict[str, Any]]) -> Page:
    """The alternatives of a choice with their costs."""
    return Page(data=None, columns=ALTERNATIVES, items=items, title="Alternatives, expected within 24 h")


def _parts(cost: dict[str, Any]) -> str:
    return "; ".join(f"{part['name']} {part['gpu_h']:.3g} GPU-h ({part['how']})" for part in cost["parts"])


@app.command()
def show(
    context: typer.Context,
    incident: Annotated[str, typer.Argument(help="The incident's id.", autocompletion=complete.incidents)],
    output: Output = Format.table,
    watch: Watch = False,
) -> None:
    """Findings, decision, plans, runs and the timeline of it all."""
    console = Console.of(context)
    read(lambda: console.controller.one("incident", incident, Incident), _page, output, watch)
