"""The operations of control/service.py for the run of a cluster, with an Orchestrator in place of local processes.

A namespace trains one run. Its settings are in the cluster; its reports are stored in a local directory like any run's,
so that lists, curves, events and diagnoses are read in the same way.
"""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steppe.control import models, presenters
from steppe.control.backends.orchestrator import ACTOR, LEARNER, ROLES, Orchestrator, RoleStatus, RunSpec
from steppe.control.database import new_operation
from steppe.control.service import Bounds, Service, operation, to_command
from steppe.core.config.run import ResolvedConfig, flat_keys, flatten, resolve_config
from steppe.core.config.tunables import needs_spec, tunable_fields, validate_changes
from steppe.core.contracts.errors import ConfigError, Conflict, SteppeError, Unreachable, UsageError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.transport import COMMANDS, EVENTS, SCALE, SET
from steppe.records.run_directory import RECORD, RunDirectory
from steppe.records.store import (
    HEARTBEAT_S,
    NO_OWNER,
    PAUSED,
    PENDING,
    RUNNING,
    STARTING,
    STOPPED,
    STOPPING,
    SUCCEEDED,
    Status,
)

if TYPE_CHECKING:
    from steppe.control.backends.kafka_mirror import KafkaMirror
    from steppe.core.config.run import KafkaConfig

ROLLOUT_TIMEOUT_S = 600.0  # time for pods to start and stop
SETTLED_BY_CLUSTER = "cluster"  # value of models.Operation.settled_by if the outcome is observed in pods
OperationOutcome = tuple[str, str | None] | None


@dataclass(frozen=True)
class CurrentRun:
    """The run that the cluster trains now."""

    described: RunSpec
    resolved: ResolvedConfig
    digest: str

    @property
    def run(self) -> str:
        return self.described.run


