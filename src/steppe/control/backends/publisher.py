"""Publish on Kafka the commands that runs receive through REST, the page and MCP, and answer them if runs do not.

    request ▶ database: pending answer ▶ commands.control ▶ the run's store or the cluster, which executes it
    events  ◀ the run, or else this module when the operation is finished ◀ the run's store

A command is published before it is executed: while no broker answers it is refused, and nothing has changed. The
database stores pending answers, so a service that was killed in between sends them after its restart. Every reader of
commands.control skips what is published here (the header `origin`): nothing is executed twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any

from steppe.control.commands import BROKER_TIMEOUT_S
from steppe.control.database import PendingAnswer
from steppe.control.periodic import PeriodicTask
from steppe.control.service import Service
from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.errors import DamagedFile, RunFailed, RunNotFound, Unreachable
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.kafka.launch import SERVICE, SUPERVISOR
from steppe.runtimes.kafka.manifest import PUBLISHED_ORIGIN, command_result, find_manifest, wire_name
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import KafkaConnection

POLL_INTERVAL_S = 0.2
ENDING = ("stop", "kill")  # a run can be ended without brokers: the command is published once one answers
NOT_STARTED = "it was not executed"


class CommandPublisher(PeriodicTask):
    """Publishes commands on request; between `start` and `stop` it also sends pending answers."""

    def __init__(self, service: Service, config: KafkaConfig) -> None:
        super().__init__("publisher", POLL_INTERVAL_S, self.poll)
        self._service, self._database, self._config = service, service.database, config
        self._keyed = service.backend.capabilities.keyed_messages
        self._sending = threading.Lock()  # the poll and a new command may both send the waiting commands

    def publish(self, directory: RunDirectory, command: Mapping[str, Any]) -> None:
        """Publish a command on Kafka. Raises Unreachable, with no answer pending, if that fails."""
        due = PendingAnswer(str(command["id"]), str(command["id"]), directory.path.name, dict(command))
        self._database.save_pending_answer(due)  # before sending: if killed in between, the service must still answer
        try:
            self._send_waiting(directory)
            self._send(directory, due)
        except (Unreachable, RunFailed) as error:
            kind = due.command["command"]
            if kind in ENDING:
                self._database.save_pending_answer(due._replace(waits=True))
                return
            self._database.delete_pending_answer(due.id)
            raise Unreachable(f"{kind} was not published, and nothing has changed: {error}") from None

    def refuse(self, directory: RunDirectory, command: Mapping[str, Any], reason: str) -> None:
        """Answer a published command that could not be started; without brokers, a shorter answer follows later."""
        with contextlib.suppress(Unreachable, RunFailed):
            publish_result(self._connection(directory)[0], directory, command, reason)
            self._database.delete_pending_answer(str(command["id"]))

    def poll(self) -> None:
        """Publish waiting commands, and answer finished ones; raises Unreachable while no broker answers."""
        for due in self._database.pending_answers():
            try:
                self._poll_one(due)
            except (RunNotFound, DamagedFile):  # the outcome in an unreadable run is unknown
                self._database.delete_pending_answer(due.id)

    def _poll_one(self, due: PendingAnswer) -> None:
        directory = RunDirectory.open(self._service.root / due.run)
        if due.waits:
            self._send_waiting(directory)
        self._answer_if_finished(directory, due)

    def _send_waiting(self, directory: RunDirectory) -> None:
        """Publish the run's commands that no broker has accepted yet, in the order of their requests."""
        with self._sending:
            for due in self._database.pending_answers():
                if due.waits and due.run == directory.path.name:
                    self._send(directory, due)
                    self._database.save_pending_answer(due._replace(waits=False))

    def _answer_if_finished(self, directory: RunDirectory, due: PendingAnswer) -> None:
        try:
            found = self._service.get_operation(due.operation)
        except RunNotFound:
            # Another process may be about to start it.
            if time.time() > (due.command.get("expires_s") or 0.0):
                self._answer(directory, due, NOT_STARTED)
            return
        if found.state != "pending":
            self._answer(directory, due, None if found.state == "succeeded" else found.message or "it failed")

    def _answer(self, directory: RunDirectory, due: PendingAnswer, reason: str | None) -> None:
        """Answer unless the run did: its answers are in its store, copied to Kafka by its supervisor or from there."""
        if not directory.store.is_answered(str(due.command["id"])):
            publish_result(self._connection(directory)[0], directory, due.command, reason)
        self._database.delete_pending_answer(due.id)

    def _send(self, directory: RunDirectory, due: PendingAnswer) -> None:
        connection, generation = self._connection(directory)
        record = {**due.command, "run": directory.id, "generation": generation}
        _post(connection, PUBLISHED_ORIGIN, COMMANDS, record)

    def _connection(self, directory: RunDirectory) -> tuple[KafkaConnection, int]:
        """Return the connection for the run's messages, and its generation there: 0 for a run that never started."""
        name = wire_name(directory) if self._keyed else directory.id
        # Without a broker this fails sooner than the search for the manifest.
        KafkaConnection(self._config, name).fetch_metadata(BROKER_TIMEOUT_S)
        manifest = find_manifest(self._config, name)
        if manifest is None:
            return KafkaConnection(self._config, name), 0
        return manifest.connection(self._config), manifest.generation


def publish_result(
    connection: KafkaConnection, directory: RunDirectory, command: Mapping[str, Any], reason: str | None
) -> None:
    """Write the result of a command to Kafka, then to the run's event log; raises Unreachable if no broker answers."""
    event = EventReport(
        run=directory.id, kind="command", role=SERVICE, details=command_result(command, reason)
    ).record()
    _post(connection, SUPERVISOR, EVENTS, event)
    directory.board.post(EVENTS, event)


def _post(connection: KafkaConnection, origin: str, topic: str, record: dict[str, Any]) -> None:
    """Post a record; raises Unreachable unless it is acknowledged. An abandoned record is not sent later."""
    board = KafkaBoard(connection, origin)
    try:
        written = board.post(topic, record)
    finally:
        board.close(0.0)
    if not written:
        raise Unreachable(f"no Kafka broker answers at {connection.config.address}: try again later")
