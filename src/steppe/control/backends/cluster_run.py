"""The run that a cluster trains: its settings, which are TOML in the cluster, and its state."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steppe.control.backends.orchestrator import RoleStatus, RunSpec
from steppe.core.config.run import ResolvedConfig, RunConfig, flat_keys, flatten, resolve_config
from steppe.core.contracts.errors import ConfigError, SteppeError
from steppe.records.store import PAUSED, PENDING, RUNNING, STARTING, STOPPED, STOPPING, SUCCEEDED, Status


@dataclass(frozen=True)
class CurrentRun:
    """The run that the cluster trains now."""

    spec: RunSpec
    resolved: ResolvedConfig
    digest: str  # of name and settings

    @property
    def run(self) -> str:
        return self.spec.run


def parse_run_spec(spec: RunSpec) -> CurrentRun:
    """Resolve the settings of a run; raises ConfigError if they are not valid."""
    try:
        resolved = resolve_config(("cluster", _flat_settings(spec)))
    except (tomllib.TOMLDecodeError, SteppeError) as error:
        raise ConfigError(f"the cluster's settings of {spec.run} cannot be read: {error}") from None
    text = json.dumps([spec.run, spec.settings])
    return CurrentRun(spec, resolved, hashlib.sha256(text.encode()).hexdigest()[:16])


def _flat_settings(spec: RunSpec) -> dict[str, Any]:
    return {"name": spec.run, "runtime": "kafka"} | flat_keys(tomllib.loads(spec.settings))


def with_hyperparameters(current: CurrentRun, agent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster's settings with other hyperparameters."""
    return _flat_settings(current.spec) | {f"agent.{name}": value for name, value in agent.items()}


def requested_settings(config: RunConfig, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested settings for a learner over Kafka, where `actors` is the number of actor slots."""
    if config.mode not in ("async", "sync"):
        raise ConfigError(f"mode={config.mode!r}: a cluster trains in mode 'async' or 'sync'")
    flat = flatten(config)
    return {key: flat[key] for key in requested if key in flat and key not in ("runtime", "flow.max_actors")}


def to_toml(settings: Mapping[str, Any]) -> str:
    """Format flat dotted keys as TOML; strings, numbers, booleans and lists of JSON are also valid TOML."""
    kept = {
        key: value for key, value in settings.items() if value is not None and key not in ("name", "run_dir", "runtime")
    }
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in kept.items())


def derive_state(
    before: Status, desired: int, status: RoleStatus, *, paused: bool
) -> tuple[str, str | None, str | None]:
    """Return state, reason and message of a run from the desired and observed learners."""
    if not desired:
        if before.state == SUCCEEDED or (before.state == PENDING and not status.total):
            return before.state, before.reason, before.message
        if status.total:
            return STOPPING, "stop_requested", "its learner writes a checkpoint and ends"
        return STOPPED, "stop_requested", exit_message(status)
    if status.complete:
        return SUCCEEDED, "completed", None
    if status.ready:
        return (PAUSED, "pause_requested", None) if paused else (RUNNING, None, None)
    return STARTING, "waiting", status.problem or "its learner is starting"


def exit_message(status: RoleStatus) -> str:
    """Return how the learner ended, in words."""
    if status.exit_code is None:
        return "the learner is gone, and its exit code is unknown: its newest checkpoint may be older"
    if status.exit_code == 0:
        return "the learner ended normally, with a checkpoint"
    return f"the learner ended with exit code {status.exit_code}: its newest checkpoint may be older"