class KubernetesService(Service):
    """Operations on the run of a cluster. Thread-safe. Call `reconcile` about twice a second."""

    def __init__(self, scaler: Orchestrator, bounds: Bounds | None = None, kafka: KafkaConfig | None = None) -> None:
        """With `kafka`, the service also reads what the roles report there."""
        super().__init__(bounds)
        self._scaler, self._kafka = scaler, kafka
        self._kafka_mirror: KafkaMirror | None = None
        self._current: CurrentRun | None = None
        self._looked_s = 0.0
        self._wanted = dict.fromkeys((ACTOR, LEARNER), 0)
        self._look()

    def close(self) -> None:
        if self._kafka_mirror is not None:
            self._kafka_mirror.stop()
        super().close()
        self._scaler.close()

    @operation("read")
    def get_readiness(self) -> models.Health:
        """Return whether runs can be read and the cluster answers."""
        if self._scaler.lost is not None:
            return models.Health(status="unavailable", detail=f"no news of the cluster: {self._scaler.lost}")
        return super().get_readiness()

    @operation("control")
    def create_run(self, request: models.RunRequest, issuer: str) -> models.RunDetail:
        """Make the cluster train another run: write its settings there and replace all roles, which then read them."""
        settings = _requested_settings(self._resolve_request(request)[0], models.to_settings(request))
        with self._lock:
            current = self._look()
            if self._scaler.wanted(LEARNER):
                raise Conflict(f"{current.run} is under way, and a cluster trains one run at a time: stop it first")
            run = settings.pop("name", None) or f"{request.env.rpartition('/')[2]}-{int(time.time()):x}".lower()
            if (self.root / run / RECORD).exists():
                raise Conflict(f"there is a run {run} already: choose another name")
            made = self._write_run_spec(current, run, settings, ROLES)
            self._note("settings", issuer, f"{run}: {request.env}; actors and manager are replaced", made)
            if request.start:
                self.start_run(run, issuer)
        return self.get_run(run)

    @operation("control")
    def start_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Scale the learner to 1; it resumes from the newest checkpoint."""
        done = self._scaled("start", run, LEARNER, 1, issuer, expected, desired="running")
        if self._kafka_mirror is not None and self._kafka_mirror.word == "pause":  # the learner would read that again
            resume = to_command(new_operation("resume", run, issuer, deadline_s=ROLLOUT_TIMEOUT_S))
            self._directory(run).store.post(COMMANDS, resume)
        return done

    @operation("control")
    def stop_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Scale the learner to 0; it writes a checkpoint before it ends."""
        return self._scaled("stop", run, LEARNER, 0, issuer, expected, desired="stopped")

    @operation("control")
    def pause_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Pause actors and learner by a command over Kafka."""
        self._require_brokers(run)
        return self._command(run, "pause", issuer, expected, desired="paused", allowed_states=(RUNNING,))

    @operation("control")
    def resume_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Continue a paused run."""
        self._require_brokers(run)
        return self._command(run, "resume", issuer, expected, desired="running", allowed_states=(PAUSED,))

    @operation("admin")
    def kill_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Refuse: the service may not kill pods."""
        raise UsageError("this service may not kill pods: scale the learner to 0, or ask the cluster's administrator")

    @operation("admin")
    def delete_run(self, run: str, issuer: str, expected: int | None = None) -> None:
        """Delete the local record of a run that the cluster no longer trains; its checkpoints stay on their volume."""
        if run == self._look().run:
            raise Conflict(f"{run} is the run of this cluster: create another one first")
        super().delete_run(run, issuer, expected)

    @operation("read")
    def get_actors(self, run: str) -> models.Actors:
        """Return the desired and observed actors."""
        if not self._is_current(run):
            return super().get_actors(run)
        wanted, seen = self._scaler.wanted(ACTOR), self._seen(ACTOR)
        with self.run_view(run) as view:
            told = presenters.present_actors(view).actors
        return models.Actors(desired=wanted, ready=seen.ready, most=self._most(), actors=told)

    @operation("control")
    def scale_actors(self, run: str, count: int, issuer: str, expected: int | None = None) -> models.Operation:
        """Set the number of actors; those that end hand over what they have collected."""
        if not 0 <= count <= self._most():
            raise UsageError(f"actors={count}: this run has room for 0 to {self._most()}")
        return self._scaled(SCALE, run, ACTOR, count, issuer, expected)

    @operation("read")
    def get_learner(self, run: str) -> models.LearnerStatus:
        """Return the desired and observed learner."""
        if not self._is_current(run):
            return super().get_learner(run)
        wanted, seen = self._scaler.wanted(LEARNER), self._seen(LEARNER)
        counts = {"desired": min(1, wanted), "ready": min(1, seen.ready)}
        with self.run_view(run) as view:
            return models.LearnerStatus(**counts, version=view.version, updates=view.updates)

    @operation("control")
    def set_hyperparameters(
        self, run: str, values: Mapping[str, Any], issuer: str, expected: int | None = None, *, dry_run: bool = False
    ) -> models.Effects:
        """Change settings in the cluster.

        If all are live and Kafka is available, the learner applies them with its next update; otherwise it is replaced.
        Refused if the environment decides whether a value is valid and its spec is not known.
        """
        self._require_current(run)
        with self._lock:
            current = self._look()
            agent = current.resolved.config.agent
            spec = self._spec()
            changed = validate_changes(agent, values, spec)
            if spec is None:
                self._require_independent(run, needs_spec(agent, changed))
            live = self._live(current)
            live = live if set(changed) <= set(live) else ()
            effects = presenters.present_effects(agent.model_dump(mode="json"), changed, live)
            if dry_run:
                return models.Effects(effects=effects, operation=None)
            words = ", ".join(f"{effect.name} {effect.before} → {effect.after}" for effect in effects)
            change = (self._set_live if live else self._replace_learner)(current, changed, issuer, expected)
            self._note("settings", issuer, words if live else f"{words}; the learner is replaced", self._look())
            return models.Effects(effects=effects, operation=change)

    @operation("read")
    def get_logs(self, run: str, source: str | None = None, after: int = 0, max_bytes: int = 65_536) -> models.Logs:
        """Return where the log lines are: with the pods."""
        self._directory(run)
        words = "the cluster keeps them: kubectl logs --selector steppe.dev/role=learner (or actor, manager) --follow"
        return models.Logs(source="cluster", sources=["cluster"], lines=[] if after else [words], next=max(after, 1))

    def reconcile(self) -> None:
        """Update the run's state from the cluster, and finish operations."""
        if time.monotonic() - self._looked_s < HEARTBEAT_S / 2:
            return
        try:
            with self._lock:
                current = self._look()
                self._update_state(current)
                super().reconcile()
        except (Unreachable, Conflict, UsageError):
            return  # readiness reports it; the next poll may succeed

    def _look(self) -> CurrentRun:
        """Return the run as the cluster has it now; creates its local directory if necessary."""
        with self._lock:
            described = self._scaler.described()
            if self._current is None or self._current.described != described:
                self._current = _parse_run_spec(described)
                self._adopt(self._current)
            for role in self._wanted:
                self._wanted[role] = self._scaler.wanted(role)
            self._looked_s = time.monotonic()
            return self._current

    def _adopt(self, current: CurrentRun) -> None:
        path = self.root / current.run
        config = current.resolved.config.model_copy(update={"name": current.run, "run_dir": None})
        if not (path / RECORD).exists():
            directory = RunDirectory.create(config, current.resolved.sources)
            directory.store.set_status(PENDING, "created", "waits for its learner", owner=NO_OWNER)
        else:
            directory = RunDirectory(path)
            directory.acquire()
            directory.settle(config)
        directory.release()
        self._known.forget(current.run)
        self._follow(directory)

    def _follow(self, directory: RunDirectory) -> None:
        if self._kafka is None or (self._kafka_mirror is not None and self._kafka_mirror.run == directory.id):
            return
        from steppe.control.backends.kafka_mirror import KafkaMirror

        if self._kafka_mirror is not None:
            self._kafka_mirror.stop()
        self._kafka_mirror = KafkaMirror(directory, self._kafka)
        self._kafka_mirror.start()

    def _write_run_spec(
        self, current: CurrentRun, run: str, settings: dict[str, Any], roles: tuple[str, ...]
    ) -> CurrentRun:
        """Write settings to the cluster and replace the roles that have read the old ones."""
        text = _to_toml(settings)
        _parse_run_spec(RunSpec(run, text, ""))  # unreadable settings must not be written
        self._scaler.describe(run, text, current.described.version)
        made = self._look()
        for role in roles:
            self._scaler.roll(role, made.digest)
        return made

    def _spec(self) -> EnvSpec | None:
        """Return the environment's spec as the learner reported it over Kafka; None before that, or without brokers."""
        charter = None if self._kafka_mirror is None else self._kafka_mirror.manifest
        return None if charter is None else charter.order.env_spec

    def _live(self, current: CurrentRun) -> tuple[str, ...]:
        """Return the hyperparameters that the learner can change now."""
        state = self._directory(current.run).store.status().state
        told = self._kafka is not None and state in (RUNNING, PAUSED)
        return tuple(tunable_fields(current.resolved.config)) if told else ()

    def _set_live(
        self, current: CurrentRun, changed: dict[str, Any], issuer: str, expected: int | None
    ) -> models.Operation:
        """Send the values to the learner, and write them to the cluster for a learner that replaces it."""
        directory = self._directory(current.run)
        record = new_operation(SET, current.run, issuer, values=changed, live=sorted(changed))
        self.ledger.require(current.run, expected)
        with self._sent(directory, record, expected) as command:
            self._write_run_spec(current, current.run, _with_hyperparameters(current, changed), ())
            self.ledger.change(current.run, None, expected)
            self.ledger.save_operation(record)
            record["details"]["number"] = directory.store.post(COMMANDS, command)
            self.ledger.save_operation(record)
        return self._refreshed_operation(record)

    def _replace_learner(
        self, current: CurrentRun, changed: dict[str, Any], issuer: str, expected: int | None
    ) -> models.Operation:
        record = new_operation(
            SET, current.run, issuer, settled_by=SETTLED_BY_CLUSTER, deadline_s=ROLLOUT_TIMEOUT_S, values=changed
        )
        with self._published(self._directory(current.run), record, expected):
            self.ledger.change(current.run, None, expected)
            made = self._write_run_spec(current, current.run, _with_hyperparameters(current, changed), (LEARNER,))
            record["details"]["digest"] = made.digest
            self.ledger.save_operation(record)
        return self._refreshed_operation(record)

    def _sent(
        self, directory: RunDirectory, record: Mapping[str, Any], expected: int | None
    ) -> AbstractContextManager[dict[str, Any]]:
        from steppe.control.backends.kafka_mirror import command_if_reachable

        assert self._kafka is not None
        return command_if_reachable(self._kafka, record)

    def _scaled(
        self, kind: str, run: str, role: str, count: int, issuer: str, expected: int | None, desired: str | None = None
    ) -> models.Operation:
        self._require_current(run)
        with self._lock:
            details = {"deadline_s": ROLLOUT_TIMEOUT_S, "role": role, role if role == LEARNER else "actors": count}
            record = new_operation(kind, run, issuer, settled_by=SETTLED_BY_CLUSTER, **details)
            with self._published(self._directory(run), record, expected):
                self.ledger.change(run, desired, expected)
                self._scaler.scale(role, count)
                self._wanted[role] = count
                self.ledger.save_operation(record)
            return self._refreshed_operation(record)

    def _refreshed_operation(self, record: dict[str, Any]) -> models.Operation:
        by_cluster = record.get("settled_by") == SETTLED_BY_CLUSTER
        if record["state"] != "pending" or not by_cluster or not self._is_current(record["run"]):
            return super()._refreshed_operation(record)
        with self._lock:
            verdict = self._operation_outcome(record)
            if verdict is None and time.time() - record["created_s"] > record["details"].get(
                "deadline_s", ROLLOUT_TIMEOUT_S
            ):
                trouble = self._seen(record["details"].get("role", LEARNER)).trouble
                verdict = "failed", f"not within {ROLLOUT_TIMEOUT_S:g} s{f': {trouble}' if trouble else ''}"
            if verdict is not None:
                record |= {"state": verdict[0], "message": verdict[1], "finished_s": time.time()}
                self.ledger.save_operation(record)
        return models.Operation(**record)

    def _operation_outcome(self, record: dict[str, Any]) -> OperationOutcome:
        if self._scaler.lost is not None:
            return None  # the observed state may be outdated
        if record["kind"] == SET:
            return self._rollout_outcome(record["details"]["digest"])
        role = record["details"]["role"]
        count = record["details"][LEARNER if role == LEARNER else "actors"]
        if self._wanted[role] != count:
            return "failed", "another number was asked for before this one was reached"
        seen = self._seen(role)
        if seen.ready != count or seen.there != count:
            return None
        return "succeeded", _exit_message(seen) if role == LEARNER and not count else None

    def _rollout_outcome(self, digest: str) -> OperationOutcome:
        if self._current is None or self._current.digest != digest:
            return "failed", "other settings were asked for before these were read"
        seen = self._seen(LEARNER)
        if not self._wanted[LEARNER] and not seen.there:
            return "succeeded", "takes effect when the learner is started"
        done = seen.ready == seen.there == self._wanted[LEARNER] and not seen.old
        return ("succeeded", "the learner has been replaced") if done else None

    def _update_state(self, current: CurrentRun) -> None:
        """Update the run's state in its store from the cluster's."""
        store = self._directory(current.run).store
        before, wanted, seen = store.status(), self._wanted[LEARNER], self._seen(LEARNER)
        if self._scaler.lost is not None:
            store.heartbeat()
            return
        paused = self._kafka_mirror is not None and self._kafka_mirror.word == "pause"
        state, reason, message = _derive_state(before, wanted, seen, paused=paused)
        if state == SUCCEEDED and wanted:
            self._finish(current)
        if (state, reason, message) != (before.state, before.reason, before.message):
            store.set_status(state, reason, message)
        store.heartbeat()

    def _finish(self, current: CurrentRun) -> None:
        """Scale learner and actors to 0: a Deployment would otherwise restart a completed run forever."""
        for role in (LEARNER, ACTOR):
            self._scaler.scale(role, 0)
        self._note("scale", "steppe", "the run has come to its end: no learner and no actors any more", current)

    def _note(self, kind: str, issuer: str, words: str, current: CurrentRun) -> None:
        details = {"what": kind, "issuer": issuer, "message": words, "digest": current.digest}
        event = EventReport(run=current.run, kind="note", role="cluster", details=details)
        self._directory(current.run).board.post(EVENTS, event.record())

    def _seen(self, role: str) -> RoleStatus:
        return self._scaler.seen(role, self._current.digest if self._current else "")

    def _most(self) -> int:
        current = self._current or self._look()
        return min(self.bounds.actors, current.resolved.config.actors)

    def _is_current(self, run: str) -> bool:
        return self._current is not None and run == self._current.run

    def _require_current(self, run: str) -> None:
        self._directory(run)
        if not self._is_current(run):
            raise Conflict(f"the cluster trains {self._look().run} now, not {run}")

    def _require_brokers(self, run: str) -> None:
        self._require_current(run)
        if self._kafka is None:
            raise UsageError(
                "a run of a cluster is paused over Kafka: start the service with --kafka HOST:PORT, or scale the learner to 0, "
                "which keeps a checkpoint"
            )

    def _require_independent(self, run: str, names: list[str]) -> None:
        """Raise if only the environment's spec can validate these hyperparameters.

        A learner that cannot start with one of them would never run again.
        """
        if not names:
            return
        about = f"{', '.join(names)}: only some environments take it, and"
        if self._kafka is None:
            raise UsageError(
                f"{about} without Kafka the service does not know that of {run}: start it with --kafka HOST:PORT, or make a "
                "new run with that value"
            )
        raise Conflict(f"{about} the learner of {run} has not told its environment yet: try again when it has started")

    def _config(self, directory: RunDirectory) -> Any:
        if self._is_current(directory.path.name):
            assert self._current is not None
            return self._current.resolved.config
        return super()._config(directory)


