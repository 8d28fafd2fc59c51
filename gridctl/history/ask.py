"""Saved questions: SQL with a header that says what it means, asked about a time and some nodes.

`questions/NAME.sql` begins with comments: `-- title:`, `subject:`, `meaning:`, `computed:`, `unknown:` and
`columns:` (then one line a column). Its one SELECT may use every view, and two tables that are made here:

    subject   the rows of the view that the header's `subject` names, those of the time and nodes asked about,
              each with `scope` (what --by asks for) and what its node was then; those of `node_spans` are cut
              to the time
    asked     one row: since_unix_s, until_unix_s, usd_per_gpu_h (null without a price), slo_NAME
"""

import json
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from gridctl.errors import ConfigError, UsageError
from gridctl.history import VIEWS, History, HistoryError
from gridctl.history.tables import quoted
from gridctl.model.policy import Policy

#: What answers can be asked by, besides the fleet as a whole.
BY = ("node_class", "rack", "driver", "node")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_HEADER = ("title", "subject", "meaning", "computed", "unknown", "columns")
_SPAN = re.compile(r"(\d{1,6})([smhdw])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: What may stand in an expression of --where; not subqueries, parameters, windows, stars.
_CLASSES = frozenset(
    ("CASE", "CAST", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR", "BETWEEN")
)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One saved question. Texts are one line each."""

    name: str
    title: str
    meaning: str
    computed: str
    unknown: str
    columns: dict[str, str]  #: name -> meaning and unit
    view: str  #: the subject
    at: str  #: column of the view that says when; "" for `node_spans`
    sql: str
    source: str = "delivered"  #: or the path of the site's file


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a question is asked about."""

    until_unix_s: float
    since_unix_s: float = 0.0
    where: str = ""  #: an expression over the subject's columns and those of its node
    by: str = ""  #: one of `BY`; "": the fleet as a whole


def questions(site: Path) -> dict[str, Question]:
    """All saved questions by name, the site's own ones too. Raises `ConfigError` for a file that is none."""
    found = {q.name: q for q in map(_delivered, (files(__package__) / "questions").iterdir())}
    for file in sorted(site.glob("*.sql")) if site.is_dir() else []:
        name = file.name.removesuffix(".sql")
        if name in found:
            raise ConfigError(f"{file}: {name} is the name of a delivered question: give it another one")
        try:
            found[name] = parse(name, file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{file}: {error}") from None
    return dict(sorted(found.items()))


def _delivered(file: Traversable) -> Question:
    return parse(file.name.removesuffix(".sql"), file.read_text(encoding="utf-8"))


def parse(name: str, text: str, source: str = "delivered") -> Question:
    """A question out of its file. Raises `ValueError` that says what its header lacks."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a question: lower case letters, digits and -")
    lines = text.splitlines()
    head = next((n for n, line in enumerate(lines) if not line.startswith("--")), len(lines))
    parts: dict[str, list[str]] = {}
    inside = ""
    for line in lines[:head]:
        word, _, rest = line[2:].strip().partition(":")
        if word in _HEADER and line.startswith(f"-- {word}:"):
            inside = word
            parts[inside] = [rest.strip()] if rest.strip() else []
        elif inside:
            parts[inside].append(line[2:].strip())
    if missing := [word for word in _HEADER if not parts.get(word)]:
        raise ValueError(f"its header lacks {', '.join(missing)}")
    view, _, at = " ".join(parts["subject"]).partition(" at ")
    if (
        view not in VIEWS
        or bool(at) == (view == "node_spans")
        or not at.replace("_", "a").isalnum() | (at == "")
    ):
        raise ValueError(f"subject {view!r} at {at!r}: a view, and which column says when (node_spans: none)")
    columns = dict(line.partition(" ")[::2] for line in parts["columns"])
    texts = {word: " ".join(parts[word]) for word in ("title", "meaning", "computed", "unknown")}
    sql = "\n".join(lines[head:]).strip().rstrip(";")
    return Question(
        name=name,
        **texts,
        columns={column: meaning.strip() for column, meaning in columns.items()},
        view=view,
        at=at,
        sql=sql,
        source=source,
    )


def compose(history: History, question: Question, asked: Asked, policy: Policy) -> str:
    """The question as one SELECT for `History.query`. Raises `UsageError` for a --where that is none."""
    by = f"nullif({asked.by}, '')" if asked.by else "'fleet'"
    if asked.by not in ("", *BY):
        raise UsageError(f"--by {asked.by}: it is one of {', '.join(BY)}")
    where = f"\n    WHERE {expression(history, asked.where)}" if asked.where.strip() else ""
    known = ", ".join(f"{value} AS {name}" for name, value in _asked(asked, policy).items())
    source = _spans() if question.view == "node_spans" else _rows(question)
    return (
        f"WITH asked AS (\n    SELECT {known}\n), subject AS (\n    SELECT *, {by} AS scope\n"
        f"    FROM ({source}){where}\n)\nSELECT * FROM (\n{question.sql}\n)"
    )


def _asked(asked: Asked, policy: Policy) -> Mapping[str, str]:
    price = policy.price_usd_per_gpu_h
    values = {
        "since_unix_s": asked.since_unix_s,
        "until_unix_s": asked.until_unix_s,
        "usd_per_gpu_h": price or None,
        **{f"slo_{name}": value for name, value in msgspec.to_builtins(policy.slo).items()},
    }
    return {name: f"{'NULL' if v is None else repr(float(v))}::DOUBLE" for name, v in values.items()}


def _spans() -> str:
    return """
        SELECT n.* REPLACE (greatest(n.from_unix_s, since_unix_s) AS from_unix_s,
                            least(coalesce(n.until_unix_s, a.until_unix_s), a.until_unix_s) AS until_unix_s)
        FROM node_spans n, asked a
        WHERE n.from_unix_s < a.until_unix_s AND coalesce(n.until_unix_s, a.until_unix_s) > a.since_unix_s"""


def _rows(question: Question) -> str:
    return f"""
        SELECT v.*, n.rack, n.node_class, n.nvlink_domain, n.driver, n.gpu_model, n.gpus AS node_gpus
        FROM (SELECT v.* FROM {question.view} v, asked a
              WHERE v.{question.at} >= a.since_unix_s AND v.{question.at} < a.until_unix_s) v
        ASOF LEFT JOIN node_spans n ON v.node = n.node AND v.{question.at} >= n.from_unix_s"""


def expression(history: History, text: str) -> str:
    """An expression as DuckDB itself writes it, in brackets. Raises `UsageError` for anything else.

    DuckDB's own parser reads it, and it is written anew from what that has understood: comments, a second
    statement, a bracket too many or a subquery do not get through.
    """
    refused = UsageError(f"--where {text[:200]!a} is no expression over columns, like \"rack = 'r1'\"")
    # The bracket closes on a line of its own: a comment does not swallow it.
    select = quoted(f"SELECT ({text}\n)")
    try:
        (serialised,) = history.query(f"SELECT json_serialize_sql({select})")[1][0]
        (statement,) = json.loads(serialised)["statements"]
        node = statement["node"]
        (item,) = node["select_list"]
        bare = all(
            not node[part] for part in ("modifiers", "where_clause", "group_expressions", "having", "qualify")
        )
        plain = node["type"] == "SELECT_NODE" and node["from_table"]["type"] == "EMPTY" and not node["sample"]
        if (
            not (bare and plain and not node["cte_map"]["map"] and not item["alias"])
            or not _classes(item) <= _CLASSES
        ):
            raise refused
        (written,) = history.query(f"SELECT json_deserialize_sql({quoted(serialised)}::JSON)")[1][0]
    except (HistoryError, LookupError, TypeError, ValueError, UnicodeError):
        raise refused from None
    return f"({written.removeprefix('SELECT ')})"


def _classes(item: Any) -> set[str]:
    """All kinds of nodes in a parsed expression."""
    if isinstance(item, list):
        return set().union(*map(_classes, item))
    if isinstance(item, dict):
        own = {item["class"]} if isinstance(item.get("class"), str) else set()
        return own.union(*map(_classes, item.values()))
    return set()


def moment(text: str, now_unix_s: float) -> float:
    """What --since and --until take: `7d`, `12h`, `30m`, `2w` ago, or a date, in UTC where it names no zone.

    Raises `UsageError`.
    """
    if match := _SPAN.fullmatch(text.strip()):
        return now_unix_s - int(match[1]) * _UNIT_S[match[2]]
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"{text[:40]!a} is no time: write 7d, 12h, 2026-11-30 or 2026-11-30T12:00+01:00"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def asked_about(since: str, until: str, where: str = "", by: str = "") -> Asked:
    """What is meant as of now. Raises `UsageError` for times that are none or leave nothing between them."""
    now_unix_s = time.time()
    begin = moment(since, now_unix_s) if since else 0.0
    end = moment(until, now_unix_s) if until else now_unix_s
    if begin >= end:
        raise UsageError("nothing lies between --since and --until")
    return Asked(since_unix_s=begin, until_unix_s=end, where=where, by=by)
