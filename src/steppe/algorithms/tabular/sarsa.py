"""SARSA, which learns the value of the policy it follows, exploration included; and Expected SARSA."""

from __future__ import annotations

from typing import Any

import numpy as np

from steppe.algorithms.tabular import batch_kernels, step_kernels
from steppe.algorithms.tabular.base import require_index
from steppe.algorithms.tabular.table import (
    OneStepAlgorithm,
    Row,
    TableAlgorithm,
    TransitionColumns,
    as_int64,
    require_lengths,
    uses_builtin_steps,
)
from steppe.core.contracts.errors import ConfigError


class SARSA(TableAlgorithm):
    """Learns towards r + γ Q(s′, a′), where a′ is the action taken next.

    `update` without a `next_action` selects it, and the next `select_action` in that state returns it.
    """

    _learn_and_choose = staticmethod(step_kernels.step_sarsa)
    _planned: tuple[int, int] | None = None  # the state after the last update, and the action selected there

    def select_action(self, state: int, action_mask: Any = None, *, deterministic: bool = False) -> int:
        """Return the action that the last `update` selected for this state; otherwise an ε-greedy action."""
        planned, self._planned = self._planned, None
        if planned is not None and planned[0] == state and not deterministic:
            return planned[1]
        return super().select_action(state, action_mask, deterministic=deterministic)

    def update(
        self,
        state: int,
        action: int,
        reward: float,
        next_state: int,
        done: bool,
        next_mask: Any = None,
        next_action: int | None = None,
    ) -> None:
        """Learn from one step and the action that follows it."""
        self._update_towards((state, action, reward, next_state, done), next_mask, next_action, turn_based=False)

    def update_turn(
        self,
        state: int,
        action: int,
        reward: float,
        next_state: int,
        done: bool,
        next_mask: Any = None,
        next_action: int | None = None,
    ) -> None:
        """Learn from one move in a turn-based game: towards r − γ Q(s′, a′), where a′ is the opponent's move."""
        self._update_towards((state, action, reward, next_state, done), next_mask, next_action, turn_based=True)

    def learn(
        self,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_states: np.ndarray,
        dones: np.ndarray,
        *,
        next_masks: np.ndarray | None = None,
        turn_based: bool = False,
        next_actions: np.ndarray | None = None,
    ) -> None:
        """Learn from arrays and the actions that follow each row (see TableAlgorithm.learn)."""
        if next_actions is None:
            raise ConfigError("SARSA learns from what was done next: give next_actions, one for each row")
        if next_masks is not None:
            raise ConfigError("next_masks would have no effect here: SARSA receives the next actions")
        columns = self._columns(states, actions, rewards, next_states, dones)
        following = as_int64(next_actions, "next_actions")
        if following.shape != columns.states.shape:
            raise ConfigError(f"{len(columns[0])} rows need as many next_actions, not {following.shape}")
        rate, discount = self.learning_rate, self._discount(turn_based=turn_based)
        wrong = int(batch_kernels.learn_sarsa(self.storage, *columns, following, rate, discount))
        if wrong != batch_kernels.VALID:
            if not columns.dones[wrong]:
                require_index(following[wrong], f"row {wrong}: next action", self.action_size)
            raise self._invalid_row_error(columns, batch_kernels.NO_MASKS, wrong)

    def _learn_tuples(self, experiences: Any) -> None:
        """Learn row by row; the next action is a row's sixth value or, in rows of five values, is selected now."""
        require_lengths(experiences, 5, 6)
        for experience in experiences:
            state, action, reward, next_state, done, *after = experience
            row = state, action, reward, next_state, done
            self._update_towards(row, None, after[0] if after else None, turn_based=False)
        self._planned = None

    def end_episode(self) -> None:
        """Count the end of an episode; discard the action selected for its last state."""
        self._planned = None
        super().end_episode()

    def _update_towards(self, row: Row, mask: Any, next_action: int | None, *, turn_based: bool) -> None:
        self._planned = None
        if next_action is None and uses_builtin_steps(type(self)):
            rates = self.learning_rate, self._discount(turn_based=turn_based), self.epsilon, self.epsilon
            after = self._step(*row, False, mask, rates)
        else:
            self._require(row)
            done, next_state = row[4], row[3]
            if next_action is not None:
                after = require_index(next_action, "next action", self.action_size)
            else:
                after = 0 if done else TableAlgorithm.select_action(self, next_state, mask)
            columns = (np.array([value]) for value in row)
            self.learn(*columns, next_actions=np.array([after]), turn_based=turn_based)
        if next_action is None and not row[4]:
            self._planned = (int(row[3]), after)


class ExpectedSARSA(OneStepAlgorithm):
    """Learns towards r + γ ((1 − ε) max Q(s′, ·) + ε mean Q(s′, ·)): SARSA without the variance of the next action."""

    _learn_and_choose = staticmethod(step_kernels.step_expected)

    def _learn(self, columns: TransitionColumns, masks: np.ndarray, discount: float) -> int:
        rate, epsilon = self.learning_rate, self.epsilon
        return int(batch_kernels.learn_expected(self.storage, *columns, masks, rate, discount, epsilon))
