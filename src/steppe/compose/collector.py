"""Collect experience without a learner: the actors of a plan in lockstep, with the caller in place of the learner.

A round is one publication of weights and one segment from every actor, so all experience is collected with the
requested weights, and the same seed gives the same experience on every runtime.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from steppe.core.array_checks import require_segment
from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import RunConfig
from steppe.core.contracts.errors import FactoryError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.weights import Weights
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import POLICY, RESTART, RUN
from steppe.roles.scheduling import RoundBatchPolicy
from steppe.runtimes import find_launcher
from steppe.runtimes.handle import CollectorHandle
from steppe.runtimes.plan import Plan, make_plan
from steppe.training.result import to_exception

ROUND_STEPS = 32
POLL_INTERVAL_S = 0.1  # between checks whether the workers are alive
STOP_S = 4.0

Experience = dict[str, Any]
WeightsProvider = Callable[[], Weights]


@dataclass(frozen=True)
class PolicySnapshot:
    """What a worker needs to act: the algorithm, its settings, and the current weights."""

    algo: str
    config: AgentConfig
    weights: Weights


@runtime_checkable
class PolicyProvider(Protocol):
    """Anything that provides a policy snapshot for an environment, such as a DistributedAgent."""

    def recipe(self, environment: Any) -> PolicySnapshot:
        """Return the policy snapshot for workers in that environment."""


class Collector:
    """The actors of one policy, and all resources that must be released with them."""

    def __init__(self, config: RunConfig, spec: EnvSpec, *, runtime: str | None) -> None:
        self._temporary_dir = Path(tempfile.mkdtemp(prefix="steppe-workers-"))
        self._handle: CollectorHandle | None = None
        self._version = -1
        try:
            config = config.model_copy(update={"run_dir": self._temporary_dir / "workers"})
            self.plan = _make_actor_plan(config, spec, runtime)
            self._directory = RunDirectory.create(self.plan.config, {}, {"passing": True})
            self._handle = _launch(self.plan, self._directory)
        except BaseException:
            self.close()
            raise
        self._rounds = RoundBatchPolicy(self._handle.channel, self.plan.config.actors)

    def round(self, weights: Weights, *, restart: bool) -> list[Segment]:
        """Return one segment from every actor, in order; `restart` starts new episodes everywhere.

        The caller must `release` the segments.
        """
        handle = self._handle
        assert handle is not None, "a collector is not used after close"
        handle.ask("actor", RESTART if restart else RUN)
        self._version += 1
        handle.weights.publish(POLICY, replace(weights, version=self._version))
        while not (segments := self._rounds.take(self._version)):
            if faults := handle.faults():
                raise to_exception(faults[0])
            handle.wait_for_segment(POLL_INTERVAL_S)
        for segment in segments:
            require_segment(segment)
        return segments

    def release(self, segments: Iterable[Segment]) -> None:
        """Return the memory of a round to the actors."""
        assert self._handle is not None
        for segment in segments:
            self._handle.channel.release(segment)

    def close(self) -> None:
        """Terminate the workers and remove their directory. Idempotent."""
        handle, self._handle = self._handle, None
        try:
            if handle is not None:
                handle.close(STOP_S)
                self._directory.store.close()
                self._directory.release()
        finally:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)


def _make_actor_plan(config: RunConfig, spec: EnvSpec, runtime: str | None) -> Plan:
    """Plan for processes if they can import the environment and the policy, for this process otherwise."""
    try:
        plan = make_plan(config.model_copy(update={"runtime": runtime or "processes"}), spec)
    except FactoryError:
        if runtime is not None:
            raise
        plan = make_plan(config.model_copy(update={"runtime": "inline"}), spec)
    return replace(plan, roles=tuple(role for role in plan.roles if role.kind == "actor"))


def _launch(plan: Plan, directory: RunDirectory) -> CollectorHandle:
    return find_launcher(plan.config.runtime)(plan, directory)  # type: ignore[no-any-return]


@dataclass
class EnvTrajectory:
    """Steps of one environment of one actor, or of one agent in it, across segments."""

    num_episodes: int
    episodes: list[list[Experience]] = field(default_factory=list)
    current: list[Experience] = field(default_factory=list)
    truncated_by_limit: bool = False  # the caller's limit cut the episode, which continues unrecorded until it ends

    @property
    def needs_more(self) -> bool:
        return len(self.episodes) < self.num_episodes

    def add_step(self, step: Experience, limit: int) -> None:
        """Add the next valid step of this environment."""
        ended = bool(step["terminated"] or step["truncated"])
        if self.truncated_by_limit or not self.needs_more:
            self.truncated_by_limit = self.truncated_by_limit and not ended
            return
        self.current.append(step)
        if not ended and len(self.current) >= limit:
            step["truncated"] = np.bool_(True)
            self.truncated_by_limit = True
        if ended or self.truncated_by_limit:
            self.episodes.append(self.current)
            self.current = []


def collect_episodes(
    collector: Collector, weights: WeightsProvider, num_episodes: int, max_steps_per_episode: int
) -> list[list[Experience]]:
    """Return whole episodes in equal shares from all environments, so that short episodes are not favoured.

    `weights` is called before every round.
    """
    num_envs = collector.plan.config.actors * collector.plan.num_rows
    quotas = [num_episodes // num_envs + (trajectory < num_episodes % num_envs) for trajectory in range(num_envs)]
    trajectories = [EnvTrajectory(quota) for quota in quotas]
    restart = True
    while any(trajectory.needs_more for trajectory in trajectories):
        segments = collector.round(weights(), restart=restart)
        if restart:
            for trajectory in trajectories:
                trajectory.current, trajectory.truncated_by_limit = [], False
        for trajectory, steps in zip(trajectories, _split_by_env(segments), strict=True):
            for step in steps:
                trajectory.add_step(step, max_steps_per_episode)
        collector.release(segments)
        # An episode may never end by itself, and its environment would then contribute nothing more.
        restart = all(trajectory.truncated_by_limit for trajectory in trajectories if trajectory.needs_more)
    ordered = [(number, index) for index, quota in enumerate(quotas) for number in range(quota)]
    return [trajectories[index].episodes[number] for number, index in sorted(ordered)]


def collect_steps(
    collector: Collector, weights: WeightsProvider, num_steps: int, *, restart: bool
) -> dict[str, np.ndarray]:
    """Return `num_steps` transitions in equal shares, environment after environment, each in chronological order."""
    num_envs = collector.plan.config.actors * collector.plan.num_rows
    quotas = [num_steps // num_envs + (trajectory < num_steps % num_envs) for trajectory in range(num_envs)]
    trajectories: list[list[Experience]] = [[] for _ in quotas]
    while any(len(trajectory) < quota for trajectory, quota in zip(trajectories, quotas, strict=True)):
        segments = collector.round(weights(), restart=restart)
        for trajectory, steps in zip(trajectories, _split_by_env(segments), strict=True):
            trajectory.extend(steps)
        collector.release(segments)
        restart = False
    rows = [step for trajectory, quota in zip(trajectories, quotas, strict=True) for step in trajectory[:quota]]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _split_by_env(segments: list[Segment]) -> list[list[Experience]]:
    """Return the valid steps of each (actor, environment), copied out of the segments."""
    trajectories = []
    for segment in segments:
        columns = {
            column.name: segment[column.name][: segment.spec.num_steps].copy()
            for column in segment.spec.fields
            if column.name not in ("valid", "final_obs") and not column.once
        }
        columns["next_obs"] = segment.next_obs()
        for env in range(segment.spec.num_envs):
            steps = np.flatnonzero(segment["valid"][:, env]).tolist()
            trajectories.append([{name: column[t, env] for name, column in columns.items()} for t in steps])
    return trajectories
