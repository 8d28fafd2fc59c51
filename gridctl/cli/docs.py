"""Writes docs/cli.md and docs/history-views.md, from commands and SQL: `python -m gridctl.cli.docs`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from gridctl.cli.app import root
from gridctl.cli.exits import MEANINGS
from gridctl.history import VIEWS
from gridctl.history.ask import Question, questions
from gridctl.history.schema import meanings

WIDTH = 100

VIEWS_HEAD = """\
# Views and saved questions

Made by `python -m gridctl.cli.docs` from `views.sql` and `questions/` of `gridctl/history`; do not edit.
[history.md](history.md) says how to ask. Units stand in the names: `_unix_s` seconds since 1970 UTC, `_s`
seconds, `_ms` milliseconds, `_h` hours, `_bytes` bytes. What is not known is null.
"""

HEAD = """\
# Command line

Made by `python -m gridctl.cli.docs`; do not edit.

`gridctl` asks the controller and prints. Data goes to stdout, everything else to stderr.

* `-o table|json|yaml|csv` on every command that reads. `json` and `yaml` hold everything, every member always
  there; `csv` has the table's columns, or more, with bare values. Names end in their unit: `_s`, `_bytes`.
* Text that came from a node (log lines, host names, reasons) is shown, never obeyed: a control character is
  printed as `\\x1b`.
* `--watch` prints again whenever something changed; with `-o json` that is one JSON document a line.
* A command that changes something asks on a terminal for a name and a reason. Elsewhere it is refused without
  `--yes --reason TEXT`. `--dry-run` shows what would be done.
* Read-only mode: `--read-only`, `GRIDCTL_READ_ONLY=1`, or `read_only = true` under `[fleet]` in `fleet.toml`.
* `NO_COLOR` and `TERM=dumb` are respected; a pipe gets no colour and tables of full width.
* `gridctl --install-completion` sets up completion for your shell; names of nodes, jobs, plans, runs and
  incidents come from the running controller, within 300 ms or not at all.

| variable | meaning |
|---|---|
| `GRIDCTL_HOME` | one folder for everything; else `gridctl` below `$XDG_CONFIG_HOME` and `$XDG_STATE_HOME` |
| `GRIDCTL_READ_ONLY` | refuse whatever would change something |
| `GRIDCTL_DEMO` | set by `gridctl demo` for what it starts, so that it finds and ends all of it |
| `GRIDAGENT_HOME` | the agent's home, in place of `--home` |
| `GRIDAGENT_CUDA_INNER` | `gloo`: CUDA tensors go through gloo, not nccl |
| `GRIDAGENT_DAMAGE` | a drill: a process spoils what it hands over, if its agent has `--allow-damage` |

## gridagent

The program of the nodes; `gridagent COMMAND --help` tells its options.

| command | meaning |
|---|---|
| `gridagent join TOKEN` | enrol this node with what `gridctl enroll` printed |
| `gridagent serve` | serve this node until SIGTERM |
| `gridagent exec --job J -- PROGRAM ARGS` | register a rank with the agent, then become it |
| `gridagent park` | wait as a warm spare until a rank is given to this process |
| `gridagent status` | what the agent says of itself |
| `gridagent version` | its version |

## Exit codes

| code | meaning |
|---|---|
"""


def document() -> str:
    """The whole file."""
    rows = "".join(f"| {int(code)} | {meaning} |\n" for code, meaning in MEANINGS.items())
    sections = "".join(f"\n## {path}\n\n```text\n{text}\n```\n" for path, text in _commands())
    return HEAD + rows + sections


def _commands() -> Iterator[tuple[str, str]]:
    command: Any = typer.main.get_command(root)
    with typer.Context(
        command, info_name="gridctl", max_content_width=WIDTH, terminal_width=WIDTH
    ) as context:
        yield from _walk(command, context)


def _walk(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    text = "\n".join(line.rstrip() for line in command.get_help(context).strip().splitlines())
    yield context.command_path, text
    for name in getattr(command, "commands", {}):
        sub = command.commands[name]
        inner = typer.Context(
            sub, parent=context, info_name=name, max_content_width=WIDTH, terminal_width=WIDTH
        )
        yield from _walk(sub, inner)


def history() -> str:
    """The whole file about views and questions."""
    told = meanings()
    views = "".join(_columns(view, told[view][0], told[view][1]) for view in VIEWS)
    asked = "".join(_question(question) for question in questions(Path()).values())
    return f"{VIEWS_HEAD}\n## Views\n{views}\n## Questions\n{asked}"


def _question(question: Question) -> str:
    about = f"{question.meaning} {question.computed}\n\nWhat it cannot know: {question.unknown}"
    return _columns(question.name, f"{question.title}\n\n{about}", question.columns)


def _columns(name: str, text: str, columns: dict[str, str]) -> str:
    rows = "".join(f"| `{column}` | {meaning} |\n" for column, meaning in columns.items())
    return f"\n### {name}\n\n{text[0].upper()}{text[1:]}\n\n| column | meaning |\n|---|---|\n{rows}"


if __name__ == "__main__":
    Path("docs/history-views.md").write_text(history(), encoding="utf-8")
    Path("docs/cli.md").write_text(document(), encoding="utf-8")
