"""MockEnvironment: a world with nothing in it, for tests of learners."""

from __future__ import annotations

from typing import Any

from steppe.envs.toy.base import DistClassicRLEnv, Info


class MockEnvironment(DistClassicRLEnv):
    """Walks through its states in order and pays 1 for action `state % num_actions`; truncated after `length` steps.

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
        """As many as it was made with."""
        return self.num_states

    @property
    def action_space_size(self) -> int:
        """As many as it was made with."""
        return self.num_actions

    def reset(self, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        """State 0."""
        super().reset(seed=seed)
        self.state = 0
        return self.state, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, Info]:
        """The next state, whatever is done."""
        self.calls.append(int(action))
        reward = float(action == self.state % self.num_actions)
        self.current_step += 1
        self.state = (self.state + 1) % self.num_states
        return self.state, reward, False, self.current_step >= self.length, {}
