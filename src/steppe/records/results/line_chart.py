"""Line charts with bands as SVG, readable on dark and light backgrounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from steppe.records.profiling.svg import round_step, svg_document

COLOURS = ("#e8804c", "#4c9be8", "#4fb286", "#b06fd8", "#c9a227", "#9aa3ad")


@dataclass(frozen=True)
class Line:
    """Points (x, y), and for each the interval of y if the line has a band. Points that are not finite are left out."""

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True)
class Frame:
    """Size of a chart, its plot area and the ranges of its axes."""

    width: int
    height: int
    low: tuple[float, float]
    high: tuple[float, float]

    left, right, top, bottom = 64, 16, 34, 44

    def at(self, x: float, y: float) -> str:
        """Return a point as SVG coordinates."""
        across = (x - self.low[0]) / (self.high[0] - self.low[0]) * (self.width - self.left - self.right) + self.left
        up = (y - self.low[1]) / (self.high[1] - self.low[1]) * (self.height - self.top - self.bottom)
        return f"{across:.1f},{self.height - self.bottom - up:.1f}"


def line_chart(title: str, lines: Sequence[Line], *, x: str, y: str, size: tuple[int, int] = (640, 300)) -> str:
    """Draw lines over linear axes, with their labels below."""
    lines = [_finite(line) for line in lines]
    lines = [line for line in lines if line.points]
    rows = math.ceil(len(lines) / 3)
    if not lines:
        return svg_document(size[0], 60, title, ['<text class="t" x="16" y="44">no evaluations yet</text>'], left=16)
    frame = _frame(lines, size)
    body = [*_grid(frame), *_axis_names(frame, x, y)]
    for index, line in enumerate(lines):
        body += _draw(line, COLOURS[index % len(COLOURS)], frame)
    for index, line in enumerate(lines):
        across, down = 16 + (index % 3) * 200, size[1] + 16 + (index // 3) * 18
        body.append(
            f'<rect x="{across}" y="{down - 10}" width="12" height="12" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        body.append(f'<text class="t s" x="{across + 18}" y="{down}">{escape(line.label)}</text>')
    return svg_document(size[0], size[1] + 12 + rows * 18, title, body, left=16)


def _finite(line: Line) -> Line:
    kept = [index for index, (_, y) in enumerate(line.points) if math.isfinite(y)]
    band = None if line.band is None else [line.band[index] for index in kept]
    return Line(line.label, [line.points[index] for index in kept], band)


def _frame(lines: Sequence[Line], size: tuple[int, int]) -> Frame:
    across = [x for line in lines for x, _ in line.points]
    up = [y for line in lines for _, y in line.points]
    up += [edge for line in lines for pair in line.band or () for edge in pair]
    margin = 0.05 * (max(up) - min(up)) or 0.5
    widest = max(across) if max(across) > min(across) else min(across) + 1
    return Frame(*size, (min(across), min(up) - margin), (widest, max(up) + margin))


def _draw(line: Line, colour: str, frame: Frame) -> list[str]:
    found = []
    if line.band is not None:
        edges = [frame.at(x, high) for (x, _), (_, high) in zip(line.points, line.band, strict=True)]
        edges += [frame.at(x, low) for (x, _), (low, _) in zip(reversed(line.points), reversed(line.band), strict=True)]
        found.append(f'<polygon points="{" ".join(edges)}" fill="{colour}" fill-opacity="0.2"/>')
    path = " ".join(frame.at(x, y) for x, y in line.points)
    return [*found, f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']


def _grid(frame: Frame) -> list[str]:
    found = []
    for tick in _ticks(frame.low[1], frame.high[1]):
        left, y = frame.at(frame.low[0], tick).split(",")
        found.append(f'<line class="g" x1="{left}" x2="{frame.width - frame.right}" y1="{y}" y2="{y}"/>')
        found.append(
            f'<text class="t s" x="{frame.left - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        )
    for tick in _ticks(frame.low[0], frame.high[0]):
        x = frame.at(tick, frame.low[1]).split(",")[0]
        found.append(f'<line class="g" x1="{x}" x2="{x}" y1="{frame.top}" y2="{frame.height - frame.bottom}"/>')
        bottom = frame.height - frame.bottom + 16
        found.append(f'<text class="t s" x="{x}" y="{bottom}" text-anchor="middle">{_number(tick)}</text>')
    return found


def _axis_names(frame: Frame, x: str, y: str) -> list[str]:
    middle = (frame.left + frame.width - frame.right) / 2
    return [
        f'<text class="t s" x="{middle}" y="{frame.height - 10}" text-anchor="middle">{escape(x)}</text>',
        f'<text class="t s" x="{frame.width - frame.right}" y="20" text-anchor="end">{escape(y)}</text>',
    ]


def _ticks(low: float, high: float) -> list[float]:
    step = round_step((high - low) / 5)
    first = math.ceil(low / step - 1e-9)
    return [step * count for count in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    for size, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"
