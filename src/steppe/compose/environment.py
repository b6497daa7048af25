"""DistributedEnvironment: an environment described once, which collects experience with several workers in parallel.

The workers are the same actors as in a run (roles/actor.py), in their own processes if those can import the environment
and the policy by name, in this process otherwise. They start with the first call that needs them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np

from steppe.compose.collector import (
    ROUND_STEPS,
    Collector,
    Experience,
    PolicyProvider,
    PolicySnapshot,
    collect_episodes,
    collect_steps,
)
from steppe.compose.named_weights import with_arrays
from steppe.compose.settings import algorithm_name, choose_device, resolve_agent_config
from steppe.core.arrays import to_numpy
from steppe.core.config import references
from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import EnvConfig, FlowConfig, RunConfig
from steppe.core.contracts.algorithm import Agent
from steppe.core.contracts.components import ParameterSource
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.weights import Weights
from steppe.core.system import seeding
from steppe.core.system.typecheck import typechecked
from steppe.envs import probe
from steppe.roles.context import POLICY

WORKER_ID = "environment"  # the id under which a server knows all the workers together
RECENT = 100  # number of newest episodes in return_mean and length_mean


@runtime_checkable
class RunCounts(Protocol):
    """Counters of a run, as a RunView has them."""

    @property
    def played_steps(self) -> int: ...

    @property
    def played_episodes(self) -> int: ...

    @property
    def recent(self) -> Sequence[tuple[float, int]]: ...


class _CollectorSession:
    """Context of the workers for one call; an exception leaves them out of step, so it terminates them."""

    def __init__(self, environment: DistributedEnvironment, collector: Collector) -> None:
        self._environment, self._collector = environment, collector

    def __enter__(self) -> Collector:
        return self._collector

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._environment.shutdown()


@typechecked
class DistributedEnvironment:
    """An environment by id or factory, with `num_workers` actors in it.

    `use_gpu` and `device` select where the workers compute actions. The same seed gives the same experience, whether
    the workers are processes or not. With a `parameter_server`, the workers load newer parameters whenever it has some,
    also during a call. `shutdown` terminates the workers; so do leaving a `with` block and the end of the program.
    """

    def __init__(
        self,
        env_factory: Callable[..., Any] | str,
        num_workers: int = 4,
        use_gpu: bool = False,
        device: str | None = None,
        *,
        config: EnvConfig | None = None,
        envs_per_worker: int | None = None,
        runtime: Literal["inline", "processes"] | None = None,
        seed: int | None = None,
        parameter_server: ParameterSource | None = None,
    ) -> None:
        if num_workers < 1 or (envs_per_worker is not None and envs_per_worker < 1):
            raise ConfigError(
                f"there must be at least one worker with one environment, not {num_workers=}, {envs_per_worker=}"
            )
        self.env = references.make_reference(env_factory)
        self.num_workers, self.envs_per_worker = num_workers, envs_per_worker
        self.device = choose_device(device, use_gpu=use_gpu)
        self.config = config or EnvConfig()
        self.runtime, self.seed = runtime, seed
        self.decided: dict[str, Any] = _caller_settings(self, config)
        self._workers: tuple[AgentConfig, str, Collector] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._launches = 0
        self._parameters: dict[str, np.ndarray] = {}
        self.parameter_server = parameter_server
        self._pulled_version = -1
        self._pulled: dict[str, np.ndarray] = {}  # newest parameters of the server
        self._restart = True
        self._steps, self._episodes = 0, 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._run: RunCounts | None = None  # of the loop's newest run in this environment

    @cached_property
    def spec(self) -> EnvSpec:
        """The environment's spec; creates one environment and closes it."""
        return probe(self.env, self.config)

    def settle(self, config: EnvConfig) -> None:
        """Apply the environment settings of a MainLoop's configuration; terminate the workers if they differ."""
        if config != self.config:
            self.shutdown()
            self.config = config
            self.__dict__.pop("spec", None)

    def generate_experiences(
        self, policy: PolicyProvider | Agent, num_episodes: int, max_steps_per_episode: int = 1000
    ) -> list[dict[str, Any]]:
        """Play whole episodes with a policy; return one dictionary per step, episode after episode.

        Each has obs, action, reward, next_obs, terminated, truncated, the policy's further columns (logp, value, …) and
        the index of its episode. A longer episode is truncated after `max_steps_per_episode` steps. Every worker plays
        an equal share, so short episodes are not favoured.
        """
        if num_episodes < 1 or max_steps_per_episode < 1:
            raise ConfigError(f"at least one episode of one step, not {num_episodes=}, {max_steps_per_episode=}")
        snapshot = self._policy_snapshot(policy)
        with self._collector_session(snapshot) as collector:
            episodes = collect_episodes(
                collector, partial(self._weights, snapshot), num_episodes, max_steps_per_episode
            )
        self._restart = True
        for number, steps in enumerate(episodes):
            self._count_episode(steps)
            for step in steps:
                step["episode"] = number
        return [step for steps in episodes for step in steps]

    def generate_batch_experiences(self, policy: PolicyProvider | Agent, batch_size: int) -> dict[str, np.ndarray]:
        """Return `batch_size` steps as arrays, an equal share from every worker; episodes continue from call to call.

        The steps of each worker are consecutive and in order.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: must be at least 1")
        snapshot = self._policy_snapshot(policy)
        with self._collector_session(snapshot) as collector:
            batch = collect_steps(collector, partial(self._weights, snapshot), batch_size, restart=self._restart)
        self._restart = False
        self._steps += batch_size
        self._episodes += int((batch["terminated"] | batch["truncated"]).sum())
        return batch

    def update_policy(self, new_policy_params: Mapping[str, Any]) -> None:
        """Use these parameters instead of the policy's own in later calls; an empty dictionary restores its own.

        Newer parameters of the server replace them in turn.
        """
        self._pull()
        self._pulled = {}
        self._parameters = {name: to_numpy(value, repr(name)).copy() for name, value in new_policy_params.items()}

    def reset_environments(self) -> None:
        """Abandon all current episodes: the next experience starts with first steps."""
        self._restart = True

    def follow_run(self, run: RunCounts) -> None:
        """Include a loop's run in the statistics from now on, during the run and afterwards."""
        self._absorb_run_counts()
        self._run = run

    def _absorb_run_counts(self) -> None:
        """Add the counts of the previous run to the totals and stop following it."""
        if self._run is not None:
            self._steps, self._episodes = (
                self._steps + self._run.played_steps,
                self._episodes + self._run.played_episodes,
            )
            self._recent.extend(self._run.recent)
            self._run = None

    def get_environment_stats(self) -> dict[str, Any]:
        """Return the number of workers, steps and episodes, and the mean return and length of the newest episodes.

        The counts include the runs of loops. A run's actors may have played a few more steps than its learner received.
        """
        run = self._run
        recent = [*self._recent, *(run.recent if run is not None else ())][-RECENT:]
        returns, lengths = zip(*recent, strict=True) if recent else ((), ())
        collector = self._workers[2] if self._workers else None
        return {
            "env": self.env,
            "num_workers": self.num_workers,
            "envs_per_worker": self.envs_per_worker or 1,
            "running": collector is not None,
            "runtime": collector.plan.config.runtime if collector else self.runtime,
            "device": self.device,
            "steps": self._steps + (run.played_steps if run is not None else 0),
            "episodes": self._episodes + (run.played_episodes if run is not None else 0),
            "policy_version": self._pulled_version if self.parameter_server is not None else None,
            "return_mean": float(np.mean(returns)) if returns else None,
            "length_mean": float(np.mean(lengths)) if lengths else None,
        }

    def shutdown(self) -> None:
        """Terminate the workers; the next call that needs them starts new ones."""
        self._workers, self._restart = None, True
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    def _policy_snapshot(self, policy: PolicyProvider | Agent) -> PolicySnapshot:
        references.stop_if_loading_main()
        if isinstance(policy, PolicyProvider):
            return policy.recipe(self)
        config, _ = resolve_agent_config(policy, {}, None)
        return PolicySnapshot(algorithm_name(policy), config, policy.weights())

    def _weights(self, snapshot: PolicySnapshot) -> Weights:
        """Return the weights for the next round."""
        self._pull()
        weights = with_arrays(snapshot.weights, self._parameters) if self._parameters else snapshot.weights
        return with_arrays(weights, {**weights.arrays(), **self._pulled}) if self._pulled else weights

    def _pull(self) -> None:
        """Load newer parameters of the server, if there are any."""
        server: Any = self.parameter_server
        if server is None:
            return
        if hasattr(server, "newer_than"):
            newer = server.newer_than(POLICY, self._pulled_version)
            if newer is not None:
                self._pulled_version, self._pulled = newer.version, newer.arrays()
        else:  # a user's own server, which has no versions
            server.register_worker(WORKER_ID)
            self._pulled_version, self._pulled = self._pulled_version + 1, server.get_parameters(WORKER_ID)

    def _collector_session(self, snapshot: PolicySnapshot) -> _CollectorSession:
        """Return the workers for a policy snapshot, started if necessary; an error in the session terminates them."""
        if self._workers is not None and self._workers[:2] != (snapshot.config, snapshot.algo):
            self.shutdown()
        if self._workers is None:
            collector = Collector(self._run_config(snapshot), self.spec, runtime=self.runtime)
            self._finalizer = weakref.finalize(self, collector.close)
            self._workers = snapshot.config, snapshot.algo, collector
            self._launches += 1
        return _CollectorSession(self, self._workers[2])

    def _run_config(self, snapshot: PolicySnapshot) -> RunConfig:
        seed = self.seed or 0
        return RunConfig(
            env=self.env,
            algo=snapshot.algo,
            mode="sync",
            actors=self.num_workers,
            envs=self.envs_per_worker or 1,
            seed=seeding.integer_seed(seed, "workers", self._launches) if self._launches else seed,
            environment=self.config,
            agent=snapshot.config.model_copy(update={"segment_steps": ROUND_STEPS}),
            flow=FlowConfig(ahead=0, actor_device=self.device),  # each round uses the requested weights
        )

    def _count_episode(self, steps: list[Experience]) -> None:
        self._absorb_run_counts()
        self._steps += len(steps)
        self._episodes += 1
        self._recent.append((float(sum(float(step["reward"]) for step in steps)), len(steps)))


def _caller_settings(environment: DistributedEnvironment, config: EnvConfig | None) -> dict[str, Any]:
    """Return the configuration keys that the caller decided, for a MainLoop."""
    decided: dict[str, Any] = {
        "env": environment.env,
        "actors": environment.num_workers,
        "flow.actor_device": environment.device,
        "envs": environment.envs_per_worker,
        "runtime": environment.runtime,
        "seed": environment.seed,
    }
    if config is not None:
        decided |= {f"environment.{name}": value for name, value in config.model_dump().items()}
    return {key: value for key, value in decided.items() if value is not None or key.startswith("environment.")}
