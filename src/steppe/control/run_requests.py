"""Resolve requests for new runs into configurations, within the limits of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steppe.control import models
from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.config.run import KafkaConfig, RunConfig, resolve_config
from steppe.core.config.runtime_table import RUNTIMES, capabilities_of, is_installed, runtimes_with
from steppe.core.contracts.errors import ConfigError
from steppe.runtimes.memory_need import require_memory, smallest_env_spec

STOP_S = 30.0  # time for a run to stop in order before it is killed


@dataclass(frozen=True)
class Bounds:
    """Limits of what callers may request from this machine."""

    actors: int = 16
    live_runs: int = 8
    envs: int = 4_096
    stop_s: float = STOP_S
    modules: tuple[str, ...] = ()  # `module:Id` environments that are allowed in addition to the registered ones


class RequestResolver:
    """Resolves requests for new runs."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._env_ids: frozenset[str] = frozenset()

    def list_environments(self) -> list[models.Environment]:
        """Return the environments that requests may name."""
        from steppe.envs.catalog import list_environments

        self._env_ids = frozenset(row["id"] for row in list_environments(every=True))
        registered = [models.Environment(**row) for row in list_environments()]
        unknown = {"max_episode_steps": None, "solved_at": None, "native_vector": False, "needs": None}
        return registered + [models.Environment(id=name, **unknown) for name in self._bounds.modules]

    def resolve(self, request: models.RunRequest, kafka: KafkaConfig | None) -> tuple[RunConfig, dict[str, str]]:
        """Return the configuration and the source of each value; raises ConfigError for what is not allowed here.

        `kafka` has the brokers of runs over Kafka, if there are any.
        """
        settings = models.to_settings(request)
        self._require_names(request.env, settings)
        self._require_bounds(settings)
        if settings.get("environment.kwargs"):
            from steppe.envs.arguments import require_env_kwargs

            require_env_kwargs(request.env, settings["environment.kwargs"])
        runtimes = available_runtimes(kafka)
        if settings.get("runtime") not in (None, *runtimes_with("needs_brokers"), *runtimes):
            raise ConfigError(
                f"runtime={settings['runtime']!r} is not available here; choose one of: {', '.join(runtimes)}"
            )
        own_settings = _service_settings(settings, kafka)
        runtime = settings.get("runtime") or own_settings.get("runtime") or RunConfig.model_fields["runtime"].default
        if settings.get("mode") == "async" and capabilities_of(runtime).scales_actors:
            settings.setdefault("flow.max_actors", self._bounds.actors)
        resolved = resolve_config(("service", own_settings), ("request", settings))
        require_memory(resolved.config, smallest_env_spec(resolved.config))
        return resolved.config, resolved.sources

    def _require_names(self, env: str, settings: Mapping[str, Any]) -> None:
        if env not in self._env_ids | set(self._bounds.modules):
            self.list_environments()
        if env not in self._env_ids | set(self._bounds.modules):
            raise ConfigError(f"env={env!r} is not in the list of environments")
        if settings.get("algo", "ppo") not in ALGORITHMS:
            raise ConfigError(f"algo={settings['algo']!r} is not in the list of algorithms")
        if settings.get("agent.network", "auto") not in models.ALLOWED_NETWORKS:
            raise ConfigError(f"agent.network must be one of {', '.join(models.ALLOWED_NETWORKS)}")

    def _require_bounds(self, settings: Mapping[str, Any]) -> None:
        bounds = self._bounds
        for key, most in (("actors", bounds.actors), ("flow.max_actors", bounds.actors), ("envs", bounds.envs)):
            if settings.get(key, 0) > most:
                raise ConfigError(f"{key}={settings[key]}: this service allows at most {most}")


def available_runtimes(kafka: KafkaConfig | None) -> list[str]:
    """Return the runtimes that are available here: installed ones, and with brokers those that need them."""
    brokers = kafka is not None
    return [name for name in RUNTIMES if (brokers if capabilities_of(name).needs_brokers else is_installed(name))]


def _service_settings(settings: Mapping[str, Any], kafka: KafkaConfig | None) -> dict[str, Any]:
    """Return the settings that the service decides: the default runtime, and the brokers' connection settings."""
    runtime = settings.get("runtime")
    if runtime is None and kafka is not None:
        mode = resolve_config(("request", settings)).config.mode
        candidates = [
            name for name in runtimes_with("needs_brokers") if mode != "workers" or capabilities_of(name).workers
        ]
        runtime = candidates[0] if candidates else None
    if runtime is None or not capabilities_of(runtime).needs_brokers:
        return {}
    if kafka is None:
        raise ConfigError(f"runtime={runtime!r} needs brokers: start the service with steppe serve --kafka HOST:PORT")
    brokers = kafka.model_dump(mode="json", exclude_unset=True)
    return {"runtime": runtime, **{f"kafka.{name}": value for name, value in brokers.items()}}
