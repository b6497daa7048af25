"""The settings of mode `workers` for agents with networks: how gradients of workers are combined and applied."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from steppe.core.config.agent import AgentConfig
from steppe.core.config.fields import Coefficient, Count, FrozenConfig, Positive, PositiveFloat, RoleCount
from steppe.core.contracts.errors import ConfigError

_OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {"sgd": (), "momentum": ("beta1",), "adam": ("beta1", "beta2", "eps")}


class ParamsConfig(FrozenConfig):
    """How gradients of workers are combined and applied."""

    in_rounds: bool | None = Field(
        None,
        description="Synchronous rounds: wait for a gradient of every worker and apply them together, instead of each as it "
        "arrives. Default: depends on the algorithm.",
    )
    deltas: bool = Field(
        False,
        description="Workers learn on their own and push the changes of their weights, for a parameter server that accepts deltas.",
    )
    aggregation: Literal["average", "sum", "weighted", "median", "trimmed_mean", "krum", "multi_krum"] = Field(
        "weighted", description="How gradients are combined; weighted: by their numbers of steps."
    )
    byzantine: RoleCount | None = Field(
        None, description="Maximum number of arbitrarily wrong gradients, for krum, multi_krum and trimmed_mean."
    )
    trim: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.1, description="Fraction that trimmed_mean removes at each end."
    )
    update_every: Positive | None = Field(
        None,
        description="Number of gradients that are applied together. Default: one of every worker in rounds, otherwise 1.",
    )
    optimizer: Literal["sgd", "momentum", "adam"] = Field(
        "adam", description="Optimizer that applies combined gradients."
    )
    learning_rate: PositiveFloat | None = Field(None, description="Step size of the optimizer. Default: the agent's.")
    beta1: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="First moment decay of adam, or the momentum. Default: 0.9."
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Second moment decay of adam. Default: 0.999."
    )
    eps: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="Epsilon of adam. Default: the agent's.")
    max_grad_norm: Annotated[float, Field(ge=0, le=1e12)] | None = Field(
        None,
        description="Maximum norm of combined gradients; larger ones are scaled down to it, 0: never. Default: the agent's.",
    )
    damping: Coefficient = Field(
        0.0, description="A gradient that is s updates old is weighted by (1 + s)^-damping. Not in rounds."
    )
    max_staleness: Count | None = Field(
        None, description="Gradients that are older than this many updates are refused and counted. Not in rounds."
    )

    @property
    def needs(self) -> int:
        """Return the minimum number of gradients that the aggregation can combine."""
        if self.aggregation in ("krum", "multi_krum"):
            return 2 * (self.byzantine or 0) + 3
        return 2 * (self.byzantine or 0) + 1

    def settled(self, agent: AgentConfig, num_workers: int) -> tuple[Self, AgentConfig]:
        """Return these settings and the agent's with defaults resolved; ConfigError for invalid combinations."""
        in_rounds = agent.in_rounds if self.in_rounds is None else self.in_rounds
        self._require(num_workers, in_rounds=in_rounds)
        if agent.memory == "sequences" and getattr(agent, "prioritized", True):
            raise ConfigError(
                "sequences are sampled by priorities, which workers do not have: set prioritized=false, or use --mode sync"
            )
        for name in ("normalize_obs", "normalize_reward", "prioritized"):
            if getattr(agent, name, None):
                raise ConfigError(
                    f"{name} needs the experience of all workers in one process: set {name}=false, or use --mode sync"
                )
        if getattr(agent, "buffer_storage", "memory") != "memory":
            raise ConfigError(
                "buffer_storage=disk is for one learner's replay, and every worker has its own replay: leave it out"
            )
        plain = {name: False for name in ("normalize_obs", "normalize_reward") if getattr(agent, name) is None}
        return self.model_copy(update={"in_rounds": in_rounds}), agent.model_copy(update=plain)

    def _require(self, num_workers: int, *, in_rounds: bool) -> None:
        together = self.update_every or (num_workers if in_rounds else 1)
        if in_rounds and (self.damping or self.max_staleness is not None):
            raise ConfigError(
                "params.damping and max_staleness are for gradients that are applied as they arrive: in rounds none is old"
            )
        if in_rounds and together != num_workers:
            raise ConfigError(
                f"params.update_every={together}: a round is one gradient of each of the {num_workers} workers"
            )
        if together < self.needs:
            raise ConfigError(
                f"params.aggregation={self.aggregation!r} needs {self.needs} gradients, {together} are applied together: "
                "use more --actors in rounds, or params.update_every"
            )
        for name in ("beta1", "beta2", "eps"):
            if getattr(self, name) is not None and name not in _OPTIMIZER_OPTIONS[self.optimizer]:
                raise ConfigError(f"params.{name} means nothing to the optimizer {self.optimizer!r}: leave it out")
