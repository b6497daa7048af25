"""Numbers as small pictures and short words, in plain text: sparklines, bars and counts. Knows nothing of runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

TICKS = "▁▂▃▄▅▆▇█"
FILLS = "█▓▒░·"  # told apart without colour; phases beyond them share the last


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` ticks from lowest to highest, each the mean of an equal share of the finite values."""
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
    """Columns for each share, adding up to `width` as the shares add up to 1 (largest remainders are rounded up)."""
    total = max(1.0, sum(shares))
    exact = [max(0.0, share) / total * width for share in shares]
    columns = [int(size) for size in exact]
    missing = round(sum(exact)) - sum(columns)
    by_remainder = sorted(range(len(exact)), key=lambda index: exact[index] - columns[index], reverse=True)
    for index in by_remainder[: max(0, missing)]:
        columns[index] += 1
    return columns


def fill(index: int) -> str:
    """The character that stands for the phase at this place."""
    return FILLS[min(index, len(FILLS) - 1)]


def progress(fraction: float, width: int) -> str:
    """Heavy for what is done, light for what is not."""
    done = int(min(1.0, max(0.0, fraction)) * width)
    return "━" * done + "─" * (width - done)


def count(value: float | None) -> str:
    """A whole number with thousands separated; a dash for nothing."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """A return or the like: about three figures, whatever its size."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{_places(value)}f}"


def mean_and_std(mean: float, deviation: float) -> str:
    """Mean ± deviation, both to the places that suit the mean."""
    return f"{decimal(mean)} ± {deviation:,.{_places(mean)}f}"


def _places(value: float) -> int:
    return 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3


def percent(share: float) -> str:
    """A share as whole percents."""
    return f"{share * 100:.0f} %"


def duration(seconds: float | None) -> str:
    """0.8 s, 42 s, 3:05, 2:03:05."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_shares(shares: Mapping[str, float]) -> str:
    """`env 45 %  policy 30 %`, largest first, leaving out what rounds to nothing."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return "  ".join(f"{phase} {percent(share)}" for phase, share in ordered if share >= 0.005)
