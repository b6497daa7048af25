"""Timeline of a recorded run: its spans as an SVG with one lane per role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS, Board
from steppe.records.phase_times import role_order
from steppe.records.profiling.svg import round_step, svg_document

# Colour only repeats what the labels, tooltips and legend say.
PHASES = {
    "collect": "#4c9be8",
    "wait": "#9aa3ad",
    "learn": "#e8804c",
    "publish": "#b06fd8",
    "evaluate": "#4fb286",
}
_OTHER = "#c2a83e"
_LEFT, _TOP, _LANE, _BAR, _BOTTOM = 110, 44, 34, 22, 40
_PAGE = 10_000


@dataclass(frozen=True)
class Span:
    """One piece of work of one role; seconds are on the run's clock."""

    role: str
    phase: str
    start_s: float
    end_s: float
    version: int | None = None
    sequence: int | None = None

    @property
    def label(self) -> str:
        """Text on the bar: the segment's number and the version of its weights."""
        number = "" if self.sequence is None else f"{self.sequence}·"
        return number + ("" if self.version is None else f"v{self.version}")


def read_spans(board: Board) -> list[Span]:
    """Return every span of a run, ordered by start time."""
    spans, after = [], 0
    while page := board.read(EVENTS, after, _PAGE):
        after = page[-1][0]
        events = (EventReport.read(record) for _, record in page if record.get("kind") == "span")
        spans += [_span(event) for event in events]
    return sorted(spans, key=lambda span: (span.start_s, span.role))


def timeline_svg(spans: Sequence[Span], *, width: int = 960, title: str = "", window_s: float | None = None) -> str:
    """Draw the timeline, readable on dark and light backgrounds; `window_s` limits its length."""
    if not spans:
        raise ValueError("no spans were recorded: train with -s flow.trace_spans=200")
    start = min(span.start_s for span in spans)
    end = max(span.end_s for span in spans)
    if window_s is not None:
        end = min(end, start + window_s)
        spans = [span for span in spans if span.start_s < end]
    roles = sorted({span.role for span in spans}, key=role_order)
    height = _TOP + _LANE * len(roles) + _BOTTOM
    scale = (width - _LEFT - 20) / max(end - start, 1e-9)
    body = [*_axis(end - start, scale, height), *_legend(spans, height)]
    for index, role in enumerate(roles):
        y = _TOP + _LANE * index
        body.append(f'<text class="t" x="{_LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(role)}</text>')
        body += [_bar(span, start, end, scale, y) for span in spans if span.role == role]
    return svg_document(width, height, title, body, left=_LEFT)


def _span(event: EventReport) -> Span:
    known = {name: event.details.get(name) for name in ("version", "sequence")}
    return Span(event.role, event.details["phase"], event.details["start_s"], event.details["end_s"], **known)


def _bar(span: Span, start: float, end: float, scale: float, y: float) -> str:
    x = _LEFT + (span.start_s - start) * scale
    width = max(1.0, (min(span.end_s, end) - span.start_s) * scale)
    title_text = f"{span.role}: {span.phase} {span.label}, {(span.end_s - span.start_s) * 1e3:.1f} ms"
    shape = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" rx="2" fill="{_colour(span.phase)}">'
        f"<title>{escape(title_text)}</title></rect>"
    )
    label = next((text for text in (f"{span.phase} {span.label}", span.label) if 6.0 * len(text) <= width), "")
    if not label:
        return shape
    return shape + f'<text class="t b" x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle">{escape(label)}</text>'


def _axis(length_s: float, scale: float, height: float) -> list[str]:
    step = round_step(length_s / 8)
    lines = []
    for tick in range(int(length_s / step + 1e-9) + 1):
        x = _LEFT + tick * step * scale
        lines.append(f'<line class="g" x1="{x:.2f}" y1="{_TOP - 6}" x2="{x:.2f}" y2="{height - _BOTTOM + 2}"/>')
        lines.append(
            f'<text class="t s" x="{x:.2f}" y="{_TOP - 10}" text-anchor="middle">{tick * step * 1e3:g} ms</text>'
        )
    return lines


def _legend(spans: Iterable[Span], height: float) -> list[str]:
    present = {span.phase for span in spans}
    phases = [phase for phase in PHASES if phase in present] + sorted(present - PHASES.keys())
    items, x = [], float(_LEFT)
    for phase in phases:
        items.append(f'<rect x="{x:.0f}" y="{height - 24}" width="14" height="14" rx="2" fill="{_colour(phase)}"/>')
        items.append(f'<text class="t" x="{x + 20:.0f}" y="{height - 12}">{escape(phase)}</text>')
        x += 44 + 7.5 * len(phase)
    return items


def _colour(phase: str) -> str:
    return PHASES.get(phase, _OTHER)
