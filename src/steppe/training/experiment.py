"""The run of one configuration: planned, started, supervised and ended.

The configuration describes everything. A caller that has parts of its own (an agent, a replay pool, a parameter
server) supplies them, and the run uses them in place where it can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from steppe import runtimes
from steppe.core.config import references
from steppe.core.config.run import ResolvedConfig, RunConfig
from steppe.core.config.runtime_table import capabilities_of, runtimes_with
from steppe.core.contracts.algorithm import Agent
from steppe.core.contracts.errors import ConfigError, DamagedFile, DiskFull
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.core.io.atomic_files import raising_disk_full
from steppe.envs import probe
from steppe.records.checkpoints import Checkpoint, Checkpoints
from steppe.records.profiling.report import write_profile
from steppe.records.run_directory import RunDirectory
from steppe.records.store import PENDING
from steppe.records.view import RunView
from steppe.runtimes.memory_need import require_memory
from steppe.runtimes.plan import Plan, make_plan
from steppe.training.initial_weights import build_agent, load_weights_of, save_start
from steppe.training.launch import launch
from steppe.training.result import RunResult
from steppe.training.supervisor import Observer, Outcome, StopSignalHandler, Supervisor

RETRYABLE_REASONS = ("role_died", "out_of_memory")  # faults that may not happen again in another attempt


class SuppliedParts(Protocol):
    """Parts of the caller that a run uses besides its configuration."""

    pool: Any  # a ReplayBufferPool, or None
    server: Any  # a ParameterServer or ParameterClient that the workers push to, or None
    may_host_learner: bool  # whether the learner runs in this process if it can

    @property
    def spec(self) -> EnvSpec:
        """The spec of the environment."""

    @property
    def has_weights(self) -> bool:
        """Whether the agent has weights already, which the run starts with."""

    def prepare(self, plan: Plan) -> None:
        """Prepare for a planned run, before its directory exists."""

    def agent(self, plan: Plan) -> Agent:
        """Return the agent with the plan's settings; built if it was not."""

    def node(self) -> Any:
        """Return the client through which a cluster node's learner reaches its parameter server, or None."""

    def follow_run(self, view: RunView, *, uses_pool: bool) -> None:
        """Include the run in the statistics from now on; `uses_pool` says that its learner fills the pool itself."""

    def adopt_result(self, directory: RunDirectory, plan: Plan) -> None:
        """Continue from the end of a run that learned in other processes."""


