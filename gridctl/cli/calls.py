"""The calls of a dry run, as a page."""

from collections.abc import Sequence

from gridctl.cli.output import Column, flat
from gridctl.cli.page import Page, full
from gridctl.model.plans import DryCall

CALLS = (
    Column("step", lambda c: c.step),
    Column("when", lambda c: c.when),
    Column("method", lambda c: c.method),
    Column("url", lambda c: c.url),
    Column("kind", lambda c: c.kind),
    Column("args", lambda c: c.args),
)
CALLS_SHOWN = (
    *CALLS[:2],
    Column("call", lambda c: " ".join(filter(None, (c.method, c.url, c.kind, flat(c.args)))), wraps=True),
)


def calls_page(calls: Sequence[DryCall]) -> Page:
    """One line a call, in their order."""
    return Page(data=[full(call) for call in calls], columns=CALLS, items=calls, shown=CALLS_SHOWN)
