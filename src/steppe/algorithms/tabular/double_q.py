"""Double Q-learning: two tables that evaluate each other's choices, which avoids maximization bias."""

from __future__ import annotations

import numpy as np

from steppe.algorithms.tabular import batch_kernels, step_kernels
from steppe.algorithms.tabular.base import require_index
from steppe.algorithms.tabular.table import OneStepAlgorithm, TransitionColumns, as_int64


class DoubleQLearning(OneStepAlgorithm):
    """Learns in `storage` [2, S, A], one randomly chosen table per step, and acts by the mean of both, `q_table`."""

    num_tables = 2
    _choose = staticmethod(step_kernels.select_action_double)
    _learn_and_choose = staticmethod(step_kernels.step_double)

    @property
    def q_table(self) -> np.ndarray:
        """The mean of both tables, as a new array. Assigning [2, S, A] adopts it; [S, A] is copied into both."""
        mean: np.ndarray = (self.storage[0] + self.storage[1]) * np.float32(0.5)
        return mean

    @q_table.setter
    def q_table(self, table: np.ndarray) -> None:
        if isinstance(table, np.ndarray) and table.shape == (self.state_size, self.action_size):
            self.storage[...] = table
        else:
            self.adopt(table)

    def select_actions(
        self, states: np.ndarray, action_masks: np.ndarray | None = None, *, deterministic: bool = False
    ) -> np.ndarray:
        """Return an action for each state, as `select_action` would choose them one after another."""
        states = as_int64(states, "states")
        for row in np.flatnonzero((states < 0) | (states >= self.state_size)):
            require_index(states[row], f"row {row}: state", self.state_size)
        both = self.storage[0, states] + self.storage[1, states]
        return self._select_actions(both, np.arange(len(states)), states, action_masks, deterministic=deterministic)

    def _learn(self, columns: TransitionColumns, masks: np.ndarray, discount: float) -> int:
        words = self.words.take(len(columns[0]))
        return int(batch_kernels.learn_double(self.storage, *columns, masks, self.learning_rate, discount, words))
