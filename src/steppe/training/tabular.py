"""Trainers for tabular learners: on one core, on all cores of a machine, and on the ranks of an MPI job.

One core is a loop over the learner's own `train_episode`. The other two are ordinary runs in mode `workers` with the
built-in roles and runtimes; their results are read from the run's directory, which is then removed.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steppe import runtimes
from steppe.algorithms.tabular.agent import ClassicAgent, get_table_storage, set_table_storage
from steppe.algorithms.tabular.base import BaseAlgorithm, is_turn_based, step_limit
from steppe.algorithms.tabular.q_learning import ListQLearning, OptimalQLearning
from steppe.algorithms.tabular.schedules import Schedule, to_plain
from steppe.core.config import references
from steppe.core.config.fields import MAX_SETTING
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.reports import ActorReport, EvaluationReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS
from steppe.core.system.typecheck import typechecked
from steppe.envs.wrappers.flatten import as_gym_env
from steppe.records.run_directory import RunDirectory
from steppe.records.statistics import TrainingStatistics
from steppe.runtimes.mpi import launch as mpi
from steppe.training.experiment import Experiment
from steppe.training.initial_weights import build_agent, load_result
from steppe.training.result import RunResult

Observer = Callable[[Any], object]
_given_envs: list[Any] = []  # the environment of this process's DistAsyncQLearning


@typechecked
class SingleThreadQLearning:
    """Trains one learner in one environment, in this process.

    `algorithm` is the learner; `training_stats` has its episodes.
    """

    def __init__(self, algorithm_class: type[BaseAlgorithm] = OptimalQLearning, **kwargs: Any) -> None:
        self.algorithm = algorithm_class(**kwargs)
        self.training_stats = TrainingStatistics()
        self.validation: list[tuple[int, float]] = []  # (steps so far, mean return of the greedy actions)

    def train(
        self,
        env: Any,
        episodes: int | None = None,
        steps: int | None = None,
        *,
        validation_env: Any = None,
        validation_every: int = 10_000,
        validation_episodes: int = 20,
    ) -> TrainingStatistics:
        """Play whole episodes and learn from every step, until `episodes` episodes or `steps` steps are reached.

        With `validation_env`, which must not be `env`, the greedy actions are evaluated there every `validation_every`
        steps and at the end.
        """
        if (episodes is None) == (steps is None):
            raise ConfigError("give either episodes or steps")
        _require_positive(episodes=episodes, steps=steps, validation_every=validation_every)
        if validation_env is env:
            raise ConfigError("validation_env is the environment of training: make another, or learning is disturbed")
        algorithm, stats = self.algorithm, self.training_stats
        first, last_step = algorithm.episode_count, algorithm.step_count + (steps or 0)
        validated_at = algorithm.step_count
        while algorithm.episode_count - first < episodes if episodes is not None else algorithm.step_count < last_step:
            before = algorithm.step_count
            stats.record_episode(algorithm.train_episode(env), algorithm.step_count - before)
            if validation_env is not None and algorithm.step_count - validated_at >= validation_every:
                validated_at = algorithm.step_count
                self._validate(validation_env, validation_episodes)
        if validation_env is not None and (not self.validation or self.validation[-1][0] < algorithm.step_count):
            self._validate(validation_env, validation_episodes)
        return stats

    def _validate(self, env: Any, episodes: int) -> None:
        mean = float(np.mean(validate(self.algorithm, env, episodes)))
        self.validation.append((self.algorithm.step_count, mean))
        self.training_stats.record_metric("validation_return", mean)


class _SharedTableTrainer:
    """Common part of the two trainers with a shared table: start a run in mode `workers` and read its results."""

    def __init__(self, algorithm_class: type[BaseAlgorithm], kwargs: dict[str, Any]) -> None:
        if issubclass(algorithm_class, ListQLearning):
            raise ConfigError(
                f"{algorithm_class.__name__} keeps its table in Python lists, which cannot be in shared memory: use "
                "OptimalQLearning, or SingleThreadQLearning"
            )
        self.algorithm_class, self.kwargs = algorithm_class, dict(kwargs)
        self._learner: Any = None
        self._trained = False
        self._merges = 0  # of all workers, in the newest training
        self._experiment: Experiment | None = None  # of the newest training
        self.training_stats = TrainingStatistics()
        self.validation: list[tuple[int, float]] = []  # (steps so far, mean return of the greedy actions)
        self.result: RunResult | None = None

    @property
    def algorithm(self) -> Any:
        """The learner, trained or initial; None before training if its sizes were not given."""
        if self._learner is None and {"state_size", "action_size"} <= self.kwargs.keys():
            self._learner = self.algorithm_class(**self.kwargs)
        return self._learner

    @property
    def q_table(self) -> Any:
        """The learned table. Raises UsageError before training."""
        if not self._trained:
            raise UsageError("nothing was learned yet: call train first")
        return self.algorithm.q_table

    def _run(
        self, env: str, steps: int, workers: int, settings: Mapping[str, Any], observers: Sequence[Observer]
    ) -> None:
        temporary_dir = Path(tempfile.mkdtemp(prefix="steppe-classic-"))
        sizes = {name: int(size) for name, size in self.kwargs.items() if name in ("state_size", "action_size")}
        options = {name: _to_plain_option(value) for name, value in self.kwargs.items() if name not in sizes}
        seed = {"seed": int(options["seed"])} if options.get("seed") is not None else {"seed": _random_seed()}
        layer = {
            "env": env,
            "algo": references.make_reference(ClassicAgent),
            "agent.learner": references.make_reference(self.algorithm_class),
            "agent.options": {name: value for name, value in options.items() if name != "seed"},
            "mode": "workers",
            "actors": workers,
            "steps": steps,
            "run_dir": str(temporary_dir / "run"),
            **seed,
            **settings,
        }
        try:
            experiment = self._experiment = Experiment.of(resolve_config(("call", layer)))
            agent = self._build_agent(experiment, sizes)
            result = experiment.run(observers, agent=agent)
            self._adopt_result(agent, result)
        finally:
            shutil.rmtree(temporary_dir, ignore_errors=True)
        result.raise_for_fault()

    def _build_agent(self, experiment: Experiment, sizes: dict[str, int]) -> Any:
        """Build the learner in this process first, so that its errors are raised before any process is started."""
        agent: Any = build_agent(experiment.plan())
        for name, size in sizes.items():
            if size != getattr(agent.algorithm, name):
                states = "states" if name == "state_size" else "actions"
                actual = getattr(agent.algorithm, name)
                raise ConfigError(f"{name}={size}, but the environment has {actual} {states}: leave {name} out")
        if self._trained:
            agent.table[...] = get_table_storage(self.algorithm).reshape(agent.table.shape)
            agent.set_epsilon(self.algorithm.epsilon)
        return agent

    @property
    def _handle(self) -> Any:
        """The handle of the newest run (runtimes/handle.py), or None before it."""
        experiment = self._experiment
        return experiment.supervisor.handle if experiment and experiment.supervisor else None

    def _adopt_result(self, agent: Any, result: RunResult) -> None:
        """Copy the learned table, the counters and the statistics from the finished run."""
        directory = RunDirectory.open(result.path)
        load_result(agent, directory)
        self._learner, self._trained, self.result = agent.algorithm, True, result
        set_table_storage(self.algorithm, get_table_storage(self.algorithm).copy())
        self.algorithm.step_count, self.algorithm.episode_count = (
            result.summary["env_steps"],
            result.summary["episodes"],
        )
        merges: dict[int, int] = {}
        listed = 0
        for report in _read_reports(directory, ACTORS, ActorReport):
            merges[report.actor] = max(merges.get(report.actor, 0), report.sequence)
            listed += len(report.episodes)
            for score, length in report.episodes:
                self.training_stats.record_episode(score, length)
        self.training_stats.count_unlisted(max(0, self.algorithm.episode_count - listed))
        self._merges = sum(merges.values())
        for evaluation in _read_reports(directory, EVALUATIONS, EvaluationReport):
            self.validation.append((evaluation.env_steps, evaluation.return_mean))
            self.training_stats.record_metric("validation_return", evaluation.return_mean)
        directory.store.close()


@typechecked
class ParallelQLearning(_SharedTableTrainer):
    """Trains one table with as many processes as there are cores.

    For any number of processes, their updates are added up in one table in shared memory, which is freed after the run.
    A process that is killed is replaced, and the loss is reported.
    """

    def __init__(
        self,
        algorithm_class: type[BaseAlgorithm] = OptimalQLearning,
        num_processes: int | None = None,
        **kwargs: Any,
    ) -> None:
        if num_processes is not None and num_processes < 1:
            raise ConfigError(f"num_processes={num_processes}: there must be at least one")
        super().__init__(algorithm_class, kwargs)
        self.num_processes = num_processes or len(os.sched_getaffinity(0))

    @property
    def processes(self) -> list[Any]:
        """The worker processes of the newest training, running or ended; empty before it, and on runtime inline."""
        handle = self._handle
        return handle.workers() if hasattr(handle, "workers") else []

    @property
    def shared_q_table(self) -> np.ndarray | None:
        """The shared-memory table that all processes write in training; the learned table afterwards; None before."""
        handle = self._handle
        shared: np.ndarray | None = handle.shared_values() if hasattr(handle, "shared_values") else None
        return shared if shared is not None or not self._trained else self.q_table

    def train(
        self,
        env_factory: Callable[..., Any] | str,
        steps: int,
        steps_per_sync: int = 1000,
        *,
        validation_every: int | None = None,
        validation_episodes: int = 20,
        runtime: str = "processes",
        callbacks: Sequence[Observer] = (),
    ) -> TrainingStatistics:
        """Take `steps` steps over all processes together, rounded up to whole episodes, merging every `steps_per_sync`.

        `env_factory` is a function that makes an environment, or an id. The greedy actions are evaluated in a separate
        environment every `validation_every` steps, and at the end. Further calls continue from the learned table.
        """
        references.stop_if_loading_main()
        _require_positive(steps=steps, steps_per_sync=steps_per_sync, validation_every=validation_every)
        settings = {
            "runtime": runtime,
            "agent.segment_steps": steps_per_sync,
            "evaluation.every_steps": validation_every or MAX_SETTING,
            "evaluation.episodes": validation_episodes,
        }
        self._run(references.make_reference(env_factory), steps, self.num_processes, settings, callbacks)
        return self.training_stats


@typechecked
class DistAsyncQLearning(_SharedTableTrainer):
    """Trains one table on all ranks that `mpiexec -n N python script.py` starts; on one rank without mpiexec.

    The first rank owns the table and also works. Every `batch_size` steps a rank sends its updates, and after
    `sync_frequency` of these messages it receives those of the others. No rank waits for the work of another. Only the
    first rank returns from `train`; the others serve it until it ends.
    """

    def __init__(
        self,
        algorithm_class: type[BaseAlgorithm] = OptimalQLearning,
        batch_size: int = 32,
        sync_frequency: int = 100,
        **kwargs: Any,
    ) -> None:
        _require_positive(batch_size=batch_size, sync_frequency=sync_frequency)
        mpi.require_library()
        super().__init__(algorithm_class, kwargs)
        self.batch_size, self.sync_frequency = batch_size, sync_frequency
        self.update_buffer: list[Any] = []  # updates not sent yet: empty outside `train`, which sends all of them
        self.sync_counter = 0  # messages that the ranks have sent

    @property
    def comm(self) -> Any:
        """The communicator of all processes that mpiexec started: mpi4py's COMM_WORLD."""
        from steppe.runtimes.mpi.root import comm_world

        return comm_world()

    @property
    def rank(self) -> int:
        """The rank of this process among those that mpiexec started."""
        return self._rank_and_size()[0]

    @property
    def size(self) -> int:
        """The number of processes that mpiexec started."""
        return self._rank_and_size()[1]

    def train(
        self,
        env: Any,
        steps: int,
        *,
        validation_every: int | None = None,
        validation_episodes: int = 20,
        callbacks: Sequence[Observer] = (),
    ) -> TrainingStatistics:
        """Take `steps` steps over all ranks together, rounded up to whole episodes, in copies of `env`.

        The greedy actions are evaluated in another copy every `validation_every` steps, and at the end. Under mpiexec
        the other ranks stay in their first call, so later calls must pass the same environment.
        """
        references.stop_if_loading_main()
        _require_positive(steps=steps, validation_every=validation_every)
        if self.size > 1 and _given_envs and _given_envs[0] is not env:
            raise UsageError(
                "the other ranks have only the environment of the first train call: pass that same object again, or start "
                "another program for another environment"
            )
        _given_envs[:] = [env]
        runtime = "mpi" if mpi.under_mpiexec() else "inline"
        runtimes.join(runtime)
        settings = {
            "runtime": runtime,
            "agent.segment_steps": self.batch_size,
            "flow.refresh_every": self.sync_frequency,
            "evaluation.every_steps": validation_every or MAX_SETTING,
            "evaluation.episodes": validation_episodes,
        }
        self._run(references.make_reference(copy_given_env), steps, self.size, settings, callbacks)
        self.sync_counter += self._merges
        return self.training_stats

    def _rank_and_size(self) -> tuple[int, int]:
        if not mpi.under_mpiexec():
            return 0, 1
        from steppe.runtimes.mpi.root import comm_world

        return comm_world().Get_rank(), comm_world().Get_size()


