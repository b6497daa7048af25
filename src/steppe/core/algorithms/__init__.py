"""The hyperparameters of each algorithm: frozen, documented at the field, checked. No tensors here, so the command line
and the processes that only supervise read them without importing torch. One file per family; here they have their names."""

from __future__ import annotations

import importlib

from steppe.core.algorithms.actor_critic import (
    A2CConfig,
    A3CConfig,
    ActorCriticConfig,
    PPOConfig,
)
from steppe.core.algorithms.kinds import (
    SCHEDULE_STEPS,
    AgentConfig,
    Coefficient,
    Count,
    Duration,
    Fraction,
    FrozenConfig,
    Positive,
    PositiveDuration,
    PositiveFloat,
    RoleCount,
    default_cell_size,
    describe_action_space,
    hidden_state_field,
)
from steppe.core.algorithms.replay import (
    DHCConfig,
    DQNConfig,
    R2D2Config,
    ReplayConfig,
    SequenceConfig,
)
from steppe.core.algorithms.tabular import (
    ClassicConfig,
    DoubleQConfig,
    ExpectedSarsaConfig,
    NStepQConfig,
    QLambdaConfig,
    QLearningConfig,
    SarsaConfig,
    TabularConfig,
)
from steppe.core.config import references
from steppe.core.config.foreign_names import algorithm_hint
from steppe.core.contracts.errors import ConfigError, did_you_mean

__all__ = [
    "ALGORITHMS",
    "SCHEDULE_STEPS",
    "A2CConfig",
    "A3CConfig",
    "ActorCriticConfig",
    "AgentConfig",
    "ClassicConfig",
    "Coefficient",
    "Count",
    "DHCConfig",
    "DQNConfig",
    "DoubleQConfig",
    "Duration",
    "ExpectedSarsaConfig",
    "Fraction",
    "FrozenConfig",
    "NStepQConfig",
    "PPOConfig",
    "Positive",
    "PositiveDuration",
    "PositiveFloat",
    "QLambdaConfig",
    "QLearningConfig",
    "R2D2Config",
    "ReplayConfig",
    "RoleCount",
    "SarsaConfig",
    "SequenceConfig",
    "TabularConfig",
    "agent_class",
    "config_class",
    "default_cell_size",
    "describe_action_space",
    "hidden_state_field",
]

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
    if not references.is_reference(algo):
        raise ConfigError(
            f"there is no algorithm {algo!r}; there are: {', '.join(ALGORITHMS)}."
            f"{algorithm_hint(algo, ALGORITHMS) or did_you_mean(algo, ALGORITHMS)}"
        )
    config = getattr(references.resolve_reference(algo), "Config", None)
    if not (isinstance(config, type) and issubclass(config, AgentConfig)):
        raise ConfigError(f"{algo} has no inner class `Config` that extends steppe.AgentConfig")
    return config


def agent_class(algo: str) -> type:
    """The agent's class; imports what it needs (torch, mostly)."""
    text = config_class(algo).implementation if algo in ALGORITHMS else algo
    module, _, name = text.partition(":")
    if algo in ALGORITHMS:
        found: type = getattr(importlib.import_module(module), name)
        return found
    return references.resolve_reference(text)  # type: ignore[no-any-return]
