"""A site's own word on Xids, on top of the tables, and what no site can say.

It replaces fields of the number's row, also where the line's own text was decoded (74, 144 to 150). The
driver's recovery advice still comes first, and rules about repeats are rows of their own.
"""

import difflib
from collections.abc import Iterable, Mapping
from functools import cache

import msgspec

from gridctl.detect.policy import WHEN, DetectPolicy, XidRow, said, site_source, xid_row
from gridctl.detect.policy.rows import all_rows
from gridctl.model.findings import SEVERITIES
from gridctl.model.policy import XidOverride

#: Numbers that programs cause (NVIDIA Xid catalogue): whatever a file says, they never move a job alone.
APPLICATIONS = (13, 31, 43, 45, 68)
#: Actions that take a GPU or a node away from the job that is on it.
_MOVING = ("evacuate", "drain", "isolate", "quarantine", "hold_node", "keep_drained", "replace_gpu", "page_")
_XID_MAX = 99_999


class OverrideError(Exception):
    """An override that cannot be: of which number, in which field ("" for the whole), and why."""

    def __init__(self, xid: int, field: str, text: str) -> None:
        super().__init__(text)
        self.xid, self.field = xid, field


def with_overrides(policy: DetectPolicy, overrides: Mapping[int, XidOverride]) -> DetectPolicy:
    """The policy with these words on top. Raises `OverrideError`."""
    rows = {xid: _merged(policy, xid, override) for xid, override in sorted(overrides.items())}
    return msgspec.structs.replace(policy, xids={**policy.xids, **rows}, overrides=dict(overrides))


def _merged(policy: DetectPolicy, xid: int, override: XidOverride) -> XidRow:
    if not 0 < xid <= _XID_MAX:
        raise OverrideError(xid, "", f"an Xid is a number from 1 to {_XID_MAX}")
    _check_words(xid, override)
    row = xid_row(policy, xid)
    row = msgspec.structs.replace(row, **said(override, row.when), source=site_source(override))
    if xid in APPLICATIONS and (row.preempt != "no" or row.when == "now" or _moves(row.action)):
        field = "preempt" if row.preempt != "no" else "when" if row.when == "now" else "action"
        raise OverrideError(xid, field, "applications cause this number: it never moves a job alone")
    if xid not in policy.xids and row.preempt != "no":
        raise OverrideError(xid, "preempt", "this number has no known meaning: it never moves a job")
    if (row.preempt == "no") == (row.when == "now"):
        says = "does not move a job" if row.preempt == "no" else "moves the job"
        raise OverrideError(xid, "when", f"when is {row.when!r}, but preempt {says}: set both, or neither")
    return row


def _check_words(xid: int, override: XidOverride) -> None:
    if not override.reason.strip():
        raise OverrideError(xid, "reason", "reason is empty: say whose experience this is")
    if all(getattr(override, name) is None for name in ("severity", "action", "preempt", "when")):
        raise OverrideError(xid, "", "nothing is overridden: give severity, action, preempt or when")
    for field, words in (("severity", SEVERITIES), ("action", actions()), ("when", WHEN)):
        word = getattr(override, field)
        if word is not None and word not in words:
            raise OverrideError(xid, field, f"{word!r} is no {field}; {_instead(word, words)}")


def _instead(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, words, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(words))}"


def _moves(action: str) -> bool:
    return action.startswith(_MOVING)


@cache
def actions() -> tuple[str, ...]:
    """Every action that a delivered row names."""
    return tuple(sorted({row.action for row in all_rows()}))
