"""Every operation on runs, defined once. REST, WebSocket, MCP and the command line only translate.

The service validates requests, reads the stores of runs (repository.py) and leaves their execution to a backend
(backends/base.py). Its database keeps the requests that it accepted, so it continues after a crash and restart.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from steppe.control import models, presenters
from steppe.control.backends.base import Backend, supported
from steppe.control.commands import CommandSender
from steppe.control.database import ControlDatabase, RequestedState
from steppe.control.operations import Record
from steppe.control.pagination import paginate
from steppe.control.repository import RunRepository
from steppe.control.run_requests import Bounds, RequestResolver, available_runtimes
from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.config.run import flatten
from steppe.core.config.tunables import tunable_fields
from steppe.core.contracts.errors import RunNotFound, Unreachable, did_you_mean
from steppe.core.contracts.transport import EVALUATIONS, EVENTS
from steppe.records.checkpoints import Checkpoints
from steppe.records.view import RunView

SCOPES = ("read", "control", "admin")
API = "v1"
_PAGE = 1_000
# Not returned to callers.
_HIDDEN_KEYS = (
    "run_dir",
    *(f"kafka.{name}" for name in ("username", "ca", "certificate", "key", "claims")),
)

Method = TypeVar("Method", bound=Callable[..., Any])


def operation(scope: str) -> Callable[[Method], Method]:
    """Mark a method as an operation that every interface offers, and set the scope that it needs."""

    def mark(method: Method) -> Method:
        method.scope = scope  # type: ignore[attr-defined]
        return method

    return mark


class Service:
    """Operations on runs. Thread-safe. Call `reconcile` about twice a second. `control/factory.py` makes one."""

    def __init__(self, runs: RunRepository, commands: CommandSender, backend: Backend, bounds: Bounds) -> None:
        self.bounds, self.backend, self.commands = bounds, backend, commands
        self._runs = runs
        self._requests = RequestResolver(bounds)

    @property
    def root(self) -> Path:
        """Directory of the runs."""
        return self._runs.root

    @property
    def private(self) -> Path:
        """Directory of the service's own files."""
        return self._runs.private

    @property
    def database(self) -> ControlDatabase:
        """The service's own persistent state."""
        return self._runs.database

    def close(self) -> None:
        """Release resources; runs continue."""
        self.backend.close()
        self._runs.close()

    @operation("read")
    def get_version(self) -> models.Version:
        """Return the version of the service and the runtimes that it has."""
        kafka = self.backend.kafka
        return models.Version(
            version=importlib.metadata.version("steppe"),
            api=API,
            broker="embedded" if kafka is None else "kafka",
            runtimes=available_runtimes(kafka),
        )

    @operation("read")
    def get_health(self) -> models.Health:
        """Return that the service answers."""
        return models.Health(status="ok")

    @operation("read")
    def get_readiness(self) -> models.Health:
        """Return whether runs can be read and started."""
        try:
            self.backend.require_ready()
            self.database.operations(limit=1)
            list(self.root.iterdir())
        except (OSError, Unreachable) as error:
            return models.Health(status="unavailable", detail=str(error))
        return models.Health(status="ok")

    @operation("read")
    def list_environments(self, limit: int | None = None, cursor: str | None = None) -> models.Environments:
        """List the environments that runs can use."""
        page, following = paginate(self._requests.list_environments(), lambda env: env.id, limit, cursor)
        return models.Environments(environments=page, next=following)

    @operation("read")
    def list_algorithms(self, limit: int | None = None, cursor: str | None = None) -> models.Algorithms:
        """List the algorithms with their hyperparameters and ranges."""
        names, following = paginate(list(ALGORITHMS), str, limit, cursor)
        return models.Algorithms(algorithms=[presenters.present_algorithm(name) for name in names], next=following)

    @operation("control")
    def create_run(self, request: models.RunRequest, issuer: str) -> models.RunDetail:
        """Create a run, and start it unless `start` is false."""
        create = supported(self.backend.capabilities.create_run)
        config, sources = self._requests.resolve(request, self.backend.kafka)
        return self.get_run(create(request, config, sources, issuer))

    @operation("read")
    def list_runs(self, limit: int | None = None, cursor: str | None = None) -> models.Runs:
        """List all runs, newest first."""
        requested = self.database.requested_states()
        infos, following = paginate(self._runs.infos(), lambda info: info.path.name, limit, cursor)
        runs = [self._runs.entry(info, requested.get(info.path.name, RequestedState())) for info in infos]
        return models.Runs(runs=runs, next=following)

    @operation("read")
    def get_run(self, run: str) -> models.RunDetail:
        """Return one run with its configuration."""
        directory = self._runs.directory(run)
        requested = self.database.requested_states().get(run, RequestedState())
        entry = self._runs.entry(self._runs.info(directory), requested).model_dump()
        flat = flatten(self.backend.config(directory))
        config = {key: value for key, value in flat.items() if key not in _HIDDEN_KEYS}
        return models.RunDetail(**entry, config=config, sources=directory.sources)

    @operation("control")
    def start_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Start a run, or resume one that was stopped, failed or was lost."""
        return self._present(self.backend.start_run(self._runs.directory(run), issuer, expected))

    @operation("control")
    def pause_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Pause the actors and the learner of a run."""
        pause = supported(self.backend.capabilities.pause_run)
        return self._present(pause(self._runs.directory(run), issuer, expected))

    @operation("control")
    def resume_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Continue a paused run."""
        resume = supported(self.backend.capabilities.resume_run)
        return self._present(resume(self._runs.directory(run), issuer, expected))

    @operation("control")
    def stop_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Stop a run with a checkpoint; a local run that does not stop in time is killed."""
        return self._present(self.backend.stop_run(self._runs.directory(run), issuer, expected))

    @operation("admin")
    def kill_run(self, run: str, issuer: str, expected: int | None = None) -> models.Operation:
        """Kill a run at once, without a checkpoint."""
        kill = supported(self.backend.capabilities.kill_run)
        return self._present(kill(self._runs.directory(run), issuer, expected))

    @operation("admin")
    def delete_run(self, run: str, issuer: str, expected: int | None = None) -> None:
        """Delete a run that has ended, with its checkpoints, curves and logs."""
        delete = supported(self.backend.capabilities.delete_run)
        delete(self._runs.directory(run), expected)

    @operation("read")
    def get_actors(self, run: str) -> models.Actors:
        """Return the desired and observed actors of a run."""
        return self.backend.get_actors(run)

    @operation("control")
    def scale_actors(self, run: str, count: int, issuer: str, expected: int | None = None) -> models.Operation:
        """Change the number of actors while the run continues; what they have collected is learned from."""
        scale = supported(self.backend.capabilities.scale_actors)
        return self._present(scale(self._runs.directory(run), count, issuer, expected))

    @operation("read")
    def get_learner(self, run: str) -> models.LearnerStatus:
        """Return the desired and observed learner of a run."""
        return self.backend.get_learner(run)

    @operation("control")
    def scale_learner(self, run: str, count: int, issuer: str, expected: int | None = None) -> models.Operation:
        """Stop a run with a checkpoint (0), or resume it from there (1)."""
        return (self.start_run if count else self.stop_run)(run, issuer, expected)

    @operation("read")
    def get_hyperparameters(self, run: str) -> models.Hyperparameters:
        """Return the hyperparameters of a run with their ranges, values, and when a change takes effect."""
        config = self.backend.config(self._runs.directory(run))
        values = config.agent.model_dump(mode="json")
        found = presenters.present_hyperparameters(type(config.agent), values, tunable_fields(config))
        return models.Hyperparameters(algo=config.algo, hyperparameters=found)

    @operation("control")
    def set_hyperparameters(
        self, run: str, values: Mapping[str, Any], issuer: str, expected: int | None = None, *, dry_run: bool = False
    ) -> models.Effects:
        """Change hyperparameters: with the next update where the learner supports it, otherwise on restart."""
        directory = self._runs.directory(run)
        with self._runs.lock:
            plan = self.backend.plan_hyperparameters(directory, values)
            before = plan.config.agent.model_dump(mode="json")
            effects = presenters.present_effects(before, plan.changed, plan.live)
            if dry_run:
                return models.Effects(effects=effects, operation=None)
            record = self.backend.set_hyperparameters(directory, plan, issuer, expected)
        return models.Effects(effects=effects, operation=self._present(record))

    @operation("read")
    def get_metrics(
        self, run: str, series: list[str] | None = None, since: int = 0, max_points: int = 500
    ) -> models.Metrics:
        """Return curves after a cursor, each downsampled to its minima and maxima."""
        with self._runs.cached(run).curves() as curves:
            names, cursor = curves.names, curves.cursor
            unknown = sorted(set(series or ()) - set(names))
            if unknown:
                raise RunNotFound(f"{run} has no series {unknown[0][:100]!r}.{did_you_mean(unknown[0], names)}")
            found = [(name, *curves.points(name, since, max_points)) for name in series or names]
        presented = [models.Series(name=name, points=points, total=total) for name, points, total in found]
        return models.Metrics(series=presented, names=names, next=cursor)

    @operation("read")
    def get_logs(self, run: str, source: str | None = None, after: int = 0, max_bytes: int = 65_536) -> models.Logs:
        """Return the lines that a role printed, after a cursor."""
        return self.backend.get_logs(self._runs.directory(run), source, after, max_bytes)

    @operation("read")
    def get_events(self, run: str, after: int = 0, limit: int = 200) -> models.Events:
        """Return the events of a run after a cursor: commands, faults, restarts, checkpoints."""
        store, found = self._runs.directory(run).store, list[models.Event]()
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
        """List the checkpoints of a run."""
        directory = self._runs.directory(run)
        found = Checkpoints(directory.checkpoints, run=directory.key).list()
        page, following = paginate(found, lambda info: f"{info.number}{'-best' if info.best else ''}", limit, cursor)
        return models.CheckpointList(checkpoints=[presenters.present_checkpoint(info) for info in page], next=following)

    @operation("read")
    def list_evaluations(self, run: str, after: int = 0, limit: int = 200) -> models.Evaluations:
        """List the evaluations of a run after a cursor."""
        rows = self._runs.directory(run).store.read(EVALUATIONS, after, limit)
        found = [presenters.present_evaluation(*row) for row in rows]
        return models.Evaluations(evaluations=found, next=rows[-1][0] if rows else after)

    @operation("read")
    def diagnose_run(self, run: str, *, whole_life: bool = False) -> models.RunDiagnosis:
        """Return what limits a run's speed, from shares of time over its last 30 s or, on request, the whole run."""
        with self._runs.view(run) as view:
            return presenters.present_diagnosis(view, whole_life=whole_life)

    @operation("read")
    def list_operations(self, run: str | None = None, limit: int = 100, cursor: str | None = None) -> models.Operations:
        """List pending and finished operations, newest first."""
        if run is not None:
            self._runs.directory(run)
        found = self.database.operations(run, limit=limit + 1, after=cursor)
        page = [self._present(record) for record in found[:limit]]
        return models.Operations(operations=page, next=page[-1].id if len(found) > limit else None)

    @operation("read")
    def get_operation(self, identity: str) -> models.Operation:
        """Return an operation in its current state."""
        record = self.database.operation(identity)
        if record is None:
            raise RunNotFound("there is no operation with that id")
        return self._present(record)

    @operation("admin")
    def get_audit(self, limit: int = 100, cursor: str | None = None) -> models.Audit:
        """Return the audit log: who did what, newest first."""
        rows = self.database.audit_entries(limit + 1, cursor)
        numbers = [row.pop("number") for row in rows]
        entries = [models.AuditEntry(**row) for row in rows[:limit]]
        return models.Audit(entries=entries, next=str(numbers[limit - 1]) if len(rows) > limit else None)

    def run_view(self, run: str) -> AbstractContextManager[RunView]:
        """Return a context manager with the run's current view, which the caller holds exclusively until it exits."""
        return self._runs.view(run)

    def reconcile(self) -> None:
        """Update the states of runs, finish pending operations, and kill local runs that did not stop in time."""
        if self.backend.reconcile():
            for record in self.database.operations(pending=True, limit=1_000):
                self.backend.refresh(record)

    def _present(self, record: Record) -> models.Operation:
        """Return an operation in its current state."""
        return models.Operation(**(self.backend.refresh(record) if record["state"] == "pending" else record))


def operations() -> dict[str, str]:
    """Return every operation's name and the scope that it needs."""
    found = {name: getattr(method, "scope", None) for name, method in vars(Service).items()}
    return {name: scope for name, scope in found.items() if scope is not None}
