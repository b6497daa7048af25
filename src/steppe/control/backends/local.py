"""Backend of runs that are processes of this machine.

Each run has its own session and reports everything in its own store, so runs and service outlive each other. Runs over
Kafka differ only inside: their supervisors keep the stores equal to the topics.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from steppe.control import models, presenters, process_host
from steppe.control.backends.base import BackendCapabilities, HyperparameterPlan
from steppe.control.backends.from_store import plan_hyperparameters, present_learner, refresh_from_store
from steppe.control.commands import BROKER_TIMEOUT_S, CommandSender
from steppe.control.database import new_operation
from steppe.control.operations import Record
from steppe.control.repository import RunRepository
from steppe.control.run_requests import Bounds
from steppe.core.config.run import KafkaConfig, RunConfig
from steppe.core.contracts.errors import Conflict, RunNotFound, Unreachable, UsageError
from steppe.core.contracts.transport import SCALE, SET
from steppe.records.run_directory import RunDirectory
from steppe.records.store import NO_OWNER, PAUSED, PENDING, RUNNING, STOPPED, SUCCEEDED
from steppe.records.view import ENDED
from steppe.training.resume import COMPLETE_REASONS
from steppe.transport.kafka.client import KafkaConnection

START_S = 180.0  # time for a run to start
SCALE_S = 180.0  # time for actors to start and stop


class LocalBackend:
    """Runs in processes of this machine. Implements Backend."""

    def __init__(
        self, runs: RunRepository, commands: CommandSender, bounds: Bounds, kafka: KafkaConfig | None = None
    ) -> None:
        """With `kafka`, runs use those brokers; raises Unreachable if none answers."""
        if kafka is not None:
            KafkaConnection(kafka, "").fetch_metadata()
        self.kafka = kafka
        self.capabilities = BackendCapabilities(
            create_run=self._create_run,
            pause_run=commands.pause,
            resume_run=commands.resume,
            kill_run=self._kill_run,
            delete_run=runs.delete,
            scale_actors=self._scale_actors,
            receives_start_commands=kafka is not None,
        )
        self._runs, self._commands, self._bounds = runs, commands, bounds
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        for child in self._children.values():
            child.returncode = child.poll() or 0  # no ResourceWarning for runs that continue without us

    def require_ready(self) -> None:
        if self.kafka is not None:
            KafkaConnection(self.kafka, "").fetch_metadata(BROKER_TIMEOUT_S)

    def config(self, directory: RunDirectory) -> RunConfig:
        return self._runs.config(directory)

    def start_run(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        run = directory.path.name
        with self._runs.lock:
            status = directory.store.status()
            if status.live or (status.state == PENDING and status.pid != NO_OWNER):
                raise Conflict(f"{run} is {status.state} already")
            if status.state == SUCCEEDED and status.reason in COMPLETE_REASONS:
                raise Conflict(f"{run} is complete ({status.reason}): there is nothing to resume")
            self._require_capacity()
            return self._start(directory, issuer, expected)

    def stop_run(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        """Stop a run with a checkpoint; one that does not stop in time is killed."""
        run, stop_s = directory.path.name, self._bounds.stop_s
        with self._runs.lock:
            status = directory.store.status()
            if status.state != PENDING or status.pid != NO_OWNER:
                return self._commands.post(directory, "stop", issuer, expected, desired="stopped", deadline_s=stop_s)
            record = new_operation("stop", run, issuer, deadline_s=stop_s)
            with self._commands.publishing(directory, record, expected):
                self._runs.database.change(run, "stopped", expected)
                directory.store.set_status(STOPPED, "stop_requested", f"stopped by {issuer} before it was started")
                self._runs.database.save_operation(record)
            return record

    def get_actors(self, run: str) -> models.Actors:
        with self._runs.view(run) as view:
            return presenters.present_actors(view)

    def get_learner(self, run: str) -> models.LearnerStatus:
        return present_learner(self._runs, run)

    def plan_hyperparameters(self, directory: RunDirectory, values: Mapping[str, Any]) -> HyperparameterPlan:
        return plan_hyperparameters(self._runs, directory, values)

    def set_hyperparameters(
        self, directory: RunDirectory, plan: HyperparameterPlan, issuer: str, expected: int | None
    ) -> Record:
        live = [name for name in plan.changed if name in plan.live]
        return self._commands.post(directory, SET, issuer, expected, values=plan.changed, live=live)

    def get_logs(self, directory: RunDirectory, source: str | None, after: int, max_bytes: int) -> models.Logs:
        logs = directory.path / "logs"
        sources = process_host.log_sources(logs)
        supervisor = process_host.SUPERVISOR_LOG
        source = source or (supervisor if supervisor in sources else next(iter(sources), None))
        if source is None:
            return models.Logs(source=None, sources=[], lines=[], next=0)
        if source not in sources:
            raise RunNotFound(f"{directory.path.name} has no log of that name; it has: {', '.join(sources) or 'none'}")
        data = process_host.read_log(logs / f"{source}.log", after, max_bytes)
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == max_bytes else b"")
        lines = whole.decode(errors="replace").splitlines()
        return models.Logs(source=source, sources=sources, lines=lines, next=after + len(whole))

    def refresh(self, record: Record) -> Record:
        with self._runs.lock:
            child = self._children.get(record["run"])
            if child is not None:
                child.poll()  # reap it: a zombie would be taken for a running process
            return refresh_from_store(self._runs, record)

    def reconcile(self) -> bool:
        """Reap ended processes."""
        with self._runs.lock:
            for run, child in list(self._children.items()):
                if child.poll() is not None:
                    del self._children[run]
        return True

    def _create_run(self, request: models.RunRequest, config: RunConfig, sources: dict[str, str], issuer: str) -> str:
        with self._runs.lock:
            if request.start:
                self._require_capacity()
            directory = RunDirectory.create(config, sources)
            directory.store.set_status(PENDING, "created", "not started yet", owner=NO_OWNER)
            directory.release()
            if request.start:
                self._start_new(directory, issuer)
        return directory.path.name

    def _start_new(self, directory: RunDirectory, issuer: str) -> None:
        """Start a run that was just created; remove it if the start command cannot be published."""
        try:
            self._start(directory, issuer, None)
        except Unreachable:
            directory.store.close()
            shutil.rmtree(directory.path)
            raise

    def _start(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        run = directory.path.name
        record = new_operation("start", run, issuer, deadline_s=START_S)
        with self._commands.publishing(directory, record, expected):
            self._runs.database.change(run, "running", expected)
            self._children[run] = process_host.start_run_process(directory, self.kafka)
            self._runs.database.save_operation(record)
        return record

    def _kill_run(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        run = directory.path.name
        with self._runs.lock:
            status = directory.store.status()
            if status.state in ENDED or status.pid == NO_OWNER:
                raise Conflict(f"{run} is {status.state}: there is nothing to kill")
            record = new_operation("kill", run, issuer)
            with self._commands.publishing(directory, record, expected):
                self._runs.database.change(run, "stopped", expected)
                process_host.kill_run_processes(status)
                self._runs.database.save_operation(record)
            return record

    def _scale_actors(self, directory: RunDirectory, count: int, issuer: str, expected: int | None) -> Record:
        most = presenters.max_scalable_actors(self.config(directory))
        if not most:
            raise UsageError("the number of actors can change in mode 'async' on runtimes 'processes' and 'kafka' only")
        most = min(most, self._bounds.actors)
        if not 0 <= count <= most:
            raise UsageError(f"actors={count}: this run can have 0 to {most}")
        states = (RUNNING, PAUSED)
        return self._commands.post(
            directory, SCALE, issuer, expected, allowed_states=states, actors=count, deadline_s=SCALE_S
        )

    def _require_capacity(self) -> None:
        live = sum(info.status.live for info in self._runs.infos())
        if live >= self._bounds.live_runs:
            raise Conflict(f"{live} runs are live, which is the limit here: stop one first")
