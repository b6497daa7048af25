"""The operations of control/service.py for one externally managed run over Kafka, such as one started by compose.

State and commands of the run travel over Kafka (kafka_mirror.py). The service manages no processes: operations that
need them are refused with a hint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from steppe.control import models
from steppe.control.backends.kafka_mirror import KafkaMirror, command_if_reachable
from steppe.control.database import new_operation
from steppe.control.service import Bounds, Service, operation
from steppe.core.config.run import KafkaConfig, unflatten
from steppe.core.config.tunables import tunable_fields
from steppe.core.contracts.errors import Conflict, RunNotFound, SteppeError, UsageError
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.transport import COMMANDS
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

START_S = 600.0  # time for the operator to start a learner
STOP_S = 120.0  # time for a learner to write its last checkpoint
POLL_INTERVAL_S = 1.0
START_REQUESTED = "start_requested"
SCALING_HINT = "actors are started and stopped where they run: docker compose up --scale actor=N --no-recreate"
State = tuple[str, str | None, str | None]


class ExternalRunService(Service):
    """Operations on one external run. Thread-safe. Call `reconcile` about twice a second.

    There is no run until its learner has started it.
    """

    def __init__(self, run: str, kafka: KafkaConfig, bounds: Bounds | None = None) -> None:
        """`run` is the name of the run; raises Unreachable if no broker answers."""
        super().__init__(bounds, kafka)
        self._run, self._brokers = run, kafka
        self._kafka_mirror: KafkaMirror | None = None
        self._manifest: RunManifest | None = None
        self._looked_s = 0.0
        self._look()

    def close(self) -> None:
        if self._kafka_mirror is not None:
            self._kafka_mirror.stop()
        super().close()

    @operation("control")
    def create_run(self, request: models.RunRequest, issuer: str) -> models.RunDetail:
        """Refuse: the run's learner creates it."""
        raise UsageError(
            f"this service looks after {self._run}, which its learner creates: start another learner with --run and a service for it"
        )

    @operation("control")
    def start_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Allow a stopped run to resume as soon as its roles are started again."""
        directory = self._directory(run)
        with self._lock:
            status = directory.store.status()
            if status.live or status.state == SUCCEEDED:
                raise Conflict(f"{run} is {status.state}: it cannot be started now")
            record = new_operation("start", run, issuer, deadline_s=START_S)
            with self._sent(directory, record, expected) as command:
                self.ledger.change(run, "running", expected)
                directory.store.set_status(STARTING, START_REQUESTED, "waits for its roles: docker compose up")
                self.ledger.save_operation(record)
                directory.store.post(COMMANDS, {**command, "command": "resume"})
            return self._refreshed_operation(record)

    @operation("control")
    def stop_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Stop every role; the learner writes a checkpoint."""
        return self._command(run, "stop", issuer, expected, desired="stopped", deadline_s=STOP_S)

    @operation("admin")
    def kill_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Refuse: its processes are on other machines."""
        raise UsageError("the processes of this run are not this service's: docker compose kill")

    @operation("admin")
    def delete_run(self, run: str, issuer: str, expected: int | None = None) -> None:
        """Refuse: the run would be found again on Kafka."""
        raise UsageError("this service looks after one run alone: stop the service to forget it")

    @operation("read")
    def get_actors(self, run: str) -> models.Actors:
        """Return the observed actors; their desired number is not known here."""
        told = super().get_actors(run)
        return told.model_copy(update={"desired": told.ready, "most": 0})

    @operation("control")
    def scale_actors(self, run: str, count: int, issuer: str, expected: int | None = None) -> models.Operation:
        """Refuse: see `SCALING_HINT`."""
        self._directory(run)
        raise UsageError(SCALING_HINT)

    @operation("control")
    def set_hyperparameters(
        self, run: str, values: Mapping[str, Any], issuer: str, expected: int | None = None, *, dry_run: bool = False
    ) -> models.Effects:
        """Change live settings with the next update; others are in the file that the learner is started with."""
        live = tunable_fields(self._config(self._directory(run)))
        fixed = sorted(set(values) - set(live))
        if fixed:
            raise UsageError(
                f"{fixed[0]} cannot change while the learner is there: write it into its settings, and start it again"
            )
        return super().set_hyperparameters(run, values, issuer, expected, dry_run=dry_run)

    @operation("read")
    def get_logs(self, run: str, source: str | None = None, after: int = 0, max_bytes: int = 65_536) -> models.Logs:
        """Return where the log lines are: with the roles."""
        self._directory(run)
        words = "whoever runs the roles keeps them: docker compose logs --follow learner (or actor, manager)"
        return models.Logs(
            source="elsewhere", sources=["elsewhere"], lines=[] if after else [words], next=max(after, 1)
        )

    def reconcile(self) -> None:
        """Update the run's state from its reports, and finish operations."""
        if time.monotonic() - self._looked_s < POLL_INTERVAL_S:
            return
        with self._lock:
            self._looked_s = time.monotonic()
            try:
                self._look()
            except SteppeError:
                return  # readiness reports it; the next poll may succeed
            if self._kafka_mirror is not None:
                self._update_state(self._kafka_mirror)
            super().reconcile()

    def _look(self) -> None:
        """Start to mirror the run, or apply its newer manifest."""
        charter = self._kafka_mirror.manifest if self._kafka_mirror else find_manifest(self._brokers, self._run)
        if charter is None or charter == self._manifest:
            return
        config = unflatten(charter.order.config).model_copy(update={"name": self._run, "run_dir": None})
        path = self.root / self._run
        if not (path / RECORD).exists():
            directory = RunDirectory.create(config, {})
        else:
            directory = RunDirectory(path)
            directory.acquire()
        directory.settle(config, charter.order.env_spec)
        directory.release()
        self._known.forget(self._run)
        self._manifest = charter
        if self._kafka_mirror is None:
            self._kafka_mirror = KafkaMirror(directory, self._brokers)
            self._kafka_mirror.start()

    def _update_state(self, following: KafkaMirror) -> None:
        """Update the run's state in its store from its reports."""
        store = self._directory(self._run).store
        before = store.status()
        with self.run_view(self._run) as view:
            state = _derive_state(before, view.training, following.word)
        if state is not None and state != (before.state, before.reason, before.message):
            store.set_status(*state)
        store.heartbeat()

    def _refreshed_operation(self, record: dict[str, Any]) -> models.Operation:
        """Refresh an operation; a stop that times out fails, as there is no process to kill here."""
        late = time.time() - record["created_s"] > record["details"].get("deadline_s", STOP_S)
        if record["state"] == "pending" and record["kind"] == "stop" and late:
            with self._lock:
                ended = self._directory(record["run"]).store.status().state in ENDED
                verdict = ("succeeded", None) if ended else ("failed", f"it has not stopped within {STOP_S:g} s")
                record |= {"state": verdict[0], "message": verdict[1], "finished_s": time.time()}
                self.ledger.save_operation(record)
        return super()._refreshed_operation(record)

    def _sent(
        self, directory: RunDirectory, record: Mapping[str, Any], expected: int | None
    ) -> AbstractContextManager[dict[str, Any]]:
        return command_if_reachable(self._brokers, record)

    def _directory(self, run: str) -> RunDirectory:
        if run != self._run:
            raise RunNotFound(f"this service looks after {self._run} alone")
        return super()._directory(run)


def _derive_state(before: Status, report: TrainingReport | None, word: str) -> State | None:
    """Return the state that follows from the newest report; None if it does not change."""
    fresh = report is not None and time.time() - report.time_s < LOST_AFTER_S
    if report is not None and fresh and not report.final:
        return (PAUSED, "pause_requested", None) if word == "pause" else (RUNNING, None, None)
    if before.reason == START_REQUESTED:
        return None  # the operator may take any time to start it
    if report is None:
        return STARTING, None, "waits for its learner"
    if word == "finish":
        return SUCCEEDED, "complete", "the run has come to its end"
    if report.final:
        return STOPPED, "stopped", "its learner has ended, with a checkpoint"
    if before.state not in ENDED:
        return LOST, HEARTBEAT_EXPIRED, f"its learner has been silent for more than {LOST_AFTER_S:g} s"
    return None
