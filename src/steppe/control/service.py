"""Every operation on runs, defined once. REST, WebSocket, MCP and the command line only translate.

Runs are processes with their own sessions and report everything in their own stores. The service reads those stores,
posts commands there, and keeps only the requests that it accepted in its database. After a crash and restart it
continues where it was. With brokers, runs use Kafka: their supervisors keep the stores equal to the topics, so nothing
differs here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from steppe.control import models, presenters, process_host
from steppe.control.database import ControlDatabase, RequestedState, new_operation
from steppe.control.operations import DEADLINE_S, refresh_operation
from steppe.control.pagination import paginate
from steppe.control.run_cache import CachedRun, RunCache
from steppe.core.algorithms import ALGORITHMS
from steppe.core.config.run import KafkaConfig, RunConfig, flatten, resolve_config
from steppe.core.config.tunables import tunable_fields, validate_changes
from steppe.core.contracts.errors import (
    ConfigError,
    Conflict,
    DamagedFile,
    MissingExtra,
    RunNotFound,
    Unreachable,
    UsageError,
    did_you_mean,
)
from steppe.core.contracts.transport import COMMANDS, EVALUATIONS, EVENTS, SCALE, SET
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RECORD, RunDirectory, RunInfo, run_paths, runs_root
from steppe.records.store import NO_OWNER, PAUSED, PENDING, RUNNING, STOPPED, SUCCEEDED
from steppe.records.view import ENDED, RunView
from steppe.runtimes.memory_need import require_memory, smallest_env_spec
from steppe.training.resume import COMPLETE_REASONS, with_set_hyperparameters
from steppe.transport.kafka.client import KafkaConnection

SCOPES = ("read", "control", "admin")
API = "v1"
PRIVATE = ".control"  # in the directory of the runs
STOP_S = 30.0  # time for a run to stop in order before it is killed
BROKER_TIMEOUT_S = 2.0  # time for brokers to answer a probe
KAFKA_ISSUER_PREFIX = "kafka:"  # prefix of issuers whose command came over Kafka
_PAGE = 1_000
# Not returned to callers.
_HIDDEN_KEYS = (
    "run_dir",
    *(f"kafka.{name}" for name in ("username", "ca", "certificate", "key", "claims")),
)

Method = TypeVar("Method", bound=Callable[..., Any])


class Publisher(Protocol):
    """Publishes the commands that runs receive (control/backends/publisher.py)."""

    def publish(self, directory: RunDirectory, command: Mapping[str, Any]) -> None:
        """Publish a command before it is executed; raises Unreachable if no broker acknowledges it."""

    def refuse(self, directory: RunDirectory, command: Mapping[str, Any], reason: str) -> None:
        """Publish that the command could not be executed."""


@dataclass(frozen=True)
class Bounds:
    """Limits of what callers may request from this machine."""

    actors: int = 16
    live_runs: int = 8
    envs: int = 4_096
    stop_s: float = STOP_S
    modules: tuple[str, ...] = ()  # `module:Id` environments that are allowed in addition to the registered ones


def operation(scope: str) -> Callable[[Method], Method]:
    """Mark a method as an operation that every interface offers, and set the scope that it needs."""

    def mark(method: Method) -> Method:
        method.scope = scope  # type: ignore[attr-defined]
        return method

    return mark


class Service:
    """Operations on the runs of this machine. Thread-safe. Call `reconcile` about twice a second."""

    def __init__(self, bounds: Bounds | None = None, kafka: KafkaConfig | None = None) -> None:
        """With `kafka`, runs use those brokers; raises Unreachable if none answers."""
        self.bounds, self.kafka = bounds or Bounds(), kafka
        if kafka is not None:
            KafkaConnection(kafka, "").fetch_metadata()
        self.root = runs_root().resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self.ledger = ControlDatabase(self.private)
        self.publisher: Publisher | None = None
        self._lock = threading.RLock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._known = RunCache()
        self._ids: frozenset[str] = frozenset()
        self._lines: dict[str, tuple[RunInfo, RequestedState, models.Run]] = {}

    @property
    def private(self) -> Path:
        """Directory of the service's own files."""
        return self.root / PRIVATE

    def close(self) -> None:
        """Release resources; runs continue."""
        self.ledger.close()
        for child in self._children.values():
            child.returncode = child.poll() or 0  # no ResourceWarning for runs that continue without us

    @operation("read")
    def get_version(self) -> models.Version:
        """Which version this is."""
        return models.Version(
            version=importlib.metadata.version("steppe"),
            api=API,
            broker="embedded" if self.kafka is None else "kafka",
            runtimes=self._runtimes(),
        )

    @operation("read")
    def get_health(self) -> models.Health:
        """That the service answers."""
        return models.Health(status="ok")

    @operation("read")
    def get_readiness(self) -> models.Health:
        """Whether runs can be read and started."""
        try:
            self.ledger.operations(limit=1)
            list(self.root.iterdir())
            if self.kafka is not None:
                KafkaConnection(self.kafka, "").fetch_metadata(BROKER_TIMEOUT_S)
        except (OSError, Unreachable) as error:
            return models.Health(status="unavailable", detail=str(error))
        return models.Health(status="ok")

    @operation("read")
    def list_environments(self, limit: int | None = None, cursor: str | None = None) -> models.Environments:
        """What can be learned here."""
        from steppe.envs.catalog import list_environments

        self._ids = frozenset(row["id"] for row in list_environments(every=True))
        known = [models.Environment(**row) for row in list_environments()]
        extra = {"max_episode_steps": None, "solved_at": None, "native_vector": False, "needs": None}
        allowed = [models.Environment(id=name, **extra) for name in self.bounds.modules]
        page, following = paginate(known + allowed, lambda one: one.id, limit, cursor)
        return models.Environments(environments=page, next=following)

    @operation("read")
    def list_algorithms(self, limit: int | None = None, cursor: str | None = None) -> models.Algorithms:
        """What can learn, with hyperparameters and their ranges."""
        names, following = paginate(list(ALGORITHMS), str, limit, cursor)
        return models.Algorithms(algorithms=[presenters.present_algorithm(name) for name in names], next=following)

    @operation("control")
    def create_run(self, request: models.RunRequest, issuer: str) -> models.RunDetail:
        """Make a run, and start it unless asked not to."""
        config, sources = self._resolve_request(request)
        with self._lock:
            if request.start:
                self._require_room()
            directory = RunDirectory.create(config, sources)
            directory.store.set_status(PENDING, "created", "waits to be started", owner=NO_OWNER)
            directory.release()
            if request.start:
                self._start_new(directory, issuer)
        return self.get_run(directory.path.name)

    @operation("read")
    def list_runs(self, limit: int | None = None, cursor: str | None = None) -> models.Runs:
        """Every run, newest first."""
        asked = self.ledger.asked()
        infos, following = paginate(self._infos(), lambda info: info.path.name, limit, cursor)
        runs = [self._line(info, asked.get(info.path.name, RequestedState())) for info in infos]
        return models.Runs(runs=runs, next=following)

    @operation("read")
    def get_run(self, run: str) -> models.RunDetail:
        """One run with its configuration."""
        directory = self._directory(run)
        asked = self.ledger.asked().get(run, RequestedState())
        told = self._line(self._known.info(directory.path), asked).model_dump()
        config = {key: value for key, value in flatten(self._config(directory)).items() if key not in _HIDDEN_KEYS}
        return models.RunDetail(**told, config=config, sources=directory.sources)

    @operation("control")
    def start_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Start a run that waits, or go on with one that was stopped, failed or was lost."""
        directory = self._directory(run)
        with self._lock:
            status = directory.store.status()
            if status.live or (status.state == PENDING and status.pid != NO_OWNER):
                raise Conflict(f"{run} is {status.state} already")
            if status.state == SUCCEEDED and status.reason in COMPLETE_REASONS:
                raise Conflict(f"{run} is complete ({status.reason}): there is nothing to go on with")
            self._require_room()
            return self._start(directory, issuer, expected)

    @operation("control")
    def pause_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Let actors and learner rest."""
        return self._command(run, "pause", issuer, expected, desired="paused", allowed_states=(RUNNING,))

    @operation("control")
    def resume_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Let a paused run go on."""
        return self._command(run, "resume", issuer, expected, desired="running", allowed_states=(PAUSED,))

    @operation("control")
    def stop_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Stop a run with a checkpoint; one that does not stop in time is killed."""
        directory = self._directory(run)
        with self._lock:
            status = directory.store.status()
            if status.state == PENDING and status.pid == NO_OWNER:
                record = new_operation("stop", run, issuer, deadline_s=self.bounds.stop_s)
                with self._published(directory, record, expected):
                    self.ledger.change(run, "stopped", expected)
                    directory.store.set_status(STOPPED, "stop_requested", f"stopped by {issuer} before it was started")
                    self.ledger.save_operation(record)
                return self._refreshed_operation(record)
        return self._command(
            run, "stop", issuer, expected, desired="stopped", allowed_states=None, deadline_s=self.bounds.stop_s
        )

    @operation("admin")
    def kill_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """End a run at once, without a checkpoint."""
        directory = self._directory(run)
        with self._lock:
            status = directory.store.status()
            if status.state in ENDED or status.pid == NO_OWNER:
                raise Conflict(f"{run} is {status.state}: there is nothing to kill")
            record = new_operation("kill", run, issuer)
            with self._published(directory, record, expected):
                self.ledger.change(run, "stopped", expected)
                process_host.kill_run_processes(status)
                self.ledger.save_operation(record)
            return self._refreshed_operation(record)

    @operation("admin")
    def delete_run(self, run: str, issuer: str, expected: int | None = None) -> None:
        """Remove a run that has ended, with everything it left."""
        directory = self._directory(run)
        with self._lock:
            status = directory.store.status()
            if status.state not in ENDED and status.pid != NO_OWNER:
                raise Conflict(f"{run} is {status.state}: stop it before deleting it")
            directory.acquire()
            try:
                self.ledger.change(run, None, expected)
                doomed = self.private / f"deleted-{uuid.uuid4().hex}"
                directory.path.rename(doomed)
            finally:
                directory.release()
            self._known.forget(run)
            self._lines.pop(run, None)
            self.ledger.delete_run_records(run)
            shutil.rmtree(doomed, ignore_errors=True)

    @operation("read")
    def get_actors(self, run: str) -> models.Actors:
        """Actors wanted and seen."""
        with self._cached_run(run).view() as view:
            return presenters.present_actors(view)

    @operation("control")
    def scale_actors(self, run: str, count: int, issuer: str, expected: int | None = None) -> models.Operation:
        """Have so many actors while the run goes on; what they have handed over is learned from."""
        room = presenters.max_scalable_actors(self._config(self._directory(run)))
        if not room:
            raise UsageError("the number of actors can change in mode 'async' on runtimes 'processes' and 'kafka' only")
        if not 0 <= count <= min(room, self.bounds.actors):
            raise UsageError(f"actors={count}: this run has room for 0 to {min(room, self.bounds.actors)}")
        return self._command(
            run, SCALE, issuer, expected, allowed_states=(RUNNING, PAUSED), actors=count, deadline_s=180.0
        )

    @operation("read")
    def get_learner(self, run: str) -> models.LearnerStatus:
        """The learner wanted and seen."""
        desired, _ = self.ledger.desired_state(run)
        with self._cached_run(run).view() as view:
            ready = view.state in (RUNNING, PAUSED)
            wanted = int(desired != "stopped" and view.state not in ENDED and view.status.pid != NO_OWNER)
            return models.LearnerStatus(desired=wanted, ready=int(ready), version=view.version, updates=view.updates)

    @operation("control")
    def scale_learner(self, run: str, count: int, issuer: str, expected: int | None = None) -> models.Operation:
        """0: stop the run with a checkpoint. 1: go on from there."""
        return (self.start_run if count else self.stop_run)(run, issuer, expected)

    @operation("read")
    def get_hyperparameters(self, run: str) -> models.Hyperparameters:
        """The algorithm's settings with ranges, values, and when a change takes effect."""
        config = self._config(self._directory(run))
        values = config.agent.model_dump(mode="json")
        found = presenters.present_hyperparameters(type(config.agent), values, tunable_fields(config))
        return models.Hyperparameters(algo=config.algo, hyperparameters=found)

    @operation("control")
    def set_hyperparameters(
        self, run: str, values: Mapping[str, Any], issuer: str, expected: int | None = None, *, dry_run: bool = False
    ) -> models.Effects:
        """Change settings: with the next update where the learner can, otherwise on restart."""
        directory = self._directory(run)
        with self._lock:
            config = self._config(directory)
            changed = validate_changes(config.agent, values, directory.spec)
            asked = config.model_copy(update={"agent": config.agent.model_copy(update=changed)})
            require_memory(asked, smallest_env_spec(asked))
            status = directory.store.status()
            if status.state == SUCCEEDED:
                raise Conflict(f"{run} is complete: its hyperparameters have no effect any more")
            live = tunable_fields(config) if status.live else ()
            effects = presenters.present_effects(config.agent.model_dump(mode="json"), changed, live)
            if dry_run:
                return models.Effects(effects=effects, operation=None)
            now = [name for name in changed if name in live]
            done = self._command(run, SET, issuer, expected, values=changed, live=now)
        return models.Effects(effects=effects, operation=done)

    @operation("read")
    def get_metrics(
        self, run: str, series: list[str] | None = None, since: int = 0, max_points: int = 500
    ) -> models.Metrics:
        """Curves after a cursor, each downsampled to its least and greatest values."""
        with self._cached_run(run).curves() as curves:
            names, cursor = curves.names, curves.cursor
            unknown = sorted(set(series or ()) - set(names))
            if unknown:
                raise RunNotFound(f"{run} has no series {unknown[0][:100]!r}.{did_you_mean(unknown[0], names)}")
            found = [(name, *curves.points(name, since, max_points)) for name in series or names]
        told = [models.Series(name=name, points=points, total=total) for name, points, total in found]
        return models.Metrics(series=told, names=names, next=cursor)

    @operation("read")
    def get_logs(self, run: str, source: str | None = None, after: int = 0, max_bytes: int = 65_536) -> models.Logs:
        """Lines that a role printed, after a cursor."""
        logs = self._directory(run).path / "logs"
        sources = process_host.log_sources(logs)
        source = source or (
            process_host.SUPERVISOR_LOG if process_host.SUPERVISOR_LOG in sources else next(iter(sources), None)
        )
        if source is None:
            return models.Logs(source=None, sources=[], lines=[], next=0)
        if source not in sources:
            raise RunNotFound(f"{run} has no log of that name; it has: {', '.join(sources) or 'none'}")
        data = process_host.read_log(logs / f"{source}.log", after, max_bytes)
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == max_bytes else b"")
        lines = whole.decode(errors="replace").splitlines()
        return models.Logs(source=source, sources=sources, lines=lines, next=after + len(whole))

    @operation("read")
    def get_events(self, run: str, after: int = 0, limit: int = 200) -> models.Events:
        """What happened to the run, after a cursor: commands, faults, restarts, checkpoints."""
        store, found = self._directory(run).store, list[models.Event]()
        while len(found) < limit and (page := store.read(EVENTS, after, _PAGE)):  # spans are omitted: page past them
            for number, record in page:
                after = number
                if record.get("kind") != "span":
                    found.append(presenters.present_event(number, record))
                if len(found) == limit:
                    break
        return models.Events(events=found, next=after)

    @operation("read")
    def list_checkpoints(self, run: str, limit: int | None = None, cursor: str | None = None) -> models.CheckpointList:
        """What can be gone on from."""
        directory = self._directory(run)
        found = Checkpoints(directory.checkpoints, run=directory.key).list()
        page, following = paginate(found, lambda info: f"{info.number}{'-best' if info.best else ''}", limit, cursor)
        return models.CheckpointList(checkpoints=[presenters.present_checkpoint(info) for info in page], next=following)

    @operation("read")
    def list_evaluations(self, run: str, after: int = 0, limit: int = 200) -> models.Evaluations:
        """How the weights were judged, after a cursor."""
        rows = self._directory(run).store.read(EVALUATIONS, after, limit)
        found = [presenters.present_evaluation(*row) for row in rows]
        return models.Evaluations(evaluations=found, next=rows[-1][0] if rows else after)

    @operation("read")
    def diagnose_run(self, run: str, *, whole_life: bool = False) -> models.Finding:
        """What holds the run back, from shares of time measured over its last 30 s or, on request, its whole life."""
        with self._cached_run(run).view() as view:
            return presenters.present_diagnosis(view, whole_life=whole_life)

    @operation("read")
    def list_operations(self, run: str | None = None, limit: int = 100, cursor: str | None = None) -> models.Operations:
        """Changes under way and finished ones, newest first."""
        if run is not None:
            self._directory(run)
        found = self.ledger.operations(run, limit=limit + 1, after=cursor)
        page = [self._refreshed_operation(record) for record in found[:limit]]
        return models.Operations(operations=page, next=page[-1].id if len(found) > limit else None)

    @operation("read")
    def get_operation(self, identity: str) -> models.Operation:
        """What has become of a change."""
        record = self.ledger.operation(identity)
        if record is None:
            raise RunNotFound("there is no operation of that id")
        return self._refreshed_operation(record)

    @operation("admin")
    def get_audit(self, limit: int = 100, cursor: str | None = None) -> models.Audit:
        """Who did what, newest first."""
        rows = self.ledger.audit_entries(limit + 1, cursor)
        numbers = [row.pop("number") for row in rows]
        entries = [models.AuditEntry(**row) for row in rows[:limit]]
        return models.Audit(entries=entries, next=str(numbers[limit - 1]) if len(rows) > limit else None)

    def run_view(self, run: str) -> AbstractContextManager[RunView]:
        """Return a context manager with the run's current view, which the caller holds exclusively until it exits."""
        return self._cached_run(run).view()

    def reconcile(self) -> None:
        """Finish pending operations, kill runs that did not stop in time, and reap ended processes."""
        for record in self.ledger.operations(pending=True, limit=1_000):
            self._refreshed_operation(record)
        with self._lock:
            for run, child in list(self._children.items()):
                if child.poll() is not None:
                    del self._children[run]

    def _start(self, directory: RunDirectory, issuer: str, expected: int | None) -> models.Operation:
        run = directory.path.name
        record = new_operation("start", run, issuer, deadline_s=180.0)
        with self._published(directory, record, expected):
            self.ledger.change(run, "running", expected)
            self._children[run] = process_host.start_run_process(directory, self.kafka)
            self.ledger.save_operation(record)
        return self._refreshed_operation(record)

    def _start_new(self, directory: RunDirectory, issuer: str) -> None:
        """Start a run that was just created; remove it if the start command cannot be published."""
        try:
            self._start(directory, issuer, None)
        except Unreachable:
            directory.store.close()
            shutil.rmtree(directory.path)
            raise

    @contextlib.contextmanager
    def _published(
        self, directory: RunDirectory, record: Mapping[str, Any], expected: int | None
    ) -> Iterator[dict[str, Any]]:
        """Yield the command of an operation, which the caller executes inside; with a publisher, publish it first.

        Raises Unreachable or Stale, with nothing changed, if it cannot be published or expects another generation.
        """
        command = to_command(record)
        known = record["issuer"].startswith(KAFKA_ISSUER_PREFIX)
        if self.publisher is None or known or directory.config().runtime != "kafka":
            yield command
            return
        self.ledger.require(record["run"], expected)
        self.publisher.publish(directory, command)
        try:
            yield command
        except Exception as error:
            self.publisher.refuse(directory, command, str(error))
            raise

    def _command(
        self,
        run: str,
        word: str,
        issuer: str,
        expected: int | None,
        *,
        desired: str | None = None,
        allowed_states: tuple[str, ...] | None = None,
        deadline_s: float = DEADLINE_S,
        **values: Any,
    ) -> models.Operation:
        """Post a command to a run in one of `allowed_states`; with None, to any run that has not ended."""
        directory = self._directory(run)
        with self._lock:
            status = directory.store.status()
            wrong = status.state not in allowed_states if allowed_states else status.state in ENDED and word != SET
            if wrong:
                why = f" ({status.reason})" if status.reason else ""
                raise Conflict(f"{run} is {status.state}{why}: it cannot be asked to {word} now")
            record = new_operation(word, run, issuer, deadline_s=deadline_s, **values)
            with self._sent(directory, record, expected) as command:
                self.ledger.change(run, desired, expected)
                self.ledger.save_operation(record)  # before any process can execute it
                record["details"]["number"] = directory.store.post(COMMANDS, command)
                self.ledger.save_operation(record)
            return self._refreshed_operation(record)

    def _sent(
        self, directory: RunDirectory, record: Mapping[str, Any], expected: int | None
    ) -> AbstractContextManager[dict[str, Any]]:
        """Yield the command of an operation, which the caller posts to the run's store inside; see `_published`."""
        return self._published(directory, record, expected)

    def _refreshed_operation(self, record: dict[str, Any]) -> models.Operation:
        """Return an operation in its current state."""
        if record["state"] == "pending":
            with self._lock:
                child = self._children.get(record["run"])
                if child is not None:
                    child.poll()  # reap it: a zombie would be taken for a running process
                try:
                    changed = refresh_operation(record, self._directory(record["run"]))
                except RunNotFound:
                    changed = record | {"state": "failed", "message": "the run is gone", "finished_s": time.time()}
                if changed != record:
                    self.ledger.save_operation(changed)
                record = changed
        return models.Operation(**record)

    def _resolve_request(self, request: models.RunRequest) -> tuple[RunConfig, dict[str, str]]:
        settings = models.to_settings(request)
        if request.env not in self._ids | set(self.bounds.modules):
            self.list_environments()
        if request.env not in self._ids | set(self.bounds.modules):
            raise ConfigError(f"env={request.env!r} is not in the list of environments")
        if settings.get("algo", "ppo") not in ALGORITHMS:
            raise ConfigError(f"algo={settings['algo']!r} is not in the list of algorithms")
        if settings.get("agent.network", "auto") not in models.ALLOWED_NETWORKS:
            raise ConfigError(f"agent.network must be one of {', '.join(models.ALLOWED_NETWORKS)}")
        for key, most in (
            ("actors", self.bounds.actors),
            ("flow.max_actors", self.bounds.actors),
            ("envs", self.bounds.envs),
        ):
            if settings.get(key, 0) > most:
                raise ConfigError(f"{key}={settings[key]}: at most {most} here")
        if settings.get("environment.kwargs"):
            from steppe.envs.arguments import require_env_kwargs

            require_env_kwargs(request.env, settings["environment.kwargs"])
        if settings.get("runtime") not in (None, "kafka", *self._runtimes()):
            raise ConfigError(
                f"runtime={settings['runtime']!r} is not installed here; there are: {', '.join(self._runtimes())}"
            )
        carried = self._carried(settings)
        if settings.get("mode") == "async" and settings.get("runtime") != "inline":
            settings.setdefault("flow.max_actors", self.bounds.actors)
        resolved = resolve_config(("service", carried), ("request", settings))
        require_memory(resolved.config, smallest_env_spec(resolved.config))
        return resolved.config, resolved.sources

    def _runtimes(self) -> list[str]:
        """Return the runtimes that are available here: installed ones, and kafka if there are brokers."""
        found = ["inline", "processes"]
        if importlib.util.find_spec("mpi4py") is not None and _has_mpiexec():
            found.append("mpi")
        if importlib.util.find_spec("ray") is not None:
            found.append("ray")
        return [*found, "kafka"] if self.kafka is not None else found

    def _carried(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that the service decides: the default runtime, and the brokers' connection settings."""
        runtime = settings.get("runtime")
        if (
            runtime is None
            and self.kafka is not None
            and resolve_config(("request", settings)).config.mode != "workers"
        ):
            runtime = "kafka"  # not for mode workers, which shares memory
        if runtime != "kafka":
            return {}
        if self.kafka is None:
            raise ConfigError(
                "runtime='kafka' needs brokers, which this service has not: steppe serve --kafka HOST:PORT"
            )
        brokers = self.kafka.model_dump(mode="json", exclude_unset=True)
        return {"runtime": runtime, **{f"kafka.{name}": value for name, value in brokers.items()}}

    def _require_room(self) -> None:
        live = sum(info.status.live for info in self._infos())
        if live >= self.bounds.live_runs:
            raise Conflict(f"{live} runs are under way, as many as are allowed here: stop one first")

    def _directory(self, run: str) -> RunDirectory:
        return RunDirectory(self._path(run))

    def _cached_run(self, run: str) -> CachedRun:
        return self._known.of(self._path(run))

    def _path(self, run: str) -> Path:
        path = self.root / run
        if not self._is_run(path):
            raise RunNotFound("there is no run of that id")
        return path

    def _is_run(self, path: Path) -> bool:
        """Return whether the path is a run directly under the root, with a safe name and no symbolic link."""
        named = re.fullmatch(models.RUN_ID, path.name) is not None and path.parent == self.root
        return named and not os.path.islink(path) and os.path.exists(f"{path}/{RECORD}")

    def _config(self, directory: RunDirectory) -> RunConfig:
        return with_set_hyperparameters(directory.config(), directory)

    def _infos(self) -> list[RunInfo]:
        found = [self._known.info(path) for path in run_paths(self.root) if self._is_run(path)]
        return sorted(found, key=lambda info: info.created_s, reverse=True)

    def _line(self, info: RunInfo, asked: RequestedState) -> models.Run:
        """Return one entry of the run list, from the view of a run that is live or ended without a summary."""
        if not info.damage and (info.summary is None or info.status.live):
            with contextlib.suppress(DamagedFile, RunNotFound), self._known.of(info.path).view() as view:
                return presenters.present_run(info, view, asked)
        before = self._lines.get(info.path.name)
        if before is None or before[0] is not info or before[1] != asked:  # reuse an unchanged entry
            before = self._lines[info.path.name] = (info, asked, presenters.present_run(info, None, asked))
        return before[2]


def _has_mpiexec() -> bool:
    from steppe.runtimes.mpi.launch import find_mpiexec

    try:
        find_mpiexec()
    except MissingExtra:
        return False
    return True


def to_command(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command of an operation; it expires when the operation would time out."""
    details = record["details"]
    expires_s = record["created_s"] + details.get("deadline_s", DEADLINE_S)
    about = {"command": record["kind"], "id": record["id"], "issuer": record["issuer"], "time_s": record["created_s"]}
    values = {name: details[name] for name in ("actors", "values", "live") if name in details}
    return {**about, "expires_s": expires_s, **values}


def operations() -> dict[str, str]:
    """Return every operation's name and the scope that it needs."""
    found = {name: getattr(method, "scope", None) for name, method in vars(Service).items()}
    return {name: scope for name, scope in found.items() if scope is not None}
