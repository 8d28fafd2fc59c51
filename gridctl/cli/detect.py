"""`gridctl detect score`: how good the watchdog is, on recordings whose truth is known. Needs no fleet."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gridctl.cli.output import Column, Format, say
from gridctl.cli.page import Output, Page, present

app = typer.Typer(no_args_is_help=True, help="Judge detection.")

COLUMNS = (
    Column("recording", lambda s: s["recording"]),
    Column("found", lambda s: f"{s['found']} of {s['faults']}"),
    Column("median s", lambda s: _number(s["delay_median_s"])),
    Column("p99 s", lambda s: _number(s["delay_p99_s"])),
    Column("preemptions", lambda s: s["preemptions"]),
    Column("unnecessary", lambda s: s["unnecessary"]),
    Column("at most (95 %)", lambda s: _share(s["unnecessary_share_bound_95"])),
    Column("false nodes", lambda s: len(s["false_nodes"])),
    Column("false / node-month", lambda s: _number(s["false_per_node_month"])),
    Column("premature", lambda s: len(s["premature_nodes"])),
    Column("node-months", lambda s: _number(s["node_months"])),
    Column("blind", lambda s: _share(s["blind_share"])),
)


@app.callback()
def _group() -> None:
    """Judge detection."""


@app.command()
def score(
    files: Annotated[list[Path], typer.Argument(help="Recordings; NAME.truth.json stands beside each.")],
    output: Output = Format.table,
) -> None:
    """Replay recordings and hold what the watchdog says against the truth beside them."""
    from gridctl.assess.skill import skills
    from gridctl.detect.score import total

    told = [_scored(file) for file in files]
    scores = [one for one, _ in told]
    shown = [as_row(one, skills(outcomes)) for one, outcomes in told]
    if len(scores) > 1:
        shown.append(as_row(total(scores), skills(o for _, outcomes in told for o in outcomes)))
    page = Page(data=shown, columns=COLUMNS, items=shown, empty="No recordings.")
    present(page, output)
    if output is Format.table:
        for one in scores:
            for fault in one.missed():
                say(f"{one.name}: missed {fault.kind} of {fault.node}/{fault.device} at {fault.t:.0f} s")
            for text in one.unnecessary:
                say(f"{one.name}: unnecessary: {text}")


def _scored(file: Path) -> tuple[Any, list[Any]]:
    """The score, and what the forecasts of each day came to."""
    from gridctl.assess.hindsight import Hindsight
    from gridctl.assess.rates import tables
    from gridctl.detect.playback import Playback
    from gridctl.detect.policy import builtin
    from gridctl.detect.score import Judge
    from gridctl.ports.recording import Recording, job_members, truth_of

    truth = truth_of(file)
    recording = Recording(file)
    try:
        header = recording.header
        playback = Playback(builtin(), header.nodes, job_members(header.jobs))
        judge, hindsight = Judge(truth), Hindsight(tables(), header.nodes)
        end_s = 0.0
        for record in recording.records():
            end_s = max(end_s, record.t_unix_s)
            hindsight.record(record)
            for line in playback.feed(record):
                judge.feed(line)
                hindsight.line(line)
        if recording.unreadable:
            say(f"{file}: {recording.unreadable} lines could not be read and were left out")
        score = judge.score(file.name.split(".jsonl")[0], len(header.nodes), end_s)
        return score, hindsight.outcomes(truth)
    finally:
        recording.close()


def as_row(one: Any, skills: Iterable[Any] = ()) -> dict[str, Any]:
    """A score as flat members, each with its unit; shares name what they are shares of.

    `calibration`: by class of fault; none of recordings of less than two days.
    """
    from gridctl.detect.score import quantile, upper_bound

    delays_s = one.delays_s()
    unnecessary = len(one.unnecessary)
    return {
        "recording": one.name,
        "faults": len(one.faults),
        "found": len(delays_s),
        "missed": [f"{f.kind}@{f.node}/{f.device}" for f in one.missed()],
        "device_named": sum(found.device_named for found in one.faults),
        "delay_median_s": quantile(delays_s, 0.5),
        "delay_p99_s": quantile(delays_s, 0.99),
        "delay_max_s": quantile(delays_s, 1.0),
        "streamed_decisive_max_s": quantile(one.delays_s(preempt_job=True, signal="streamed"), 1.0),
        "polled_decisive_max_s": quantile(one.delays_s(preempt_job=True, signal="polled"), 1.0),
        "preemptions": one.preemptions,
        "unnecessary": unnecessary,
        "unnecessary_of_preemptions": unnecessary / one.preemptions if one.preemptions else None,
        "unnecessary_share_bound_95": upper_bound(unnecessary, one.preemptions),
        "unnecessary_at": one.unnecessary,
        "false_nodes": one.false_nodes,
        "premature_nodes": one.premature_nodes,
        "node_months": one.node_months,
        "false_per_node_month": unnecessary / one.node_months if one.node_months else None,
        "evicted_nodes": one.evicted,
        "evicted_nodes_max": one.evicted_max,
        "incidents": one.incidents,
        "blind_node_s": one.blind_node_s,
        "blind_share": one.blind_node_s / one.node_s if one.node_s else None,
        "calibration": [msgspec.to_builtins(skill) for skill in skills],
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
