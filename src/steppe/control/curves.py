"""A run's curves in memory, extended incrementally from its store, and downsampled for charts."""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, Report, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING, Board
from steppe.records.scalars import Scalars

MAX_POINTS = 20_000  # per series; beyond that, older points are downsampled
MAX_SERIES = 500
_KINDS: dict[str, type[Report]] = {
    TRAINING: TrainingReport,
    ACTORS: ActorReport,
    EVALUATIONS: EvaluationReport,
    EVENTS: EventReport,
}
_PAGE = 1_000

Point = tuple[int, float, float | None]
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # of a series, in order


class CurveColumns(NamedTuple):
    """Columns of one curve: the report's number in the store, environment steps, time, value."""

    numbers: array[int]
    steps: array[int]
    times: array[float]
    values: array[float]

    @classmethod
    def empty(cls) -> CurveColumns:
        return cls(array("q"), array("q"), array("d"), array("d"))

    def add(self, columns: Columns) -> None:
        own: tuple[array[Any], ...] = (self.numbers, self.steps, self.times, self.values)
        for column, new in zip(own, columns, strict=True):
            column.frombytes(new.tobytes())

    def take(self, rows: Sequence[int]) -> CurveColumns:
        numbers, steps = (array("q", [column[row] for row in rows]) for column in (self.numbers, self.steps))
        times, values = (array("d", [column[row] for row in rows]) for column in (self.times, self.values))
        return CurveColumns(numbers, steps, times, values)


class Curves:
    """The curves of one run. Not thread-safe."""

    def __init__(self, board: Board, most_points: int = MAX_POINTS) -> None:
        self.cursor = 0  # number of the newest report that was read
        self._board, self._most = board, most_points
        self._scalars = Scalars()
        self._cursors = dict.fromkeys(_KINDS, 0)
        self._series: dict[str, CurveColumns] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._series)

    @property
    def num_points(self) -> int:
        """Number of points in memory, over all series."""
        return sum(len(series.values) for series in self._series.values())

    def refresh(self) -> None:
        """Read the reports since the last call, in order, a page at a time: histories are long."""
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
        """Add reports, those with the same curves as one table: there are far more points than kinds of reports."""
        heads: list[tuple[int, int, float]] = []
        tables: dict[tuple[str, ...], tuple[list[int], list[list[float]]]] = {}
        for number, report in reports:
            scalars = self._scalars.of(report)
            if scalars:
                rows, values = tables.setdefault(tuple(scalars), ([], []))
                rows.append(len(heads))
                values.append(list(scalars.values()))
                heads.append((number, self._scalars.env_steps, report.time_s))
        self.cursor = max(self.cursor, reports[-1][0])
        if not heads:
            return
        numbers, steps, times = map(np.array, zip(*heads, strict=True))
        for name, chosen, column in _columns_by_curve(tables):
            if name in self._series or len(self._series) < MAX_SERIES:
                self._add(name, (numbers[chosen], steps[chosen], times[chosen].astype(np.float64), column))

    def _add(self, name: str, columns: Columns) -> None:
        series = self._series.setdefault(name, CurveColumns.empty())
        series.add(columns)
        length = len(series.values)
        if length > self._most:
            kept = downsample_extremes(series.values, range(length - 1), self._most // 2)
            self._series[name] = series.take([*kept, length - 1])

    def points(self, name: str, since: int, most: int) -> tuple[list[Point], int]:
        """Return at most `most` points of a curve after a cursor, including its extremes, and how many there are."""
        series = self._series.get(name)
        if series is None:
            return [], 0
        rows = range(bisect_right(series.numbers, since), len(series.numbers))
        chosen = downsample_extremes(series.values, rows, most)
        return [(series.steps[row], series.times[row], _finite_or_none(series.values[row])) for row in chosen], len(
            rows
        )


def _columns_by_curve(
    tables: Mapping[tuple[str, ...], tuple[list[int], list[list[float]]]],
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield each curve with the rows in which it has points, in order, and their values."""
    found: defaultdict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for names, (rows, values) in tables.items():
        at, table = np.array(rows), np.array(values, dtype=np.float64)
        for column, name in enumerate(names):
            found[name].append((at, table[:, column]))
    for name, parts in found.items():
        rows_, column_ = (np.concatenate(some) for some in zip(*parts, strict=True))
        order = np.argsort(rows_) if len(parts) > 1 else slice(None)
        yield name, rows_[order], column_[order]


def downsample_extremes(values: Sequence[float], rows: range, max_points: int) -> list[int]:
    """Return at most `max_points` of the rows, in order: the minimum and the maximum of each of equal parts."""
    if len(rows) <= max_points:
        return list(rows)
    parts = max(1, max_points // 2)
    bounds = np.arange(parts + 1) * len(rows) // parts
    part = np.repeat(np.arange(parts), np.diff(bounds))
    column = np.asarray(values, dtype=np.float64)[rows.start : rows.stop]
    known = np.isfinite(column)
    found = []
    for ufunc, nothing in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        filled = np.where(known, column, nothing)
        hits = np.flatnonzero(known & (filled == ufunc.reduceat(filled, bounds[:-1])[part]))
        found.append(hits[np.unique(part[hits], return_index=True)[1]])
    chosen: list[int] = (rows.start + np.unique(np.concatenate(found))[:max_points]).tolist()
    return chosen


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
