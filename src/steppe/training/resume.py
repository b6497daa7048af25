"""Resume a run that was stopped, failed or was killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steppe import runtimes
from steppe.core.config import references
from steppe.core.config.run import RunConfig, flatten, unflatten
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.transport import COMMANDS, SET
from steppe.core.system.typecheck import typechecked
from steppe.records.run_directory import RunDirectory
from steppe.training.experiment import Experiment
from steppe.training.result import RunResult
from steppe.training.supervisor import Observer

COMPLETE_REASONS = ("steps_done", "episodes_done", "target_reached")


def with_set_hyperparameters(config: RunConfig, directory: RunDirectory) -> RunConfig:
    """Return a run's configuration with the hyperparameters that were set since, except those that it refused."""
    commands = [command for _, command in directory.store.read(COMMANDS) if command.get("command") == SET]
    if commands:
        refused = directory.store.refused_commands()
        commands = [command for command in commands if command.get("id") not in refused]
    changes = {f"agent.{key}": value for command in commands for key, value in command["values"].items()}
    return unflatten(flatten(config) | changes) if changes else config


@typechecked
def resume(
    run: str | Path,
    *,
    steps: int | None = None,
    ray_address: str | None = None,
    kafka: str | None = None,
    observers: Sequence[Observer] = (),
) -> RunResult:
    """Resume a run in its directory from its newest intact checkpoint, and run it to its end.

    `steps` is a new limit of environment steps in total; `ray_address` is another Ray cluster, and `kafka` other
    brokers, than the run used before.
    """
    return resume_directory(
        RunDirectory.open(run), steps=steps, ray_address=ray_address, kafka=kafka, observers=observers
    )


def resume_directory(
    directory: RunDirectory,
    *,
    steps: int | None = None,
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
        config = with_set_hyperparameters(config, directory)
        if steps is not None:
            config = config.model_copy(update={"steps": steps})
        elif status.state == "SUCCEEDED" and status.reason in COMPLETE_REASONS:
            raise UsageError(
                f"the run {directory.id} is complete ({status.reason}): give steps to continue beyond its end"
            )
        return Experiment(config, directory.sources).resume(directory, observers, commands_after=commands_after)
    finally:
        directory.release()
