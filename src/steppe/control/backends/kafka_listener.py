"""Listen on Kafka for commands to start runs of this service.

Other commands are executed by a run's own supervisor (runtimes/kafka/launch.py), which exists only while the run does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from steppe.control.backends.publisher import publish_result
from steppe.control.commands import KAFKA_ISSUER_PREFIX
from steppe.control.database import PendingAnswer
from steppe.control.periodic import PeriodicTask
from steppe.control.service import Service
from steppe.core.config.run import KafkaConfig
from steppe.core.config.runtime_table import capabilities_of
from steppe.core.contracts.errors import DamagedFile, RunFailed, RunNotFound, SteppeError, Unreachable
from steppe.core.contracts.transport import COMMANDS, START
from steppe.core.io.atomic_files import read_json, write_json
from steppe.core.io.record_validation import validate_record
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.kafka.launch import SERVICE
from steppe.runtimes.kafka.manifest import find_manifest, is_published, stale_reason, wire_name
from steppe.transport.kafka.client import (
    KafkaConnection,
    Message,
    PartitionReader,
    decode_headers,
    ensure_topics,
    find_offset_at,
    open_consumer,
)
from steppe.transport.kafka.dead_letters import DeadLetterQueue

POLL_INTERVAL_S = 0.5
MAX_CLOCK_SKEW_S = 60.0  # maximum difference between this clock and the brokers'
CURSOR_FILE = "heard.json"  # next offset to read: commands sent while no service is up are executed by the next one
MAX_NAME_CHARS = 100  # maximum length of an untrusted run name in the audit log


class StartCommandListener(PeriodicTask):
    """Listens between `start` and `stop`. Waits while no broker answers, or without permission to read commands."""

    required_for_readiness = True

    def __init__(self, service: Service, config: KafkaConfig) -> None:
        super().__init__("command-listener", POLL_INTERVAL_S, self.poll)
        self._service, self._connection = service, KafkaConnection(config, "")
        self._topic, self._path = self._connection.topic(COMMANDS), service.private / CURSOR_FILE
        self._since_s = time.time() - MAX_CLOCK_SKEW_S  # a run may be created and requested before brokers first answer
        self._partition_reader: PartitionReader | None = None
        self._dead_letters = DeadLetterQueue(self._connection, SERVICE, self._note)
        self._next: int | None = None  # the offset of the first unread message

    def stop(self) -> None:
        super().stop()
        self._close_reader()
        self._dead_letters.close()

    def poll(self) -> None:
        """Read new commands; raises Unreachable without brokers. CommandPublisher answers started operations."""
        try:
            self._partition_reader = self._partition_reader or self._open_reader()
            before = self._next
            self._partition_reader.progress()
            self._dead_letters.progress()
        except SteppeError:
            self._close_reader()
            raise
        if self._next != before:
            write_json(self._path, {self._topic: self._next})

    def _open_reader(self) -> PartitionReader:
        ensure_topics(self._connection)
        if self._next is None:
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                self._next = read_json(self._path).get(self._topic)
        if self._next is None:
            with open_consumer(self._connection) as consumer:
                self._next = find_offset_at(consumer, self._topic, self._since_s)
            write_json(self._path, {self._topic: self._next})
        reader = PartitionReader(self._connection)
        reader.follow(self._topic, 0, self._next, self._take)
        return reader

    def _close_reader(self) -> None:
        if self._partition_reader is not None:
            self._partition_reader.close()
            self._partition_reader = None

    def _take(self, message: Message) -> None:
        try:
            record = validate_record(COMMANDS, message.value())
        except DamagedFile as error:
            self._dead_letters.refuse(message, str(error))
        else:
            if record["command"] == START and not is_published(message):
                self._handle_safely(message, record)
        self._next = message.offset() + 1

    def _note(self, details: Mapping[str, Any]) -> None:
        """Record a refusal in the audit log, as it belongs to no known run."""
        self._service.database.audit("kafka", "control", "read_commands", None, f"refused: {details['message']}")

    def _handle_safely(self, message: Message, record: Mapping[str, Any]) -> None:
        """Handle a command; one that fails for any reason must not block the next."""
        try:
            self._handle(decode_headers(message).get("run", b"").decode(errors="replace"), record)
        except (SteppeError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - the reason is in the dead-letter queue
            self._dead_letters.refuse(message, f"it could not be executed: {type(error).__name__}: {error}"[:300])

    def _handle(self, named: str, record: Mapping[str, Any]) -> None:
        issuer = f"{KAFKA_ISSUER_PREFIX}{record.get('issuer')}"[:MAX_NAME_CHARS]
        run = self._own(named)
        try:
            reason = self._execute(run, record, issuer) if run else "this service has no such run over Kafka"
        except (Unreachable, RunFailed):
            raise  # it is read again when brokers answer
        except SteppeError as error:
            reason = str(error)
        self._service.database.audit(
            issuer, "control", "start_run", named[:MAX_NAME_CHARS], f"refused: {reason}" if reason else "done"
        )
        if run is not None and reason is not None:
            self._publish_result(run, record, reason)

    def _own(self, named: str) -> str | None:
        """Return the run of that name, or name and key, if it belongs to this service; others answer for theirs."""
        try:
            found = self._service.get_run(named.partition("~")[0])
        except (DamagedFile, RunNotFound):
            return None
        directory = self._directory(found.id)
        ours = capabilities_of(str(found.config["runtime"])).needs_brokers and named in (
            directory.id,
            wire_name(directory),
        )
        return found.id if ours else None

    def _execute(self, run: str, record: Mapping[str, Any], issuer: str) -> str | None:
        """Return None if the run was started, otherwise the reason why not."""
        directory, database, key = self._directory(run), self._service.database, f"kafka:{record.get('id')}"
        manifest = find_manifest(self._connection.config, wire_name(directory))
        reason = stale_reason(record, directory.id, manifest.generation if manifest else 0, time.time())
        if reason is not None:
            return reason
        if database.claim_idempotency_key(key, run) is not None:
            return "it was executed before"
        try:
            operation = self._service.start_run(run, issuer)
        except BaseException:
            database.save_answer(key, None)
            raise
        database.save_answer(key, {"operation": operation.id})
        database.save_pending_answer(PendingAnswer(str(record["id"]), operation.id, run, dict(record)))
        return None

    def _publish_result(self, run: str, record: Mapping[str, Any], reason: str | None) -> None:
        """Write the result to the run's event log, here and on Kafka."""
        directory = self._directory(run)
        publish_result(KafkaConnection(self._connection.config, wire_name(directory)), directory, record, reason)

    def _directory(self, run: str) -> RunDirectory:
        return RunDirectory(self._service.root / run)