def copy_given_env() -> Any:
    """Return a copy of the environment that was given to this process's DistAsyncQLearning."""
    if not _given_envs:
        raise UsageError("every rank must call train with an environment: start the same script on all of them")
    try:
        env = copy.deepcopy(_given_envs[0])
    except Exception as error:
        raise UsageError(
            f"a {type(_given_envs[0]).__name__} cannot be copied ({error}): give one that can be"
        ) from error
    return as_gym_env(env)


def validate(algorithm: BaseAlgorithm, env: Any, episodes: int) -> list[float]:
    """Return the returns of whole episodes with greedy actions, without learning.

    In turn-based games of two agents they are the first agent's returns.
    """
    _require_positive(episodes=episodes)
    in_turns, limit = is_turn_based(env), step_limit(env)
    epsilon, algorithm.epsilon = algorithm.epsilon, 0.0
    try:
        return [_play(algorithm, env, limit, in_turns=in_turns) for _ in range(episodes)]
    finally:
        algorithm.epsilon = epsilon


def _play(algorithm: BaseAlgorithm, env: Any, limit: float, *, in_turns: bool) -> float:
    state, info = env.reset()
    total, sign, length, ended = 0.0, 1.0, 0, False
    while not ended:
        mask = (info.get("action_mask"),) if algorithm.takes_masks else ()
        state, reward, terminated, truncated, info = env.step(algorithm.select_action(state, *mask))
        total += sign * float(reward)
        sign, length = -sign if in_turns else sign, length + 1
        ended = bool(terminated or truncated or length >= limit)
    return total


def _read_reports(directory: RunDirectory, topic: str, kind: Any) -> list[Any]:
    found, after = [], 0
    while page := directory.board.read(topic, after):
        after = page[-1][0]
        found += [kind.read(record) for _, record in page]
    return found


def _to_plain_option(value: Any) -> Any:
    """Return an option of a learner as plain data that can be sent to another process."""
    if isinstance(value, Schedule):
        return to_plain(value)
    return value.item() if isinstance(value, np.generic) else value


def _random_seed() -> int:
    return int(np.random.SeedSequence().generate_state(1, np.uint32)[0])


def _require_positive(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
