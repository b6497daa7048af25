"""The hyperparameters of DHC."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from steppe.algorithms.dhc.expert import has_expert_planes
from steppe.algorithms.shared.replay_config import BatchSize, SequenceConfig, SequenceLength
from steppe.core.config.fields import Coefficient, Positive, PositiveFloat
from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.core.contracts.specs import EnvSpec, FieldSpec


class DHCConfig(SequenceConfig):
    """Agents that see a window, remember, and talk to their neighbours, for pathfinding (Ma, Luo and Ma 2021)."""

    implementation = "steppe.algorithms.dhc.dhc:DHC"
    by_spec = (*SequenceConfig.by_spec, "advice", "lesson_agents", "lesson_sizes")
    publish_every = 5

    # The network is this algorithm's own, so setting what describes others is an error.
    network: ClassVar[str] = "auto"  # type: ignore[misc]
    hidden: ClassVar[tuple[int, ...] | None] = ()  # type: ignore[misc]
    normalize_obs: ClassVar[bool | None] = False  # type: ignore[misc]
    dueling: ClassVar[bool] = True  # type: ignore[misc]

    channels: Annotated[int, Field(ge=8, le=4_096, multiple_of=8)] = Field(
        32, description="Width of the convolutions; all else is in proportion. 128: the published network."
    )
    max_grad_norm: PositiveFloat = Field(40.0, description="Gradients longer than this are scaled back to it.")
    batch_size: BatchSize = Field(16, description="Sequences per update, each of all agents of an environment.")
    samples_per_insert: Annotated[float, Field(gt=0, le=1e6)] = Field(
        4.0, description="Steps learned from per step gathered: batch_size × sequence_length × updates per step."
    )
    burn_in: Annotated[int, Field(ge=0, le=10_000)] = Field(
        4, description="Steps before a sequence that only bring the stored state up to date."
    )
    n_step: SequenceLength = Field(2, description="Rewards summed before bootstrapping.")
    target_every: Positive | None = Field(500, description="Updates between copies into the target network.")
    halve_at: tuple[Positive, ...] = Field(
        (200_000, 400_000), description="Updates after which the learning rate is halved."
    )
    learn_from: Literal["all", "first"] = Field(
        "all", description="Whose experience counts: everyone's, or the first agent's, which then alone explores."
    )
    temperature: Coefficient = Field(
        0.0,
        description="Agents act by softmax(values / this), also when judged, so that two who block each other do not for ever; "
        "0: the best actions.",
    )
    advice: Coefficient = Field(
        0.0,
        description="Weight of a second loss, by which expert actions are to be worth more than all others by "
        "`advice_margin`: to move nearer, and to make way for adjacent agents.",
    )
    advice_margin: PositiveFloat = Field(
        0.4, description="How much more; beside `temperature` it says how often agents do something else."
    )
    lesson_agents: tuple[Positive, ...] | None = Field(
        None,
        description="Numbers of agents to begin with and to go on to; 1, 2, 3, … if absent, [] for all of them at once.",
    )
    lesson_sizes: tuple[Positive, ...] | None = Field(
        None,
        description="Sizes of maps to begin with and to go on to; 10, 15, 20, … if absent, [] for the world's own only.",
    )
    lesson_episodes: Positive = Field(
        200, description="Newest episodes of a curriculum stage by which it is evaluated."
    )
    lesson_pass: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of them that must succeed before more agents and larger maps come."
    )

    def columns(self, spec: EnvSpec) -> tuple[FieldSpec, ...]:
        comm_columns = (FieldSpec(name, (spec.num_agents,), "bool") for name in ("comm_mask", "final_comm_mask"))
        stage_columns = () if spec.largest_stage is None else (FieldSpec("lesson", (2,), "int32"),)
        hidden = FieldSpec("hidden", (2 * self.channels,), "float16")  # between -1 and 1
        return hidden, FieldSpec("q_val", spec.action.sizes, "float32"), *comm_columns, *stage_columns

    def require(self, spec: EnvSpec, name: str) -> None:
        super().require(spec, name)
        if not spec.is_image or min(spec.obs.shape[1:]) < 3:
            raise WorldError(
                f"{name} sees planes (channels, height, width) of at least 3 × 3 cells, and {spec.id} has observations of "
                f"the shape {spec.obs.shape}"
            )
        if self.advice and not has_expert_planes(spec):
            raise ConfigError(
                f"advice={self.advice}: observations of {spec.id} do not say which moves lead nearer; leave it out"
            )
        for key in ("lesson_agents", "lesson_sizes"):
            self._require_curriculum_stages(spec, key, getattr(self, key))

    def _require_curriculum_stages(self, spec: EnvSpec, key: str, stages: tuple[int, ...] | None) -> None:
        """Raise unless the stages rise, and the environment can produce them."""
        if not stages:
            return
        if spec.largest_stage is None:
            raise ConfigError(f"{key}: {spec.id} has no curriculum stages; leave it out")
        most = spec.largest_stage[key == "lesson_sizes"]
        if list(stages) != sorted(set(stages)) or stages[-1] > most:
            raise ConfigError(f"{key}={list(stages)}: must rise, up to the {most} that {spec.id} was made with")

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """16 environments per actor, segments of 16 steps, a step size of 3e-4, or 1e-4 for the published network's size.

        Curriculum stages go from one agent on 10 × 10 cells to what the environment was made with, by one agent and by 5
        cells.
        """
        agents, size = spec.largest_stage or (0, 0)
        fitted = self._chosen(
            spec,
            segment_steps=16,
            learning_rate=1e-4 if self.channels >= 128 else 3e-4,
            sequence_stride=max(1, self.sequence_length // 2),
            lesson_agents=tuple(range(1, agents + 1)),
            lesson_sizes=(*range(10, size, 5), size) if size else (),
        )
        if spec.largest_stage is not None:  # stages in one of the two need a value of the other
            whole = {"lesson_agents": (agents,), "lesson_sizes": (size,)}
            fitted = fitted.model_copy(update={key: value for key, value in whole.items() if not getattr(fitted, key)})
        return fitted, num_envs or 16
