"""Record an accepted request as an operation, and send its command to the run.

A run reads commands from its store. With brokers, commands also are published on Kafka, before they are executed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from steppe.control.database import new_operation
from steppe.control.operations import DEADLINE_S, Record
from steppe.control.repository import RunRepository
from steppe.core.config.run import KafkaConfig
from steppe.core.config.runtime_table import capabilities_of
from steppe.core.contracts.errors import Conflict
from steppe.core.contracts.transport import COMMANDS, SET
from steppe.records.run_directory import RunDirectory
from steppe.records.store import PAUSED, RUNNING
from steppe.records.view import ENDED
from steppe.transport.kafka.client import KafkaConnection

BROKER_TIMEOUT_S = 2.0  # time for brokers to answer a probe
KAFKA_ISSUER_PREFIX = "kafka:"  # prefix of issuers whose command came over Kafka


class Publisher(Protocol):
    """Publishes the commands that runs receive (control/backends/publisher.py)."""

    def publish(self, directory: RunDirectory, command: Mapping[str, Any]) -> None:
        """Publish a command before it is executed; raises Unreachable if no broker acknowledges it."""

    def refuse(self, directory: RunDirectory, command: Mapping[str, Any], reason: str) -> None:
        """Publish that the command could not be executed."""


class CommandSender:
    """Sends commands to the runs of a repository. Thread-safe."""

    def __init__(self, runs: RunRepository, mirrored_to: KafkaConfig | None = None) -> None:
        """With `mirrored_to`, a KafkaMirror sends posted commands to these brokers, which must answer."""
        self.publisher: Publisher | None = None
        self._runs, self._mirrored_to = runs, mirrored_to

    def pause(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        """Ask a run to pause its actors and its learner."""
        return self.post(directory, "pause", issuer, expected, desired="paused", allowed_states=(RUNNING,))

    def resume(self, directory: RunDirectory, issuer: str, expected: int | None) -> Record:
        """Ask a paused run to continue."""
        return self.post(directory, "resume", issuer, expected, desired="running", allowed_states=(PAUSED,))

    def post(
        self,
        directory: RunDirectory,
        kind: str,
        issuer: str,
        expected: int | None,
        *,
        desired: str | None = None,
        allowed_states: tuple[str, ...] | None = None,
        deadline_s: float = DEADLINE_S,
        **values: Any,
    ) -> Record:
        """Post a command to a run in one of `allowed_states`; with None, to any run that has not ended.

        Returns the operation's record; raises Conflict in other states, Stale, and Unreachable without brokers.
        """
        run, database = directory.path.name, self._runs.database
        with self._runs.lock:
            status = directory.store.status()
            refused = status.state not in allowed_states if allowed_states else status.state in ENDED and kind != SET
            if refused:
                reason = f" ({status.reason})" if status.reason else ""
                raise Conflict(f"{run} is {status.state}{reason}: {kind} is not possible now")
            record = new_operation(kind, run, issuer, deadline_s=deadline_s, **values)
            with self.sending(directory, record, expected) as command:
                database.change(run, desired, expected)
                database.save_operation(record)  # before any process can execute it
                record["details"]["number"] = directory.store.post(COMMANDS, command)
                database.save_operation(record)
            return record

    def sending(
        self, directory: RunDirectory, record: Record, expected: int | None
    ) -> AbstractContextManager[dict[str, Any]]:
        """Yield the command of an operation, which the caller posts in the run's store inside; see `publishing`."""
        if self._mirrored_to is None:
            return self.publishing(directory, record, expected)
        KafkaConnection(self._mirrored_to, "").fetch_metadata(BROKER_TIMEOUT_S)
        return contextlib.nullcontext(to_command(record))

    @contextlib.contextmanager
    def publishing(self, directory: RunDirectory, record: Record, expected: int | None) -> Iterator[dict[str, Any]]:
        """Yield the command of an operation, which the caller executes inside; with a publisher, publish it first.

        Raises Unreachable or Stale, with nothing changed, if it cannot be published or expects another generation.
        """
        command = to_command(record)
        from_kafka = record["issuer"].startswith(KAFKA_ISSUER_PREFIX)
        if self.publisher is None or from_kafka or not capabilities_of(directory.config().runtime).needs_brokers:
            yield command
            return
        self._runs.database.require(record["run"], expected)
        self.publisher.publish(directory, command)
        try:
            yield command
        except Exception as error:
            self.publisher.refuse(directory, command, str(error))
            raise


def to_command(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command of an operation; it expires when the operation would time out."""
    details = record["details"]
    expires_s = record["created_s"] + details.get("deadline_s", DEADLINE_S)
    header = {"command": record["kind"], "id": record["id"], "issuer": record["issuer"], "time_s": record["created_s"]}
    values = {name: details[name] for name in ("actors", "values", "live") if name in details}
    return {**header, "expires_s": expires_s, **values}
