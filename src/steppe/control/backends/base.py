"""Contract of a backend, which executes the runs of a service: local processes, a cluster, or external processes.

What every backend does is a method of `Backend`. What only some can do is a capability, which a backend declares: the
service never asks which backend it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from steppe.control import models
from steppe.control.operations import Record
from steppe.core.config.run import KafkaConfig, RunConfig
from steppe.core.contracts.errors import UsageError
from steppe.records.run_directory import RunDirectory

Change = Callable[[RunDirectory, str, int | None], Record]  # run, issuer, expected generation → the operation's record
Create = Callable[[models.RunRequest, RunConfig, dict[str, str], str], str]  # → the run's id
Delete = Callable[[RunDirectory, int | None], None]
Scale = Callable[[RunDirectory, int, str, int | None], Record]
Ability = TypeVar("Ability")


@dataclass(frozen=True)
class Unsupported:
    """Declares that a backend lacks an operation: why, and what to do instead."""

    reason: str


@dataclass(frozen=True)
class BackendCapabilities:
    """The optional operations of a backend, each as a function or as Unsupported, and its use of Kafka."""

    create_run: Create | Unsupported
    pause_run: Change | Unsupported
    resume_run: Change | Unsupported
    kill_run: Change | Unsupported
    delete_run: Delete | Unsupported
    scale_actors: Scale | Unsupported
    receives_start_commands: bool = False  # starts runs by commands over Kafka (kafka_listener.py)
    publishes_commands: bool = True  # False: all of its commands are sent over Kafka in any case
    keyed_messages: bool = True  # Kafka messages of a run carry its name and key; False: its name only


def supported(ability: Ability | Unsupported) -> Ability:
    """Return the function of a capability; raises UsageError with the reason if the backend lacks it."""
    if isinstance(ability, Unsupported):
        raise UsageError(ability.reason)
    return ability


@dataclass(frozen=True)
class HyperparameterPlan:
    """A validated change of hyperparameters, and which of them take effect with the next update."""

    config: RunConfig
    changed: dict[str, Any]
    live: tuple[str, ...]


class Backend(Protocol):
    """Executes runs. Blocking and thread-safe.

    Methods that change a run take its directory, the issuer and the generation that the caller expects, if any. They
    return the record of the operation, raise Stale if the run is at another generation, and Conflict if its state does
    not allow the change.
    """

    capabilities: BackendCapabilities
    kafka: KafkaConfig | None  # brokers of the runs that are created here

    def close(self) -> None:
        """Release resources; runs continue."""

    def require_ready(self) -> None:
        """Raise Unreachable if what executes the runs does not answer."""

    def config(self, directory: RunDirectory) -> RunConfig:
        """Return the current configuration of a run."""

    def start_run(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        """Start a run, or resume it from its newest checkpoint."""

    def stop_run(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        """Stop a run with a checkpoint."""

    def get_actors(self, run: str) -> models.Actors:
        """Return the desired and observed actors."""

    def get_learner(self, run: str) -> models.LearnerStatus:
        """Return the desired and observed learner."""

    def plan_hyperparameters(self, directory: RunDirectory, values: Mapping[str, Any]) -> HyperparameterPlan:
        """Validate new values, without any effect."""

    def set_hyperparameters(
        self, directory: RunDirectory, plan: HyperparameterPlan, issuer: str, expected: int | None
    ) -> Record:
        """Carry out a plan. The caller holds the repository's lock since it was made."""

    def get_logs(self, directory: RunDirectory, source: str | None, after: int, max_bytes: int) -> models.Logs:
        """Return lines that a role printed, after a cursor."""

    def refresh(self, record: Record) -> Record:
        """Return an operation's record in its current state; a changed one is stored in the database."""

    def reconcile(self) -> bool:
        """Update the states of runs from what executes them; return whether operations may have finished."""
