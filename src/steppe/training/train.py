"""MainLoop: make a plan from an environment, a replay buffer and an agent, launch it, supervise it and shut it down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe import runtimes
from steppe.core.config import references
from steppe.core.config.run import ResolvedConfig, RunConfig, resolve_config
from steppe.core.config.runtime_table import capabilities_of, runtimes_with
from steppe.core.contracts.components import AgentComponent, EnvironmentComponent, ParameterSource, ReplayComponent
from steppe.core.contracts.errors import ConfigError, DamagedFile, DiskFull, FactoryError, RunNotFound, UsageError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.core.io.atomic_files import raising_disk_full, read_json, write_json
from steppe.core.system.typecheck import typechecked
from steppe.records.checkpoints import Checkpoint, Checkpoints
from steppe.records.profiling.report import write_profile
from steppe.records.run_directory import RunDirectory, runs_root
from steppe.records.store import PENDING
from steppe.records.view import RunView
from steppe.roles.context import POLICY
from steppe.runtimes.memory_need import require_memory
from steppe.runtimes.plan import Plan, make_plan
from steppe.training.composition.agent import DistributedAgent
from steppe.training.composition.config_merge import PARAMETER_SERVER_SETTINGS, compose_config, with_episode_limits
from steppe.training.composition.environment import DistributedEnvironment
from steppe.training.composition.manual import ManualRun, ManualTrainer
from steppe.training.composition.parameter_server import (
    load_server_parameters,
    make_own_server,
    push_difference,
    server_settings,
)
from steppe.training.initial_weights import init_from_run
from steppe.training.launch import launch
from steppe.training.result import RunResult
from steppe.training.supervisor import Observer, Outcome, StopSignalHandler, Supervisor

if (
    TYPE_CHECKING
):  # type only: importing compiled modules takes as long as all other imports, and most loops do not need them
    from steppe.params.server import ParameterServer

Callback = Callable[[RunView], object]
LOOP_FILE, PARAMETERS_DIR = "loop.json", "parameters"
RETRYABLE_REASONS = ("role_died", "out_of_memory")  # faults that may not happen again in another attempt


@typechecked
def train(
    env: str | Callable[..., Any], *, algo: str | type = "ppo", callbacks: Sequence[Callback] = (), **settings: Any
) -> RunResult:
    """Train an agent and return the run's result. Raises the fault of a run that failed.

    `settings` are the configuration's keys: `steps=200_000, actors=2, mode="async"`, the algorithm's hyperparameters
    (`learning_rate=3e-4`), or dotted ones in a dictionary (`**{"flow.max_lag": 4}`). A callback is called about five
    times a second with the run's RunView; one that returns True ends the run, one that returns a dictionary of numbers
    adds them to the run's curves.
    """
    references.stop_if_loading_main()
    runtimes.join(settings.get("runtime"))
    given = {name: _to_references(value) for name, value in settings.items()}
    layer = {"env": references.make_reference(env), "algo": references.make_reference(algo), **given}
    result = run_experiment(resolve_config(("call", layer)), observers=callbacks)
    result.raise_for_fault()
    return result


def _to_references(value: Any) -> Any:
    """Replace callables by references to them, in a single value or in a list."""
    if isinstance(value, list | tuple):
        return [_to_references(item) for item in value]
    return references.make_reference(value) if callable(value) else value


def run_experiment(resolved: ResolvedConfig, *, observers: Sequence[Observer] = ()) -> RunResult:
    """Run a resolved configuration to its end."""
    runtimes.join(resolved.config.runtime)
    if resolved.auto:
        from steppe.training.autotune import (
            resolve_auto_settings,  # imports torch, which this process does not need otherwise
        )

        resolved = resolve_auto_settings(resolved)
    return MainLoop.of(resolved).run(observers)


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
        self._supervisor: Supervisor | None = None
        self._running = False
        self._directory: RunDirectory | None = None
        self._commands_after = 0  # commands up to this number were for an earlier attempt of the run
        self._init_from: str | None = None
        self._manual_run: ManualRun | None = None
        self._manual_trainer_or_none: ManualTrainer | None = None
        if not self._has_builtin_parts():
            if config is not None:
                raise ConfigError(
                    "config is for parts of the house: parts of your own are played as they are, leave it out"
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
        found: dict[str, Mapping[str, Any]] = {"usual": {"runtime": self._default_runtime(environment)}}
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
        self._parts()
        return self._plan(self.config)

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
        view = self._supervisor.view if self._supervisor else None
        best, last = (view.best_evaluation, view.last_evaluation) if view else (None, None)
        return {
            "state": view.state if view else "PENDING",
            "run": str(self._directory.path) if self._directory else None,
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
        references.stop_if_loading_main()
        runtimes.join(config.runtime)
        plan = self._plan(config.model_copy(update={"init_from": self._init_from}))
        agent = self._parts()[1]
        about = init_from_run(self._init_from, agent, plan) if self._init_from is not None else {}
        if self._server is not None:
            agent.settle(plan.config.agent, plan.config.seed, plan.config.steps)
            load_server_parameters(agent.agent, self._given_server().newer_than(POLICY, -1).arrays())
        directory = RunDirectory.create(plan.config, self.sources, {**about, "spec": asdict(plan.spec)})
        self._init_from = None
        return self._live(plan, directory, observers)

    def go_on(
        self, directory: RunDirectory, observers: Sequence[Observer] = (), *, commands_after: int | None = None
    ) -> RunResult:
        """Run this loop's configuration in the directory of an existing run, from its newest intact checkpoint.

        A run that was only created starts from the beginning. Commands up to number `commands_after` were for an
        earlier attempt of the run; default: all commands so far.
        """
        self._commands_after = directory.store.newest(COMMANDS) if commands_after is None else commands_after
        plan = self._plan(self.config)
        if directory.store.status().state == PENDING:
            directory.settle(plan.config, plan.spec)
        else:
            plan = self._from_newest(plan, directory)
        return self._live(plan, directory, observers)

    def _live(self, plan: Plan, directory: RunDirectory, observers: Sequence[Observer]) -> RunResult:
        self._directory = directory
        self._running = True
        directory.reserve()
        try:
            with StopSignalHandler() as interrupts, directory.store.heartbeats():
                outcome, view = self._supervise(plan, directory, interrupts, observers)
                for _ in range(plan.config.restarts):
                    if outcome.fault is None or outcome.reason not in RETRYABLE_REASONS:
                        break
                    plan = self._from_newest(plan, directory)
                    self._commands_after = self._supervisor.commands_after if self._supervisor else self._commands_after
                    outcome, view = self._supervise(plan, directory, interrupts, observers)
                interrupts.ignore()
                result = finish_run(directory, outcome, view)
        finally:
            self._running = False
            directory.free_reserve()
            directory.release()
        self.episode += view.episodes
        if not capabilities_of(plan.config.runtime).one_process and not self._hosts_learner(plan):
            self._parts()[1].adopt_result(directory, plan)
        self._sync_own_server()
        return result

    def _plan(self, config: RunConfig) -> Plan:
        runtimes.prepare(config.runtime, torch=not config.agent.in_table)
        for device in (config.device, config.flow.actor_device):
            if device.startswith("cuda"):
                from steppe.algorithms.nn.device import resolve_device

                resolve_device(device)
        spec = self._parts()[0].spec
        limit = config.environment.time_limit or spec.max_episode_steps
        plan = make_plan(config, replace(spec, max_episode_steps=limit))
        if config.params.deltas and self._server is None:
            raise ConfigError(
                "params.deltas is for a parameter server that takes deltas: give the loop that server, or leave it out"
            )
        if self._server is not None and not capabilities_of(config.runtime).hosts_learner:
            able = " or ".join(map(repr, runtimes_with("hosts_learner")))
            raise ConfigError(
                f"a parameter server works in this process, and runtime {config.runtime!r} has its own: use {able}, or "
                "DistributedMainLoop for several machines"
            )
        require_memory(plan.config, plan.spec, replay=self.replay_buffer is None)
        runtimes.require(config.runtime, plan)
        return plan

    def _supervise(
        self, plan: Plan, directory: RunDirectory, interrupts: StopSignalHandler, observers: Sequence[Observer]
    ) -> tuple[Outcome, RunView]:
        with contextlib.suppress(DiskFull):
            directory.store.set_status("STARTING")
        try:
            server = None if self._server is None else self._given_server()
            hosted = self._hosts_learner(plan)
            agent, node = self._parts()[1], self._node_client()
            handle = launch(plan, directory, agent, self.replay_buffer, server, hosted=hosted, node=node)
            self._supervisor = Supervisor(
                handle, directory, plan.config, interrupts, commands_after=self._commands_after
            )
            self._parts()[0].follow_run(self._supervisor.view)
            self._parts()[1].follow_run(self._supervisor.view)
            return self._supervisor.run(observers), self._supervisor.view
        except KeyboardInterrupt:
            return Outcome("STOPPED", "interrupted", "stopped at once by a second signal"), RunView(directory)
        except BaseException as error:
            directory.free_reserve()
            with contextlib.suppress(DiskFull):
                directory.store.set_status("FAILED", "error", f"{type(error).__name__}: {error}")
            raise

    @property
    def handle(self) -> Any:
        """The newest run's handle (runtimes/handle.py), or None before the first run."""
        return None if self._supervisor is None else self._supervisor.handle

    def _node_client(self) -> Any:
        """Return the client of the cluster's server for this node's learner; None: the learner connects by itself."""
        return None

    def _hosts_learner(self, plan: Plan) -> bool:
        """Return whether the learner is in this process while the actors are not.

        A run that pushes gradients does so only with a given parameter server.
        """
        own_store = plan.config.by_gradients and self._server is None
        return self._may_host_learner and not own_store and plan.can_host_learner

    def _from_newest(self, plan: Plan, directory: RunDirectory) -> Plan:
        """Return the plan from the newest intact checkpoint, or from the beginning if there is none; logs an event."""
        checkpoint, damaged = latest_intact_checkpoint(directory)
        number = checkpoint.number if checkpoint else None
        counters = checkpoint.counters if checkpoint else {}
        details = {"checkpoint": number, "damaged": damaged, "total_steps": plan.config.steps, **counters}
        event = EventReport(run=directory.id, kind="resume", role="supervisor", details=details)
        directory.board.post(EVENTS, event.record())
        return replace(plan, resume=number)

    @property
    def _manual_trainer(self) -> ManualTrainer:
        if self._manual_trainer_or_none is None:
            self._manual_trainer_or_none = ManualTrainer(self.environment, self.replay_buffer, self.agent, self._server)
        return self._manual_trainer_or_none

    def _train_manually(
        self, run: ManualRun, given: tuple[int, int, int, int], callbacks: Sequence[Callable[[Any], object]]
    ) -> dict[str, Any]:
        def look(progress: dict[str, Any]) -> bool:
            told = {**progress, "episode": self.episode}
            answers = [callback(told) for callback in callbacks]
            return any(answer is True for answer in answers)

        self._running = True
        try:
            return run.run(given, self._play, lambda: self.save_checkpoint(self.episode), look) | {
                "episode": self.episode
            }
        finally:
            self._running = False

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
            raise UsageError("parts of your own are played by hand: use run_training or run_single_episode")
        return environment, agent

    def _given_server(self) -> Any:
        """Return the given server or client, as Any: importing its type would import compiled modules."""
        return self._server

    def _default_checkpoint(self) -> Path:
        return (self._directory.path if self._directory else runs_root()) / "loop-checkpoint"

    def _require_here(self, what: str) -> None:
        if self._running and self._manual_run is None and not capabilities_of(self.config.runtime).one_process:
            raise UsageError(
                f"{what} is not possible while the learner works in another process: wait for the run's end"
            )

    def _require_running(self, verb: str) -> Supervisor | ManualRun:
        running = self._manual_run or self._supervisor
        if not self._running or running is None:
            raise UsageError(f"there is no training under way to {verb}")
        return running


def latest_intact_checkpoint(directory: RunDirectory) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to resume from, if there is one, and the errors of newer ones that are corrupt."""
    try:
        checkpoint = Checkpoints(directory.checkpoints, run=directory.key).latest()
    except DamagedFile as error:
        return None, [str(error)]
    return checkpoint, list(checkpoint.damaged) if checkpoint else []


def finish_run(directory: RunDirectory, outcome: Outcome, view: RunView) -> RunResult:
    """Write the run's final status, summary and profile, and return its result."""
    directory.free_reserve()
    with contextlib.suppress(DiskFull):  # a run without a final status is reported LOST and can be resumed
        directory.store.set_status(outcome.state, outcome.reason, outcome.message)
    directory.board.flush()
    view.refresh()
    summary = view.summary() | {"state": outcome.state, "reason": outcome.reason}
    with contextlib.suppress(DiskFull), raising_disk_full(directory.summary_path):
        directory.write_summary(summary | {"message": outcome.message})
        if view.config.flow.profile:
            write_profile(view)
    return RunResult(directory.path, summary, outcome.message, outcome.fault)
