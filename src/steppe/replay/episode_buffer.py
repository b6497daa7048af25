"""Recurrent replay by episodes, under the names of the pathfinding project: a LocalBuffer gathers one, a GlobalBuffer keeps many.

Both are thin: an episode is a piece of sequence replay (sequence_windows.py), the global buffer a pool with one buffer. An episode is
checked once, when it enters the global buffer: windows are laid by compiled code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steppe.core.array_checks import as_column, as_numeric_array, require_below, require_finite, require_flags
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import FieldSpec
from steppe.core.system.typecheck import typechecked
from steppe.replay.factory import MAX_MEMORY_SHARE, available_bytes
from steppe.replay.ingest import as_block, fit_block
from steppe.replay.pool import ReplayBufferPool
from steppe.replay.sequence_windows import POSITION_FIELDS, SequenceBatchBuffer, SequenceReplay, Windowing

Episode = dict[str, np.ndarray]  # rows of steps, and one more row that has only the last observation
LEADING_COLUMNS = ("obs", "action", "reward", "terminated")  # in this order a batch is unpacked, and then the rest
STEP_COLUMNS = ("action", "reward", "hidden", "comm_mask", "q_val")
WINDOW_BYTES = 32  # of a row of a batch, for what `Windows` adds to the columns
DERIVED_COLUMNS = (
    "before",
    "after",
    "discount",
    "following",
    "valid",
    "learn",
)  # columns of batches that no episode has


class LocalBuffer:
    """The steps of one episode, from its first observation `obs` (num_agents, *obs_shape) to `finish`."""

    def __init__(self, obs: Any) -> None:
        self._obs = [_finite_array(obs, "obs", "the first observation")]
        self._rows: list[tuple[np.ndarray, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, action: Any, reward: float, next_obs: Any, hidden: Any, comm_mask: Any, q_val: Any) -> None:
        """Append a step; `hidden` is the state in which the policy saw the observation before it, q_val its values of that."""
        where = f"step {len(self._rows)}"
        given = zip(STEP_COLUMNS, (action, reward, hidden, comm_mask, q_val), strict=True)
        row = [_finite_array(value, name, where) for name, value in given]
        row[:2] = [value.reshape(()) if value.shape == (1,) else value for value in row[:2]]  # (1,) is one number too
        row[1] = _finite_array(row[1], "reward", where, np.float32)
        seen = _finite_array(next_obs, "next_obs", where)
        before = (*self._rows[0], self._obs[0]) if self._rows else (*row, self._obs[0])
        for name, value, first in zip((*STEP_COLUMNS, "next_obs"), (*row, seen), before, strict=True):
            if value.shape != first.shape:
                raise UsageError(f"{name} of {where} has shape {value.shape}, but it was {first.shape} before")
        self._rows.append(tuple(row))
        self._obs.append(seen)

    @typechecked
    def finish(self, *, terminated: bool) -> Episode:
        """The whole episode; `terminated` is False where it was cut by a time limit."""
        if not self._rows:
            raise UsageError("an episode without a step cannot be kept: add one first")
        of_each = self._rows[0][1].shape  # agents that have a reward of their own
        ends = np.zeros((len(self._rows) + 1, *of_each), bool)
        ends[-2] = terminated
        episode = {"obs": np.stack(self._obs), "terminated": ends}
        for name, values in zip(STEP_COLUMNS, zip(*self._rows, strict=True), strict=True):
            rows = np.stack(values)
            episode[name] = np.concatenate([rows, np.zeros_like(rows[:1])])
        return episode


class GlobalBuffer:
    """Episodes of all actors, up to `capacity` steps; sequences are drawn by priority.

    Batches are as sequence_windows.py draws them: time first, `following` says which row is a step's next observation. They can be
    unpacked: `obs, action, reward, terminated, *rest = buffer.get_batch()`.
    """

    @typechecked
    def __init__(
        self,
        capacity: int = 2048 * 256,
        windowing: Windowing | None = None,
        batch_size: int = 192,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        seed: int | None = None,
    ) -> None:
        self.windowing = windowing or Windowing(length=16, n_step=2)
        self.batch_size, self.beta = batch_size, beta
        self.pool = ReplayBufferPool(1, capacity, use_prioritized=True, alpha=alpha)
        self._stream = np.random.default_rng(seed)
        self._replay: SequenceReplay | None = None
        self._sequence_buffers: dict[int, SequenceBatchBuffer] = {}

    def __len__(self) -> int:
        """Rows stored: steps, and an observation per episode."""
        return len(self.pool.store)

    def add(self, episode: Mapping[str, Any]) -> None:
        """Keep what `LocalBuffer.finish` gave; its sequences enter with the actor's own estimate of their errors.

        UsageError or NotFinite, and nothing is kept, where it cannot be learned from or does not fit the episodes before.
        """
        store = self.pool.store
        known = [field for field in store.fields if field not in POSITION_FIELDS]
        columns = validate_episode(episode, known)
        count = len(columns["reward"])
        if count > store.capacity:  # before it decides what the columns are
            raise ConfigError(f"an episode of {count} rows does not fit a buffer of {store.capacity}")
        if self._replay is None:
            fields = [FieldSpec(name, rows.shape[1:], rows.dtype.name) for name, rows in columns.items()]
            store.allocate([*fields, *POSITION_FIELDS])
            self._replay = SequenceReplay(self.pool, self.windowing)
        starts = np.arange(0, count - 1, self.windowing.step)
        with np.errstate(over="ignore", invalid="ignore"):  # an estimate that is not finite does not count
            priorities = self._replay.initial_priorities(columns, starts, whole=True)
        self._replay.write(columns, starts, 0, priorities)

    def get_data(self) -> Batch:
        """The next batch of `batch_size` sequences."""
        return self.get_batch(self.batch_size)

    @typechecked
    def get_batch(self, batch_size: int | None = None) -> Batch:
        """A batch of sequences with weights and indices, of `self.batch_size` if no other is given; its arrays are reused by
        the next one of the same size."""
        if self._replay is None:
            raise UsageError("there is no episode yet: add one first")
        batch_size = self.batch_size if batch_size is None else batch_size
        if batch_size not in self._sequence_buffers:
            self._require_room(batch_size)
            self._sequence_buffers[batch_size] = self._replay.room(batch_size)
        drawn = self._replay.draw(self._stream, self._sequence_buffers[batch_size], self.beta)
        first = {name: drawn.columns[name] for name in LEADING_COLUMNS}
        return Batch({**first, **drawn.columns}, drawn.weights, drawn.indices)

    def _require_room(self, batch_size: int) -> None:
        """Raise UsageError for a batch of no sequence, or of more than memory holds."""
        row_bytes = WINDOW_BYTES + sum(field.nbytes for field in self.pool.store.fields)
        most = int(MAX_MEMORY_SHARE * available_bytes() / (row_bytes * self.windowing.rows))
        if not 1 <= batch_size <= most:
            raise UsageError(f"batch_size={batch_size}: must be at least 1, and memory has room for {most:,} sequences")

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Set the priorities of sequences by the indices of a batch; UsageError for a row that begins none.

        Where a row was overwritten since it was drawn nothing changes: `pool.get_buffer_stats()` counts that in `stale_updates`.
        """
        store, indices = self.pool.store, as_column(indices, "indices", np.int64)
        with store.lock:
            if self._replay is not None and indices.ndim == 1:
                self._require_starts(indices)
            store.update_priorities(indices, priorities)

    def _require_starts(self, indices: np.ndarray) -> None:
        """Raise UsageError for a row at which `add` began no sequence; those that are gone are not looked at."""
        store = self.pool.store
        slots = store.slots_of(indices)
        before, after = (store.columns[field.name][slots] for field in POSITION_FIELDS)
        wrong = (slots >= 0) & ((before % self.windowing.step != 0) | (after == 0))
        if wrong.any():
            raise UsageError(
                f"index {indices[wrong.argmax()]} is of a row that begins no sequence: use the indices that came with a batch"
            )


