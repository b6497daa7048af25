"""Q-learning in four implementations with the same values: compiled, NumPy, Python lists, and allocation-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import numpy as np

from steppe.algorithms.tabular import batch_kernels, step_kernels
from steppe.algorithms.tabular.base import (
    BaseAlgorithm,
    as_bool,
    require_action_mask,
    require_finite_reward,
    require_index,
)
from steppe.algorithms.tabular.memory_limits import MemoryPool, require_memory
from steppe.algorithms.tabular.table import (
    EXPERIENCE_DTYPES,
    EXPERIENCE_KEYS,
    OneStepAlgorithm,
    TransitionColumns,
    require_lengths,
)
from steppe.core.contracts.errors import ConfigError

_LIST_ENTRY_BYTES = 32  # a pointer and the float it points to
_PLAIN: tuple[Callable[[Any], Any], ...] = (index, index, float, index, bool)  # a step's values
_LOWER, _UNIT = 0xFFFFFFFF, 2.0**-32


class OptimalQLearning(OneStepAlgorithm):
    """Compiled Q-learning: one call per batch, and one call per step of an episode."""

    _learn_and_choose = staticmethod(step_kernels.step_q)

    def _learn(self, columns: TransitionColumns, masks: np.ndarray, discount: float) -> int:
        return int(batch_kernels.learn_q(self.storage, *columns, masks, self.learning_rate, discount))


class NumpyQLearning(OptimalQLearning):
    """Q-learning whose single updates are plain NumPy and whose batches are compiled; equal to the last bit."""

    def update(
        self, state: int, action: int, reward: float, next_state: int, done: bool, next_mask: Any = None
    ) -> None:
        """Learn from one step; `next_mask` says which actions are allowed in `next_state`."""
        self._update_entry(state, action, reward, next_state, done, next_mask, self.discount_factor)

    def update_turn(
        self, state: int, action: int, reward: float, next_state: int, done: bool, next_mask: Any = None
    ) -> None:
        """Learn from one move in a turn-based game, where the opponent moves in `next_state`."""
        self._update_entry(state, action, reward, next_state, done, next_mask, -self.discount_factor)

    def _update_entry(
        self, state: Any, action: Any, reward: Any, next_state: Any, done: Any, next_mask: Any, discount: float
    ) -> None:
        state, action = (
            require_index(state, "state", self.state_size),
            require_index(action, "action", self.action_size),
        )
        following, target = (
            self.q_table[require_index(next_state, "next state", self.state_size)],
            require_finite_reward(reward),
        )
        done = as_bool(done, "done")
        if not done and next_mask is not None:
            following = following[require_action_mask(next_mask, self.action_size, f"state {next_state}")]
        if not done:
            target += discount * float(np.max(following))
        value = float(self.q_table[state, action])
        self.q_table[state, action] = value + self.learning_rate * (target - value)


class MemoryOptimizedQLearning(OptimalQLearning):
    """Q-learning that takes all arrays from a pool: after the first batch of a size it allocates none."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.memory_pool = MemoryPool()

    def _learn_tuples(self, experiences: Sequence[tuple[Any, ...]]) -> None:
        count = len(experiences)
        with self.memory_pool.borrow(*((count, kind) for kind in EXPERIENCE_DTYPES)) as columns:
            for i, row in enumerate(experiences):
                try:
                    for column, plain, value in zip(columns, _PLAIN, row, strict=True):
                        column[i] = plain(value)
                except (TypeError, ValueError, OverflowError) as error:
                    require_lengths([row], len(EXPERIENCE_KEYS))
                    raise ConfigError(f"row {i}: {row!r:.60} is not a step of numbers: {error}") from None
            self.learn(*columns)


class ListQLearning(BaseAlgorithm):
    """Q-learning over Python lists in double precision: nothing to compile; processes cannot share the table."""

    takes_masks = True

    def _initialize_q_table(self) -> list[list[float]]:
        require_memory(self.state_size, self.action_size, _LIST_ENTRY_BYTES)
        return [[0.0] * self.action_size for _ in range(self.state_size)]

    def update(
        self, state: int, action: int, reward: float, next_state: int, done: bool, next_mask: Any = None
    ) -> None:
        """Learn from one step; `next_mask` says which actions are allowed in `next_state`."""
        self._update(state, action, reward, next_state, done, next_mask, self.discount_factor)

    def update_turn(
        self, state: int, action: int, reward: float, next_state: int, done: bool, next_mask: Any = None
    ) -> None:
        """Learn from one move in a turn-based game, where the opponent moves in `next_state`."""
        self._update(state, action, reward, next_state, done, next_mask, -self.discount_factor)

    def select_action(self, state: int, action_mask: Any = None, *, deterministic: bool = False) -> int:
        """Return the best allowed action, the first of equals, or with probability `epsilon` a random allowed one."""
        values = self.q_table[require_index(state, "state", self.state_size)]
        choices = self._choices(action_mask, state)
        if not deterministic and self.epsilon > 0.0:
            word = self.words.take_one()
            if (word & _LOWER) * _UNIT < self.epsilon:
                return choices[(word >> 32) * len(choices) >> 32]
        if action_mask is None:
            return int(values.index(max(values)))
        return max(choices, key=values.__getitem__)

    def batch_update(self, experiences: Sequence[tuple[Any, ...]]) -> None:
        """Learn from (state, action, reward, next_state, done) tuples, one by one."""
        require_lengths(experiences, len(EXPERIENCE_KEYS))
        for experience in experiences:
            self.update(*experience)

    def _update(
        self, state: Any, action: Any, reward: Any, next_state: Any, done: Any, next_mask: Any, discount: float
    ) -> None:
        row = self.q_table[require_index(state, "state", self.state_size)]
        action, target = require_index(action, "action", self.action_size), require_finite_reward(reward)
        following, done = self.q_table[require_index(next_state, "next state", self.state_size)], as_bool(done, "done")
        if not done and next_mask is None:
            target += discount * max(following)
        elif not done:
            target += discount * max(following[choice] for choice in self._choices(next_mask, next_state))
        row[action] += self.learning_rate * (target - row[action])

    def _choices(self, mask: Any, state: Any) -> Sequence[int]:
        if mask is None:
            return range(self.action_size)
        return [int(i) for i in np.flatnonzero(require_action_mask(mask, self.action_size, f"state {state}"))]
