"""What backends derive from the store of a run: its learner, plans for its hyperparameters, the outcome of operations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from steppe.control import models
from steppe.control.backends.base import HyperparameterPlan
from steppe.control.operations import Record, refresh_operation
from steppe.control.repository import RunRepository
from steppe.core.config.tunables import needs_spec, tunable_fields, validate_changes
from steppe.core.contracts.errors import Conflict, RunNotFound
from steppe.records.run_directory import RunDirectory
from steppe.records.store import NO_OWNER, PAUSED, RUNNING, SUCCEEDED
from steppe.records.view import ENDED
from steppe.runtimes.memory_need import require_memory, smallest_env_spec


def present_learner(runs: RunRepository, run: str) -> models.LearnerStatus:
    """Return the desired and observed learner of a run, from its store."""
    desired, _ = runs.database.desired_state(run)
    with runs.view(run) as view:
        wanted = int(desired != "stopped" and view.state not in ENDED and view.status.pid != NO_OWNER)
        ready = int(view.state in (RUNNING, PAUSED))
        return models.LearnerStatus(desired=wanted, ready=ready, version=view.version, updates=view.updates)


def plan_hyperparameters(runs: RunRepository, directory: RunDirectory, values: Mapping[str, Any]) -> HyperparameterPlan:
    """Validate new values against the run's environment, the machine's memory and the run's state."""
    config = runs.config(directory)
    changed = validate_changes(config.agent, values, directory.spec)
    requested = config.model_copy(update={"agent": config.agent.model_copy(update=changed)})
    require_memory(requested, smallest_env_spec(requested))
    status = directory.store.status()
    if status.state == SUCCEEDED:
        raise Conflict(f"{directory.path.name} is complete: its hyperparameters have no effect any more")
    doubtful = needs_spec(config.agent, changed)
    if doubtful and directory.spec is None and not status.live:  # a live learner validates them itself
        raise Conflict(
            f"{', '.join(doubtful)}: only some environments support it, and {directory.path.name} has not started yet: retry "
            "when it has, or create a new run with that value"
        )
    return HyperparameterPlan(config, changed, tuple(tunable_fields(config)) if status.live else ())


def refresh_from_store(runs: RunRepository, record: Record) -> Record:
    """Return an operation's record in the state that the run's store shows. The caller holds the lock."""
    try:
        changed = refresh_operation(record, runs.directory(record["run"]))
    except RunNotFound:
        changed = record | {"state": "failed", "message": "the run was deleted", "finished_s": time.time()}
    if changed != record:
        runs.database.save_operation(changed)
    return changed
