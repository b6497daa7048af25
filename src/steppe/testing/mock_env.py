"""MockEnvironment: a trivial environment, for tests of learners."""

from __future__ import annotations

from typing import Any

from steppe.envs.toy.base import DistClassicRLEnv, Info


class MockEnvironment(DistClassicRLEnv):
    """Visits its states in order and rewards action `state % num_actions` with 1; truncated after `length` steps.

    `calls` holds every action that was taken.
    """

    def __init__(self, num_states: int = 10, num_actions: int = 4, length: int = 20) -> None:
        super().__init__()
        self.num_states = num_states
        self.num_actions = num_actions
        self.length = length
        self.state = 0
        self.calls: list[int] = []

    @property
    def observation_space_size(self) -> int:
        """Number of states."""
        return self.num_states

    @property
    def action_space_size(self) -> int:
        """Number of actions."""
        return self.num_actions

    def reset(self, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        """Return to state 0."""
        super().reset(seed=seed)
        self.state = 0
        return self.state, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, Info]:
        """Move to the next state, whatever the action."""
        self.calls.append(int(action))
        reward = float(action == self.state % self.num_actions)
        self.current_step += 1
        self.state = (self.state + 1) % self.num_states
        return self.state, reward, False, self.current_step >= self.length, {}
