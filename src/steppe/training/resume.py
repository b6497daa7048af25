"""Resume a run that was stopped, failed or was killed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steppe import runtimes
from steppe.core.config import references
from steppe.core.config.run import RunConfig, flatten, unflatten
from steppe.core.config.tunables import tunable_fields, validate_changes
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.transport import COMMANDS, SET
from steppe.core.system.typecheck import typechecked
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.records.selectors import CheckpointSelector, open_run, select_checkpoint
from steppe.training.experiment import Experiment
from steppe.training.result import RunResult
from steppe.training.supervisor import Observer

NEWEST = CheckpointSelector()
COMPLETE_REASONS = ("steps_done", "episodes_done", "target_reached")


def with_set_hyperparameters(config: RunConfig, directory: RunDirectory) -> RunConfig:
    """Return a run's configuration with the hyperparameters that were set since, except those that it refused."""
    commands = [command for _, command in directory.store.read(COMMANDS) if command.get("command") == SET]
    if commands:
        refused = directory.store.refused_commands()
        commands = [command for command in commands if command.get("id") not in refused]
    changes = {f"agent.{key}": value for command in commands for key, value in command["values"].items()}
    return unflatten(flatten(config) | changes) if changes else config


def make_set_command(directory: RunDirectory, config: RunConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command that sets hyperparameters of a run that is about to resume. ConfigError if they are not valid."""
    names = {key.removeprefix("agent."): value for key, value in values.items()}
    others = [key for key in names if "." in key or key in RunConfig.model_fields]
    if others:
        raise ConfigError(
            f"{others[0]} cannot change when a run resumes: hyperparameters of the algorithm can, and steps with --steps"
        )
    changed = validate_changes(config.agent, names, directory.spec)
    live = [name for name in changed if name in tunable_fields(config)]
    command = {"command": SET, "id": uuid.uuid4().hex, "issuer": "resume", "time_s": time.time()}
    return {**command, "values": changed, "live": live}


@typechecked
def resume(
    run: str | Path,
    checkpoint: str | int | None = None,
    *,
    steps: int | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    ray_address: str | None = None,
    kafka: str | None = None,
    observers: Sequence[Observer] = (),
) -> RunResult:
    """Resume a run in its directory from its newest intact checkpoint, and run it to its end.

    `checkpoint` (or RUN@12, RUN@step=400000) resumes from an older one. `steps` is a new limit of environment steps in
    total; `hyperparameters` are changed from there on. `ray_address` is another Ray cluster, and `kafka` other brokers,
    than the run used before.
    """
    directory, selector = open_run(run, checkpoint)
    return resume_directory(
        directory,
        selector=selector,
        steps=steps,
        hyperparameters=hyperparameters,
        ray_address=ray_address,
        kafka=kafka,
        observers=observers,
    )


def resume_directory(
    directory: RunDirectory,
    *,
    selector: CheckpointSelector = NEWEST,
    steps: int | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    ray_address: str | None = None,
    kafka: str | None = None,
    observers: Sequence[Observer] = (),
    commands_after: int | None = None,
) -> RunResult:
    """Resume a run as `resume` does; commands after number `commands_after` are for this attempt."""
    references.stop_if_loading_main()
    config = directory.config()
    runtimes.join(config.runtime)
    directory.acquire()
    try:
        status = directory.store.status()
        addresses = {"ray.address": ray_address, "kafka.address": kafka}
        if any(addresses.values()):
            config = unflatten(flatten(config) | {key: value for key, value in addresses.items() if value is not None})
        if steps is None and status.state == "SUCCEEDED" and status.reason in COMPLETE_REASONS:
            raise UsageError(
                f"the run {directory.id} is complete ({status.reason}): give steps to continue beyond its end"
            )
        number = None if selector == NEWEST else select_checkpoint(directory, selector)
        if hyperparameters:
            now = with_set_hyperparameters(config, directory)
            directory.store.post(COMMANDS, make_set_command(directory, now, hyperparameters))
        config = with_set_hyperparameters(config, directory)
        if steps is not None:
            directory.extend(steps)
            config = config.model_copy(update={"steps": steps})
        if number is not None:
            Checkpoints(directory.checkpoints, run=directory.key).restore_as_newest(number)
        return Experiment(config, directory.sources).resume(directory, observers, commands_after=commands_after)
    finally:
        directory.release()
