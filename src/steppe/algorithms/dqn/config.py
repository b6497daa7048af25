"""The hyperparameters of DQN."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from steppe.algorithms.shared.replay_config import ReplayConfig
from steppe.core.config.fields import SCHEDULE_STEPS, Fraction
from steppe.core.contracts.specs import EnvSpec


class DQNConfig(ReplayConfig):
    """Deep Q-learning with double targets and optional prioritized replay (Mnih et al. 2015, van Hasselt et al. 2016)."""

    implementation = "steppe.algorithms.dqn.dqn:DQN"
    live = (*ReplayConfig.live, "epsilon_start", "epsilon_end")

    epsilon_start: Fraction = Field(1.0, description="Share of random actions at the start.")
    epsilon_end: Fraction = Field(0.04, description="Share of random actions after the exploration phase.")
    exploration_fraction: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None,
        description="Part of the run over which the share falls (of 100,000 steps where a run has no fixed number). "
        "If absent 0.16, but over 8,000 steps at most, or 250,000 with images.",
    )

    def exploration_steps(self, spec: EnvSpec, total_steps: int | None) -> float:
        """The environment steps over which the share of random actions falls: longer runs need no more of them."""
        total = total_steps or SCHEDULE_STEPS
        if self.exploration_fraction is not None:
            return self.exploration_fraction * total
        return min(0.16 * total, 250_000 if spec.is_image else 8_000)

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """32 environments per actor where they step as a vector, 8 elsewhere; segments so short that all actors together
        bring 256 steps before the next block of updates. One target network per block: with more of them CartPole was
        not learned. Vectors: two layers of 64 and a step size of 2e-3; images: 1e-4.
        """
        envs = num_envs or (32 if spec.native_vector else 8)
        fitted = self._chosen(
            spec,
            segment_steps=max(1, 256 // (envs * num_actors)),
            learning_rate=1e-4 if spec.is_image else 2e-3,
            target_every=1_000 if spec.is_image else 200,
            hidden=(64, 64),
        )
        return fitted, envs
