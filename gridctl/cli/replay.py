"""`gridctl replay`: what the watchdog would have said of a recording. Needs no fleet and no controller."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gridctl.cli.console import Console
from gridctl.cli.output import Column, Format, say
from gridctl.cli.page import Output, Page, present
from gridctl.home import Home

COLUMNS = (
    Column("t", lambda o: f"{o['t']:.3f}"),
    Column("what", lambda o: o["type"]),
    Column("node", lambda o: o["node"] or ""),
    Column("device", lambda o: o["device"]),
    Column("kind", lambda o: o["kind"]),
    Column("severity", lambda o: o["severity"]),
    Column("action", lambda o: o["action"]),
    Column("moves the job", lambda o: o["preempt_job"]),
    Column("why", lambda o: f"{'; '.join(o['why'])} [{o['rule']}]"),
)


def replay(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A recording: .jsonl, .jsonl.gz or .jsonl.zst.")],
    output: Output = Format.table,
) -> None:
    """Say what the watchdog would have decided, in the recording's time; JSON is one object a line."""
    from gridctl.ports.recording import Recording

    recording = Recording(file)
    try:
        lines = _lines(recording, Console.of(context).home)
        if output is Format.json:
            _stream(lines)
        else:
            items = list(lines)
            present(Page(data=items, columns=COLUMNS, items=items, empty="Nothing to say."), output)
    finally:
        recording.close()
    if recording.unreadable:
        say(f"{recording.unreadable} lines could not be read and were left out")


def _lines(recording: Any, home: Home) -> Iterator[dict[str, Any]]:
    from gridctl.control.settings import detect_policy, load_policy
    from gridctl.detect.playback import Playback
    from gridctl.ports.recording import job_members

    header = recording.header
    playback = Playback(detect_policy(load_policy(home)), header.nodes, job_members(header.jobs))
    for record in recording.records():
        yield from playback.feed(record)


def _stream(lines: Iterator[dict[str, Any]]) -> None:
    """Prints each line as it comes: a recording may be longer than memory."""
    import sys

    encode = msgspec.json.Encoder().encode
    for line in lines:
        sys.stdout.buffer.write(encode(line) + b"\n")
    sys.stdout.buffer.flush()
