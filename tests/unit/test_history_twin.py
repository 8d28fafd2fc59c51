"""MTTR, MTBF and lemons against slow and plain Python over the same random journals."""

import math
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from history_story import HOUR, T0, Told, answer, closed, decision, facts, opened, uncordon, written
from hypothesis import given, settings
from hypothesis import strategies as st

from gridctl.history import History

NODES = ("n1", "n2", "n3")
END_H = 2000.0

#: Hours from one record to the next; so that an hour's gap falls on both sides.
gaps = st.sampled_from([0.0, 0.01, 0.5, 0.999, 1.0, 1.5, 20.0, 300.0])
acts = st.tuples(
    gaps, st.sampled_from(["facts", "fault", "open", "close", "uncordon", "recover"]), st.sampled_from(NODES)
)


def journal(drawn: list[tuple[float, str, str]]) -> list[Told]:
    told: list[Told] = []
    h, known = 0.0, defaultdict(list)
    for number, (gap, act, node) in enumerate(drawn):
        h += gap
        if h >= END_H:
            break
        t = h * HOUR
        if act == "facts":
            told.append(facts(t, node, f"r{number % 2}"))
        elif act in ("fault", "recover"):
            more = {"action": "recover_rank"} if act == "recover" else {}
            told.append(decision(t, f"i{number}", node, **more))
        elif act == "uncordon":
            told.append(uncordon(t, node))
        elif act == "open":
            known[node].append(f"i{number}")
            told.append(opened(t, f"i{number}", node))
        elif known[node]:
            told.append(closed(t, known[node].pop(), node))
    return told


def faults(told: list[Told]) -> dict[str, list[float]]:
    """When the faults of each node began."""
    begun: dict[str, list[float]] = defaultdict(list)
    last: dict[str, float] = {}
    for t, kind, data in told:
        if kind == "decision" and data["action"] != "recover_rank":
            node = data["node"]
            if node not in last or (T0 + t) - last[node] >= HOUR:
                begun[node].append(t)
            last[node] = T0 + t
    return begun


def first(told: list[Told]) -> dict[str, float]:
    found: dict[str, float] = {}
    for t, _, data in told:
        found.setdefault(data["node"], t)
    return found


def poisson(n: int, mean: float) -> float:
    """P(at most n)."""
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(n + 1))


def solved(n: int, share: float) -> float:
    """The mean at which at most n are seen with this probability."""
    low, high = 1e-9, 10.0 * n + 50
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if poisson(n, middle) > share else (low, middle)
    return low


def asked(told: list[Told], name: str, **about: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return answer(written(Path(folder), told), name, until_h=END_H, **about)


@settings(max_examples=25, deadline=None)
@given(st.lists(acts, max_size=40))
def test_mttr_as_plain_python_has_it(drawn: list[tuple[float, str, str]]) -> None:
    told = journal(drawn)
    begun = {data["incident"]: t for t, kind, data in told if kind == "incident" and data["state"] == "open"}
    ended = {
        data["incident"]: t for t, kind, data in told if kind == "incident" and data["state"] == "closed"
    }
    rows = asked(told, "mttr")
    if not begun:
        assert rows == []
        return
    lasted = [ended[name] - begun[name] for name in ended]
    (row,) = rows
    assert (row["incidents"], row["closed"], row["still_open"]) == (
        len(begun),
        len(ended),
        len(begun) - len(ended),
    )
    assert row["mean_s"] == (pytest.approx(statistics.mean(lasted), abs=1e-3) if lasted else None)
    assert row["median_s"] == (pytest.approx(statistics.median(lasted), abs=1e-3) if lasted else None)


@settings(max_examples=25, deadline=None)
@given(st.lists(acts, max_size=40))
def test_mtbf_as_plain_python_has_it(drawn: list[tuple[float, str, str]]) -> None:
    told = journal(drawn)
    begun, since = faults(told), first(told)
    rows = asked(told, "mtbf", by="node")
    assert [row["scope"] for row in rows] == sorted(since)
    for row in rows:
        node, count = row["scope"], len(begun[row["scope"]])
        hours = END_H - since[node] / HOUR
        assert (row["nodes"], row["faults"], row["node_h"]) == (1, count, pytest.approx(hours))
        assert row["mtbf_h"] == (pytest.approx(hours / count) if count else None)
        assert row["mtbf_low_h"] == pytest.approx(hours / solved(count, 0.05), rel=1e-4)
        assert row["mtbf_high_h"] == (
            pytest.approx(hours / solved(count - 1, 0.95), rel=1e-3) if count else None
        )
    by_rack = asked(told, "mtbf", by="rack")
    assert sum(row["faults"] for row in by_rack) == sum(map(len, begun.values()))
    assert sum(row["node_h"] for row in by_rack) == pytest.approx(
        sum(END_H - t / HOUR for t in since.values())
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(acts, max_size=40))
def test_lemons_as_plain_python_has_them(drawn: list[tuple[float, str, str]]) -> None:
    told = journal(drawn)
    begun, since = faults(told), first(told)
    expected = {}
    for node in since:
        back = {t for t, kind, data in told if kind == "audit" and data["node"] == node}
        again = [t for t in begun[node] if any(0 < (T0 + t) - (T0 + b) <= 30 * 86400 for b in back)]
        if len(begun[node]) >= 2 or again:
            expected[node] = (len(begun[node]), len(back), len(again), len(again) >= 2)
    rows = asked(told, "lemons")
    assert {r["node"]: (r["faults"], r["opened"], r["relapses"], r["lemon"]) for r in rows} == expected
    assert rows == sorted(rows, key=lambda r: (not r["lemon"], -r["relapses"], -r["faults"], r["node"]))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 29, 30, 31, 60, 400])
def test_the_limits_of_a_count(count: int, tmp_path: Path) -> None:
    ((low, high),) = History(tmp_path).query(f"SELECT poisson_low({count}), poisson_high({count})")[1]
    assert high == pytest.approx(solved(count, 0.05), rel=1e-4)
    assert low == (pytest.approx(solved(count - 1, 0.95), rel=1e-3) if count else 0.0)


def test_the_limits_of_a_share(tmp_path: Path) -> None:
    history = History(tmp_path)
    for good, of in ((0, 1), (1, 1), (3, 10), (99, 100)):
        ((low, high),) = history.query(f"SELECT share_low({good}, {of}), share_high({good}, {of})")[1]
        # Wilson: where the score test just does not reject
        for limit in (low, high):
            if 0 < limit < 1:
                z = abs(good / of - limit) / math.sqrt(limit * (1 - limit) / of)
                assert z == pytest.approx(1.644854, rel=1e-3) or z == 0
        assert low <= good / of <= high
    assert history.query("SELECT share_low(0, 0)")[1] == [(None,)]
