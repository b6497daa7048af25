"""A run's curves in memory, built up from what is new in its store, and cut down to what a chart can show."""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
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
_PAGE = 1_000

Row = tuple[int, int, float, float]  # of a series' columns
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

    def add(self, rows: Iterable[Row]) -> None:
        numbers, steps, times, values = zip(*rows, strict=True)
        self.numbers.extend(numbers)
        self.steps.extend(steps)
        self.times.extend(times)
        self.values.extend(values)

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
        """Take in what was reported since the last call, in order, a page at a time: histories are long."""
        reports = heapq.merge(*map(self._new, _KINDS), key=itemgetter(0))
        while page := list(islice(reports, _PAGE)):
            self._take(page)

    def _new(self, topic: str) -> Iterator[tuple[int, Report]]:
        while page := self._board.read(topic, self._cursors[topic], _PAGE):
            self._cursors[topic] = page[-1][0]
            yield from ((number, _KINDS[topic].read(record)) for number, record in page)
            if len(page) < _PAGE:
                return

    def _take(self, reports: list[tuple[int, Report]]) -> None:
        rows: defaultdict[str, list[Row]] = defaultdict(list)
        for number, report in reports:
            for name, value in self._scalars.of(report).items():
                rows[name].append((number, self._scalars.env_steps, report.time_s, value))
        self.cursor = max(self.cursor, reports[-1][0])
        for name, new in rows.items():
            if name in self._series or len(self._series) < MOST_SERIES:
                self._add(name, new)

    def _add(self, name: str, rows: list[Row]) -> None:
        series = self._series.setdefault(name, Series.empty())
        series.add(rows)
        length = len(series.values)
        if length > self._most:
            kept = extremes(series.values, range(length - 1), self._most // 2)
            self._series[name] = series.take([*kept, length - 1])

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
    bounds = np.arange(parts + 1) * len(rows) // parts
    part = np.repeat(np.arange(parts), np.diff(bounds))
    column = np.asarray(values, dtype=np.float64)[rows.start : rows.stop]
    known = np.isfinite(column)
    found = []
    for ufunc, nothing in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        filled = np.where(known, column, nothing)
        hits = np.flatnonzero(known & (filled == ufunc.reduceat(filled, bounds[:-1])[part]))
        found.append(hits[np.unique(part[hits], return_index=True)[1]])
    chosen: list[int] = (rows.start + np.unique(np.concatenate(found))[:most]).tolist()
    return chosen


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
