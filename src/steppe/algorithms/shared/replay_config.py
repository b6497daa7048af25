"""The hyperparameters of algorithms that learn action values from replay, of single steps or of sequences."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from steppe.core.config.agent import AgentConfig
from steppe.core.config.fields import Count, Fraction, Positive, PositiveFloat
from steppe.core.contracts.errors import ConfigError

BatchSize = Annotated[int, Field(gt=0, le=10**6)]
SequenceLength = Annotated[int, Field(gt=0, le=10_000)]  # consecutive steps that are learned from together


class ReplayConfig(AgentConfig):
    """What every algorithm has that learns action values from replay, with a target network."""

    memory: ClassVar[Literal["rollout", "replay", "sequences"]] = "replay"
    actions = ("discrete",)
    live: ClassVar[tuple[str, ...]] = ("learning_rate", "target_every")
    fixed = (*AgentConfig.fixed, "dueling", "buffer_size", "buffer_storage", "n_step", "prioritized", "alpha")

    max_grad_norm: PositiveFloat = Field(10.0, description="Gradients longer than this are scaled back to it.")
    batch_size: BatchSize = Field(64, description="Transitions per update.")
    buffer_size: Positive = Field(100_000, description="Transitions kept.")
    buffer_storage: Literal["memory", "disk"] = Field(
        "memory", description="Where transitions lie; disk: in the run's directory, for more of them than memory holds."
    )
    learning_starts: Count = Field(1_000, description="Transitions to gather before the first update.")
    samples_per_insert: Annotated[float, Field(gt=0, le=1e6)] = Field(
        32.0, description="Transitions learned from per transition gathered: batch_size × updates per step."
    )
    target_every: Positive | None = Field(
        None, description="Environment steps between copies into the target network; chosen to fit if absent."
    )
    double: bool = Field(True, description="Choose with the online network, judge with the target network.")
    dueling: bool = Field(False, description="Separate value and advantage streams.")
    n_step: SequenceLength = Field(3, description="Rewards summed before bootstrapping.")
    prioritized: bool = Field(False, description="Draw transitions in proportion to their error.")
    alpha: Fraction = Field(0.6, description="How strongly errors shape the draw (prioritized).")
    beta: Fraction = Field(
        0.4, description="Importance correction at the start; reaches 1 at the end of the run (prioritized)."
    )


class SequenceConfig(ReplayConfig):
    """What every algorithm has that learns action values from sequences, with a state that is carried along in them.

    Its columns are `hidden`, the state in which each step was met, and `q_val`, what the actor thought of its actions.
    """

    memory = "sequences"
    normalize_reward: ClassVar[bool | None] = False  # type: ignore[misc]  # rewards are kept as they were

    batch_size: BatchSize = Field(32, description="Sequences per update.")
    buffer_size: Positive = Field(100_000, description="Steps kept.")
    learning_starts: Count = Field(1_000, description="Steps to gather before the first update.")
    samples_per_insert: Annotated[float, Field(gt=0, le=1e6)] = Field(
        16.0, description="Steps learned from per step gathered: batch_size × sequence_length × updates per step."
    )
    sequence_length: SequenceLength = Field(16, description="Steps of a sequence that are learned from.")
    sequence_stride: SequenceLength | None = Field(
        None, description="Steps from the start of one sequence to the next, which overlap; half a sequence if absent."
    )
    burn_in: Annotated[int, Field(ge=0, le=10_000)] = Field(
        8, description="Steps before a sequence that only bring the stored state up to date."
    )
    prioritized: bool = Field(True, description="Draw sequences in proportion to their errors.")
    value_rescaling: bool = Field(False, description="Learn values in a scale that brings large ones near each other.")
    epsilon_base: Fraction = Field(0.4, description="Share of random actions in the environment that explores most.")
    epsilon_power: Annotated[float, Field(ge=0, le=1_000)] = Field(
        7.0,
        description="From there the share falls to epsilon_base ** (1 + this) over all actors' environments.",
    )

    def model_post_init(self, _: Any) -> None:
        if self.sequence_stride is not None and self.sequence_stride > self.sequence_length:
            raise ConfigError(
                f"sequence_stride={self.sequence_stride} would leave steps out between sequences of "
                f"{self.sequence_length}: give at most sequence_length"
            )
