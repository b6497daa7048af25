"""Recurrent replay by episodes, under the names of the pathfinding project: a LocalBuffer gathers one, a GlobalBuffer keeps many.

Both are thin: an episode is a piece of sequence replay (sequences.py), the global buffer a pool with one buffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from steppe.core.arrays import as_array
from steppe.core.checked import checked
from steppe.core.errors import UsageError
from steppe.core.experience import Batch
from steppe.core.specs import FieldSpec
from steppe.replay.pool import ReplayBufferPool
from steppe.replay.sequences import META, SequenceReplay, Windowing, Windows

Episode = dict[str, np.ndarray]  # rows of steps, and one more row that has only the last observation
FIRST = ("obs", "action", "reward", "terminated")  # in this order a batch is unpacked, and then the rest
NAMES = ("action", "reward", "hidden", "comm_mask", "q_val")


class LocalBuffer:
    """The steps of one episode, from its first observation `obs` (num_agents, *obs_shape) to `finish`."""

    def __init__(self, obs: np.ndarray) -> None:
        self._obs = [as_array(obs, "obs")]
        self._rows: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, action: Any, reward: float, next_obs: Any, hidden: Any, comm_mask: Any, q_val: Any) -> None:
        """Append a step; `hidden` is the state in which the policy saw the observation before it, q_val its values of that."""
        row = [
            as_array(value, name) for name, value in zip(NAMES, (action, reward, hidden, comm_mask, q_val), strict=True)
        ]
        row[:2] = [value.reshape(()) if value.shape == (1,) else value for value in row[:2]]  # (1,) is one number too
        row[1] = row[1].astype(np.float32)
        seen = as_array(next_obs, "next_obs")
        for name, value in zip((*NAMES, "next_obs"), (*row, seen), strict=True):
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise UsageError(f"{name} of step {len(self._rows)} has NaN or infinity: leave this episode out")
        self._rows.append(tuple(row))
        self._obs.append(seen)

    @checked
    def finish(self, *, terminated: bool) -> Episode:
        """The whole episode; `terminated` is False where it was cut by a time limit."""
        if not self._rows:
            raise UsageError("an episode without a step cannot be kept: add one first")
        of_each = self._rows[0][1].shape  # agents that have a reward of their own
        ends = np.zeros((len(self._rows) + 1, *of_each), bool)
        ends[-2] = terminated
        episode = {"obs": np.stack(self._obs), "terminated": ends}
        for name, values in zip(NAMES, zip(*self._rows, strict=True), strict=True):
            rows = np.stack([np.asarray(value) for value in values])
            episode[name] = np.concatenate([rows, np.zeros_like(rows[:1])])
        return episode


class GlobalBuffer:
    """Episodes of all actors, up to `capacity` steps; sequences are drawn by priority.

    Batches are as sequences.py draws them: time first, `following` says which row is a step's next observation. They can be
    unpacked: `obs, action, reward, terminated, *rest = buffer.get_batch()`.
    """

    @checked
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
        self._rooms: dict[int, Windows] = {}

    def __len__(self) -> int:
        """Rows stored: steps, and an observation per episode."""
        return len(self.pool.store)

    def add(self, episode: Episode) -> None:
        """Keep what `LocalBuffer.finish` gave; its sequences enter with the actor's own estimate of their errors."""
        shapes = [episode[name].shape if name in episode else None for name in ("terminated", "reward")]
        if shapes[0] != shapes[1]:
            raise UsageError(
                f"an episode has a 'terminated' for every 'reward', not shapes {shapes[0]} and {shapes[1]}"
            )
        if self._replay is None:
            fields = [FieldSpec(name, rows.shape[1:], rows.dtype.name) for name, rows in episode.items()]
            self.pool.store.allocate([*fields, *META])
            self._replay = SequenceReplay(self.pool, self.windowing)
        for field in self.pool.store.fields:
            if field not in META and (field.name not in episode or episode[field.name].shape[1:] != field.shape):
                found = episode[field.name].shape[1:] if field.name in episode else "none"
                raise UsageError(f"{field.name!r} has shape {found}, but this buffer's column has {field.shape}")
        starts = np.arange(0, len(episode["reward"]) - 1, self.windowing.step)
        self._replay.write(episode, starts, 0, self._replay.entering(episode, starts, whole=True))

    def get_data(self) -> Batch:
        """The next batch of `batch_size` sequences."""
        return self.get_batch(self.batch_size)

    @checked
    def get_batch(self, batch_size: int | None = None) -> Batch:
        """A batch of sequences with weights and indices, of `self.batch_size` if no other is given; its arrays are reused by
        the next one of the same size."""
        if self._replay is None:
            raise UsageError("there is no episode yet: add one first")
        batch_size = self.batch_size if batch_size is None else batch_size
        if batch_size not in self._rooms:
            self._rooms[batch_size] = self._replay.room(batch_size)
        drawn = self._replay.draw(self._stream, self._rooms[batch_size], self.beta)
        first = {name: drawn.columns[name] for name in FIRST}
        return Batch({**first, **drawn.columns}, drawn.weights, drawn.indices)

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of sequences by the indices of a batch."""
        self.pool.store.prioritize(indices, priorities)
