"""Cache of runs: views and curves that are built once and then kept up to date.

Each run has its own locks, so that reading a long history for the first time blocks no reader of another run.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from steppe.control.curves import Curves
from steppe.records.run_directory import RECORD, STORE, SUMMARY, RunDirectory, RunInfo, get_run_info
from steppe.records.store import FAILED, NO_OWNER, PENDING, STOPPED, SUCCEEDED
from steppe.records.view import RunView

MAX_CACHED_RUNS = 64  # runs whose curves and views stay in memory
MAX_TOTAL_POINTS = 8_000_000  # of all their curves together, at 32 bytes each
_FINAL_STATES = (SUCCEEDED, FAILED, STOPPED)  # states that only a new writer changes
_FILES = (RECORD, STORE, f"{STORE}-wal", SUMMARY)

_FileStamp = tuple[int, int] | None
_FileStamps = tuple[_FileStamp, ...]


class CachedRun:
    """One run. `view` and `curves` yield up-to-date objects, which the caller holds exclusively until it exits."""

    def __init__(self, directory: RunDirectory, stamp: _FileStamp = None) -> None:
        self.stamp = stamp  # of the file that identifies the run
        self.num_points = 0  # in its curves
        self._directory = directory
        self._view: RunView | None = None
        self._curves: Curves | None = None
        self._view_lock, self._curves_lock = threading.Lock(), threading.Lock()

    @contextlib.contextmanager
    def view(self) -> Iterator[RunView]:
        with self._view_lock:
            if self._view is None:
                self._view = RunView(self._directory)
            self._view.refresh()
            yield self._view

    @contextlib.contextmanager
    def curves(self) -> Iterator[Curves]:
        with self._curves_lock:
            if self._curves is None:
                self._curves = Curves(self._directory.board)
            self._curves.refresh()
            self.num_points = self._curves.num_points
            yield self._curves


class RunCache:
    """The runs that were read recently, and the infos of those that have ended. Thread-safe."""

    def __init__(self, most: int = MAX_CACHED_RUNS, most_points: int = MAX_TOTAL_POINTS) -> None:
        self._most, self._most_points = most, most_points
        self._lock = threading.Lock()
        self._runs: dict[str, CachedRun] = {}
        self._infos: dict[str, tuple[_FileStamps, RunInfo]] = {}
        self._open: dict[str, tuple[_FileStamp, RunDirectory]] = {}  # live runs, whose stores stay open

    def of(self, path: Path) -> CachedRun:
        """Return the cached run; a new one if its record changed or another run has the name now."""
        stamp = _file_stamp(f"{path}/{RECORD}")
        with self._lock:
            found = self._runs.pop(path.name, None)
            if found is None or found.stamp != stamp:
                found = CachedRun(RunDirectory(path), stamp)
            self._runs[path.name] = found
            while len(self._runs) > self._most or (len(self._runs) > 1 and self._num_points() > self._most_points):
                del self._runs[next(iter(self._runs))]
            return found

    def _num_points(self) -> int:
        return sum(run.num_points for run in self._runs.values())

    def info(self, path: Path) -> RunInfo:
        """Return the info of a run, read again only if its files changed: most runs of a long list have ended."""
        stamps = tuple(_file_stamp(f"{path}/{name}") for name in _FILES)
        with self._lock:
            before, opened = self._infos.get(path.name), self._open.get(path.name)
        if before is not None and before[0] == stamps:
            return before[1]
        directory = opened[1] if opened is not None and opened[0] == stamps[0] else RunDirectory(path)
        info = get_run_info(directory)
        unchanging = info.status.state in _FINAL_STATES or (
            info.status.state == PENDING and info.status.pid == NO_OWNER
        )
        with self._lock:
            self._infos.pop(path.name, None)
            self._open.pop(path.name, None)
            if info.damage is None and unchanging:
                self._infos[path.name] = (stamps, info)
            elif info.damage is None:
                self._open[path.name] = (stamps[0], directory)
        return info

    def forget(self, name: str) -> None:
        with self._lock:
            self._runs.pop(name, None)
            self._infos.pop(name, None)
            self._open.pop(name, None)


def _file_stamp(path: str) -> _FileStamp:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
