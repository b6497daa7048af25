"""Map the arguments of the composition API (an algorithm, four numbers, use_gpu) to an AgentConfig and a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steppe.core.config import references
from steppe.core.config.agent import AgentConfig
from steppe.core.config.algorithm_table import ALGORITHMS, config_class
from steppe.core.config.run import validate_device
from steppe.core.config.validation import validate_config
from steppe.core.contracts.algorithm import Agent
from steppe.core.contracts.errors import ConfigError, UsageError, did_you_mean

DEFAULT_ARGUMENTS = {"learning_rate": 0.001, "batch_size": 32, "update_frequency": 4, "target_update_frequency": 100}


def algorithm_name(algorithm: str | type | Agent) -> str:
    """Return the reference of an algorithm: `ppo`, `module:Class`, or `local:N` for a class of this process only."""
    if isinstance(algorithm, str):
        return algorithm
    text = references.make_reference(algorithm if isinstance(algorithm, type) else type(algorithm))
    return next((name for name, config in ALGORITHMS.items() if config.implementation == text), text)


def resolve_agent_config(
    algorithm: str | type | Agent, given: Mapping[str, float], config: AgentConfig | Mapping[str, Any] | None
) -> tuple[AgentConfig, dict[str, Any]]:
    """Return the configuration of an algorithm, and those of its fields that the caller decided.

    `given` has the four numbers of DEFAULT_ARGUMENTS. A complete AgentConfig, or an existing agent, decides everything.
    """
    name = algorithm_name(algorithm)
    if isinstance(algorithm, Agent):
        config = _require_config(algorithm)
    if isinstance(config, AgentConfig):
        changed = [key for key, value in given.items() if value != DEFAULT_ARGUMENTS[key]]
        if changed:
            raise ConfigError(
                f"{changed[0]}={given[changed[0]]}: the agent comes with its own settings, change it there"
            )
        return config, config.model_dump()
    kind = config_class(name)
    decided = _map_arguments(kind, given, name, config or {})
    for key, value in (config or {}).items():
        if key not in kind.model_fields:
            raise ConfigError(f"{name} has no setting {key!r}.{did_you_mean(key, kind.model_fields)}")
        if key in decided and decided[key] != value:
            raise ConfigError(f"{key} is given twice: {decided[key]} by the arguments and {value} in config")
        decided[key] = references.make_reference(value) if callable(value) else value
    return validate_config(kind, decided, "agent."), decided


def _map_arguments(
    kind: type[AgentConfig], given: Mapping[str, float], name: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Map the four numbers to the algorithm's field names; a number without a field must have its default value."""
    fields = kind.model_fields
    length = config.get("sequence_length", fields["sequence_length"].default) if "sequence_length" in fields else 1
    for key in ("learning_rate", "batch_size", "update_frequency", "target_update_frequency"):
        if not given[key] > 0:
            raise ConfigError(f"{key}={given[key]}: must be greater than 0")
    homes = {
        "learning_rate": ("learning_rate", given["learning_rate"]),
        "batch_size": ("batch_size" if "batch_size" in fields else "minibatch_size", given["batch_size"]),
        "update_frequency": ("samples_per_insert", given["batch_size"] * length / given["update_frequency"]),
        "target_update_frequency": ("target_every", given["target_update_frequency"]),
    }
    decided: dict[str, Any] = {}
    for key, (field, value) in homes.items():
        if field in fields:
            decided[field] = value
        elif given[key] != DEFAULT_ARGUMENTS[key]:
            raise ConfigError(f"{key}={given[key]} means nothing to {name}: leave it out")
    return decided


def _require_config(agent: Agent) -> AgentConfig:
    config = getattr(agent, "config", None)
    if not isinstance(config, AgentConfig):
        raise UsageError(f"a {type(agent).__name__} needs its AgentConfig as the attribute `config`")
    return config


def choose_device(device: str | None, *, use_gpu: bool) -> str:
    """Return the device's name. Raises ConfigError if a GPU is asked for and missing."""
    if device is None:
        device = "cuda" if use_gpu else "cpu"
    try:
        validate_device(device)
    except ValueError as error:
        raise ConfigError(f"device={device!r}: {error}") from None
    if use_gpu and device == "cpu":
        raise ConfigError("use_gpu=True and device='cpu' contradict each other: leave one out")
    if use_gpu or device.startswith("cuda"):
        from steppe.algorithms.nn.device import resolve_device

        if not resolve_device("cuda" if device == "auto" else device).startswith("cuda"):
            raise ConfigError(f"use_gpu=True, but {device!r} is no GPU")
    return device
