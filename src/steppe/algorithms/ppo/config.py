"""The hyperparameters of PPO."""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

from pydantic import Field

from steppe.algorithms.shared.actor_critic_config import ActorCriticConfig
from steppe.core.config.fields import Rows
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec


class PPOConfig(ActorCriticConfig):
    """Proximal policy optimization: clipped updates on fresh rollouts (Schulman et al. 2017)."""

    implementation = "steppe.algorithms.ppo.ppo:PPO"
    own_steps = ("epochs", "minibatch_size", "clip", "target_kl")
    live = (*ActorCriticConfig.live, *own_steps)

    epochs: Annotated[int, Field(gt=0, le=1_000)] | None = Field(
        None, description="Passes over each rollout; chosen to fit if absent."
    )
    minibatch_size: Rows | None = Field(None, description="Rows per optimizer step; chosen to fit if absent.")
    clip: Annotated[float, Field(gt=0, le=10)] = Field(
        0.2, description="How far the probability ratio may move before its gradient stops."
    )
    target_kl: Annotated[float, Field(gt=0, le=1_000)] | None = Field(
        None, description="End a rollout's epochs early beyond this divergence."
    )
    normalize_advantage: bool = Field(True, description="Bring each minibatch's advantages to mean 0 and deviation 1.")

    def model_post_init(self, _: Any) -> None:
        super().model_post_init(_)
        if self.recurrent and self.segment_steps and self.minibatch_size and self.minibatch_size < self.segment_steps:
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} holds no whole sequence of {self.segment_steps} steps, which "
                "recurrent=true learns from: raise it, or lower segment_steps"
            )

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """Environments that step as a vector are cheap: many of them (128 over all actors), short segments (32), large
        minibatches and 2 epochs. Others: 8 per actor, 128 steps, 4 epochs. A rollout makes 8 minibatches of 64 to 512
        rows. The step size grows with the root of the minibatch, 1e-3 at 64 rows to 2.5e-3 at 400 and more; 2.5e-4 for
        images. Worlds with continuous actions mostly have rewards and observations of any scale: there both are
        normalized. Recurrent: one layer before the cell, and minibatches of at least one whole sequence.
        """
        cheap = spec.native_vector and not spec.is_image
        envs = num_envs or (max(1, 128 // (num_actors * spec.num_agents)) if cheap else 8)
        steps = self.segment_steps or (32 if cheap else 128)
        minibatch = self.minibatch_size or min(512, max(64, steps * envs * spec.num_agents * num_actors // 8))
        if self.recurrent and minibatch < steps:
            minibatch = self._whole(steps)
        rate = 2.5e-4 if spec.is_image else min(2.5e-3, 1e-3 * math.sqrt(minibatch / 64))
        continuous = spec.action.kind == "box"
        fitted = self._chosen(
            spec,
            segment_steps=steps,
            epochs=2 if cheap else 4,
            minibatch_size=minibatch,
            learning_rate=rate,
            normalize_obs=continuous,
            normalize_reward=continuous,
            bounds_coef=0.0,
            **self._default_layers(spec),
        )
        return fitted, envs

    def _whole(self, steps: int) -> int:
        """The smallest minibatch of recurrent learning: one sequence."""
        if self.minibatch_size is not None:
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} holds no whole sequence of {steps} steps, which recurrent=true learns "
                "from: raise it, or lower segment_steps"
            )
        return steps
