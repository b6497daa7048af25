"""Which hyperparameters of a run can change while it goes on, and which values it takes. Command line, service and Kafka ask
here before a change is accepted, and the learner asks again before it takes one over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import RunConfig
from steppe.core.config.validation import validate_config
from steppe.core.contracts.errors import ConfigError, did_you_mean
from steppe.core.contracts.specs import EnvSpec


def tunable_fields(config: RunConfig) -> tuple[str, ...]:
    """The hyperparameters that take effect while this run goes on; all others that may change wait for a restart.

    Workers that share a table read their configuration once. Workers that push gradients take no optimizer steps, and a step
    size that the parameter server or the cluster has of its own is not the agent's to change.
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
    """The values as the algorithm takes them; ConfigError for one that it does not know, cannot change or would refuse.

    With `spec`, also for one that means nothing in that world.
    """
    kind = type(agent)
    for name, value in values.items():
        if name not in kind.model_fields:
            raise ConfigError(f"there is no hyperparameter {name[:100]!r}.{did_you_mean(name, kind.model_fields)}")
        if name in kind.fixed:
            raise ConfigError(f"{name} cannot change in a run that has begun to be what it is: make a new run")
        if value is None and getattr(agent, name) is not None and not _may_be_absent(kind, name):
            raise ConfigError(f"{name} has been chosen: give a number")
    changed: AgentConfig = validate_config(kind, {**agent.model_dump(mode="json"), **values}, "agent.")
    if spec is not None:
        changed.require(spec, kind.__name__.removesuffix("Config"))
    made = changed.model_dump(mode="json")
    return {name: made[name] for name in values}


def needs_spec(agent: AgentConfig, changed: Mapping[str, Any]) -> list[str]:
    """The names of changes that only the environment's spec can tell to be right. Absent, 0 and [] are right everywhere."""
    before = agent.model_dump(mode="json")
    return [name for name in agent.by_spec if name in changed and changed[name] and changed[name] != before[name]]


def _may_be_absent(kind: type[AgentConfig], name: str) -> bool:
    """Whether None is a value of this field, and not only the word for a choice that is still to be made."""
    return name in ("target_kl", "learning_rate_end") and kind.model_fields[name].default is None
