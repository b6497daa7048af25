"""Merge the settings of all parts with a configuration, and refuse contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steppe.core.config import references
from steppe.core.config.fields import MAX_SETTING
from steppe.core.config.run import ResolvedConfig, RunConfig, flatten, resolve_config
from steppe.core.contracts.errors import ConfigError

if TYPE_CHECKING:
    from steppe.compose.agent import DistributedAgent
    from steppe.compose.environment import DistributedEnvironment
    from steppe.core.contracts.specs import EnvSpec
    from steppe.replay.pool import ReplayBufferPool

DEFAULT_SETTINGS = {"runtime": "inline"}  # the caller's own parts work in the caller's process
PARAMETER_SERVER_SETTINGS = {"mode": "workers"}  # what a parameter server decides


def compose_config(
    environment: DistributedEnvironment,
    pool: ReplayBufferPool | None,
    agent: DistributedAgent,
    given: RunConfig | Mapping[str, Any] | None,
    *,
    server: Mapping[str, Any] | None = None,
    loop: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Return the merged configuration; raises ConfigError if two parts, or a part and `given`, disagree.

    `server` has the settings of a parameter server. Settings in `loop` override the environment's. `defaults` has
    defaults.
    """
    parts: dict[str, tuple[str, Any]] = {}
    for source, decided in (
        ("the loop", loop or {}),
        ("the environment", {key: value for key, value in environment.decided.items() if key not in (loop or {})}),
        ("the agent", agent.decided),
        ("the replay buffer", _pool_settings(pool, agent)),
        ("the parameter server", server or {}),
    ):
        for key, value in decided.items():
            if key in parts and parts[key][1] != value:
                raise _conflict_error(key, *parts[key], source, value)
            parts[key] = (source, value)
    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("default", {**DEFAULT_SETTINGS, **(defaults or {})}),
        ("parts", {key: value for key, (_, value) in parts.items()}),
    ]
    parts_only = flatten(resolve_config(*layers).config)
    if isinstance(given, RunConfig):
        resolved = ResolvedConfig(given, {})
    else:
        names = {
            key: references.make_reference(value) if callable(value) else value for key, value in (given or {}).items()
        }
        resolved = resolve_config(*layers, ("config", names))
    merged = flatten(resolved.config)
    for key, (source, _) in parts.items():
        if merged.get(key) != parts_only[key]:
            raise _conflict_error(key, source, parts_only[key], "the configuration", merged.get(key))
    return resolved


def with_episode_limits(
    config: RunConfig,
    spec: EnvSpec,
    total_episodes: int,
    max_steps_per_episode: int,
    evaluation_frequency: int,
    checkpoint_frequency: int,
) -> RunConfig:
    """Return the configuration with length, evaluations and checkpoints in episodes, truncated at the given length."""
    for value in (total_episodes, max_steps_per_episode, evaluation_frequency, checkpoint_frequency):
        if value < 1:
            raise ConfigError(f"episodes, steps and frequencies are at least 1, not {value}")
    evaluation = {"every_episodes": evaluation_frequency}
    if "every_steps" not in config.evaluation.model_fields_set:
        evaluation["every_steps"] = MAX_SETTING
    changes: dict[str, Any] = {
        "episodes": total_episodes,
        "steps": config.steps if "steps" in config.model_fields_set else None,
        "evaluation": config.evaluation.model_copy(update=evaluation),
        "checkpoint": config.checkpoint.model_copy(update={"every_episodes": checkpoint_frequency}),
    }
    if spec.max_episode_steps is None or max_steps_per_episode < spec.max_episode_steps:
        changes["environment"] = config.environment.model_copy(update={"time_limit": max_steps_per_episode})
    return config.model_copy(update=changes)


def _pool_settings(pool: ReplayBufferPool | None, agent: DistributedAgent) -> dict[str, Any]:
    if pool is None:
        return {}
    if agent.config.memory == "rollout":
        raise ConfigError(
            f"{agent.algo} learns from fresh rollouts and keeps no replay buffer: give replay_buffer=None"
        )
    decided: dict[str, Any] = {
        "agent.buffer_size": pool.num_buffers * pool.buffer_capacity,
        "agent.prioritized": pool.use_prioritized,
    }
    if pool.use_prioritized:
        decided["agent.alpha"] = pool.store.alpha
    return decided


def _conflict_error(key: str, source: str, value: Any, other: str, other_value: Any) -> ConfigError:
    name = key.removeprefix("agent.")
    return ConfigError(f"{name} is {value!r} by {source}, but {other_value!r} by {other}: set it in one place only")
