"""The hyperparameters of algorithms that learn action values from replay, of single steps or of sequences."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from steppe.core.config.agent import AgentConfig
from steppe.core.config.fields import Count, Fraction, Positive, PositiveFloat
from steppe.core.contracts.errors import ConfigError

BatchSize = Annotated[int, Field(gt=0, le=10**6)]
SequenceLength = Annotated[int, Field(gt=0, le=10_000)]  # consecutive steps


class ReplayConfig(AgentConfig):
    """Hyperparameters of all algorithms that learn action values from replay, with a target network."""

    memory: ClassVar[Literal["rollout", "replay", "sequences"]] = "replay"
    actions = ("discrete",)
    live: ClassVar[tuple[str, ...]] = ("learning_rate", "target_every")
    fixed = (*AgentConfig.fixed, "dueling", "buffer_size", "buffer_storage", "n_step", "prioritized", "alpha")

    max_grad_norm: PositiveFloat = Field(
        10.0, description="Maximum gradient norm; larger gradients are scaled down to it."
    )
    batch_size: BatchSize = Field(64, description="Transitions per update.")
    buffer_size: Positive = Field(100_000, description="Maximum number of stored transitions.")
    buffer_storage: Literal["memory", "disk"] = Field(
        "memory",
        description="Where transitions are stored; disk: in the run's directory, for buffers larger than memory.",
    )
    learning_starts: Count = Field(1_000, description="Transitions to collect before the first update.")
    samples_per_insert: Annotated[float, Field(gt=0, le=1e6)] = Field(
        32.0, description="Transitions learned from per collected transition: batch_size × updates per step."
    )
    target_every: Positive | None = Field(
        None,
        description="Environment steps between updates of the target network. Default: depends on algorithm and environment.",
    )
    double: bool = Field(
        True,
        description="Double Q-learning: select actions with the online network, evaluate them with the target network.",
    )
    dueling: bool = Field(False, description="Dueling network: separate value and advantage streams.")
    n_step: SequenceLength = Field(3, description="Number of rewards summed before bootstrapping.")
    prioritized: bool = Field(
        False, description="Prioritized replay: sample transitions in proportion to their TD error."
    )
    alpha: Fraction = Field(0.6, description="Exponent of the priorities, with prioritized=true; 0 samples uniformly.")
    beta: Fraction = Field(
        0.4,
        description="Exponent of the importance weights at the start, with prioritized=true; rises to 1 at the end of the run.",
    )


class SequenceConfig(ReplayConfig):
    """Hyperparameters of all algorithms that learn action values from sequences, with a recurrent state.

    Segments have the columns `hidden`, the recurrent state before each step, and `q_val`, the actor's action values.
    """

    memory = "sequences"
    normalize_reward: ClassVar[bool | None] = False  # type: ignore[misc]  # replay stores unscaled rewards

    batch_size: BatchSize = Field(32, description="Sequences per update.")
    buffer_size: Positive = Field(100_000, description="Maximum number of stored steps.")
    learning_starts: Count = Field(1_000, description="Steps to collect before the first update.")
    samples_per_insert: Annotated[float, Field(gt=0, le=1e6)] = Field(
        16.0, description="Steps learned from per collected step: batch_size × sequence_length × updates per step."
    )
    sequence_length: SequenceLength = Field(16, description="Steps of a sequence that contribute to the loss.")
    sequence_stride: SequenceLength | None = Field(
        None,
        description="Steps from the start of one sequence to the start of the next; less than sequence_length makes them overlap. Default: half of it.",
    )
    burn_in: Annotated[int, Field(ge=0, le=10_000)] = Field(
        8, description="Steps before each sequence that only update the stored recurrent state."
    )
    prioritized: bool = Field(
        True, description="Prioritized replay: sample sequences in proportion to their TD errors."
    )
    value_rescaling: bool = Field(
        False, description="Learn values on a compressed scale, for rewards of different sizes."
    )
    epsilon_base: Fraction = Field(0.4, description="Exploration rate of the environment that explores most.")
    epsilon_power: Annotated[float, Field(ge=0, le=1_000)] = Field(
        7.0,
        description="The exploration rates of all actors' environments fall from epsilon_base to epsilon_base ** (1 + epsilon_power).",
    )

    def model_post_init(self, _: Any) -> None:
        if self.sequence_stride is not None and self.sequence_stride > self.sequence_length:
            raise ConfigError(
                f"sequence_stride={self.sequence_stride} would leave steps out between sequences of "
                f"{self.sequence_length}: give at most sequence_length"
            )
