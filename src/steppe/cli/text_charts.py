"""Plain-text charts and number formats: sparklines, bars, counts, percentages, durations. Independent of runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

TICKS = "▁▂▃▄▅▆▇█"
FILLS = "█▓▒░·"  # distinct without color; further phases share the last one


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw at most `width` ticks between minimum and maximum; each tick is the mean of an equal share of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    columns = min(width, len(finite))
    edges = [len(finite) * column // columns for column in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span <= 0:
        return TICKS[3] * columns
    return "".join(TICKS[round((mean - low) / span * (len(TICKS) - 1))] for mean in means)


def bar(shares: Sequence[float], width: int) -> list[int]:
    """Return the columns of each share; shares that sum to 1 fill `width` (the largest remainders are rounded up)."""
    total = max(1.0, sum(shares))
    exact = [max(0.0, share) / total * width for share in shares]
    columns = [int(size) for size in exact]
    missing = round(sum(exact)) - sum(columns)
    by_remainder = sorted(range(len(exact)), key=lambda index: exact[index] - columns[index], reverse=True)
    for index in by_remainder[: max(0, missing)]:
        columns[index] += 1
    return columns


def fill(index: int) -> str:
    """Return the fill character of the phase with this index."""
    return FILLS[min(index, len(FILLS) - 1)]


def progress(fraction: float, width: int) -> str:
    """Draw a progress bar: a heavy line for the finished part, a light line for the rest."""
    done = int(min(1.0, max(0.0, fraction)) * width)
    return "━" * done + "─" * (width - done)


def count(value: float | None) -> str:
    """Format an integer with thousands separators; None and non-finite values become a dash."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """Format a number with about three significant digits; None and non-finite values become a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{_places(value)}f}"


def mean_and_std(mean: float, deviation: float) -> str:
    """Format mean ± standard deviation, both with the decimal places of the mean."""
    return f"{decimal(mean)} ± {deviation:,.{_places(mean)}f}"


def _places(value: float) -> int:
    return 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3


def percent(share: float) -> str:
    """Format a share as a whole percentage."""
    return f"{share * 100:.0f} %"


def duration(seconds: float | None) -> str:
    """Format seconds as 0.8 s, 42 s, 3:05 or 2:03:05."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_shares(shares: Mapping[str, float]) -> str:
    """Format shares as `env 45 %  policy 30 %`, largest first, without those that round to 0 %."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return "  ".join(f"{phase} {percent(share)}" for phase, share in ordered if share >= 0.005)
