"""The hyperparameters of A2C and A3C."""

from __future__ import annotations

from typing import Self

from steppe.algorithms.shared.actor_critic_config import ActorCriticConfig
from steppe.core.contracts.specs import EnvSpec


class A2CConfig(ActorCriticConfig):
    """Advantage actor-critic: one step along the policy gradient per rollout; with workers, in rounds (Mnih et al. 2016)."""

    implementation = "steppe.algorithms.a2c.a2c:A2C"
    in_rounds = True

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """Environments that step as a vector are cheap: 64 over all actors, 8 per actor elsewhere; 16 steps between updates.
        A rollout is used once, so the step size is larger than PPO's: 3e-3, 7e-4 for images. Rewards and observations of
        worlds with continuous actions are normalized, but where agents mostly are workers: each would know only its own.
        Nothing holds a step back here as PPO's clipping does, so there means beyond the bounds cost something.
        """
        cheap = spec.native_vector and not spec.is_image
        continuous = spec.action.kind == "box" and self.usual_mode == "sync"
        fitted = self._chosen(
            spec,
            segment_steps=16,
            learning_rate=7e-4 if spec.is_image else 3e-3,
            normalize_obs=continuous,
            normalize_reward=continuous,
            bounds_coef=0.1 if spec.action.kind == "box" else 0.0,
            **self._default_layers(spec),
        )
        return fitted, num_envs or (max(1, 64 // num_actors) if cheap else 8)


class A3CConfig(A2CConfig):
    """The same by workers of which none waits for another: each gradient is applied as it comes (Mnih et al. 2016)."""

    usual_mode = "workers"
    in_rounds = False