class Experiment:
    """Runs a configuration once, in a new directory (`run`) or in that of an earlier attempt (`resume`)."""

    def __init__(
        self, config: RunConfig, sources: Mapping[str, str] | None = None, parts: SuppliedParts | None = None
    ) -> None:
        self.config, self._sources, self._parts = config, dict(sources or {}), parts
        self.supervisor: Supervisor | None = None
        self.directory: RunDirectory | None = None
        self.running = False
        self._commands_after = 0  # commands up to this number were for an earlier attempt of the run
        self._agent: Agent | None = None  # built here because the run starts with its weights

    @classmethod
    def of(cls, resolved: ResolvedConfig) -> Experiment:
        """Return the experiment of a resolved configuration."""
        return cls(resolved.config, resolved.sources)

    def plan(self) -> Plan:
        """Return the topology of the run. Checks every setting and writes nothing."""
        config, parts = self.config, self._parts
        runtimes.prepare(config.runtime, torch=not config.agent.in_table)
        for device in (config.device, config.flow.actor_device):
            if device.startswith("cuda"):
                from steppe.algorithms.nn.device import resolve_device

                resolve_device(device)
        spec = probe(config.env, config.environment) if parts is None else parts.spec
        limit = config.environment.time_limit or spec.max_episode_steps
        plan = make_plan(config, replace(spec, max_episode_steps=limit))
        self._require_server()
        require_memory(plan.config, plan.spec, replay=parts is None or parts.pool is None)
        runtimes.require(config.runtime, plan)
        return plan

    def run(self, observers: Sequence[Observer] = (), *, agent: Agent | None = None) -> RunResult:
        """Run until the configuration's limit is reached, and record everything in the run's directory.

        `agent`, if given, has the weights to start with, and must have been built for this plan.
        """
        references.stop_if_loading_main()
        runtimes.join(self.config.runtime)
        plan = self.plan()
        self._agent = agent
        about: dict[str, Any] = {}
        if self.config.init_from is not None:
            about = load_weights_of(self.config.init_from, self._start_agent(plan), plan)
        if self._parts is not None:
            self._parts.prepare(plan)
        directory = RunDirectory.create(plan.config, self._sources, {**about, "spec": asdict(plan.spec)})
        return self._execute(plan, directory, observers)

    def resume(
        self, directory: RunDirectory, observers: Sequence[Observer] = (), *, commands_after: int | None = None
    ) -> RunResult:
        """Run in the directory of an existing run, from its newest intact checkpoint.

        A run that was only created starts from the beginning. Commands up to number `commands_after` were for an
        earlier attempt of the run; default: all commands so far.
        """
        self._commands_after = directory.store.newest(COMMANDS) if commands_after is None else commands_after
        plan = self.plan()
        if directory.store.status().state == PENDING:
            directory.write_resolved(plan.config, plan.spec)
        else:
            plan = self._from_newest(plan, directory)
        return self._execute(plan, directory, observers)

    def _start_agent(self, plan: Plan) -> Agent:
        """Return the agent in this process that the run starts with."""
        if self._parts is not None:
            return self._parts.agent(plan)
        if self._agent is None:
            self._agent = build_agent(plan)
        return self._agent

    def _execute(self, plan: Plan, directory: RunDirectory, observers: Sequence[Observer]) -> RunResult:
        self.directory = directory
        self.running = True
        directory.reserve()
        try:
            with StopSignalHandler() as interrupts, directory.store.heartbeats():
                outcome, view = self._supervise(plan, directory, interrupts, observers)
                for _ in range(plan.config.restarts):
                    if outcome.fault is None or outcome.reason not in RETRYABLE_REASONS:
                        break
                    plan = self._from_newest(plan, directory)
                    self._commands_after = self.supervisor.commands_after if self.supervisor else self._commands_after
                    outcome, view = self._supervise(plan, directory, interrupts, observers)
                interrupts.ignore()
                result = finish_run(directory, outcome, view)
        finally:
            self.running = False
            directory.free_reserve()
            directory.release()
        if self._parts is not None and not (self._is_one_process or self._hosts_learner(plan)):
            self._parts.adopt_result(directory, plan)
        return result

    def _supervise(
        self, plan: Plan, directory: RunDirectory, interrupts: StopSignalHandler, observers: Sequence[Observer]
    ) -> tuple[Outcome, RunView]:
        with contextlib.suppress(DiskFull):
            directory.store.set_status("STARTING")
        parts = self._parts
        try:
            self._save_start(plan, directory)
            hosted = self._hosts_learner(plan)
            handle = launch(plan, directory, parts if hosted or self._is_one_process else None, hosted=hosted)
            self.supervisor = Supervisor(
                handle, directory, plan.config, interrupts, commands_after=self._commands_after
            )
            if parts is not None:
                parts.follow_run(self.supervisor.view, uses_pool=hosted or self._is_one_process)
            return self.supervisor.run(observers), self.supervisor.view
        except KeyboardInterrupt:
            return Outcome("STOPPED", "interrupted", "stopped at once by a second signal"), RunView(directory)
        except BaseException as error:
            directory.free_reserve()
            with contextlib.suppress(DiskFull):
                directory.store.set_status("FAILED", "error", f"{type(error).__name__}: {error}")
            raise

    def _save_start(self, plan: Plan, directory: RunDirectory) -> None:
        """Write the initial state of an agent that has weights, for the run's processes and for reruns."""
        if plan.resume is not None:
            return
        if self._parts is not None and self._parts.has_weights:
            save_start(self._parts.agent(plan), directory, self._parts.server)
        elif self._agent is not None:
            save_start(self._agent, directory)

    @property
    def _is_one_process(self) -> bool:
        return capabilities_of(self.config.runtime).one_process

    def _hosts_learner(self, plan: Plan) -> bool:
        """Return whether the learner is in this process while the actors are not.

        A run that pushes gradients does so only with a supplied parameter server.
        """
        parts = self._parts
        if parts is None or not parts.may_host_learner or (plan.config.by_gradients and parts.server is None):
            return False
        return plan.can_host_learner

    def _require_server(self) -> None:
        """Raise ConfigError if the parameter server does not go with the configuration."""
        server = None if self._parts is None else self._parts.server
        if self.config.params.deltas and server is None:
            raise ConfigError(
                "params.deltas is for a parameter server that takes deltas: give the loop that server, or leave it out"
            )
        if server is not None and not capabilities_of(self.config.runtime).hosts_learner:
            able = " or ".join(map(repr, runtimes_with("hosts_learner")))
            raise ConfigError(
                f"a parameter server works in this process, and runtime {self.config.runtime!r} has its own: use {able}, "
                "or DistributedMainLoop for several machines"
            )

    def _from_newest(self, plan: Plan, directory: RunDirectory) -> Plan:
        """Return the plan from the newest intact checkpoint, or from the beginning if there is none; logs an event."""
        checkpoint, damaged = latest_intact_checkpoint(directory)
        number = checkpoint.number if checkpoint else None
        details = {"checkpoint": number, "damaged": damaged, **(checkpoint.counters if checkpoint else {})}
        event = EventReport(run=directory.id, kind="resume", role="supervisor", details=details)
        directory.board.post(EVENTS, event.record())
        return replace(plan, resume=number)


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
