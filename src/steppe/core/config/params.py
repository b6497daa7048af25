"""The settings of mode `workers` for agents with networks: how the gradients of workers become weights."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from steppe.core.config.agent import AgentConfig
from steppe.core.config.fields import Coefficient, Count, FrozenConfig, Positive, PositiveFloat, RoleCount
from steppe.core.contracts.errors import ConfigError

_OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {"sgd": (), "momentum": ("beta1",), "adam": ("beta1", "beta2", "eps")}


class ParamsConfig(FrozenConfig):
    """How the gradients of workers become weights."""

    in_rounds: bool | None = Field(
        None,
        description="Wait for a gradient of every worker and apply them together, or apply each as it comes. Default: what the "
        "algorithm usually does.",
    )
    deltas: bool = Field(
        False,
        description="Workers learn by themselves and push what changed; for a parameter server that takes deltas.",
    )
    aggregation: Literal["average", "sum", "weighted", "median", "trimmed_mean", "krum", "multi_krum"] = Field(
        "weighted", description="How several gradients become one; weighted: by the steps behind each."
    )
    byzantine: RoleCount | None = Field(
        None, description="Gradients that may be arbitrary, for krum, multi_krum and trimmed_mean."
    )
    trim: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.1, description="Share that trimmed_mean cuts off at each end."
    )
    update_every: Positive | None = Field(
        None, description="Gradients that are applied together, in rounds every worker's and else 1, if absent."
    )
    optimizer: Literal["sgd", "momentum", "adam"] = Field(
        "adam", description="What a combined gradient is applied with."
    )
    learning_rate: PositiveFloat | None = Field(None, description="Its step size; the agent's, if absent.")
    beta1: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Its first factor; the usual, if absent."
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="Its second factor; likewise.")
    eps: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Adam's small number; the agent's, if absent."
    )
    max_grad_norm: Annotated[float, Field(ge=0, le=1e12)] | None = Field(
        None, description="Combined gradients longer than this are scaled back to it, 0: never; the agent's, if absent."
    )
    damping: Coefficient = Field(
        0.0, description="A gradient that is s updates old counts (1 + s)^-damping as much, unless in rounds."
    )
    max_staleness: Count | None = Field(
        None, description="Gradients more updates old than this are refused and counted, unless in rounds."
    )

    @property
    def needs(self) -> int:
        """The fewest gradients that the aggregation can make one of."""
        if self.aggregation in ("krum", "multi_krum"):
            return 2 * (self.byzantine or 0) + 3
        return 2 * (self.byzantine or 0) + 1

    def settled(self, agent: AgentConfig, num_workers: int) -> tuple[Self, AgentConfig]:
        """These settings and the agent's with what is absent chosen; ConfigError for what cannot be."""
        in_rounds = agent.in_rounds if self.in_rounds is None else self.in_rounds
        self._require(num_workers, in_rounds=in_rounds)
        if agent.memory == "sequences" and getattr(agent, "prioritized", True):
            raise ConfigError(
                "sequences are drawn by priorities, which workers do not keep: set prioritized=false, or use --mode sync"
            )
        for name in ("normalize_obs", "normalize_reward", "prioritized"):
            if getattr(agent, name, None):
                raise ConfigError(
                    f"{name} needs the experience of all workers in one process: set {name}=false, or use --mode sync"
                )
        if getattr(agent, "buffer_storage", "memory") != "memory":
            raise ConfigError(
                "buffer_storage=disk is for one learner's replay, and every worker has its own: leave it out"
            )
        plain = {name: False for name in ("normalize_obs", "normalize_reward") if getattr(agent, name) is None}
        return self.model_copy(update={"in_rounds": in_rounds}), agent.model_copy(update=plain)

    def _require(self, num_workers: int, *, in_rounds: bool) -> None:
        together = self.update_every or (num_workers if in_rounds else 1)
        if in_rounds and (self.damping or self.max_staleness is not None):
            raise ConfigError(
                "params.damping and max_staleness are for gradients that come as they come: in rounds none is old"
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
