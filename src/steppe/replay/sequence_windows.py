"""Sequence replay: each step is stored once, in order, and sampled as part of time windows with burn-in.

A fragment is a run of consecutive steps of one environment within one episode: a row per step, oldest first, and at the
end of the episode one more row that has only the last observation. Each row stores how many rows of its fragment are
before and after it, so a window never leaves its episode. Some rows are sequence starts: only they have a leaf above 0
in the sum tree, so a priority belongs to a sequence.

    rows     b b b b S · · · · · · · n n          b: burn-in, S: start, ·: learned from, n: only to bootstrap from
    columns  obs, action, …            [burn_in + length + n_step, N, …]   time first
             hidden, …                 [N, …]   at the first row of each window

If an episode begins or ends within a window, the window is shorter: `valid` marks the rows that exist, `learn` those
that are learned from. Missing rows repeat the last existing one.

If an environment has several agents, all its columns, including reward and terminated, have an agent axis; an
additional column, `live`, marks the agents that are present.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.priorities import sequence_priority
from steppe.core.value_rescaling import inverse_rescale_value, rescale_value
from steppe.replay.kernels.copy import compiled
from steppe.replay.kernels.ring_index import CURSOR, SIZE
from steppe.replay.pool import ReplayBufferPool
from steppe.replay.remote.client import RemoteReplayPool, RemoteReplayStore
from steppe.replay.store.gather import BatchGatherer
from steppe.replay.store.store import ReplayStore

MIN_PRIORITY = 1e-6  # a sequence with a TD error of exactly 0 must still be sampled sometimes
POSITION_FIELDS = (FieldSpec("before", (), "int32"), FieldSpec("after", (), "int32"))
NOT_STORED = ("final_comm_mask", "lesson")  # extra columns that no batch contains


@dataclass(frozen=True)
class Windowing:
    """Shape of sequences and their windows; sequences start every `stride` steps and overlap by length - stride."""

    length: int = 16
    burn_in: int = 0
    stride: int | None = None  # default: length, without overlap
    n_step: int = 1
    gamma: float = 0.99
    rescaled: bool = False  # the actor's values are rescaled as in core/value_rescaling.py
    states: tuple[str, ...] = ("hidden",)  # columns of which a batch has only the window's first row

    def __post_init__(self) -> None:
        if min(self.length, self.n_step, self.step) < 1 or self.burn_in < 0 or self.step > self.length:
            raise ConfigError(
                "a sequence has length ≥ 1, n_step ≥ 1, burn_in ≥ 0 and 1 ≤ stride ≤ length, "
                f"not {self.length}, {self.n_step}, {self.burn_in} and {self.stride}"
            )

    @property
    def step(self) -> int:
        """Steps between the starts of consecutive sequences."""
        return self.length if self.stride is None else self.stride

    @property
    def rows(self) -> int:
        """Rows of a full window."""
        return self.burn_in + self.length + self.n_step


def step_fields(spec: SegmentSpec) -> tuple[FieldSpec, ...]:
    """Return the columns of one environment's step in sequence replay, with an agent axis if it has several agents."""
    reward, terminated = FieldSpec("reward", (), "float32"), FieldSpec("terminated", (), "bool")
    extras = (f for f in spec.extras if f.name not in NOT_STORED)
    fields = (spec.obs, spec.action, reward, terminated, *extras)
    if spec.num_agents == 1:
        return (*fields, *POSITION_FIELDS)
    together = (*fields, FieldSpec("live", (), "bool"))
    return (*(replace(f, shape=(spec.num_agents, *f.shape), frames=1) for f in together), *POSITION_FIELDS)


