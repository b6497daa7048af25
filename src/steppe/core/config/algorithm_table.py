"""The table of built-in algorithms: the configuration class of each by name, imported when it is needed.

An algorithm's `config` module imports no torch. The table has names only, so that no algorithm is imported before it is
used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from steppe.core.config import references
from steppe.core.config.agent import AgentConfig
from steppe.core.contracts.errors import ConfigError, did_you_mean

_CONFIG_CLASSES = {
    "a2c": "steppe.algorithms.a2c.config:A2CConfig",
    "a3c": "steppe.algorithms.a2c.config:A3CConfig",
    "dhc": "steppe.algorithms.dhc.config:DHCConfig",
    "dqn": "steppe.algorithms.dqn.config:DQNConfig",
    "ppo": "steppe.algorithms.ppo.config:PPOConfig",
    "r2d2": "steppe.algorithms.r2d2.config:R2D2Config",
    "q-learning": "steppe.algorithms.tabular.config:QLearningConfig",
    "sarsa": "steppe.algorithms.tabular.config:SarsaConfig",
    "expected-sarsa": "steppe.algorithms.tabular.config:ExpectedSarsaConfig",
    "double-q": "steppe.algorithms.tabular.config:DoubleQConfig",
    "n-step-q": "steppe.algorithms.tabular.config:NStepQConfig",
    "q-lambda": "steppe.algorithms.tabular.config:QLambdaConfig",
}
DEFAULT_ALGORITHM = "ppo"


class _ConfigClasses(Mapping[str, type[AgentConfig]]):
    """Configuration classes by the name of the algorithm; a lookup imports the class."""

    def __getitem__(self, algo: str) -> type[AgentConfig]:
        config: type[AgentConfig] = _import_class(_CONFIG_CLASSES[algo])
        return config

    def __iter__(self) -> Iterator[str]:
        return iter(_CONFIG_CLASSES)

    def __len__(self) -> int:
        return len(_CONFIG_CLASSES)

    def __contains__(self, algo: object) -> bool:
        return algo in _CONFIG_CLASSES


ALGORITHMS: Mapping[str, type[AgentConfig]] = _ConfigClasses()


def config_class(algo: str) -> type[AgentConfig]:
    """Return the configuration class of an algorithm, given by name or as the user's `module:Class`."""
    if algo in ALGORITHMS:
        return ALGORITHMS[algo]
    if not references.is_reference(algo):
        raise ConfigError(
            f"there is no algorithm {algo!r}; there are: {', '.join(ALGORITHMS)}.{did_you_mean(algo, ALGORITHMS)}"
        )
    config = getattr(references.resolve_reference(algo), "Config", None)
    if not (isinstance(config, type) and issubclass(config, AgentConfig)):
        raise ConfigError(f"{algo} has no inner class `Config` that extends steppe.AgentConfig")
    return config


def agent_class(algo: str) -> type:
    """Return the agent's class; imports what it needs (torch, mostly)."""
    if algo in ALGORITHMS:
        return _import_class(ALGORITHMS[algo].implementation)
    return references.resolve_reference(algo)  # type: ignore[no-any-return]


def _import_class(text: str) -> type:
    module, _, name = text.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found
