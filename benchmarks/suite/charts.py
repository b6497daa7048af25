"""Draws measurements as SVG: bars with their spread, and line charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from steppe.records.profiling.svg import round_step, svg_document

OURS, THEIRS = "#e8804c", "#4c9be8"
COLOURS = ("#e8804c", "#4c9be8", "#4fb286", "#b06fd8", "#9aa3ad")
_WIDTH, _LEFT, _TOP, _BAR, _GAP = 900, 300, 40, 20, 9
_PLOT_LEFT, _PLOT_RIGHT, _PLOT_HEIGHT = 80, 190, 260


def bars(title: str, rows: Sequence[dict[str, Any]], unit: str) -> str:
    """Draw one bar per row with a figure: its median, with a line from the lowest to the highest run."""
    shown = [row for row in rows if row["median"] is not None]
    longest = max((row["high"] if row["high"] is not None else row["median"] for row in shown), default=1.0) or 1.0
    scale = (_WIDTH - _LEFT - 150) / longest
    body = []
    for place, row in enumerate(shown):
        body += _bar(row, _TOP + place * (_BAR + _GAP), scale, unit)
    return svg_document(_WIDTH, _TOP + len(shown) * (_BAR + _GAP) + 14, title, body, left=16)


def _bar(row: dict[str, Any], y: int, scale: float, unit: str) -> list[str]:
    colour = OURS if row["label"].startswith("Steppe") else THEIRS
    high = row["high"] if row["high"] is not None else row["median"]
    end, middle = _LEFT + max(row["median"], high) * scale, y + _BAR / 2
    return [
        f'<text class="t" x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(row["label"])}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{max(1.0, row["median"] * scale):.1f}" height="{_BAR}" rx="2" fill="{colour}"/>',
        f'<line x1="{_LEFT + row["low"] * scale:.1f}" x2="{_LEFT + high * scale:.1f}" y1="{middle}" y2="{middle}" '
        'stroke="#8b949e" stroke-width="2"/>',
        f'<text class="t" x="{end + 8:.1f}" y="{y + 15}">{number(row["median"])} {escape(unit)}</text>',
    ]


def lines(chart: dict[str, Any]) -> str:
    """Series of (x, y) points over a logarithmic x axis; y is logarithmic too where the chart says so."""
    points = [point for series in chart["series"] for point in series["points"]]
    if not points:
        return svg_document(
            _WIDTH, 60, chart["title"], ['<text class="t" x="16" y="44">nothing measured</text>'], left=16
        )
    across = _Axis([x for x, _ in points], _PLOT_LEFT, _WIDTH - _PLOT_RIGHT, logarithmic=True)
    bottom = _TOP + _PLOT_HEIGHT
    up = _Axis([y for _, y in points], bottom, _TOP + 10, logarithmic=chart.get("log_y", False))
    sizes = sorted({x for x, _ in points})
    body = [*_grid(across, sizes, up, bottom), *_names(chart, bottom)]
    for place, series in enumerate(chart["series"]):
        body += _series(series, COLOURS[place % len(COLOURS)], across, up)
    body += _series_names(chart["series"], up)
    return svg_document(_WIDTH, bottom + 50, chart["title"], body, left=16)


class _Axis:
    """Maps values to pixels; a linear axis begins at 0."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, logarithmic: bool) -> None:
        self._of: Callable[[float], float] = math.log10 if logarithmic else float
        self.logarithmic = logarithmic
        self.low = min(values) if logarithmic else 0.0
        self.high = max(values) if max(values) > self.low else self.low + 1.0
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        low, high = self._of(self.low), self._of(self.high)
        return self._start + (self._of(value) - low) / (high - low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            step = round_step((self.high - self.low) / 5)
            return [step * count for count in range(int(self.high / step + 1e-9) + 1)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        tens = [10.0**power for power in range(first, last + 1)]
        return [ten for ten in tens if self.low * 0.999 <= ten <= self.high * 1.001] or [self.low, self.high]


def _grid(across: _Axis, sizes: Sequence[float], up: _Axis, bottom: float) -> list[str]:
    """Draw grid lines at every measured size and at round values."""
    found = []
    for tick in sizes:
        x = across(tick)
        found.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        found.append(f'<text class="t s" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>')
    for tick in up.ticks():
        y = up(tick)
        found.append(f'<line class="g" x1="{_PLOT_LEFT}" x2="{_WIDTH - _PLOT_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        found.append(f'<text class="t s" x="{_PLOT_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    return found


def _names(chart: dict[str, Any], bottom: float) -> list[str]:
    middle = (_PLOT_LEFT + _WIDTH - _PLOT_RIGHT) / 2
    return [
        f'<text class="t" x="{middle}" y="{bottom + 38}" text-anchor="middle">{escape(chart["x"])}</text>',
        f'<text class="t s" x="{_PLOT_LEFT - 8}" y="{_TOP - 2}" text-anchor="end">{escape(chart["y"])}</text>',
    ]


def _series(series: dict[str, Any], colour: str, across: _Axis, up: _Axis) -> list[str]:
    places = [(across(x), up(y)) for x, y in series["points"]]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}"><title>{number(x)}: {number(y)}</title></circle>'
        for (px, py), (x, y) in zip(places, series["points"], strict=True)
    ]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


def _series_names(series: Sequence[dict[str, Any]], up: _Axis) -> list[str]:
    """Place each label at the end of its line, moved down where two would overlap."""
    ends = sorted((up(one["points"][-1][1]), place) for place, one in enumerate(series) if one["points"])
    found, lowest = [], -math.inf
    for y, place in ends:
        lowest = max(y + 4, lowest + 16)
        found.append(
            f'<text x="{_WIDTH - _PLOT_RIGHT + 10}" y="{lowest:.1f}" class="t" style="fill:{COLOURS[place % len(COLOURS)]}">'
            f"{escape(series[place]['label'])}</text>"
        )
    return found


def number(value: float | None) -> str:
    """Format with about three significant digits and thousands separators; None is a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
