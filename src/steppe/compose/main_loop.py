"""MainLoop: a training composed of an environment, a replay buffer and an agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.compose.agent import DistributedAgent
from steppe.compose.config_merge import PARAMETER_SERVER_SETTINGS, compose_config, with_episode_limits
from steppe.compose.environment import DistributedEnvironment
from steppe.compose.manual import ManualRun, ManualTrainer
from steppe.compose.parameter_server import make_own_server, push_difference, server_settings
from steppe.compose.supplied_parts import LoopParts
from steppe.core.config.run import ResolvedConfig, RunConfig
from steppe.core.config.runtime_table import capabilities_of
from steppe.core.contracts.components import AgentComponent, EnvironmentComponent, ParameterSource, ReplayComponent
from steppe.core.contracts.errors import ConfigError, FactoryError, RunNotFound, UsageError
from steppe.core.io.atomic_files import read_json, write_json
from steppe.core.system.typecheck import typechecked
from steppe.records.run_directory import runs_root
from steppe.runtimes.plan import Plan, make_plan
from steppe.training.experiment import Experiment
from steppe.training.result import RunResult
from steppe.training.supervisor import Observer, Supervisor
from steppe.training.train import Callback

if (
    TYPE_CHECKING
):  # type only: importing compiled modules takes as long as all other imports, and most loops do not need them
    from steppe.params.server import ParameterServer

LOOP_FILE, PARAMETERS_DIR = "loop.json", "parameters"


@typechecked
class MainLoop:
    """Runs an experiment composed of parts. `run` follows the configuration; `run_training` counts episodes.

    Several workers are processes by default, if those can import environment and agent by name; otherwise, and with one
    worker, all roles take turns in this process (`inline`). On both runtimes the run uses the given agent and pool
    themselves. On other runtimes they describe what each process builds, and the agent loads the final weights
    afterwards. Every run starts with the agent's current weights; counters and schedules restart. `config` has further
    settings by (dotted) name.

    With a parameter server, or a ParameterClient of a remote one, workers push to it (mode `workers`): gradients, or
    deltas if it takes those. It aggregates and applies them by its own rules during the run, and writes its checkpoints
    on its own schedule. Without one the loop keeps its own store, `parameter_server`, with the same statistics and
    checkpoints. A user's own parts (core/contracts/components.py) are trained manually, in this process and one episode
    at a time.
    """

    in_parallel = True  # whether several workers are processes by default

    def __init__(
        self,
        environment: EnvironmentComponent,
        replay_buffer: ReplayComponent | None,
        agent: AgentComponent,
        parameter_server: ParameterSource | None = None,
        config: RunConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self._may_host_learner = True  # whether the learner runs in this process if it can
        self.environment: Any = environment
        self.replay_buffer: Any = replay_buffer
        self.agent: Any = agent
        self._server = parameter_server
        self._store: ParameterServer | None = None
        self.episode = 0  # training episodes so far, over all runs
        self._experiment: Experiment | None = None  # the newest run
        self._playing = False  # whether a manual training is under way
        self._init_from: str | None = None
        self._manual_run: ManualRun | None = None
        self._manual_trainer_or_none: ManualTrainer | None = None
        if not self._has_builtin_parts():
            if config is not None:
                raise ConfigError(
                    "config is for DistributedEnvironment and DistributedAgent: parts of your own are used as they are, leave it out"
                )
            self._manual_run = ManualRun(self._manual_trainer)
            return
        self._compose(config)

    def _compose(self, config: RunConfig | Mapping[str, Any] | None) -> None:
        """Merge the settings of all parts into one configuration, and apply it to environment and agent."""
        environment, agent = self._parts()
        decided = self._decided(environment)
        resolved = compose_config(environment, self.replay_buffer, agent, config, **decided)
        self.config, self.sources = resolved.config, resolved.sources
        environment.settle(self.config.environment)
        steps = self.config.steps if "steps" in self.config.model_fields_set else None
        agent.settle(self.config.agent, self.config.seed, steps)
        agent.bind(environment)
        if self._server is not None and environment.parameter_server is None:
            environment.parameter_server = self._server
        self._init_from = self.config.init_from  # cleared when the first run has started with it

    def _decided(self, environment: DistributedEnvironment) -> dict[str, Mapping[str, Any]]:
        """Return the settings that the parameter server and the loop itself decide."""
        found: dict[str, Mapping[str, Any]] = {"defaults": {"runtime": self._default_runtime(environment)}}
        if self._server is None:
            return found
        return found | {
            "server": PARAMETER_SERVER_SETTINGS | server_settings(self._given_server(), environment.num_workers)
        }

    def _default_runtime(self, environment: DistributedEnvironment) -> str:
        """Return the runtime if none is given: `processes` for several workers if possible, else `inline`."""
        return self._runtime(environment) if self.in_parallel and environment.num_workers > 1 else "inline"

    def _runtime(self, environment: DistributedEnvironment) -> str:
        """Return `processes`, or `inline` if other processes could not import environment or agent by name."""
        agent = self._parts()[1]
        given: dict[str, Any] = {
            "env": environment.env,
            "algo": agent.algo,
            "agent": agent.config,
            "environment": environment.config,
        }
        try:
            make_plan(RunConfig(**given, mode="sync", runtime="processes"), environment.spec)
        except (FactoryError, ConfigError):  # other errors are reported when the run is planned
            return "inline"
        return "processes"

    @property
    def parameter_server(self) -> ParameterSource:
        """The server that was given, or else the loop's own store, which holds what this loop has learned so far."""
        if self._server is not None:
            return self._server
        if self._store is None:
            self._store = make_own_server(self.agent.get_policy_parameters())
        return self._store

    @classmethod
    def of(cls, resolved: ResolvedConfig) -> MainLoop:
        """Build the loop that a resolved configuration describes, with all its parts."""
        config = resolved.config
        environment = DistributedEnvironment(
            config.env, config.actors, device=config.flow.actor_device, config=config.environment, seed=config.seed
        )
        loop = cls(environment, None, DistributedAgent.of(config), config=config)
        loop.sources = resolved.sources
        loop._may_host_learner = False  # this process only supervises: it needs neither torch nor the agent
        return loop

    def run(self, observers: Sequence[Observer] = ()) -> RunResult:
        """Run until the configuration's limit is reached, and record everything in the run's directory."""
        self._parts()
        return self._run(self.config, observers)

    def plan(self) -> Plan:
        """Return the topology of the run. Checks every setting and writes nothing."""
        return self._new_experiment(self.config).plan()

    def run_training(
        self,
        total_episodes: int = 1000,
        max_steps_per_episode: int = 1000,
        evaluation_frequency: int = 100,
        checkpoint_frequency: int = 500,
        *,
        callbacks: Sequence[Callback] = (),
    ) -> dict[str, Any]:
        """Train for this many episodes in total over all workers, and return the run's summary.

        Frequencies are in training episodes. Longer episodes are truncated. Raises the fault of a run that failed.
        """
        given = (total_episodes, max_steps_per_episode, evaluation_frequency, checkpoint_frequency)
        if self._manual_run is not None:
            return self._train_manually(self._manual_run, given, callbacks)
        result = self._run(with_episode_limits(self.config, self._parts()[0].spec, *given), callbacks)
        result.raise_for_fault()
        return {**result.summary, "message": result.message, "path": str(result.path)}

    def run_single_episode(self) -> dict[str, Any]:
        """Play one episode, store it and run the updates that are due; return its return, length and losses."""
        self._require_here("an episode of one's own")
        return self._play(1000)

    def _play(self, max_steps: int) -> dict[str, Any]:
        found = self._manual_trainer.episode(max_steps)
        self.replay_buffer = self._manual_trainer.replay_buffer
        self.episode += 1
        self._sync_own_server()
        return {"episode": self.episode, **found}

    def evaluate_policy(self, num_episodes: int = 10) -> dict[str, Any]:
        """Play whole episodes with the greedy actions of the agent's current weights, and return their statistics."""
        self._require_here("an evaluation")
        found: dict[str, Any] = self.agent.evaluate_policy(num_episodes)
        return found

    def save_checkpoint(self, episode: int, path: str | Path | None = None) -> Path:
        """Write agent, pool and parameter server into a directory, and return its path.

        Runs write their own checkpoints in addition.
        """
        self._require_here("a checkpoint")
        chosen = Path(path) if path is not None else self._default_checkpoint()
        chosen.mkdir(parents=True, exist_ok=True)
        if self.replay_buffer is not None and self.replay_buffer.get_total_experiences():
            self.replay_buffer.save_buffers(chosen / "replay")
        self.agent.save_checkpoint(chosen / "agent")
        server: Any = self._server or self._store
        if hasattr(server, "save_checkpoint") and not hasattr(server, "url"):  # a remote server writes its own
            server.save_checkpoint(chosen / PARAMETERS_DIR)
        write_json(chosen / LOOP_FILE, {"episode": episode, "owed_updates": self._manual_trainer.pending_updates})
        return chosen

    def load_checkpoint(self, path: str | Path) -> int:
        """Continue from what `save_checkpoint` wrote; returns its episode."""
        self._require_here("a checkpoint")
        source = Path(path)
        if not (source / LOOP_FILE).exists():
            raise RunNotFound(f"{path} holds no checkpoint of a loop")
        found = read_json(source / LOOP_FILE)
        self.agent.load_checkpoint(source / "agent")
        if self.replay_buffer is not None and (source / "replay").exists():
            self.replay_buffer.load_buffers(source / "replay")
        if (source / PARAMETERS_DIR).exists():
            server: Any = self.parameter_server
            server.load_checkpoint(source / PARAMETERS_DIR)
        self.episode, self._manual_trainer.pending_updates = int(found["episode"]), float(found["owed_updates"])
        return self.episode

    def get_training_progress(self) -> dict[str, Any]:
        """Return the progress of the newest run as of its last poll (five per second). Thread-safe."""
        if self._manual_run is not None:
            return {**self._manual_run.progress, "episode": self.episode}
        experiment = self._experiment
        view = experiment.supervisor.view if experiment and experiment.supervisor else None
        directory = experiment.directory if experiment else None
        best, last = (view.best_evaluation, view.last_evaluation) if view else (None, None)
        return {
            "state": view.state if view else "PENDING",
            "run": str(directory.path) if directory else None,
            "episode": self.episode + (view.episodes if view and self._running else 0),
            "env_steps": view.env_steps if view else 0,
            "updates": view.updates if view else 0,
            "version": view.version if view else 0,
            "train_return_mean": view.train_return_mean if view else None,
            "eval_return_mean": last.return_mean if last else None,
            "best_return_mean": best.return_mean if best else None,
            "steps_per_s": view.steps_per_s if view else None,
        }

    def stop_training(self) -> None:
        """Ask the current run to end with a checkpoint; from a callback or another thread."""
        running = self._require_running("stop")
        running.stop() if isinstance(running, ManualRun) else running.stop(
            "stop_requested", "stopped by stop_training()"
        )

    def pause_training(self) -> None:
        """Pause actors and learner until `resume_training`; from a callback or another thread."""
        self._require_running("pause").pause()

    def resume_training(self) -> None:
        """Continue after `pause_training`."""
        self._require_running("resume").resume()

    def _run(self, config: RunConfig, observers: Sequence[Observer]) -> RunResult:
        experiment = self._new_experiment(config.model_copy(update={"init_from": self._init_from}))
        self._experiment = experiment
        try:
            result = experiment.run(observers)
        finally:
            if experiment.directory is not None:
                self._init_from = None  # later runs continue with the agent's own weights
        assert experiment.supervisor is not None
        self.episode += experiment.supervisor.view.episodes
        self._sync_own_server()
        return result

    def _new_experiment(self, config: RunConfig) -> Experiment:
        environment, agent = self._parts()
        parts = LoopParts(
            environment,
            agent,
            self.replay_buffer,
            self._server,
            node_client=self._node_client(),
            may_host_learner=self._may_host_learner,
        )
        return Experiment(config, self.sources, parts)

    @property
    def handle(self) -> Any:
        """The newest run's handle (runtimes/handle.py), or None before the first run."""
        experiment = self._experiment
        return experiment.supervisor.handle if experiment and experiment.supervisor else None

    def _node_client(self) -> Any:
        """Return the client of the cluster's server for this node's learner; None: the learner connects by itself."""
        return None

    @property
    def _manual_trainer(self) -> ManualTrainer:
        if self._manual_trainer_or_none is None:
            self._manual_trainer_or_none = ManualTrainer(self.environment, self.replay_buffer, self.agent, self._server)
        return self._manual_trainer_or_none

    def _train_manually(
        self, run: ManualRun, given: tuple[int, int, int, int], callbacks: Sequence[Callable[[Any], object]]
    ) -> dict[str, Any]:
        def look(progress: dict[str, Any]) -> bool:
            reported = {**progress, "episode": self.episode}
            answers = [callback(reported) for callback in callbacks]
            return any(answer is True for answer in answers)

        self._playing = True
        try:
            return run.run(given, self._play, lambda: self.save_checkpoint(self.episode), look) | {
                "episode": self.episode
            }
        finally:
            self._playing = False

    @property
    def _running(self) -> bool:
        return self._playing or (self._experiment is not None and self._experiment.running)

    def _sync_own_server(self) -> None:
        """Copy what was learned into the loop's own store, if that was created."""
        if self._store is not None:
            push_difference(self._store, self.agent.get_policy_parameters())

    def _has_builtin_parts(self) -> bool:
        kinds = (DistributedEnvironment, DistributedAgent)
        ours = all(isinstance(part, kind) for part, kind in zip((self.environment, self.agent), kinds, strict=True))
        if ours and self.replay_buffer is not None:
            from steppe.replay import ReplayBufferPool as Pool

            ours = isinstance(self.replay_buffer, Pool)
        if ours and self._server is not None:
            from steppe.params.client import ParameterClient
            from steppe.params.server import ParameterServer

            ours = isinstance(self._server, ParameterServer | ParameterClient)
        return ours

    def _parts(self) -> tuple[DistributedEnvironment, DistributedAgent]:
        """Return the built-in environment and agent. Raises UsageError for a user's own parts, which have no plan."""
        environment, agent = self.environment, self.agent
        if not isinstance(environment, DistributedEnvironment) or not isinstance(agent, DistributedAgent):
            raise UsageError("parts of your own are trained manually: use run_training or run_single_episode")
        return environment, agent

    def _given_server(self) -> Any:
        """Return the given server or client, as Any: importing its type would import compiled modules."""
        return self._server

    def _default_checkpoint(self) -> Path:
        directory = self._experiment.directory if self._experiment else None
        return (directory.path if directory else runs_root()) / "loop-checkpoint"

    def _require_here(self, what: str) -> None:
        if self._running and self._manual_run is None and not capabilities_of(self.config.runtime).one_process:
            raise UsageError(
                f"{what} is not possible while the learner works in another process: wait for the run's end"
            )

    def _require_running(self, verb: str) -> Supervisor | ManualRun:
        running = self._manual_run or (self._experiment.supervisor if self._experiment else None)
        if not self._running or running is None:
            raise UsageError(f"there is no training under way to {verb}")
        return running