class SequenceReplay:
    """Write fragments to a pool's store and sample batches of windows. The pool's columns must be allocated already."""

    def __init__(self, pool: ReplayBufferPool | RemoteReplayPool, windowing: Windowing) -> None:
        if not pool.use_prioritized:
            raise ConfigError("sequences need a pool with use_prioritized=True; alpha=0 draws them uniformly")
        self.pool, self.windowing = pool, windowing
        self.store: ReplayStore | RemoteReplayStore = pool.store
        store = self.store
        self._states = tuple(f.name for f in store.fields if f.name in windowing.states)
        left = {*self._states, *(f.name for f in POSITION_FIELDS), "reward", "terminated"}
        self._fields = tuple(f for f in store.fields if f.name not in left)
        columns = {f.name: store.columns[f.name] for f in self._fields}
        stacked = [f.name for f in self._fields if f.name in store.stacked]
        self._gatherer = BatchGatherer(self._fields, columns, stacked, store.frames)
        self._agents = next(f.shape for f in store.fields if f.name == "reward")
        self.sequences = 0  # number of sequences ever written

    def write(
        self, fragment: Mapping[str, np.ndarray], starts: np.ndarray, source: int, priorities: np.ndarray
    ) -> None:
        """Store a fragment in one buffer; sequences start at rows `starts`."""
        count = len(fragment["reward"])
        if count > self.store.capacity:
            raise ConfigError(f"an episode of {count} rows does not fit a buffer of {self.store.capacity}")
        rows = np.arange(count, dtype=np.int32)
        leaves = np.zeros(count)
        leaves[starts] = priorities
        self.store.write(self.pool.route(source), {**fragment, "before": rows, "after": rows[::-1]}, leaves)
        self.pool.routed()
        self.sequences += len(starts)

    def initial_priorities(
        self, fragment: Mapping[str, np.ndarray], starts: np.ndarray, *, complete: bool
    ) -> np.ndarray:
        """Return priorities of new sequences: the actor's own TD errors if it recorded values, else the largest yet."""
        largest = self.store.max_priority
        if "q_val" not in fragment:
            return np.full(len(starts), largest)
        own = estimate_priorities(fragment, starts, self.windowing, complete=complete)
        return np.where(np.isfinite(own), np.maximum(own, MIN_PRIORITY), largest)

    @property
    def can_sample(self) -> bool:
        """Whether a sequence can be sampled."""
        return self.store.can_sample

    def batch_buffer(self, count: int) -> SequenceBatchBuffer:
        """Return reusable arrays for batches of `count` sequences."""
        return SequenceBatchBuffer(self.windowing, self._gatherer, count, self._agents)

    def draw(self, stream: np.random.Generator, into: SequenceBatchBuffer, beta: float) -> Batch:
        """Sample `into.count` sequences in proportion to their priorities, with importance weights."""
        store = self.store
        assert isinstance(store, ReplayStore), "rows of remote shards are drawn by the shards"
        with store.lock:
            starts, leaves = store.draw(stream, into.count)
            states = self.fill_windows(starts, into)
            indices, weights = store.describe(starts, leaves, beta)
        return Batch({**into.columns, **states}, weights=weights, indices=indices)

    def fill_windows(self, starts: np.ndarray, into: SequenceBatchBuffer) -> dict[str, np.ndarray]:
        """Fill `into` with the windows around the slots `starts`; return the recurrent states at their first rows."""
        store, rules, columns = self.store, self.windowing, self.store.columns
        assert isinstance(store, ReplayStore), "rows of remote shards are gathered by the shards"
        reward, ends = (columns[name].reshape(len(columns[name]), -1) for name in ("reward", "terminated"))
        meta = columns["before"], columns["after"], reward, ends
        _fill_windows(
            store.rings, store.capacity, starts, *meta, rules.burn_in, rules.length, rules.n_step, rules.gamma,
            into.slots, into.valid, into.learn, into.reward, into.discount, into.terminated, into.following,
        )  # fmt: skip
        self._gatherer(into.slots.reshape(-1), into.batch_buffer)
        return {name: columns[name][into.slots[0]] for name in self._states}


class SequenceBatchBuffer:
    """The reusable arrays of one batch of windows; `agents` is (num_agents,), or () without an agent axis."""

    def __init__(self, rules: Windowing, gathering: BatchGatherer, count: int, agents: tuple[int, ...]) -> None:
        shape = (rules.rows, count)
        reward_shape = (*shape, *(agents or (1,)))
        self.count = count
        self.slots = np.empty(shape, np.int64)
        self.valid, self.learn = np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        self.reward, self.terminated = np.empty(reward_shape, np.float32), np.empty(reward_shape, np.bool_)
        self.discount = np.empty(shape, np.float32)
        self.following = np.empty(shape, np.int64)
        self.batch_buffer = gathering.batch_buffer(rules.rows * count)
        self.columns = {
            name: rows.reshape(*shape, *rows.shape[1:]) for name, rows in self.batch_buffer.columns.items()
        } | {
            "reward": self.reward.reshape(*shape, *agents),
            "discount": self.discount,
            "terminated": self.terminated.reshape(*shape, *agents),
            "following": self.following,
            "valid": self.valid,
            "learn": self.learn,
        }


