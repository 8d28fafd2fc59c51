"""A plot as SVG: lines that differ in colour and in dash, moments, axes. Pure."""

import datetime
import math
from collections.abc import Iterator, Sequence

from gridctl.history.report.document import Figure
from gridctl.history.report.escape import markup
from gridctl.history.report.facts import Plot, Series

WIDTH, HEIGHT = 760, 220
LEFT, RIGHT, TOP, BOTTOM = 72, 12, 12, 28
#: A line is broken where nothing was measured for longer than so many of its usual distances.
GAP = 3.0
_X_TICKS, _Y_TICKS = 5, 4
#: The width of a mark's word.
_WORD = 70


class _Scale:
    """From seconds and values to the plot's own units."""

    def __init__(self, plot: Plot) -> None:
        points = [point for line in plot.series for point in line.points]
        self.t0, self.t1 = min(t for t, _ in points), max(t for t, _ in points)
        low, high = min(v for _, v in points), max(v for _, v in points)
        room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        self.low, self.high = low - room, high + room

    def x(self, t: float) -> float:
        return LEFT + (t - self.t0) / ((self.t1 - self.t0) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def svg(figure: Figure) -> str:
    """The drawing of a figure that has lines."""
    plot, scale = figure.plot, _Scale(figure.plot)
    title = markup(f"{plot.title}{f', {plot.unit}' if plot.unit else ''}")
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        *_axes(scale),
        *(line for place, series in enumerate(plot.series) for line in _line(scale, place, series)),
        *_marks(scale, figure.marks),
        "</svg>",
    ]
    return "\n".join(parts)


def legend(plot: Plot) -> str:
    """What each line is, as a list of HTML."""
    items = [
        f'<li><svg class="key" viewBox="0 0 28 8"><path class="s{place}" d="M0 4H28"/></svg>'
        f" {markup(series.name)}</li>"
        for place, series in enumerate(plot.series)
    ]
    more = f"<li>and {plot.left_out} lines that move less</li>" if plot.left_out else ""
    return f'<ul class="legend">{"".join(items)}{more}</ul>'


def _axes(scale: _Scale) -> Iterator[str]:
    for value in _round_values(scale.low, scale.high):
        y = scale.y(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="y" x="{LEFT - 6}" y="{y + 4:.1f}">{value:.6g}</text>'
    ticks = _X_TICKS if scale.t1 > scale.t0 else 0
    for number in range(ticks + 1):
        t = scale.t0 + (scale.t1 - scale.t0) * number / (ticks or 1)
        anchor = "start" if number == 0 else "end" if number == ticks else "middle"
        yield f'<text text-anchor="{anchor}" x="{scale.x(t):.1f}" y="{HEIGHT - 8}">{_hour(t)}</text>'


def _round_values(low: float, high: float) -> Iterator[float]:
    """About `_Y_TICKS` values between the two that people like to read: 1, 2 or 5 of some power of ten."""
    rough = (high - low) / _Y_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield number * step


def _marks(scale: _Scale, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
    """Moments that lie within what was measured; their words below each other, so that none hides another."""
    shown = sorted((scale.x(t), name) for t, name in marks if scale.t0 <= t <= scale.t1)
    for place, (x, name) in enumerate(shown):
        y = TOP + 11 + 12 * (place % 4)
        left = x > WIDTH * 0.75 or any(x < other < x + _WORD for other, _ in shown[:4])
        yield f'<path class="mark" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        anchor, at = ("end", x - 4) if left else ("start", x + 4)
        yield f'<text class="word" text-anchor="{anchor}" x="{at:.1f}" y="{y}">{markup(name)}</text>'


def _line(scale: _Scale, place: int, series: Series) -> Iterator[str]:
    steps = sorted(b[0] - a[0] for a, b in zip(series.points, series.points[1:], strict=False))
    usual = steps[len(steps) // 2] if steps else 0.0
    path, last = [], -math.inf
    for t, value in series.points:
        joined = t - last <= usual * GAP
        path.append(f"{'L' if joined else 'M'}{scale.x(t):.1f} {scale.y(value):.1f}")
        last = t
    yield f'<path class="s{place}" d="{"".join(path)}"><title>{markup(series.name)}</title></path>'
    if len(series.points) == 1:
        (t, value) = series.points[0]
        yield f'<circle class="s{place}" cx="{scale.x(t):.1f}" cy="{scale.y(value):.1f}" r="3"/>'


def _hour(t: float) -> str:
    return f"{datetime.datetime.fromtimestamp(t, datetime.UTC):%H:%M:%S}Z"
