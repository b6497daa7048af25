"""Backend of the run of a cluster, with an Orchestrator in place of local processes.

A namespace trains one run. Its settings are in the cluster; its reports are stored in a local directory like any run's,
so that lists, curves, events and diagnoses are read in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steppe.control import models, presenters
from steppe.control.backends.base import BackendCapabilities, Change, HyperparameterPlan, Unsupported
from steppe.control.backends.cluster_run import (
    CurrentRun,
    derive_state,
    exit_message,
    parse_run_spec,
    requested_settings,
    to_toml,
    with_hyperparameters,
)
from steppe.control.backends.from_store import present_learner, refresh_from_store
from steppe.control.backends.orchestrator import ACTOR, LEARNER, ROLES, Orchestrator, RoleStatus, RunSpec
from steppe.control.commands import CommandSender, to_command
from steppe.control.database import new_operation
from steppe.control.operations import OperationOutcome, Record
from steppe.control.repository import RunRepository
from steppe.control.run_requests import Bounds
from steppe.core.config.run import RunConfig
from steppe.core.config.tunables import needs_spec, tunable_fields, validate_changes
from steppe.core.contracts.errors import Conflict, Unreachable, UsageError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.transport import COMMANDS, EVENTS, SCALE, SET
from steppe.records.run_directory import RECORD, RunDirectory
from steppe.records.store import HEARTBEAT_S, NO_OWNER, PAUSED, PENDING, RUNNING, SUCCEEDED

if TYPE_CHECKING:
    from steppe.control.backends.kafka_mirror import KafkaMirror
    from steppe.core.config.run import KafkaConfig

ROLLOUT_TIMEOUT_S = 600.0  # time for pods to start and stop
SETTLED_BY_CLUSTER = "cluster"  # value of models.Operation.settled_by if the outcome is observed in pods
LOGS_HINT = "the logs are in the cluster: kubectl logs --selector steppe.dev/role=learner (or actor, manager) --follow"


class KubernetesBackend:
    """The run of a cluster. Implements Backend."""

    kafka: KafkaConfig | None = None  # the cluster's settings have the brokers of its runs

    def __init__(
        self,
        orchestrator: Orchestrator,
        runs: RunRepository,
        commands: CommandSender,
        bounds: Bounds,
        kafka: KafkaConfig | None = None,
    ) -> None:
        """With `kafka`, the service also reads what the roles report there."""
        self._orchestrator, self._runs, self._commands, self._bounds = orchestrator, runs, commands, bounds
        self._brokers = kafka
        self.capabilities = self._declare()
        self._mirror: KafkaMirror | None = None
        self._current: CurrentRun | None = None
        self._polled_s = 0.0
        self._desired = dict.fromkeys((ACTOR, LEARNER), 0)
        self._read_current()

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.stop()
        self._orchestrator.close()

    def require_ready(self) -> None:
        if self._orchestrator.lost_reason is not None:
            raise Unreachable(f"the state of the cluster is not known: {self._orchestrator.lost_reason}")

    def config(self, directory: RunDirectory) -> RunConfig:
        if self._current is not None and self._current.run == directory.path.name:
            return self._current.resolved.config
        return self._runs.config(directory)

    def start_run(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        """Scale the learner to 1; it resumes from the newest checkpoint."""
        record = self._scale("start", directory, LEARNER, 1, issuer, expected, desired="running")
        if self._mirror is not None and self._mirror.newest_command == "pause":  # the learner would read that again
            resume = to_command(new_operation("resume", directory.path.name, issuer, deadline_s=ROLLOUT_TIMEOUT_S))
            directory.store.post(COMMANDS, resume)
        return record

    def stop_run(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        """Scale the learner to 0; it writes a checkpoint before it ends."""
        return self._scale("stop", directory, LEARNER, 0, issuer, expected, desired="stopped")

    def get_actors(self, run: str) -> models.Actors:
        with self._runs.view(run) as view:
            found = presenters.present_actors(view)
        if not self._is_current(run):
            return found
        desired, status = self._orchestrator.desired(ACTOR), self._observed(ACTOR)
        return models.Actors(desired=desired, ready=status.ready, most=self._max_actors(), actors=found.actors)

    def get_learner(self, run: str) -> models.LearnerStatus:
        found = present_learner(self._runs, run)
        if not self._is_current(run):
            return found
        counts = {"desired": self._orchestrator.desired(LEARNER), "ready": self._observed(LEARNER).ready}
        return found.model_copy(update={name: min(1, count) for name, count in counts.items()})

    def plan_hyperparameters(self, directory: RunDirectory, values: Mapping[str, Any]) -> HyperparameterPlan:
        """Validate new values; all take effect with the next update, or the learner must be replaced.

        Refused if the environment decides whether a value is valid and its spec is not known.
        """
        self._require_current(directory.path.name)
        current = self._read_current()
        config, spec = current.resolved.config, self._env_spec()
        changed = validate_changes(config.agent, values, spec)
        if spec is None:
            self._require_independent(current.run, needs_spec(config.agent, changed))
        live = self._live_fields(directory, config)
        return HyperparameterPlan(config, changed, live if set(changed) <= set(live) else ())

    def set_hyperparameters(
        self, directory: RunDirectory, plan: HyperparameterPlan, issuer: str, expected: int | None
    ) -> Record:
        current = self._read_current()
        before = plan.config.agent.model_dump(mode="json")
        changes = ", ".join(f"{name} {before[name]} → {value}" for name, value in plan.changed.items())
        change = self._set_live if plan.live else self._replace_learner
        record = change(current, directory, plan.changed, issuer, expected)
        self._note("settings", issuer, changes if plan.live else f"{changes}; the learner is replaced")
        return record

    def get_logs(self, directory: RunDirectory, source: str | None, after: int, max_bytes: int) -> models.Logs:
        """Return where the log lines are: in the cluster."""
        lines = [] if after else [LOGS_HINT]
        return models.Logs(source="cluster", sources=["cluster"], lines=lines, next=max(after, 1))

    def refresh(self, record: Record) -> Record:
        with self._runs.lock:
            if record.get("settled_by") != SETTLED_BY_CLUSTER or not self._is_current(record["run"]):
                return refresh_from_store(self._runs, record)
            outcome = self._operation_outcome(record)
            deadline_s = record["details"].get("deadline_s", ROLLOUT_TIMEOUT_S)
            if outcome is None and time.time() - record["created_s"] > deadline_s:
                problem = self._observed(record["details"].get("role", LEARNER)).problem
                outcome = "failed", f"not within {ROLLOUT_TIMEOUT_S:g} s{f': {problem}' if problem else ''}"
            if outcome is not None:
                record = record | {"state": outcome[0], "message": outcome[1], "finished_s": time.time()}
                self._runs.database.save_operation(record)
            return record

    def reconcile(self) -> bool:
        """Update the run's state from the cluster, at most once per half heartbeat."""
        if time.monotonic() - self._polled_s < HEARTBEAT_S / 2:
            return False
        try:
            with self._runs.lock:
                self._update_state(self._read_current())
        except (Unreachable, Conflict, UsageError):
            return False  # readiness reports it; the next poll may succeed
        return True

    def _declare(self) -> BackendCapabilities:
        hint = (
            "a run of a cluster is paused over Kafka: start the service with --kafka HOST:PORT, or scale the learner "
        )
        no_kafka = Unsupported(f"{hint}to 0, which writes a checkpoint")
        return BackendCapabilities(
            create_run=self._create_run,
            pause_run=no_kafka if self._brokers is None else self._for_current(self._commands.pause),
            resume_run=no_kafka if self._brokers is None else self._for_current(self._commands.resume),
            kill_run=Unsupported(
                "this service may not kill pods: scale the learner to 0, or ask the cluster's administrator"
            ),
            delete_run=self._delete_run,
            scale_actors=self._scale_actors,
            keyed_messages=False,  # only the cluster's learner has the key
        )

    def _for_current(self, change: Change) -> Change:
        """Restrict a change to the run that the cluster trains now."""

        def change_current(directory: RunDirectory, issuer: str, expected: int | None) -> Record:
            self._require_current(directory.path.name)
            return change(directory, issuer, expected)

        return change_current

    def _create_run(self, request: models.RunRequest, config: RunConfig, sources: dict[str, str], issuer: str) -> str:
        """Make the cluster train another run: write its settings there and replace all roles, which then read them."""
        settings = requested_settings(config, models.to_settings(request))
        with self._runs.lock:
            current = self._read_current()
            if self._orchestrator.desired(LEARNER):
                raise Conflict(f"the cluster trains {current.run}, and only one run at a time: stop it first")
            run = settings.pop("name", None) or f"{request.env.rpartition('/')[2]}-{int(time.time()):x}".lower()
            if (self._runs.root / run / RECORD).exists():
                raise Conflict(f"a run {run} exists already: choose another name")
            self._write_run_spec(current, run, settings, ROLES)
            self._note("settings", issuer, f"{run}: {request.env}; actors and manager are replaced")
            if request.start:
                self.start_run(self._runs.directory(run), issuer, None)
        return str(run)

    def _delete_run(self, directory: RunDirectory, expected: int | None) -> None:
        """Delete the local record of a run that the cluster no longer trains; its checkpoints stay on their volume."""
        run = directory.path.name
        if run == self._read_current().run:
            raise Conflict(f"{run} is the run of this cluster: create another one first")
        self._runs.delete(directory, expected)

    def _scale_actors(self, directory: RunDirectory, count: int, issuer: str, expected: int | None) -> Record:
        most = self._max_actors()
        if not 0 <= count <= most:
            raise UsageError(f"actors={count}: this run can have 0 to {most}")
        return self._scale(SCALE, directory, ACTOR, count, issuer, expected)

    def _scale(
        self,
        kind: str,
        directory: RunDirectory,
        role: str,
        count: int,
        issuer: str,
        expected: int | None,
        desired: str | None = None,
    ) -> Record:
        run = directory.path.name
        self._require_current(run)
        with self._runs.lock:
            details = {"deadline_s": ROLLOUT_TIMEOUT_S, "role": role, role if role == LEARNER else "actors": count}
            record = new_operation(kind, run, issuer, settled_by=SETTLED_BY_CLUSTER, **details)
            with self._commands.publishing(directory, record, expected):
                self._runs.database.change(run, desired, expected)
                self._orchestrator.scale(role, count)
                self._desired[role] = count
                self._runs.database.save_operation(record)
            return record

    def _set_live(
        self, current: CurrentRun, directory: RunDirectory, changed: dict[str, Any], issuer: str, expected: int | None
    ) -> Record:
        """Send the values to the learner, and write them to the cluster for a learner that replaces it."""
        run, database = current.run, self._runs.database
        record = new_operation(SET, run, issuer, values=changed, live=sorted(changed))
        database.require(run, expected)
        with self._commands.sending(directory, record, expected) as command:
            self._write_run_spec(current, run, with_hyperparameters(current, changed), ())
            database.change(run, None, expected)
            database.save_operation(record)
            record["details"]["number"] = directory.store.post(COMMANDS, command)
            database.save_operation(record)
        return record

    def _replace_learner(
        self, current: CurrentRun, directory: RunDirectory, changed: dict[str, Any], issuer: str, expected: int | None
    ) -> Record:
        details = {"deadline_s": ROLLOUT_TIMEOUT_S, "values": changed}
        record = new_operation(SET, current.run, issuer, settled_by=SETTLED_BY_CLUSTER, **details)
        with self._commands.publishing(directory, record, expected):
            self._runs.database.change(current.run, None, expected)
            settings = with_hyperparameters(current, changed)
            record["details"]["digest"] = self._write_run_spec(current, current.run, settings, (LEARNER,)).digest
            self._runs.database.save_operation(record)
        return record

    def _write_run_spec(
        self, current: CurrentRun, run: str, settings: dict[str, Any], roles: tuple[str, ...]
    ) -> CurrentRun:
        """Write settings to the cluster and replace the roles that have read the old ones."""
        text = to_toml(settings)
        parse_run_spec(RunSpec(run, text, ""))  # unreadable settings must not be written
        self._orchestrator.set_run_spec(run, text, current.spec.version)
        written = self._read_current()
        for role in roles:
            self._orchestrator.restart(role, written.digest)
        return written

    def _read_current(self) -> CurrentRun:
        """Return the run as the cluster has it now; creates its local directory if necessary."""
        with self._runs.lock:
            spec = self._orchestrator.run_spec()
            if self._current is None or self._current.spec != spec:
                self._current = parse_run_spec(spec)
                self._adopt(self._current)
            for role in self._desired:
                self._desired[role] = self._orchestrator.desired(role)
            self._polled_s = time.monotonic()
            return self._current

    def _adopt(self, current: CurrentRun) -> None:
        """Create or update the local directory of the cluster's run, and mirror the run's messages to it."""
        path = self._runs.root / current.run
        config = current.resolved.config.model_copy(update={"name": current.run, "run_dir": None})
        if not (path / RECORD).exists():
            directory = RunDirectory.create(config, current.resolved.sources)
            directory.store.set_status(PENDING, "created", "waiting for its learner", owner=NO_OWNER)
        else:
            directory = RunDirectory(path)
            directory.acquire()
            directory.write_resolved(config)
        directory.release()
        self._runs.forget(current.run)
        self._follow(directory)

    def _follow(self, directory: RunDirectory) -> None:
        if self._brokers is None or (self._mirror is not None and self._mirror.run == directory.id):
            return
        from steppe.control.backends.kafka_mirror import KafkaMirror

        if self._mirror is not None:
            self._mirror.stop()
        self._mirror = KafkaMirror(directory, self._brokers)
        self._mirror.start()

    def _operation_outcome(self, record: Record) -> OperationOutcome:
        if self._orchestrator.lost_reason is not None:
            return None  # the observed state may be outdated
        if record["kind"] == SET:
            return self._rollout_outcome(record["details"]["digest"])
        role = record["details"]["role"]
        count = record["details"][LEARNER if role == LEARNER else "actors"]
        if self._desired[role] != count:
            return "failed", "another number was requested before this one was reached"
        status = self._observed(role)
        if status.ready != count or status.total != count:
            return None
        return "succeeded", exit_message(status) if role == LEARNER and not count else None

    def _rollout_outcome(self, digest: str) -> OperationOutcome:
        if self._current is None or self._current.digest != digest:
            return "failed", "other settings were requested before these were read"
        status = self._observed(LEARNER)
        if not self._desired[LEARNER] and not status.total:
            return "succeeded", "takes effect when the learner is started"
        done = status.ready == status.total == self._desired[LEARNER] and not status.outdated
        return ("succeeded", "the learner has been replaced") if done else None

    def _update_state(self, current: CurrentRun) -> None:
        """Update the run's state in its store from the cluster's."""
        store = self._runs.directory(current.run).store
        before, desired, status = store.status(), self._desired[LEARNER], self._observed(LEARNER)
        if self._orchestrator.lost_reason is not None:
            store.heartbeat()
            return
        paused = self._mirror is not None and self._mirror.newest_command == "pause"
        state, reason, message = derive_state(before, desired, status, paused=paused)
        if state == SUCCEEDED and desired:
            self._finish()
        if (state, reason, message) != (before.state, before.reason, before.message):
            store.set_status(state, reason, message)
        store.heartbeat()

    def _finish(self) -> None:
        """Scale learner and actors to 0: a Deployment would otherwise restart a completed run forever."""
        for role in (LEARNER, ACTOR):
            self._orchestrator.scale(role, 0)
        self._note("scale", "steppe", "the run is complete: learner and actors are scaled to 0")

    def _note(self, kind: str, issuer: str, message: str) -> None:
        current = self._current or self._read_current()
        details = {"what": kind, "issuer": issuer, "message": message, "digest": current.digest}
        event = EventReport(run=current.run, kind="note", role="cluster", details=details)
        self._runs.directory(current.run).board.post(EVENTS, event.record())

    def _observed(self, role: str) -> RoleStatus:
        return self._orchestrator.observed(role, self._current.digest if self._current else "")

    def _max_actors(self) -> int:
        current = self._current or self._read_current()
        return min(self._bounds.actors, current.resolved.config.actors)

    def _env_spec(self) -> EnvSpec | None:
        """Return the environment's spec as the learner reported it over Kafka; None before that, or without brokers."""
        manifest = None if self._mirror is None else self._mirror.manifest
        return None if manifest is None else manifest.launch_spec.env_spec

    def _live_fields(self, directory: RunDirectory, config: RunConfig) -> tuple[str, ...]:
        """Return the hyperparameters that the learner can change now."""
        listens = self._brokers is not None and directory.store.status().state in (RUNNING, PAUSED)
        return tuple(tunable_fields(config)) if listens else ()

    def _is_current(self, run: str) -> bool:
        return self._current is not None and run == self._current.run

    def _require_current(self, run: str) -> None:
        if not self._is_current(run):
            raise Conflict(f"the cluster trains {self._read_current().run} now, not {run}")

    def _require_independent(self, run: str, names: list[str]) -> None:
        """Raise if only the environment's spec can validate these hyperparameters.

        A learner that cannot start with one of them would never run again.
        """
        if not names:
            return
        about = f"{', '.join(names)}: only some environments support it, and"
        if self._brokers is None:
            raise UsageError(
                f"{about} without Kafka the service does not know the environment of {run}: start the service with "
                "--kafka HOST:PORT, or create a new run with that value"
            )
        raise Conflict(f"{about} the learner of {run} has not reported its environment yet: retry when it has started")
