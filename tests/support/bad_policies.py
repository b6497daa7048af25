"""Policies that do not keep to their environment's actions. Children of a run import this by its name."""

from __future__ import annotations

from steppe.algorithms.ppo.config import PPOConfig
from steppe.algorithms.ppo.ppo import PPO


class OutOfRange(PPO):
    """PPO whose second actor takes actions that its environment does not have."""

    Config = PPOConfig

    def begin(self, num_envs, stream, *, actor=0, num_actors=1):
        super().begin(num_envs, stream, actor=actor, num_actors=num_actors)
        self.beyond = 10**8 if actor == 1 else 0

    def act(self, obs, starts, *, explore=True):
        found = super().act(obs, starts, explore=explore)
        return {**found, "action": found["action"] + self.beyond}
