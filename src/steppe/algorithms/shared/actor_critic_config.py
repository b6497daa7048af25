"""The hyperparameters of algorithms with a policy and a value beside it: ppo, a2c, a3c."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from steppe.core.algorithms.kinds import (
    AgentConfig,
    Coefficient,
    Fraction,
    Rows,
    Width,
    default_cell_size,
    hidden_state_field,
)
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec, FieldSpec


class ActorCriticConfig(AgentConfig):
    """What every algorithm with a policy and a value beside it has."""

    memory = "rollout"
    live: ClassVar[tuple[str, ...]] = (
        "learning_rate",
        "gamma",
        "gae_lambda",
        "value_coef",
        "entropy_coef",
        "bounds_coef",
    )
    by_spec = (*AgentConfig.by_spec, "bounds_coef")

    gae_lambda: Fraction = Field(0.95, description="Trade between bias (0) and variance (1) of advantages.")
    value_coef: Coefficient = Field(0.5, description="Weight of the value loss.")
    entropy_coef: Coefficient = Field(0.0, description="Weight of the entropy bonus.")
    bounds_coef: Coefficient | None = Field(
        None,
        description="Weight of the penalty on means beyond the bounds of continuous actions, where worlds cut actions off and "
        "nothing says which way is better; chosen to fit if absent.",
    )
    anneal: bool = Field(False, description="Lower the learning rate linearly to 0 over the run's steps.")
    recurrent: bool = Field(False, description="Remember within an episode, and learn from whole sequences.")
    cell: Literal["lstm", "gru"] | None = Field(
        None, description="What carries the state along (recurrent); lstm if absent."
    )
    cell_size: Width | None = Field(
        None, description="Numbers that the cell puts out (recurrent); chosen to fit if absent."
    )

    def model_post_init(self, _: Any) -> None:
        for name in ("cell", "cell_size"):
            if getattr(self, name) is not None and not self.recurrent:
                raise ConfigError(f"{name} is for recurrent=true: set that too, or leave {name} out")

    def columns(self, spec: EnvSpec) -> tuple[FieldSpec, ...]:
        noted = (FieldSpec("logp", (), "float32"), FieldSpec("value", (), "float32"))
        if not self.recurrent:
            return noted
        return (*noted, hidden_state_field(self.cell or "lstm", self.cell_size or default_cell_size(spec), once=True))

    def require(self, spec: EnvSpec, name: str) -> None:
        super().require(spec, name)
        if self.bounds_coef and spec.action.kind != "box":
            raise ConfigError(f"bounds_coef is for continuous actions, and {spec.id} has others: leave it out")

    def _default_layers(self, spec: EnvSpec) -> dict[str, object]:
        """What is chosen of the network: two layers, or one before the cell."""
        if not self.recurrent:
            return {"hidden": (64, 64)}
        return {"hidden": (64,), "cell": "lstm", "cell_size": default_cell_size(spec)}


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
