"""A table that the workers of one machine share: in this process's memory, or in a file that all of them map.

    <dir>/table        page 0…  words (_ROWS to _EPISODES_GRANTED), then four words per worker: steps granted, steps
                                merged, episodes merged, episodes granted
                       then     the log of changed rows, one word each (core/table_merge.py), then the table itself
    <dir>/table-lock   held while a worker merges; the kernel releases it when its holder is killed

A worker that is killed while it merges leaves part of its changes in the table, and steps and episodes that it was
granted but did not merge. `reclaim` makes these available again.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.transport import TableDelta, TableTotals
from steppe.core.system.shared_dir import map_file
from steppe.core.table_merge import apply_remote_rows, find_changed_rows, merge_rows

LOG_ROWS = 1 << 17
_HEAD = 32  # words before those of the workers
_ROWS, _ACTIONS, _ITEMSIZE, _WORKERS, _LIMIT, _LOGGED, _GRANTED, _STEPS, _EPISODES, _STARTED, _MERGED, _LOST = range(12)
_EPISODE_LIMIT, _EPISODES_GRANTED = 12, 13


class _Shape(NamedTuple):
    """Dimensions that determine the layout of a table's memory."""

    rows: int
    actions: int
    itemsize: int  # bytes per entry
    workers: int

    @property
    def log_at(self) -> int:
        return -(-(_HEAD + 4 * self.workers) * 8 // 4096) * 4096

    @property
    def values_at(self) -> int:
        return self.log_at + LOG_ROWS * 8

    @property
    def nbytes(self) -> int:
        return self.values_at + self.rows * self.actions * self.itemsize


class _TableMemory:
    """Array views of the parts of a table's memory."""

    def __init__(self, buffer: memoryview, shape: _Shape) -> None:
        self.words = np.frombuffer(buffer, np.int64, _HEAD)
        self.floats = np.frombuffer(buffer, np.float64, _HEAD)
        self.workers = np.frombuffer(buffer, np.int64, 4 * shape.workers, _HEAD * 8).reshape(-1, 4)
        self.log = np.frombuffer(buffer, np.int64, LOG_ROWS, shape.log_at)
        kind = np.float32 if shape.itemsize == 4 else np.float64
        count = shape.rows * shape.actions
        self.values = np.frombuffer(buffer, kind, count, shape.values_at).reshape(shape.rows, shape.actions)


class _Copy(NamedTuple):
    """A worker's copy of the table, the same at its last merge, and a buffer for row indices."""

    local: np.ndarray
    base: np.ndarray
    changed_rows: np.ndarray


class LocalTable:
    """A SharedTable in this process's memory. Roles take turns in it, so nothing is locked."""

    def __init__(self) -> None:
        self._memory: _TableMemory | None = None
        self._copies: dict[int, _Copy] = {}
        self._log_positions: dict[int, int] = {}
        self._lock: AbstractContextManager[None] = nullcontext()

    def create(
        self,
        values: np.ndarray,
        num_workers: int,
        limit: int | None,
        steps: int = 0,
        episodes: int = 0,
        *,
        episode_limit: int | None = None,
    ) -> None:
        rows, actions = values.shape
        shape = _Shape(rows, actions, values.dtype.itemsize, num_workers)
        memory = _TableMemory(self._allocate(shape), shape)
        memory.words[: _WORKERS + 1] = shape
        memory.words[_LIMIT] = -1 if limit is None else limit
        memory.words[_GRANTED] = memory.words[_STEPS] = steps
        memory.words[_EPISODE_LIMIT] = -1 if episode_limit is None else episode_limit
        memory.words[_EPISODES_GRANTED] = memory.words[_EPISODES] = episodes
        memory.values[...] = values
        self._memory = self._publish(memory)

    def begin(self, worker: int, local: np.ndarray) -> int | None:
        memory = self._open()
        if memory is None:
            return None
        lost = self.reclaim(worker)
        with self._lock:
            local[...] = memory.values
            self._log_positions[worker] = int(memory.words[_LOGGED])
        self._copies[worker] = _Copy(local, local.copy(), np.empty(len(local) + 1, np.int64))
        return lost

    def claim(self, worker: int, num_steps: int, now_s: float) -> int | None:
        memory = self._require()
        words = memory.words
        with self._lock:
            if words[_LIMIT] >= 0:
                num_steps = _fair_share(num_steps, int(words[_LIMIT] - words[_GRANTED]), int(words[_WORKERS]))
            if num_steps and not memory.floats[_STARTED]:
                memory.floats[_STARTED] = now_s
            words[_GRANTED] += num_steps
            memory.workers[worker, 0] += num_steps
        return num_steps

    def claim_episodes(self, worker: int, num_episodes: int) -> int | None:
        memory = self._require()
        words = memory.words
        with self._lock:
            left = int(words[_EPISODE_LIMIT] - words[_EPISODES_GRANTED])
            num_episodes = _fair_share(num_episodes, left, int(words[_WORKERS]))
            words[_EPISODES_GRANTED] += num_episodes
            memory.workers[worker, 3] += num_episodes
        return num_episodes

    def merge(self, worker: int, change: TableDelta, now_s: float) -> None:
        memory, (local, base, changed_rows) = self._require(), self._copies[worker]
        rows = changed_rows[: find_changed_rows(local, base, change.candidates, changed_rows)]
        with self._lock:
            logged, position = int(memory.words[_LOGGED]), self._log_positions[worker]
            head = merge_rows(memory.values, local, base, change.kept, rows, memory.log, logged, position)
            memory.words[_LOGGED] = self._log_positions[worker] = head
            self.count(worker, change.steps, change.episodes, now_s)

    def apply_rows(self, rows: np.ndarray, kept: np.ndarray, added: np.ndarray) -> None:
        """Apply a remote worker's rows; the caller calls `count` afterwards."""
        memory = self._require()
        apply_remote_rows(memory.values, rows, kept, added)
        memory.log[(memory.words[_LOGGED] + np.arange(len(rows))) % LOG_ROWS] = rows
        memory.words[_LOGGED] += len(rows)

    def changed_since(self, position: int) -> tuple[np.ndarray, int]:
        """Return the rows that changed since the log had `position` entries, and the present number of entries."""
        memory = self._require()
        logged = int(memory.words[_LOGGED])
        if logged - position > LOG_ROWS:
            return np.arange(len(memory.values)), logged
        return np.unique(memory.log[np.arange(position, logged) % LOG_ROWS]), logged

    @property
    def created(self) -> bool:
        """Whether the table was created."""
        return self._open() is not None

    @property
    def values(self) -> np.ndarray:
        """The table itself, for its only writer."""
        return self._require().values

    def count(self, worker: int, steps: int, episodes: int, now_s: float) -> None:
        """Add a worker's merged steps and episodes to the totals; the caller holds the lock."""
        memory = self._require()
        words, own = memory.words, memory.workers[worker]
        own[1] += steps
        own[2] += episodes
        excess = max(0, int(own[1] - own[0]))  # episodes and vectorized steps are not cut off at the limit
        own[0] += excess
        words[_GRANTED] += excess
        excess = max(0, int(own[2] - own[3]))  # without a limit, or `reclaim` took a live worker for dead
        own[3] += excess
        words[_EPISODES_GRANTED] += excess
        words[_STEPS] += steps
        words[_EPISODES] += episodes
        memory.floats[_MERGED] = now_s

    def reclaim(self, worker: int, steps_left: int = 0, episodes_left: int = 0) -> int:
        """Make available again what a worker was granted and did not merge, and return the number of steps.

        `steps_left` and `episodes_left` are what the worker still has to take; 0 if the worker is gone.
        """
        memory = self._open()
        if memory is None:
            return 0
        with self._lock:
            own = memory.workers[worker]
            lost = max(0, int(own[0] - own[1]) - steps_left)
            own[0] -= lost
            memory.words[_GRANTED] -= lost
            memory.words[_LOST] += lost
            lost_episodes = max(0, int(own[3] - own[2]) - episodes_left)
            own[3] -= lost_episodes
            memory.words[_EPISODES_GRANTED] -= lost_episodes
        return lost

    def totals(self) -> TableTotals:
        memory = self._open()
        if memory is None:
            return TableTotals(0, 0, 0.0, 0.0)
        words, floats = memory.words, memory.floats
        steps, episodes, lost = int(words[_STEPS]), int(words[_EPISODES]), int(words[_LOST])
        return TableTotals(steps, episodes, float(floats[_STARTED]), float(floats[_MERGED]), lost)

    def read(self, values: np.ndarray) -> TableTotals:
        with self._lock:
            values[...] = self._require().values
            return self.totals()

    def _open(self) -> _TableMemory | None:
        return self._memory

    def _require(self) -> _TableMemory:
        memory = self._open()
        assert memory is not None, "a worker calls `begin` before it claims"
        return memory

    def _allocate(self, shape: _Shape) -> memoryview:
        return memoryview(bytearray(shape.nbytes))

    def _publish(self, memory: _TableMemory) -> _TableMemory:
        return memory


class ShmTable(LocalTable):
    """The same in a file of the run's shared directory, which is removed with that directory."""

    def __init__(self, shared_dir: Path) -> None:
        super().__init__()
        self._path = shared_dir / "table"
        self._lock = _FileLock(shared_dir / "table-lock")

    def _open(self) -> _TableMemory | None:
        if self._memory is None and self._path.exists():
            buffer = memoryview(map_file(self._path))
            self._memory = _TableMemory(buffer, _Shape(*np.frombuffer(buffer, np.int64, _WORKERS + 1).tolist()))
        return self._memory

    def _allocate(self, shape: _Shape) -> memoryview:
        try:
            return memoryview(map_file(self._draft, shape.nbytes, reserve=True))
        except OSError as error:
            self._draft.unlink(missing_ok=True)
            size = f"{shape.nbytes >> 20} MiB of shared memory for the table"
            raise UsageError(f"{size}: {error.strerror}; free some, or use fewer states") from None

    def _publish(self, memory: _TableMemory) -> _TableMemory:
        os.rename(self._draft, self._path)
        return memory

    @property
    def _draft(self) -> Path:
        return self._path.with_suffix(f".{os.getpid()}")


def _fair_share(requested: int, left: int, num_workers: int) -> int:
    """Return how many of `wanted` to grant of those `left`: so few that all workers finish at about the same time."""
    return max(0, min(requested, left if num_workers == 1 else -(-left // (2 * num_workers))))


class _FileLock(AbstractContextManager[None]):
    """A lock between processes that the kernel releases when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def __enter__(self) -> None:
        if self._handle is None:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None
        fcntl.flock(self._handle, fcntl.LOCK_UN)
