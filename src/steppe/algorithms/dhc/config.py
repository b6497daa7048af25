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
    """Recurrent agents with partial observations that communicate with their neighbours, for pathfinding (Ma, Luo and Ma 2021)."""

    implementation = "steppe.algorithms.dhc.dhc:DHC"
    by_spec = (*SequenceConfig.by_spec, "expert_coef", "stage_agents", "stage_sizes")
    renamed: ClassVar[dict[str, str]] = {
        "advice": "expert_coef",
        "advice_margin": "expert_margin",
        "lesson_agents": "stage_agents",
        "lesson_sizes": "stage_sizes",
        "lesson_episodes": "stage_episodes",
        "lesson_pass": "stage_pass",
    }
    publish_every = 5

    # DHC has its own network; setting an option of other networks is an error.
    network: ClassVar[str] = "auto"  # type: ignore[misc]
    hidden: ClassVar[tuple[int, ...] | None] = ()  # type: ignore[misc]
    normalize_obs: ClassVar[bool | None] = False  # type: ignore[misc]
    dueling: ClassVar[bool] = True  # type: ignore[misc]

    channels: Annotated[int, Field(ge=8, le=4_096, multiple_of=8)] = Field(
        32, description="Channels of the convolutions; all other layers scale with it. 128: the published network."
    )
    max_grad_norm: PositiveFloat = Field(
        40.0, description="Maximum gradient norm; larger gradients are scaled down to it."
    )
    batch_size: BatchSize = Field(16, description="Sequences per update; each has all agents of an environment.")
    samples_per_insert: Annotated[float, Field(gt=0, le=1e6)] = Field(
        4.0, description="Steps learned from per collected step: batch_size × sequence_length × updates per step."
    )
    burn_in: Annotated[int, Field(ge=0, le=10_000)] = Field(
        4, description="Steps before each sequence that only update the stored recurrent state."
    )
    n_step: SequenceLength = Field(2, description="Number of rewards summed before bootstrapping.")
    target_every: Positive | None = Field(500, description="Updates between copies to the target network.")
    halve_at: tuple[Positive, ...] = Field(
        (200_000, 400_000), description="Updates after which the learning rate is halved."
    )
    learn_from: Literal["all", "first"] = Field(
        "all",
        description="Learn from all agents, or only from the first agent, which then is the only one that explores.",
    )
    temperature: Coefficient = Field(
        0.0,
        description="Sample actions from softmax(values / temperature), also in evaluations, so that agents do not block each "
        "other forever; 0 takes the best actions.",
    )
    expert_coef: Coefficient = Field(
        0.0,
        description="Weight of the large-margin loss on expert actions, which move nearer to the goal or make way for adjacent "
        "agents.",
    )
    expert_margin: PositiveFloat = Field(
        0.4,
        description="Margin by which the values of expert actions must exceed all others; with temperature, it controls how often other actions are taken.",
    )
    stage_agents: tuple[Positive, ...] | None = Field(
        None,
        description="Numbers of agents of the curriculum stages; [] starts with all agents. Default: 1, 2, 3, …",
    )
    stage_sizes: tuple[Positive, ...] | None = Field(
        None,
        description="Map sizes of the curriculum stages; [] uses only the environment's own size. Default: 10, 15, 20, …",
    )
    stage_episodes: Positive = Field(
        200, description="Number of latest episodes that decide whether a curriculum stage is passed."
    )
    stage_pass: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Success rate that passes a curriculum stage and opens those with more agents and larger maps."
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
                f"{name} needs image observations (channels, height, width) of at least 3 × 3 cells, and {spec.id} has observations of "
                f"the shape {spec.obs.shape}"
            )
        if self.expert_coef and not has_expert_planes(spec):
            raise ConfigError(
                f"expert_coef={self.expert_coef}: the observations of {spec.id} do not contain expert actions; leave it out"
            )
        for key in ("stage_agents", "stage_sizes"):
            self._require_curriculum_stages(spec, key, getattr(self, key))

    def _require_curriculum_stages(self, spec: EnvSpec, key: str, stages: tuple[int, ...] | None) -> None:
        """Raise unless the stages increase and the environment supports them."""
        if not stages:
            return
        if spec.largest_stage is None:
            raise ConfigError(f"{key}: {spec.id} has no curriculum stages; leave it out")
        largest = spec.largest_stage[key == "stage_sizes"]
        if list(stages) != sorted(set(stages)) or stages[-1] > largest:
            raise ConfigError(f"{key}={list(stages)}: must increase, and {spec.id} has at most {largest}")

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """Default to 16 environments per actor, segments of 16 steps, and a step size of 3e-4 (1e-4 at the published size).

        Curriculum stages go from one agent on 10 × 10 cells to the environment's own numbers, in steps of one agent and of
        5 cells.
        """
        agents, size = spec.largest_stage or (0, 0)
        fitted = self._chosen(
            spec,
            segment_steps=16,
            learning_rate=1e-4 if self.channels >= 128 else 3e-4,
            sequence_stride=max(1, self.sequence_length // 2),
            stage_agents=tuple(range(1, agents + 1)),
            stage_sizes=(*range(10, size, 5), size) if size else (),
        )
        if spec.largest_stage is not None:  # if only one of the two has stages, the other has one value
            whole = {"stage_agents": (agents,), "stage_sizes": (size,)}
            fitted = fitted.model_copy(update={key: value for key, value in whole.items() if not getattr(fitted, key)})
        return fitted, num_envs or 16