def validate_episode(episode: Mapping[str, Any], known: Sequence[FieldSpec]) -> Episode:
    """The columns of an episode, checked for what compiled code and `estimate` rely on, as the `known` fields if there are any.

    [rows, …] with at least two rows; finite numbers; a `terminated` for every `reward`, of one agent or of several; actions
    that `q_val`, if it is there, has a value for.
    """
    if not isinstance(episode, Mapping):
        raise UsageError(f"an episode is a dictionary of columns, not a {type(episode).__name__}")
    missing, made = (
        [name for name in LEADING_COLUMNS if name not in episode],
        [name for name in DERIVED_COLUMNS if name in episode],
    )
    if missing or made:
        problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(made)}, which is made when it is drawn"
        raise UsageError(f"the episode {problem}: LocalBuffer.finish gives what is needed")
    given = as_block(episode, None)
    if len(given.get("reward", ())) < 2:
        raise UsageError("an episode without a step cannot be kept: it has a row for each step and one more")
    dtypes = {name: rows.dtype.name for name, rows in given.items()} | {"reward": "float32", "terminated": "bool"}
    dtypes |= {"live": "bool"} if "live" in given else {}
    dtypes |= {"action": "int64"} if "q_val" in given else {}
    dtypes |= {field.name: field.dtype for field in known if field.name in given}
    columns = {name: as_column(rows, name, dtypes[name]) for name, rows in given.items()}
    if known:
        fit_block(columns, known)
    for name, rows in columns.items():
        if rows.dtype.kind == "f":
            require_finite(rows, name)
        elif rows.dtype.kind == "b":
            require_flags(rows, name)
    _require_shapes(columns)
    return columns


def _require_shapes(columns: Episode) -> None:
    """Raise UsageError unless the columns of each agent have as many agents as others have."""
    reward, terminated = columns["reward"].shape, columns["terminated"].shape
    if terminated != reward:
        raise UsageError(f"an episode has a 'terminated' for every 'reward', not shapes {terminated} and {reward}")
    if len(reward) > 2 or 0 in reward:
        raise UsageError(f"'reward' has shape {reward}, where (rows,) or (rows, agents) is needed")
    if "q_val" not in columns:
        return
    values = columns["q_val"].shape
    if len(values) not in (2, 3) or 0 in values:
        raise UsageError(f"'q_val' has shape {values}, where (rows, actions) or (rows, agents, actions) is needed")
    agents = 1 if len(values) == 2 else values[1]
    one = ((values[0],), (values[0], 1))  # two ways to write one number
    each = one if agents == 1 else ((values[0], agents),)
    for name, shapes in (("action", each), ("live", each), ("reward", (*each, *one))):
        if name in columns and columns[name].shape not in shapes:
            raise UsageError(f"{name!r} has shape {columns[name].shape}, but 'q_val' has {values}")
    require_below(columns["action"], "action", (values[-1],))


def _finite_array(value: Any, name: str, where: str, dtype: Any = None) -> np.ndarray:
    """A copy, since environments may use their arrays again; UsageError unless it holds finite numbers or truth values."""
    with np.errstate(over="ignore"):
        found = np.array(as_numeric_array(value, name), dtype, order="C")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise UsageError(f"{name} of {where} has NaN or infinity: leave this episode out")
    if found.dtype.kind == "b":
        require_flags(found, name)
    return found
