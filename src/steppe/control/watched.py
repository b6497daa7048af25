"""Runs as this process knows them: pictures and curves that are built up once and then kept up to date.

Each run has locks of its own, so that a long history being read for the first time holds up nobody who looks at another run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from steppe.control.curves import Curves
from steppe.records.directory import RECORD, STORE, SUMMARY, RunDirectory, RunInfo, info_of
from steppe.records.store import FAILED, NOBODY, PENDING, STOPPED, SUCCEEDED
from steppe.records.view import RunView

KEPT = 64  # runs whose curves and pictures stay in memory
MOST_POINTS = 8_000_000  # of all their curves together, at 32 bytes each
_QUIET = (SUCCEEDED, FAILED, STOPPED)  # what only a new writer changes
_FILES = (RECORD, STORE, f"{STORE}-wal", SUMMARY)

_Marks = tuple[tuple[int, int] | None, ...]


class Watched:
    """One run. What `view` and `curves` give is up to date, and the caller's alone until he leaves."""

    def __init__(self, directory: RunDirectory) -> None:
        self.key = directory.key
        self.num_points = 0  # that its curves take up
        self._directory = directory
        self._view: RunView | None = None
        self._curves: Curves | None = None
        self._viewing, self._drawing = threading.Lock(), threading.Lock()

    @contextlib.contextmanager
    def view(self) -> Iterator[RunView]:
        with self._viewing:
            if self._view is None:
                self._view = RunView(self._directory)
            self._view.refresh()
            yield self._view

    @contextlib.contextmanager
    def curves(self) -> Iterator[Curves]:
        with self._drawing:
            if self._curves is None:
                self._curves = Curves(self._directory.board)
            self._curves.refresh()
            self.num_points = self._curves.num_points
            yield self._curves


class Known:
    """The runs that were looked at lately, and the lines of those that have ended. May be used by several threads."""

    def __init__(self, most: int = KEPT, most_points: int = MOST_POINTS) -> None:
        self._most, self._most_points = most, most_points
        self._lock = threading.Lock()
        self._runs: dict[str, Watched] = {}
        self._lines: dict[str, tuple[_Marks, RunInfo]] = {}

    def of(self, directory: RunDirectory) -> Watched:
        """A run; another one if there is now another run of that name."""
        name, key = directory.path.name, directory.key
        with self._lock:
            found = self._runs.pop(name, None)
            if found is None or found.key != key:
                found = Watched(directory)
            self._runs[name] = found
            while len(self._runs) > self._most or (len(self._runs) > 1 and self._num_points() > self._most_points):
                del self._runs[next(iter(self._runs))]
            return found

    def _num_points(self) -> int:
        return sum(run.num_points for run in self._runs.values())

    def info(self, path: Path) -> RunInfo:
        """The line of a run, read again only if its files have changed: most runs of a long list have ended."""
        marks = tuple(_mark(path / name) for name in _FILES)
        with self._lock:
            before = self._lines.get(path.name)
        if before is not None and before[0] == marks:
            return before[1]
        info = info_of(RunDirectory(path))
        waits = info.status.state == PENDING and info.status.pid == NOBODY
        with self._lock:
            self._lines.pop(path.name, None)
            if info.damage is None and (info.status.state in _QUIET or waits):
                self._lines[path.name] = (marks, info)
        return info

    def forget(self, name: str) -> None:
        with self._lock:
            self._runs.pop(name, None)
            self._lines.pop(name, None)


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
