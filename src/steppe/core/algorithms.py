"""The hyperparameters of each algorithm: frozen, documented at the field, checked. No tensors here, so the command line
and the processes that only supervise read them without importing torch."""

from __future__ import annotations

import importlib
import math
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from steppe.core import factory
from steppe.core.errors import ConfigError, WorldError, nearest
from steppe.core.guidance import advises
from steppe.core.specs import ActionSpec, EnvSpec, FieldSpec

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
SCHEDULE_STEPS = 100_000  # what schedules run over where a run has no fixed number of steps


class Frozen(BaseModel):
    """Configuration never changes after it is made, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, coerce_numbers_to_str=True
    )


class AgentConfig(Frozen):
    """What every algorithm has. Subclass it as `Config` inside a class of your own to add fields."""

    implementation: ClassVar[str] = ""  # "module:Class" of the agent
    memory: ClassVar[Literal["rollout", "replay", "sequences"]] = "rollout"
    actions: ClassVar[tuple[str, ...]] = ("discrete", "multi_discrete", "box")
    observations: ClassVar[Literal["values", "index"]] = "values"  # "index": one number per state, to look up
    live: ClassVar[tuple[str, ...]] = ()  # fields that a running learner takes over (core/agent.py, Tunable)
    fixed: ClassVar[tuple[str, ...]] = ("network", "hidden", "normalize_obs", "normalize_reward", "segment_steps")
    in_table: ClassVar[bool] = False  # what it learns is a table, which workers can share; no torch is needed
    usual_mode: ClassVar[Literal["sync", "workers"]] = "sync"  # where a run does not say
    in_rounds: ClassVar[bool] = (
        False  # workers wait for each other before their gradients are applied, unless told otherwise
    )
    publish_every: ClassVar[int] = 50  # updates from replay between publications, unless the flow says otherwise

    learning_rate: PositiveFloat | None = Field(
        None, description="Adam's step size at the start of the run; chosen to fit if absent."
    )
    gamma: Fraction = Field(0.99, description="Discount per step.")
    segment_steps: Positive | None = Field(
        None, description="Steps an actor takes before it hands over, or a worker before it merges; chosen if absent."
    )
    max_grad_norm: PositiveFloat = Field(0.5, description="Gradients longer than this are scaled back to it.")
    network: str = Field(
        "auto", description="`auto`, `mlp`, `cnn`, or `module:function` that builds a torch module from an EnvSpec."
    )
    hidden: tuple[Positive, ...] | None = Field(
        None, description="Width of each hidden layer. Chosen to fit if absent; a network of your own has its own."
    )
    normalize_obs: bool | None = Field(
        None,
        description="Scale observations by running mean and variance, kept in the weights; chosen to fit if absent.",
    )
    normalize_reward: bool | None = Field(
        None, description="Scale rewards by the running deviation of returns, kept in the weights; likewise."
    )
    policies: Literal["shared", "own"] | dict[str, str] = Field(
        "shared",
        description="With several agents: `shared`, one policy for all; `own`, one for each; or agent → policy, as in "
        '{"wolf_*" = "wolves", "*" = "sheep"}, the first pattern that fits.',
    )

    def columns(self, spec: EnvSpec) -> tuple[FieldSpec, ...]:
        """What `act` writes into a segment besides the action."""
        return ()

    def fitted(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """This configuration with every absent choice made for a world, and the environments per actor.

        Choices already made stay, so fitting twice changes nothing.
        """
        return self._chosen(spec, segment_steps=32, learning_rate=3e-4, hidden=(64, 64)), num_envs or 8

    def _chosen(self, spec: EnvSpec, **choices: object) -> Self:
        """A copy in which these values stand where there is none; images get one wide layer after the convolutions."""
        if spec.is_image:
            choices |= {"hidden": (512,), "normalize_obs": False}
        choices = {"normalize_obs": False, "normalize_reward": False} | choices
        return self.model_copy(update={key: value for key, value in choices.items() if getattr(self, key) is None})

    def require(self, spec: EnvSpec, name: str) -> None:
        """Raise unless this algorithm can act in that world."""
        if self.policies != "shared":
            self._require_groups(spec, name)
        elif spec.members:
            raise WorldError(_differing(spec))
        if (spec.num_states is None) == (self.observations == "index"):
            raise ConfigError(f"{name} takes environment.observations={self.observations!r}: leave that key out")
        if spec.action.kind not in self.actions:
            able = [other for other, kind in ALGORITHMS.items() if spec.action.kind in kind.actions]
            raise WorldError(
                f"{name} cannot choose {describe(spec.action)} actions, which {spec.id} has; these can: {', '.join(able)}"
            )

    def groups(self, spec: EnvSpec) -> dict[str, tuple[int, ...]]:
        """The agents that share each policy, by number, in the order in which policies are first needed."""
        if self.policies == "shared":
            return {"shared": tuple(range(spec.num_agents))}
        found: dict[str, tuple[int, ...]] = {}
        used = set()
        for index, agent in enumerate(spec.agents):
            policy = agent
            if self.policies != "own":
                pattern = next((pattern for pattern in self.policies if fnmatchcase(agent, pattern)), None)
                if pattern is None:
                    raise ConfigError(f"policies says nothing of {agent!r}: add it, or '*' for all others")
                policy = self.policies[pattern]
                used.add(pattern)
            found[policy] = (*found.get(policy, ()), index)
        if self.policies != "own" and (idle := [pattern for pattern in self.policies if pattern not in used]):
            raise ConfigError(
                f"policies[{idle[0]!r}] fits none of the agents that those before it leave: {', '.join(spec.agents[:8])}"
            )
        return found

    def _require_groups(self, spec: EnvSpec, name: str) -> None:
        """Raise unless every policy is for agents that are alike, and learns from rollouts."""
        if not spec.agents:
            raise ConfigError(f"policies is for environments with several agents, and {spec.id} has one: leave it out")
        if self.memory != "rollout":
            raise ConfigError(f"{name} learns one policy for all agents: leave policies out, or use ppo")
        for policy, members in self.groups(spec).items():
            if len({spec.members[index] for index in members} if spec.members else ()) > 1:
                raise ConfigError(
                    f"the policy {policy!r} is for agents that are not alike: {_differing(spec, members)}"
                )


def fitting_cell(spec: EnvSpec) -> int:
    """The size of a recurrent cell that suits a world."""
    return 512 if spec.is_image else 64


def state_column(cell: str, size: int, *, once: bool = False) -> FieldSpec:
    """The column of what a recurrent policy remembers; an LSTM also remembers what it does not put out."""
    return FieldSpec("hidden", (2 * size if cell == "lstm" else size,), "float32", once=once)


class ActorCriticConfig(AgentConfig):
    """What every algorithm with a policy and a value beside it has."""

    memory = "rollout"
    live = (
        *("learning_rate", "gamma", "gae_lambda", "epochs", "minibatch_size"),
        *("clip", "value_coef", "entropy_coef", "bounds_coef", "target_kl"),
    )

    gae_lambda: Fraction = Field(0.95, description="Trade between bias (0) and variance (1) of advantages.")
    value_coef: Annotated[float, Field(ge=0)] = Field(0.5, description="Weight of the value loss.")
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight of the entropy bonus.")
    bounds_coef: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="Weight of the penalty on means beyond the bounds of continuous actions, where worlds cut actions off and "
        "nothing says which way is better; chosen to fit if absent.",
    )
    anneal: bool = Field(False, description="Lower the learning rate linearly to 0 over the run's steps.")
    recurrent: bool = Field(False, description="Remember within an episode, and learn from whole sequences.")
    cell: Literal["lstm", "gru"] | None = Field(
        None, description="What carries the state along (recurrent); lstm if absent."
    )
    cell_size: Positive | None = Field(
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
        return (*noted, state_column(self.cell or "lstm", self.cell_size or fitting_cell(spec), once=True))

    def require(self, spec: EnvSpec, name: str) -> None:
        super().require(spec, name)
        if self.bounds_coef and spec.action.kind != "box":
            raise ConfigError(f"bounds_coef is for continuous actions, and {spec.id} has others: leave it out")

    def _layers(self, spec: EnvSpec) -> dict[str, object]:
        """What is chosen of the network: two layers, or one before the cell."""
        if not self.recurrent:
            return {"hidden": (64, 64)}
        return {"hidden": (64,), "cell": "lstm", "cell_size": fitting_cell(spec)}


class PPOConfig(ActorCriticConfig):
    """Proximal policy optimization: clipped updates on fresh rollouts (Schulman et al. 2017)."""

    implementation = "steppe.agents.ppo:PPO"

    epochs: Positive | None = Field(None, description="Passes over each rollout; chosen to fit if absent.")
    minibatch_size: Positive | None = Field(None, description="Rows per optimizer step; chosen to fit if absent.")
    clip: PositiveFloat = Field(0.2, description="How far the probability ratio may move before its gradient stops.")
    target_kl: PositiveFloat | None = Field(None, description="End a rollout's epochs early beyond this divergence.")
    normalize_advantage: bool = Field(True, description="Bring each minibatch's advantages to mean 0 and deviation 1.")

    def fitted(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
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
            **self._layers(spec),
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

    implementation = "steppe.agents.a2c:A2C"
    in_rounds = True

    def fitted(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
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
            **self._layers(spec),
        )
        return fitted, num_envs or (max(1, 64 // num_actors) if cheap else 8)


class A3CConfig(A2CConfig):
    """The same by workers of which none waits for another: each gradient is applied as it comes (Mnih et al. 2016)."""

    usual_mode = "workers"
    in_rounds = False


class ReplayConfig(AgentConfig):
    """What every algorithm has that learns action values from replay, with a target network."""

    memory: ClassVar[Literal["rollout", "replay", "sequences"]] = "replay"
    actions = ("discrete",)
    live = ("learning_rate", "target_every", "epsilon_start", "epsilon_end")
    fixed = (*AgentConfig.fixed, "dueling", "buffer_size", "buffer_storage", "n_step", "prioritized", "alpha")

    max_grad_norm: PositiveFloat = Field(10.0, description="Gradients longer than this are scaled back to it.")
    batch_size: Positive = Field(64, description="Transitions per update.")
    buffer_size: Positive = Field(100_000, description="Transitions kept.")
    buffer_storage: Literal["memory", "disk"] = Field(
        "memory", description="Where transitions lie; disk: in the run's directory, for more of them than memory holds."
    )
    learning_starts: Annotated[int, Field(ge=0)] = Field(
        1_000, description="Transitions to gather before the first update."
    )
    samples_per_insert: PositiveFloat = Field(
        32.0, description="Transitions learned from per transition gathered: batch_size × updates per step."
    )
    target_every: Positive | None = Field(
        None, description="Environment steps between copies into the target network; chosen to fit if absent."
    )
    double: bool = Field(True, description="Choose with the online network, judge with the target network.")
    dueling: bool = Field(False, description="Separate value and advantage streams.")
    n_step: Positive = Field(3, description="Rewards summed before bootstrapping.")
    prioritized: bool = Field(False, description="Draw transitions in proportion to their error.")
    alpha: Fraction = Field(0.6, description="How strongly errors shape the draw (prioritized).")
    beta: Fraction = Field(
        0.4, description="Importance correction at the start; reaches 1 at the end of the run (prioritized)."
    )


class DQNConfig(ReplayConfig):
    """Deep Q-learning with double targets and optional prioritized replay (Mnih et al. 2015, van Hasselt et al. 2016)."""

    implementation = "steppe.agents.dqn:DQN"

    epsilon_start: Fraction = Field(1.0, description="Share of random actions at the start.")
    epsilon_end: Fraction = Field(0.04, description="Share of random actions after the exploration phase.")
    exploration_fraction: PositiveFloat | None = Field(
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

    def fitted(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
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

    batch_size: Positive = Field(32, description="Sequences per update.")
    buffer_size: Positive = Field(100_000, description="Steps kept.")
    learning_starts: Annotated[int, Field(ge=0)] = Field(1_000, description="Steps to gather before the first update.")
    samples_per_insert: PositiveFloat = Field(
        16.0, description="Steps learned from per step gathered: batch_size × sequence_length × updates per step."
    )
    sequence_length: Positive = Field(16, description="Steps of a sequence that are learned from.")
    sequence_stride: Positive | None = Field(
        None, description="Steps from the start of one sequence to the next, which overlap; half a sequence if absent."
    )
    burn_in: Annotated[int, Field(ge=0)] = Field(
        8, description="Steps before a sequence that only bring the stored state up to date."
    )
    prioritized: bool = Field(True, description="Draw sequences in proportion to their errors.")
    value_rescaling: bool = Field(False, description="Learn values in a scale that brings large ones near each other.")
    epsilon_base: Fraction = Field(0.4, description="Share of random actions in the environment that explores most.")
    epsilon_power: Annotated[float, Field(ge=0)] = Field(
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

    implementation = "steppe.agents.r2d2:R2D2"

    dueling: bool = Field(True, description="Separate value and advantage streams.")
    value_rescaling: bool = Field(True, description="Learn values in a scale that brings large ones near each other.")
    cell: Literal["lstm", "gru"] = Field("lstm", description="What carries the state along.")
    cell_size: Positive | None = Field(None, description="Numbers that the cell puts out; chosen to fit if absent.")

    def columns(self, spec: EnvSpec) -> tuple[FieldSpec, ...]:
        hidden = state_column(self.cell, self.cell_size or fitting_cell(spec))
        return hidden, FieldSpec("q_val", spec.action.sizes, "float32")

    def fitted(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
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
            cell_size=fitting_cell(spec),
        )
        return fitted, envs


class DHCConfig(SequenceConfig):
    """Agents that see a window, remember, and talk to their neighbours, for pathfinding (Ma, Luo and Ma 2021)."""

    implementation = "steppe.agents.dhc:DHC"
    publish_every = 5

    # The network is this algorithm's own, so setting what describes others is an error.
    network: ClassVar[str] = "auto"  # type: ignore[misc]
    hidden: ClassVar[tuple[int, ...] | None] = ()  # type: ignore[misc]
    normalize_obs: ClassVar[bool | None] = False  # type: ignore[misc]
    dueling: ClassVar[bool] = True  # type: ignore[misc]

    channels: Annotated[int, Field(ge=8, multiple_of=8)] = Field(
        32, description="Width of the convolutions; all else is in proportion. 128: the published network."
    )
    max_grad_norm: PositiveFloat = Field(40.0, description="Gradients longer than this are scaled back to it.")
    batch_size: Positive = Field(16, description="Sequences per update, each of all agents of an environment.")
    samples_per_insert: PositiveFloat = Field(
        4.0, description="Steps learned from per step gathered: batch_size × sequence_length × updates per step."
    )
    burn_in: Annotated[int, Field(ge=0)] = Field(
        4, description="Steps before a sequence that only bring the stored state up to date."
    )
    n_step: Positive = Field(2, description="Rewards summed before bootstrapping.")
    target_every: Positive | None = Field(500, description="Updates between copies into the target network.")
    halve_at: tuple[Positive, ...] = Field(
        (200_000, 400_000), description="Updates after which the learning rate is halved."
    )
    learn_from: Literal["all", "first"] = Field(
        "all", description="Whose experience counts: everyone's, or the first agent's, which then alone explores."
    )
    guided: Fraction = Field(
        0.0,
        description="Share of environments whose agents go the ways that they see lead nearer, one move in ten at random: "
        "success to learn from, from the start.",
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
        if self.guided and not advises(spec):
            raise ConfigError(
                f"guided={self.guided}: observations of {spec.id} do not say which moves lead nearer; leave it out"
            )
        for key in ("lesson_agents", "lesson_sizes"):
            self._require_lessons(spec, key, getattr(self, key))

    def _require_lessons(self, spec: EnvSpec, key: str, lessons: tuple[int, ...] | None) -> None:
        """Lessons rise, and the world can give them."""
        if not lessons:
            return
        if spec.largest_lesson is None:
            raise ConfigError(f"{key}: {spec.id} takes no lessons; leave it out")
        most = spec.largest_lesson[key == "lesson_sizes"]
        if list(lessons) != sorted(set(lessons)) or lessons[-1] > most:
            raise ConfigError(f"{key}={list(lessons)}: must rise, up to the {most} that {spec.id} was made with")

    def fitted(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
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


class TabularConfig(AgentConfig):
    """What every algorithm over a table of numbered states has; rates move in a straight line over the run's steps."""

    memory = "rollout"
    actions = ("discrete",)
    observations = "index"
    in_table = True

    # What only networks have is no field here, so setting it is an error.
    max_grad_norm: ClassVar[float] = 0.5  # type: ignore[misc]
    network: ClassVar[str] = "auto"  # type: ignore[misc]
    hidden: ClassVar[tuple[int, ...] | None] = None  # type: ignore[misc]
    normalize_obs: ClassVar[bool | None] = False  # type: ignore[misc]
    normalize_reward: ClassVar[bool | None] = False  # type: ignore[misc]
    policies: ClassVar[Literal["shared"]] = "shared"  # type: ignore[misc]

    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Part of the error that an update takes away, at the start of the run; 0.1 if absent."
    )
    learning_rate_end: Fraction | None = Field(
        None, description="What the learning rate falls to at the end of the run; as at the start if absent."
    )
    epsilon: Fraction = Field(1.0, description="Share of random actions at the start.")
    epsilon_end: Fraction = Field(0.05, description="Share of random actions after the exploration phase.")
    exploration_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="Part of the run over which the share falls (of 100,000 steps where it has no fixed number)."
    )

    def columns(self, spec: EnvSpec) -> tuple[FieldSpec, ...]:
        return (FieldSpec("mask", spec.action.sizes, "bool"),)

    def fitted(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """A thousand environments where compiled code steps them, 8 elsewhere; segments of 32 steps."""
        envs = num_envs or (1024 if spec.native_vector else 8)
        return self._chosen(spec, segment_steps=32, learning_rate=0.1), envs


class QLearningConfig(TabularConfig):
    """Q-learning over a table: towards the best value of the next state (Watkins 1989)."""

    implementation = "steppe.agents.tabular.agent:QLearningAgent"


class SarsaConfig(TabularConfig):
    """SARSA over a table: towards the value of the action taken next (Rummery and Niranjan 1994)."""

    implementation = "steppe.agents.tabular.agent:SarsaAgent"


class ExpectedSarsaConfig(TabularConfig):
    """Expected SARSA over a table: towards the mean over the next action (van Seijen et al. 2009)."""

    implementation = "steppe.agents.tabular.agent:ExpectedSarsaAgent"


class DoubleQConfig(TabularConfig):
    """Double Q-learning: two tables, one chooses and the other judges (van Hasselt 2010)."""

    implementation = "steppe.agents.tabular.agent:DoubleQAgent"


class NStepQConfig(TabularConfig):
    """n-step Q-learning over a table: towards several rewards and the best value after them (Watkins 1989)."""

    implementation = "steppe.agents.tabular.agent:NStepQAgent"

    n_step: Positive = Field(3, description="Rewards summed before bootstrapping.")


class QLambdaConfig(TabularConfig):
    """Watkins's Q(λ) over a table: each error also moves the steps that led to it (Watkins 1989)."""

    implementation = "steppe.agents.tabular.agent:QLambdaAgent"

    trace_decay: Fraction = Field(0.9, description="λ: what is left of an error one step further back, besides gamma.")


class ClassicConfig(TabularConfig):
    """A learner of `steppe.classic` by its class, with the constructor's own options: its rates are its own business."""

    learning_rate: ClassVar[float | None] = 0.1  # type: ignore[misc]
    learning_rate_end: ClassVar[float | None] = None  # type: ignore[misc]
    gamma: ClassVar[float] = 0.99  # type: ignore[misc]
    epsilon: ClassVar[float] = 0.1  # type: ignore[misc]
    epsilon_end: ClassVar[float] = 0.1  # type: ignore[misc]
    exploration_fraction: ClassVar[float] = 1.0  # type: ignore[misc]

    learner: str = Field(description="`module:Class` of a learner with a table.")
    options: dict[str, Any] = Field({}, description="Keyword arguments for its constructor, besides the sizes.")


ALGORITHMS: dict[str, type[AgentConfig]] = {
    "a2c": A2CConfig,
    "a3c": A3CConfig,
    "dhc": DHCConfig,
    "dqn": DQNConfig,
    "ppo": PPOConfig,
    "r2d2": R2D2Config,
    "q-learning": QLearningConfig,
    "sarsa": SarsaConfig,
    "expected-sarsa": ExpectedSarsaConfig,
    "double-q": DoubleQConfig,
    "n-step-q": NStepQConfig,
    "q-lambda": QLambdaConfig,
}


def config_class(algo: str) -> type[AgentConfig]:
    """The configuration class of an algorithm by name, or of a `module:Class` of the user's."""
    if algo in ALGORITHMS:
        return ALGORITHMS[algo]
    if not factory.is_reference(algo):
        raise ConfigError(
            f"there is no algorithm {algo!r}; there are: {', '.join(ALGORITHMS)}.{nearest(algo, ALGORITHMS)}"
        )
    config = getattr(factory.resolve(algo), "Config", None)
    if not (isinstance(config, type) and issubclass(config, AgentConfig)):
        raise ConfigError(f"{algo} has no inner class `Config` that extends steppe.AgentConfig")
    return config


def implementation(algo: str) -> type:
    """The agent's class; imports what it needs (torch, mostly)."""
    text = config_class(algo).implementation if algo in ALGORITHMS else algo
    module, _, name = text.partition(":")
    if algo in ALGORITHMS:
        found: type = getattr(importlib.import_module(module), name)
        return found
    return factory.resolve(text)  # type: ignore[no-any-return]


def describe(action: ActionSpec) -> str:
    """An action space in words."""
    return {"discrete": "discrete", "multi_discrete": "multi-discrete", "box": "continuous"}[action.kind]


def _differing(spec: EnvSpec, members: tuple[int, ...] | None = None) -> str:
    """Which two agents differ, and in what."""
    among = range(spec.num_agents) if members is None else members
    first = spec.members[among[0]]
    other = next(index for index in among if spec.members[index] != first)

    def words(index: int) -> str:
        member = spec.members[index]
        return f"{spec.agents[index]} observes {list(member.obs.shape)} and has {describe(member.action)} actions {list(member.action.sizes)}"

    told = f"{words(among[0])}, {words(other)}"
    if members is not None:
        return told
    return f"the agents of {spec.id} are not alike ({told}): give each kind a policy of its own, with policies=own or a table"
