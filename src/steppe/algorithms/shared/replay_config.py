"""The hyperparameters of algorithms that learn action values from replay: dqn, and from sequences r2d2 and dhc."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from steppe.core.algorithms.kinds import (
    SCHEDULE_STEPS,
    AgentConfig,
    Coefficient,
    Count,
    Fraction,
    Positive,
    PositiveFloat,
    Width,
    default_cell_size,
    hidden_state_field,
)
from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.core.contracts.specs import EnvSpec, FieldSpec
from steppe.core.guidance import has_expert_planes

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


class R2D2Config(SequenceConfig):
    """Recurrent Q-learning on prioritized sequences with stored state (Kapturowski et al. 2019)."""

    implementation = "steppe.algorithms.r2d2.r2d2:R2D2"

    dueling: bool = Field(True, description="Separate value and advantage streams.")
    value_rescaling: bool = Field(True, description="Learn values in a scale that brings large ones near each other.")
    cell: Literal["lstm", "gru"] = Field("lstm", description="What carries the state along.")
    cell_size: Width | None = Field(None, description="Numbers that the cell puts out; chosen to fit if absent.")

    def columns(self, spec: EnvSpec) -> tuple[FieldSpec, ...]:
        hidden = hidden_state_field(self.cell, self.cell_size or default_cell_size(spec))
        return hidden, FieldSpec("q_val", spec.action.sizes, "float32")

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """16 environments per actor where they step as a vector, 8 elsewhere; segments so short that all actors together
        bring 256 steps before the next block of updates. Vectors: one layer of 64, a cell of 64 and a step size of 2e-3;
        images: 512 and 512, 1e-4.
        """
        envs = num_envs or (16 if spec.native_vector else 8)
        fitted = self._chosen(
            spec,
            segment_steps=max(1, 256 // (envs * num_actors)),
            learning_rate=1e-4 if spec.is_image else 2e-3,
            target_every=2_500 if spec.is_image else 500,
            sequence_stride=max(1, self.sequence_length // 2),
            hidden=(64,),
            cell_size=default_cell_size(spec),
        )
        return fitted, envs


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
        description="Weight of a second loss, by which what an observation advises is to be worth more than all else by "
        "`advice_margin`: to move nearer, and to make way for who is beside.",
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
    lesson_episodes: Positive = Field(200, description="Newest episodes of a lesson by which it is judged.")
    lesson_pass: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of them that must succeed before more agents and larger maps come."
    )

    def columns(self, spec: EnvSpec) -> tuple[FieldSpec, ...]:
        heard = (FieldSpec(name, (spec.num_agents,), "bool") for name in ("comm_mask", "final_comm_mask"))
        lesson = () if spec.largest_lesson is None else (FieldSpec("lesson", (2,), "int32"),)
        hidden = FieldSpec("hidden", (2 * self.channels,), "float16")  # between -1 and 1
        return hidden, FieldSpec("q_val", spec.action.sizes, "float32"), *heard, *lesson

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

    def _require_curriculum_stages(self, spec: EnvSpec, key: str, lessons: tuple[int, ...] | None) -> None:
        """Lessons rise, and the world can give them."""
        if not lessons:
            return
        if spec.largest_lesson is None:
            raise ConfigError(f"{key}: {spec.id} takes no lessons; leave it out")
        most = spec.largest_lesson[key == "lesson_sizes"]
        if list(lessons) != sorted(set(lessons)) or lessons[-1] > most:
            raise ConfigError(f"{key}={list(lessons)}: must rise, up to the {most} that {spec.id} was made with")

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """16 environments per actor, segments of 16 steps, a step size of 3e-4, or 1e-4 for the published network's size.

        Lessons go from one agent on 10 × 10 cells to what the world was made with, by one agent and by 5 cells.
        """
        agents, size = spec.largest_lesson or (0, 0)
        fitted = self._chosen(
            spec,
            segment_steps=16,
            learning_rate=1e-4 if self.channels >= 128 else 3e-4,
            sequence_stride=max(1, self.sequence_length // 2),
            lesson_agents=tuple(range(1, agents + 1)),
            lesson_sizes=(*range(10, size, 5), size) if size else (),
        )
        if spec.largest_lesson is not None:  # lessons in one of the two need a value of the other
            whole = {"lesson_agents": (agents,), "lesson_sizes": (size,)}
            fitted = fitted.model_copy(update={key: value for key, value in whole.items() if not getattr(fitted, key)})
        return fitted, num_envs or 16
