"""A run's curves in memory, built up from what is new in its store, and cut down to what a chart can show."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from steppe.core.links import ACTORS, EVALUATIONS, EVENTS, TRAINING, Board
from steppe.core.reports import ActorReport, EvaluationReport, EventReport, Report, TrainingReport
from steppe.records.scalars import Scalars

MOST_POINTS = 20_000  # kept of one series; beyond, the older ones are thinned out
MOST_SERIES = 500
_KINDS: dict[str, type[Report]] = {
    TRAINING: TrainingReport,
    ACTORS: ActorReport,
    EVALUATIONS: EvaluationReport,
    EVENTS: EventReport,
}
_PAGE = 10_000

Point = tuple[int, float, float | None]


class Series(NamedTuple):
    """Columns of one curve: the report's number in the store, environment steps, time, value."""

    numbers: array[int]
    steps: array[int]
    times: array[float]
    values: array[float]

    @classmethod
    def empty(cls) -> Series:
        return cls(array("q"), array("q"), array("d"), array("d"))

    def add(self, number: int, env_steps: int, time_s: float, value: float) -> None:
        self.numbers.append(number)
        self.steps.append(env_steps)
        self.times.append(time_s)
        self.values.append(value)

    def take(self, rows: Sequence[int]) -> Series:
        numbers, steps = (array("q", [column[row] for row in rows]) for column in (self.numbers, self.steps))
        times, values = (array("d", [column[row] for row in rows]) for column in (self.times, self.values))
        return Series(numbers, steps, times, values)


class Curves:
    """Not for several threads at once."""

    def __init__(self, board: Board, most_points: int = MOST_POINTS) -> None:
        self.cursor = 0  # number of the newest report that was taken in
        self._board, self._most = board, most_points
        self._scalars = Scalars()
        self._cursors = dict.fromkeys(_KINDS, 0)
        self._series: dict[str, Series] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._series)

    @property
    def num_points(self) -> int:
        """Of all series, as they are kept."""
        return sum(len(series.values) for series in self._series.values())

    def refresh(self) -> None:
        """Take in what was reported since the last call, in order."""
        new: list[tuple[int, Report]] = []
        for topic, kind in _KINDS.items():
            page = self._board.read(topic, self._cursors[topic], _PAGE)
            while page:
                new += [(number, kind.read(record)) for number, record in page]
                self._cursors[topic] = page[-1][0]
                page = self._board.read(topic, page[-1][0], _PAGE) if len(page) == _PAGE else []
        for number, report in sorted(new, key=lambda item: item[0]):
            self._take(number, report)

    def _take(self, number: int, report: Report) -> None:
        self.cursor = max(self.cursor, number)
        for name, value in self._scalars.of(report).items():
            series = self._series.get(name)
            if series is None:
                if len(self._series) >= MOST_SERIES:
                    continue
                series = self._series[name] = Series.empty()
            series.add(number, self._scalars.env_steps, report.time_s, float(value))
            if len(series.values) > self._most:
                self._series[name] = series.take(extremes(series.values, range(len(series.values)), self._most // 2))

    def points(self, name: str, since: int, most: int) -> tuple[list[Point], int]:
        """At most so many points of a curve after a cursor, with its peaks and troughs, and how many there are."""
        series = self._series.get(name)
        if series is None:
            return [], 0
        rows = range(bisect_right(series.numbers, since), len(series.numbers))
        chosen = extremes(series.values, rows, most)
        return [(series.steps[row], series.times[row], _finite(series.values[row])) for row in chosen], len(rows)


def extremes(values: Sequence[float], rows: range, most: int) -> list[int]:
    """At most so many of the rows, in order: of equal parts of them each one's least and greatest value."""
    if len(rows) <= most:
        return list(rows)
    parts = max(1, most // 2)
    bounds = [part * len(rows) // parts for part in range(parts + 1)]
    column = np.asarray(values, dtype=np.float64)[rows.start : rows.stop]
    known = np.isfinite(column)
    least, greatest = np.where(known, column, np.inf), np.where(known, column, -np.inf)
    found: list[int] = []
    for start, end in pairwise(bounds):
        if known[start:end].any():
            found += sorted({start + int(least[start:end].argmin()), start + int(greatest[start:end].argmax())})
    return [rows.start + row for row in found[:most]]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
