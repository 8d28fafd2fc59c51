"""What was measured around the event, as lines. What is not kept is missing, which is not quiet."""

import math
from collections.abc import Callable
from typing import Any

from gridctl.history.report.facts import Plot, Series
from gridctl.history.report.source import Source

SERIES_MAX = 8
NOT_KEPT = "no telemetry of that time is kept"

_TEMPERATURES = ("temp_c", "mem_temp_c")


def plots(source: Source) -> list[Plot]:
    """Loss, step time, temperature, memory errors: always these, with lines or with the reason for none."""
    temperatures = [row for row in source.samples if row["metric"] in _TEMPERATURES]
    errors = [row for row in source.samples if row["metric"] not in _TEMPERATURES]
    return [
        _plot(source, "Loss", "", source.progress, "progress", "loss", _rank),
        _plot(source, "Step time", "s", source.progress, "progress", "step_s", _rank),
        _plot(source, "Temperature", "°C", temperatures, "samples", "value", _device),
        _plot(source, "Memory errors and remapped rows", "count", errors, "samples", "value", _device),
    ]


def _rank(row: dict[str, Any]) -> str:
    return f"rank {row['rank']}"


def _device(row: dict[str, Any]) -> str:
    return f"{row['device']} {row['metric']}"


def _plot(
    source: Source,
    title: str,
    unit: str,
    rows: list[dict[str, Any]],
    table: str,
    column: str,
    name: Callable[[dict[str, Any]], str],
) -> Plot:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        value = row[column]
        if isinstance(value, int | float) and math.isfinite(value):
            lines.setdefault(name(row), []).append((float(row["t"]), float(value)))
    if not lines:
        why = source.blind.get(table, "")
        return Plot(title=title, unit=unit, missing=f"{NOT_KEPT}: {why}" if why else NOT_KEPT)
    kept = sorted(lines.items(), key=lambda line: _weight(line[1]))[:SERIES_MAX]
    shown = [Series(name=name, points=points) for name, points in lines.items() if (name, points) in kept]
    return Plot(title=title, unit=unit, series=shown, left_out=len(lines) - len(shown))


def _weight(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Lines that move come first, then the high ones: a plot has room for few."""
    values = [value for _, value in points]
    return -(max(values) - min(values)), -max(values)
