"""Shared by all SVG output: a document that is readable on dark and light backgrounds, and round axis steps."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_STYLE = (
    ".t{fill:#1f2328;font:13px system-ui,sans-serif}.s{font-size:11px}.b{fill:#111;font-size:10px}"
    ".g{stroke:#8b949e;stroke-opacity:.35}@media(prefers-color-scheme:dark){.t{fill:#e6edf3}.b{fill:#111}}"
)


def svg_document(width: int, height: int, title: str, body: Iterable[str], *, left: int) -> str:
    """Return an SVG document of the elements in `body`, with the title above them, `left` pixels from the left edge."""
    heading = f'<text class="t" x="{left}" y="20" font-weight="bold">{escape(title)}</text>' if title else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title or "timeline", quote=True)}"><style>{_STYLE}</style>{heading}\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def round_step(length: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least `length`."""
    power = 1e-6
    while True:
        for factor in (1, 2, 5):
            if factor * power >= length:
                return factor * power
        power *= 10
