"""What the configuration of every algorithm has: fields, what it can act in, and how absent choices are made for an
environment. No tensors here: the command line and the processes that only supervise read configurations without torch."""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from steppe.core.config.fields import Fraction, FrozenConfig, PositiveFloat, Rows, StepSize, Width
from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec


class AgentConfig(FrozenConfig):
    """What every algorithm has. Subclass it as `Config` inside a class of your own to add fields."""

    implementation: ClassVar[str] = ""  # "module:Class" of the agent
    memory: ClassVar[Literal["rollout", "replay", "sequences"]] = "rollout"
    actions: ClassVar[tuple[str, ...]] = ("discrete", "multi_discrete", "box")
    observations: ClassVar[Literal["values", "index"]] = "values"  # "index": one number per state, to look up
    live: ClassVar[
        tuple[str, ...]
    ] = ()  # fields that a running learner takes over (core/contracts/algorithm.py, Tunable)
    own_steps: ClassVar[tuple[str, ...]] = ()  # those of them that a gradient pushed by a worker does not depend on
    fixed: ClassVar[tuple[str, ...]] = ("network", "hidden", "normalize_obs", "normalize_reward", "segment_steps")
    # Fields that `require` refuses in some environments and not in others.
    by_spec: ClassVar[tuple[str, ...]] = ("policies",)
    in_table: ClassVar[bool] = False  # what it learns is a table, which workers can share; no torch is needed
    usual_mode: ClassVar[Literal["sync", "workers"]] = "sync"  # where a run does not say
    in_rounds: ClassVar[bool] = (
        False  # workers wait for each other before their gradients are applied, unless set otherwise
    )
    publish_every: ClassVar[int] = 50  # updates from replay between publications, unless the flow says otherwise

    learning_rate: StepSize | None = Field(
        None, description="Adam's step size at the start of the run; chosen to fit if absent."
    )
    gamma: Fraction = Field(0.99, description="Discount per step.")
    segment_steps: Rows | None = Field(
        None, description="Steps an actor takes before it hands over, or a worker before it merges; chosen if absent."
    )
    max_grad_norm: PositiveFloat = Field(0.5, description="Gradients longer than this are scaled back to it.")
    network: str = Field(
        "auto", description="`auto`, `mlp`, `cnn`, or `module:function` that builds a torch module from an EnvSpec."
    )
    hidden: Annotated[tuple[Width, ...], Field(max_length=64)] | None = Field(
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

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """Return this configuration with every absent value chosen for an environment, and the environments per actor.

        Values that are set stay, so resolving twice changes nothing.
        """
        return self._chosen(spec, segment_steps=32, learning_rate=3e-4, hidden=(64, 64)), num_envs or 8

    def fitted(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """Deprecated name of `resolve_defaults`."""
        warnings.warn("fitted is now called resolve_defaults", DeprecationWarning, stacklevel=2)
        return self.resolve_defaults(spec, num_actors, num_envs)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Refuse a class that overrides a method by its former name: nobody would call it."""
        super().__pydantic_init_subclass__(**options)
        if "fitted" in vars(cls):
            raise TypeError(f"{cls.__name__}.fitted: call it resolve_defaults, its name since Steppe 0.2")

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
            raise WorldError(_describe_difference(spec))
        if (spec.num_states is None) == (self.observations == "index"):
            raise ConfigError(f"{name} takes environment.observations={self.observations!r}: leave that key out")
        if spec.action.kind not in self.actions:
            from steppe.core.config.algorithm_table import ALGORITHMS  # whose configurations extend this class

            able = [other for other, kind in ALGORITHMS.items() if spec.action.kind in kind.actions]
            raise WorldError(
                f"{name} cannot choose {describe_action_space(spec.action)} actions, which {spec.id} has; these can: {', '.join(able)}"
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
            raise ConfigError(
                f"{name} learns one policy for all agents: leave policies out, or use an algorithm that learns from rollouts"
            )
        for policy, members in self.groups(spec).items():
            if len({spec.members[index] for index in members} if spec.members else ()) > 1:
                raise ConfigError(
                    f"the policy {policy!r} is for agents that are not alike: {_describe_difference(spec, members)}"
                )


def default_cell_size(spec: EnvSpec) -> int:
    """The size of a recurrent cell that suits a world."""
    return 512 if spec.is_image else 64


def hidden_state_field(cell: str, size: int, *, once: bool = False) -> FieldSpec:
    """The column of what a recurrent policy remembers; an LSTM also remembers what it does not put out."""
    return FieldSpec("hidden", (2 * size if cell == "lstm" else size,), "float32", once=once)


def describe_action_space(action: ActionSpec) -> str:
    """An action space in words."""
    return {"discrete": "discrete", "multi_discrete": "multi-discrete", "box": "continuous"}[action.kind]


def _describe_difference(spec: EnvSpec, members: tuple[int, ...] | None = None) -> str:
    """Which two agents differ, and in what."""
    among = range(spec.num_agents) if members is None else members
    first = spec.members[among[0]]
    other = next(index for index in among if spec.members[index] != first)

    def words(index: int) -> str:
        member = spec.members[index]
        return f"{spec.agents[index]} observes {list(member.obs.shape)} and has {describe_action_space(member.action)} actions {list(member.action.sizes)}"

    difference = f"{words(among[0])}, {words(other)}"
    if members is not None:
        return difference
    return f"the agents of {spec.id} are not alike ({difference}): give each kind a policy of its own, with policies=own or a table"
