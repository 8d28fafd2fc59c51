"""`gridctl diagnose`: what logs, tool outputs and telemetry mean. Needs no fleet and no controller."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gridctl.cli.console import Console
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, present
from gridctl.model.diagnosis import Diagnosis

COLUMNS = (
    Column("severity", lambda d: d["severity"]),
    Column("kind", lambda d: d["kind"]),
    Column("device", lambda d: d["pci"] or ""),
    Column("action", lambda d: d["action"]),
    Column("when", lambda d: d["when"]),
    Column("fault", lambda d: d["fault"]),
    Column("moves the job", lambda d: d["preempt_job"]),
    Column("events", lambda d: d["event_count"]),
    Column("why", lambda d: f"{'; '.join(d['why']['evidence'])} [{d['why']['rule']}]"),
)


def diagnose(
    context: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(help="Logs and outputs; none, or -: stdin.")] = None,
    output: Output = Format.table,
) -> None:
    """Say what logs and tool outputs mean: dmesg | gridctl diagnose.

    Judges as the watchdog does, policy.toml included. Logs may be larger than memory; a large pipe is put
    into a temporary file (TMPDIR). One JSON document may have 32 Mi characters, a log may have many; of a
    line the first 8192 characters count, of a table of Slurm's nodes the first 4 million.
    """
    from gridctl.control.settings import detect_policy, load_policy
    from gridctl.detect.diagnose import diagnose as judge
    from gridctl.ports.materials import materials

    policy = detect_policy(load_policy(Console.of(context).home))
    with materials(files or [Path("-")]) as given:
        found: list[Diagnosis] = judge(given, policy)
    items: list[dict[str, Any]] = msgspec.to_builtins(found)
    present(Page(data=items, columns=COLUMNS, items=items), output)