def _parse_run_spec(described: RunSpec) -> CurrentRun:
    try:
        resolved = resolve_config(("cluster", _flat_settings(described)))
    except (tomllib.TOMLDecodeError, SteppeError) as error:
        raise ConfigError(f"the cluster's settings of {described.run} cannot be read: {error}") from None
    text = json.dumps([described.run, described.settings])
    return CurrentRun(described, resolved, hashlib.sha256(text.encode()).hexdigest()[:16])


def _flat_settings(described: RunSpec) -> dict[str, Any]:
    return {"name": described.run, "runtime": "kafka"} | flat_keys(tomllib.loads(described.settings))


def _with_hyperparameters(current: CurrentRun, agent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster's settings with other hyperparameters."""
    return _flat_settings(current.described) | {f"agent.{name}": value for name, value in agent.items()}


def _requested_settings(config: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested settings for a learner over Kafka, where `actors` is the number of actor slots."""
    if config.mode not in ("async", "sync"):
        raise ConfigError(f"mode={config.mode!r}: a cluster trains in mode 'async' or 'sync'")
    flat = flatten(config)
    return {key: flat[key] for key in asked if key in flat and key not in ("runtime", "flow.max_actors")}


def _to_toml(settings: Mapping[str, Any]) -> str:
    """Format flat dotted keys as TOML; strings, numbers, booleans and lists of JSON are also valid TOML."""
    kept = {
        key: value for key, value in settings.items() if value is not None and key not in ("name", "run_dir", "runtime")
    }
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in kept.items())


def _derive_state(before: Status, wanted: int, seen: RoleStatus, *, paused: bool) -> tuple[str, str | None, str | None]:
    if not wanted:
        if before.state == SUCCEEDED or (before.state == PENDING and not seen.there):
            return before.state, before.reason, before.message
        if seen.there:
            return STOPPING, "stop_requested", "its learner makes a checkpoint and goes"
        return STOPPED, "stop_requested", _exit_message(seen)
    if seen.complete:
        return SUCCEEDED, "completed", None
    if seen.ready:
        return (PAUSED, "pause_requested", None) if paused else (RUNNING, None, None)
    return STARTING, "waiting", seen.trouble or "its learner is starting"


def _exit_message(seen: RoleStatus) -> str | None:
    if seen.exit_code is None:
        return "the learner is gone, and how it ended was not seen: its newest checkpoint may be older"
    if seen.exit_code == 0:
        return "the learner ended in good order, with a checkpoint"
    return f"the learner ended with exit code {seen.exit_code}: its newest checkpoint may be older"