def estimate_priorities(
    fragment: Mapping[str, np.ndarray], starts: np.ndarray, windowing: Windowing, *, complete: bool
) -> np.ndarray:
    """Return priorities of new sequences from the actor's own values, column q_val [rows, …, actions]; NaN if unknown.

    The TD error is |r + … + gamma ** m · max q(s_m) − q(s, a)| with m at most n_step. There is no bootstrap after a
    termination; if the values end before the episode does, m is limited to the rows that have values. With `complete`, the
    last row has only an observation. With several agents, their mean error counts.
    """
    rows = len(fragment["reward"])
    steps = rows - 1
    known = steps + (not complete)  # rows with values
    # [rows, agents, actions]
    values = fragment["q_val"].astype(np.float64).reshape(rows, -1, fragment["q_val"].shape[-1])
    reward, ends = fragment["reward"].astype(np.float64).reshape(rows, -1), fragment["terminated"].reshape(rows, -1)
    present = fragment["live"].reshape(rows, -1) if "live" in fragment else np.ones(values.shape[:2], np.bool_)
    chosen = np.take_along_axis(values, fragment["action"].reshape(rows, -1, 1).astype(np.int64), axis=2)[:steps, :, 0]
    t = np.arange(steps)[:, None]
    count, total, ended = np.minimum(windowing.n_step, steps - t), np.zeros(1), np.zeros(1, np.bool_)
    for k in range(windowing.n_step):
        ended = ended | ((k < count) & ends[np.minimum(t[:, 0] + k, steps - 1)])
    count = np.where(ended, count, np.minimum(count, known - 1 - t))
    for k in range(windowing.n_step):
        total = total + np.where(k < count, windowing.gamma**k * reward[np.minimum(t[:, 0] + k, steps - 1)], 0.0)
    last_step = np.broadcast_to(np.minimum(t + count, known - 1), chosen.shape)
    best = np.take_along_axis(values.max(axis=2), last_step, axis=0)
    target = total + np.where(ended, 0.0, windowing.gamma**count) * (
        inverse_rescale_value(best) if windowing.rescaled else best
    )
    errors = np.abs((rescale_value(target) if windowing.rescaled else target) - chosen)
    usable = present[:steps] & (ended | ((count > 0) & np.take_along_axis(present, last_step, axis=0)))
    number = usable.sum(axis=1)
    means = np.where(usable, errors, 0.0).sum(axis=1) / np.maximum(number, 1)
    windows = np.minimum(starts[None, :] + np.arange(windowing.length)[:, None], steps - 1)
    counted = (number > 0)[windows] & (starts[None, :] + np.arange(windowing.length)[:, None] < steps)
    return np.where(counted.any(axis=0), sequence_priority(means[windows], counted), np.nan)


@compiled
def _fill_windows(
    rings: np.ndarray,
    capacity: int,
    starts: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    rewards: np.ndarray,
    ends: np.ndarray,
    burn_in: int,
    length: int,
    n_step: int,
    gamma: float,
    slots: np.ndarray,
    valid: np.ndarray,
    learn: np.ndarray,
    reward: np.ndarray,
    discount: np.ndarray,
    terminated: np.ndarray,
    following: np.ndarray,
) -> None:
    """Write the window around each start: the slot of each row, and its n-step reward, discount and termination."""
    num_rows = slots.shape[0]
    for i in range(len(starts)):
        start = starts[i]
        part = start // capacity
        position = start - part * capacity
        oldest = rings[CURSOR, part] if rings[SIZE, part] == capacity else 0
        kept = (position - oldest) % capacity  # rows before the start that are not overwritten
        num_before = min(burn_in, np.int64(before[start]), kept)
        left = np.int64(after[start])
        steps = min(length, left)
        rows = num_before + min(length + n_step, left + 1)
        for t in range(num_rows):
            row = min(t, rows - 1)
            slots[t, i] = part * capacity + (position - num_before + row) % capacity
            valid[t, i] = t < rows
            learn[t, i] = num_before <= t < num_before + steps
            discount[t, i], following[t, i] = 0.0, row
            reward[t, i, :], terminated[t, i, :] = 0.0, True
        for t in range(num_before, num_before + steps):
            count = min(n_step, left - (t - num_before))
            following[t, i] = t + count
            for agent in range(reward.shape[2]):
                total, factor, ended = 0.0, 1.0, False
                for k in range(count):
                    slot = part * capacity + (position - num_before + t + k) % capacity
                    total += factor * rewards[slot, agent]
                    factor *= gamma
                    ended |= ends[slot, agent]
                reward[t, i, agent], terminated[t, i, agent], discount[t, i] = total, ended, factor
