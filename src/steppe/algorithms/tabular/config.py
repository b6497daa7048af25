"""The hyperparameters of algorithms over a table of numbered states."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from steppe.core.config.agent import AgentConfig
from steppe.core.config.fields import Fraction
from steppe.core.contracts.specs import EnvSpec, FieldSpec


class TabularConfig(AgentConfig):
    """What every algorithm over a table of numbered states has; rates move in a straight line over the run's steps."""

    memory = "rollout"
    actions = ("discrete",)
    observations = "index"
    in_table = True
    live: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "learning_rate_end", "gamma"),
        *("epsilon", "epsilon_end", "exploration_fraction"),
    )

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

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """A thousand environments where compiled code steps them, 8 elsewhere; segments of 32 steps."""
        envs = num_envs or (1024 if spec.native_vector else 8)
        return self._chosen(spec, segment_steps=32, learning_rate=0.1), envs


class QLearningConfig(TabularConfig):
    """Q-learning over a table: towards the best value of the next state (Watkins 1989)."""

    implementation = "steppe.algorithms.tabular.agent:QLearningAgent"


class SarsaConfig(TabularConfig):
    """SARSA over a table: towards the value of the action taken next (Rummery and Niranjan 1994)."""

    implementation = "steppe.algorithms.tabular.agent:SarsaAgent"


class ExpectedSarsaConfig(TabularConfig):
    """Expected SARSA over a table: towards the mean over the next action (van Seijen et al. 2009)."""

    implementation = "steppe.algorithms.tabular.agent:ExpectedSarsaAgent"


class DoubleQConfig(TabularConfig):
    """Double Q-learning: two tables, one chooses and the other judges (van Hasselt 2010)."""

    implementation = "steppe.algorithms.tabular.agent:DoubleQAgent"


class NStepQConfig(TabularConfig):
    """n-step Q-learning over a table: towards several rewards and the best value after them (Watkins 1989)."""

    implementation = "steppe.algorithms.tabular.agent:NStepQAgent"

    n_step: Annotated[int, Field(gt=0, le=10_000)] = Field(3, description="Rewards summed before bootstrapping.")


class QLambdaConfig(TabularConfig):
    """Watkins's Q(λ) over a table: each error also moves the steps that led to it (Watkins 1989)."""

    implementation = "steppe.algorithms.tabular.agent:QLambdaAgent"

    live = tuple(name for name in TabularConfig.live if name != "gamma")  # how long traces are depends on it

    trace_decay: Fraction = Field(0.9, description="λ: what is left of an error one step further back, besides gamma.")


class ClassicConfig(TabularConfig):
    """A learner of `steppe.classic` by its class, with the constructor's own options: its rates are its own business."""

    live = ()
    learning_rate: ClassVar[float | None] = 0.1  # type: ignore[misc]
    learning_rate_end: ClassVar[float | None] = None  # type: ignore[misc]
    gamma: ClassVar[float] = 0.99  # type: ignore[misc]
    epsilon: ClassVar[float] = 0.1  # type: ignore[misc]
    epsilon_end: ClassVar[float] = 0.1  # type: ignore[misc]
    exploration_fraction: ClassVar[float] = 1.0  # type: ignore[misc]

    learner: str = Field(description="`module:Class` of a learner with a table.")
    options: dict[str, Any] = Field({}, description="Keyword arguments for its constructor, besides the sizes.")
