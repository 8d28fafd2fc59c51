"""`gridctl record`: what the nodes tell, into a file that `gridctl replay` reads."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from gridctl.cli import complete
from gridctl.cli.console import Console
from gridctl.cli.output import say
from gridctl.cli.page import duration, size

if TYPE_CHECKING:
    from gridctl.ports.recorder import Recorder

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


def _seconds(text: str) -> float:
    """90, 90s, 10m, 2h, 1d. Raises `typer.BadParameter`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)", text.strip())
    if not found or not (seconds := float(found[1]) * _UNITS_S[found[2]]):
        raise typer.BadParameter(f"{text!r} is no duration: write 90s, 10m, 2h or 1d")
    return seconds


def record(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="A new file: .jsonl or .jsonl.gz.")],
    node: Annotated[
        list[str] | None,
        typer.Option("--node", "-n", help="Only this node; may be repeated.", autocompletion=complete.nodes),
    ] = None,
    lasts: Annotated[str, typer.Option("--for", help="How long: 90s, 10m, 2h. Left out, until Ctrl-C.")] = "",
) -> None:
    """Record what the nodes tell, from now on, until Ctrl-C.

    The file is what `gridctl replay` reads. It holds log lines as the nodes have printed them:
    nothing is taken out, only you can read it.
    """
    from gridctl.ports.recorder import check_name

    seconds = _seconds(lasts) if lasts else float("inf")
    check_name(out)
    lines = Console.of(context).controller.records(node or [])
    begun_s = time.monotonic()
    with _ends() as ended, _recorder(out, next(lines)) as recorder:
        try:
            for line in lines:
                if line:
                    recorder.write(_decode(line))
                recorder.flush()
                if ended or time.monotonic() - begun_s >= seconds:
                    break
        finally:
            took_s = time.monotonic() - begun_s
            say(f"{recorder.records} records in {duration(took_s)}: {out}")
    say(f"{size(out.stat().st_size)}; gridctl replay {out}")


def _decode(line: bytes) -> Any:
    from gridagent.wire import StreamRecord

    return msgspec.json.decode(line, type=StreamRecord)


def _recorder(out: Path, first: bytes) -> "Recorder":
    """The file with its header."""
    from datetime import UTC, datetime

    from gridctl.control.taps import Beginning
    from gridctl.ports.recorder import Recorder
    from gridctl.ports.recording import Header, Job

    told = msgspec.json.decode(first, type=Beginning)
    header = Header(
        recording=1,
        name=out.name.partition(".jsonl")[0],
        start=datetime.fromtimestamp(told.start_unix_s, UTC).isoformat(timespec="milliseconds"),
        nodes=told.nodes,
        jobs=[Job(id=name, ranks=ranks) for name, ranks in told.jobs.items()],
    )
    say(f"recording {len(told.nodes)} nodes to {out}; Ctrl-C ends it")
    return Recorder(out, header, told.start_unix_s)


@contextmanager
def _ends() -> Iterator[list[int]]:
    """Signals that came: they end the recording after a whole line, and so the file as well."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield came
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
