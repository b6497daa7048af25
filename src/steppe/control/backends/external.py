"""Backend of one externally managed run over Kafka, such as one started by compose.

State and commands of the run travel over Kafka (kafka_mirror.py). The service manages no processes: what needs them is
declared as unsupported, with a hint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from steppe.control import models, presenters
from steppe.control.backends.base import BackendCapabilities, HyperparameterPlan, Unsupported
from steppe.control.backends.from_store import plan_hyperparameters, present_learner, refresh_from_store
from steppe.control.backends.kafka_mirror import KafkaMirror
from steppe.control.commands import BROKER_TIMEOUT_S, CommandSender
from steppe.control.database import new_operation
from steppe.control.operations import Record
from steppe.control.repository import RunRepository
from steppe.core.config.run import KafkaConfig, RunConfig, unflatten
from steppe.core.config.tunables import tunable_fields
from steppe.core.contracts.errors import Conflict, SteppeError, UsageError
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.transport import COMMANDS, SET
from steppe.records.run_directory import RECORD, RunDirectory
from steppe.records.store import (
    HEARTBEAT_EXPIRED,
    LOST,
    LOST_AFTER_S,
    PAUSED,
    RUNNING,
    STARTING,
    STOPPED,
    SUCCEEDED,
    Status,
)
from steppe.records.view import ENDED
from steppe.runtimes.kafka.manifest import RunManifest, find_manifest
from steppe.transport.kafka.client import KafkaConnection

START_S = 600.0  # time for the operator to start a learner
STOP_S = 120.0  # time for a learner to write its last checkpoint
POLL_INTERVAL_S = 1.0
START_REQUESTED = "start_requested"
SCALING_HINT = "start and stop actors where they run: docker compose up --scale actor=N --no-recreate"
LOGS_HINT = "the logs are with the roles: docker compose logs --follow learner (or actor, manager)"
State = tuple[str, str | None, str | None]


class ExternalBackend:
    """One external run, which does not exist until its learner has started it. Implements Backend."""

    def __init__(self, run: str, runs: RunRepository, commands: CommandSender, kafka: KafkaConfig) -> None:
        """`run` is the name of the run; raises Unreachable if no broker answers."""
        KafkaConnection(kafka, "").fetch_metadata()
        self.kafka: KafkaConfig | None = kafka
        self.capabilities = BackendCapabilities(
            create_run=Unsupported(
                f"this service manages the run {run}, which its learner creates: start another learner with --run, and "
                "a service for it"
            ),
            pause_run=commands.pause,
            resume_run=commands.resume,
            kill_run=Unsupported("this service does not own the processes of the run: docker compose kill"),
            delete_run=Unsupported(f"this service manages the run {run} only: stop the service instead"),
            scale_actors=Unsupported(SCALING_HINT),
            publishes_commands=False,
        )
        self._run, self._brokers = run, kafka
        self._runs, self._commands = runs, commands
        self._mirror: KafkaMirror | None = None
        self._manifest: RunManifest | None = None
        self._polled_s = 0.0
        self._follow_newest()

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.stop()

    def require_ready(self) -> None:
        KafkaConnection(self._brokers, "").fetch_metadata(BROKER_TIMEOUT_S)

    def config(self, directory: RunDirectory) -> RunConfig:
        return self._runs.config(directory)

    def start_run(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        """Allow a stopped run to resume as soon as its roles are started again."""
        run, database = directory.path.name, self._runs.database
        with self._runs.lock:
            status = directory.store.status()
            if status.live or status.state == SUCCEEDED:
                raise Conflict(f"{run} is {status.state}: it cannot be started now")
            record = new_operation("start", run, issuer, deadline_s=START_S)
            with self._commands.sending(directory, record, expected) as command:
                database.change(run, "running", expected)
                directory.store.set_status(STARTING, START_REQUESTED, "waiting for its roles: docker compose up")
                database.save_operation(record)
                directory.store.post(COMMANDS, {**command, "command": "resume"})
            return record

    def stop_run(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        """Stop every role; the learner writes a checkpoint."""
        return self._commands.post(directory, "stop", issuer, expected, desired="stopped", deadline_s=STOP_S)

    def get_actors(self, run: str) -> models.Actors:
        """Return the observed actors; their desired number is not known here."""
        with self._runs.view(run) as view:
            found = presenters.present_actors(view)
        return found.model_copy(update={"desired": found.ready, "most": 0})

    def get_learner(self, run: str) -> models.LearnerStatus:
        return present_learner(self._runs, run)

    def plan_hyperparameters(self, directory: RunDirectory, values: Mapping[str, Any]) -> HyperparameterPlan:
        """Validate live values; others are in the file that the learner is started with."""
        fixed = sorted(set(values) - set(tunable_fields(self.config(directory))))
        if fixed:
            raise UsageError(
                f"{fixed[0]} cannot change while the learner runs: change its settings file, and restart the learner"
            )
        return plan_hyperparameters(self._runs, directory, values)

    def set_hyperparameters(
        self, directory: RunDirectory, plan: HyperparameterPlan, issuer: str, expected: int | None
    ) -> Record:
        live = [name for name in plan.changed if name in plan.live]
        return self._commands.post(directory, SET, issuer, expected, values=plan.changed, live=live)

    def get_logs(self, directory: RunDirectory, source: str | None, after: int, max_bytes: int) -> models.Logs:
        """Return where the log lines are: with the roles."""
        lines = [] if after else [LOGS_HINT]
        return models.Logs(source="elsewhere", sources=["elsewhere"], lines=lines, next=max(after, 1))

    def refresh(self, record: Record) -> Record:
        """Refresh an operation; a stop that times out fails, as there is no process to kill here."""
        late = time.time() - record["created_s"] > record["details"].get("deadline_s", STOP_S)
        with self._runs.lock:
            if record["kind"] != "stop" or not late:
                return refresh_from_store(self._runs, record)
            ended = self._runs.directory(record["run"]).store.status().state in ENDED
            state, message = ("succeeded", None) if ended else ("failed", f"the run did not stop within {STOP_S:g} s")
            changed = record | {"state": state, "message": message, "finished_s": time.time()}
            self._runs.database.save_operation(changed)
            return changed

    def reconcile(self) -> bool:
        """Update the run's state from its reports, at most once per POLL_INTERVAL_S."""
        if time.monotonic() - self._polled_s < POLL_INTERVAL_S:
            return False
        with self._runs.lock:
            self._polled_s = time.monotonic()
            try:
                self._follow_newest()
            except SteppeError:
                return False  # readiness reports it; the next poll may succeed
            if self._mirror is not None:
                self._update_state(self._mirror)
        return True

    def _follow_newest(self) -> None:
        """Start to mirror the run, or apply its newer manifest."""
        manifest = self._mirror.manifest if self._mirror else find_manifest(self._brokers, self._run)
        if manifest is None or manifest == self._manifest:
            return
        config = unflatten(manifest.launch_spec.config).model_copy(update={"name": self._run, "run_dir": None})
        path = self._runs.root / self._run
        if not (path / RECORD).exists():
            directory = RunDirectory.create(config, {})
        else:
            directory = RunDirectory(path)
            directory.acquire()
        directory.write_resolved(config, manifest.launch_spec.env_spec)
        directory.release()
        self._runs.forget(self._run)
        self._manifest = manifest
        if self._mirror is None:
            self._mirror = KafkaMirror(directory, self._brokers)
            self._mirror.start()

    def _update_state(self, mirror: KafkaMirror) -> None:
        """Update the run's state in its store from its reports."""
        store = self._runs.directory(self._run).store
        before = store.status()
        with self._runs.view(self._run) as view:
            state = _derive_state(before, view.training, mirror.newest_command)
        if state is not None and state != (before.state, before.reason, before.message):
            store.set_status(*state)
        store.heartbeat()


def _derive_state(before: Status, report: TrainingReport | None, newest_command: str) -> State | None:
    """Return the state that follows from the newest report; None if it does not change."""
    fresh = report is not None and time.time() - report.time_s < LOST_AFTER_S
    if report is not None and fresh and not report.final:
        return (PAUSED, "pause_requested", None) if newest_command == "pause" else (RUNNING, None, None)
    if before.reason == START_REQUESTED:
        return None  # the operator may take any time to start it
    if report is None:
        return STARTING, None, "waiting for its learner"
    if newest_command == "finish":
        return SUCCEEDED, "complete", "the run is complete"
    if report.final:
        return STOPPED, "stopped", "its learner has ended, with a checkpoint"
    if before.state not in ENDED:
        return LOST, HEARTBEAT_EXPIRED, f"its learner has not reported for more than {LOST_AFTER_S:g} s"
    return None
