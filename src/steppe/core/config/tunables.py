"""Which hyperparameters can change during a run, and to which values. Command line, service and Kafka validate a change here
before they accept it, and the learner again before it applies it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steppe.core.config.agent import AgentConfig
from steppe.core.config.renamed_keys import replace_renamed_keys
from steppe.core.config.run import RunConfig
from steppe.core.config.validation import validate_config
from steppe.core.contracts.errors import ConfigError, did_you_mean
from steppe.core.contracts.specs import EnvSpec


def tunable_fields(config: RunConfig) -> tuple[str, ...]:
    """Return the hyperparameters that take effect during this run; others that may change take effect after a restart.

    Workers that share a table read their configuration once. Workers that push gradients take no optimizer steps, and a step
    size that the parameter server or the cluster sets cannot be changed in the agent.
    """
    agent = config.agent
    if config.mode == "workers" and agent.in_table:
        return ()
    without: set[str] = set()
    if config.by_gradients:
        without |= set(agent.own_steps)
        if config.params.learning_rate is not None:
            without.add("learning_rate")
    if config.cluster.joined and config.cluster.exchange == "gradients":
        without |= {"learning_rate", *agent.own_steps}  # every node takes the same steps
    return tuple(name for name in agent.live if name not in without)


def validate_changes(agent: AgentConfig, values: Mapping[str, Any], spec: EnvSpec | None = None) -> dict[str, Any]:
    """Return the validated values; ConfigError for one that is unknown, fixed or invalid.

    With `spec`, also for one that this environment does not support.
    """
    kind = type(agent)
    values = replace_renamed_keys(values, kind.renamed)
    for name, value in values.items():
        if name not in kind.model_fields:
            raise ConfigError(f"there is no hyperparameter {name[:100]!r}.{did_you_mean(name, kind.model_fields)}")
        if name in kind.fixed:
            raise ConfigError(f"{name} cannot change in an existing run: create a new run")
        if value is None and getattr(agent, name) is not None and not _may_be_absent(kind, name):
            raise ConfigError(f"{name} cannot be unset: give a value")
    changed: AgentConfig = validate_config(kind, {**agent.model_dump(mode="json"), **values}, "agent.")
    if spec is not None:
        changed.require(spec, kind.__name__.removesuffix("Config"))
    made = changed.model_dump(mode="json")
    return {name: made[name] for name in values}


def needs_spec(agent: AgentConfig, changed: Mapping[str, Any]) -> list[str]:
    """Return the names of changes that need the environment's spec to be validated. None, 0 and [] are always valid."""
    before = agent.model_dump(mode="json")
    return [name for name in agent.by_spec if name in changed and changed[name] and changed[name] != before[name]]


def _may_be_absent(kind: type[AgentConfig], name: str) -> bool:
    """Return whether None is a value of this field, and not only a default to be resolved."""
    return name in ("target_kl", "learning_rate_end") and kind.model_fields[name].default is None
