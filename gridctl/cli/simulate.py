"""`gridctl simulate`: a recording of a fleet that does not exist, with its truth. Needs no fleet."""

from pathlib import Path
from typing import Annotated

import typer

from gridctl.cli.output import say
from gridctl.errors import ConfigError


def simulate(
    out: Annotated[Path, typer.Option(help="The recording to write: .jsonl or .jsonl.gz.")],
    nodes: Annotated[int, typer.Option(min=2, max=100_000, help="How many nodes, spares among them.")] = 64,
    hours: Annotated[float, typer.Option(min=0.5, max=100_000, help="How long.")] = 24.0,
    seed: Annotated[
        int, typer.Option(help="Another number is another fleet; the same one, the same bytes.")
    ] = 1,
    times: Annotated[
        float, typer.Option(min=0.0, max=100_000, help="All rates of faults and noise, times this.")
    ] = 1.0,
    incident: Annotated[
        str, typer.Option(help="One known incident in the place of a fleet's life; `list` names them.")
    ] = "",
) -> None:
    """Write a recording of a simulated fleet, and NAME.truth.json beside it."""
    from gridctl.ports.recording import truth_path
    from gridctl.simulate.emit import play
    from gridctl.simulate.files import write
    from gridctl.simulate.incidents import INCIDENTS, incident_story
    from gridctl.simulate.layout import fleet
    from gridctl.simulate.plan import life

    if incident and incident not in INCIDENTS:
        unknown = ConfigError(f"there is no incident {incident!r}; there are:")
        for name, one in INCIDENTS.items():
            unknown.add_note(f"  {name}: {one.what}")
        raise unknown
    if incident:
        story, hours, counts = incident_story(incident, seed)
    else:
        story, counts = life(fleet(nodes, str(seed)), hours, times), {}
    name = incident or f"fleet-{seed}"
    truth = story.truth(**counts)
    records = write(out, story.fleet.header(name), play(story, hours), truth)
    say(f"{out}: {records} records, {len(truth.faults)} faults; the truth stands in {truth_path(out)}")
