"""The hyperparameters of algorithms with a policy and a value function."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from steppe.core.config.agent import AgentConfig, default_cell_size, hidden_state_field
from steppe.core.config.fields import Coefficient, Fraction, Width
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec, FieldSpec


class ActorCriticConfig(AgentConfig):
    """What every algorithm with a policy and a value beside it has."""

    memory = "rollout"
    live: ClassVar[tuple[str, ...]] = (
        "learning_rate",
        "gamma",
        "gae_lambda",
        "value_coef",
        "entropy_coef",
        "bounds_coef",
    )
    by_spec = (*AgentConfig.by_spec, "bounds_coef")

    gae_lambda: Fraction = Field(0.95, description="Trade between bias (0) and variance (1) of advantages.")
    value_coef: Coefficient = Field(0.5, description="Weight of the value loss.")
    entropy_coef: Coefficient = Field(0.0, description="Weight of the entropy bonus.")
    bounds_coef: Coefficient | None = Field(
        None,
        description="Weight of the penalty on means beyond the bounds of continuous actions, where worlds cut actions off and "
        "nothing says which way is better; chosen to fit if absent.",
    )
    anneal: bool = Field(False, description="Lower the learning rate linearly to 0 over the run's steps.")
    recurrent: bool = Field(False, description="Remember within an episode, and learn from whole sequences.")
    cell: Literal["lstm", "gru"] | None = Field(
        None, description="What carries the state along (recurrent); lstm if absent."
    )
    cell_size: Width | None = Field(
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
        return (*noted, hidden_state_field(self.cell or "lstm", self.cell_size or default_cell_size(spec), once=True))

    def require(self, spec: EnvSpec, name: str) -> None:
        super().require(spec, name)
        if self.bounds_coef and spec.action.kind != "box":
            raise ConfigError(f"bounds_coef is for continuous actions, and {spec.id} has others: leave it out")

    def _default_layers(self, spec: EnvSpec) -> dict[str, object]:
        """What is chosen of the network: two layers, or one before the cell."""
        if not self.recurrent:
            return {"hidden": (64, 64)}
        return {"hidden": (64,), "cell": "lstm", "cell_size": default_cell_size(spec)}
