"""Hears on Kafka which of the service's runs are to be started. What else is asked of a run is carried out by its own supervisor
(runtimes/kafka/launch.py); of one that is not under way, there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from steppe.control.backends.publisher import tell
from steppe.control.database import Due
from steppe.control.periodic import Repeating
from steppe.control.service import OVER_KAFKA, Service
from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.errors import DamagedFile, RunFailed, RunNotFound, SteppeError, Unreachable
from steppe.core.contracts.transport import COMMANDS, START
from steppe.core.io.atomic_files import read_json, write_json
from steppe.core.io.record_validation import checked
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.kafka.launch import SERVICE
from steppe.runtimes.kafka.manifest import find_charter, is_published, stale, wire_name
from steppe.transport.kafka.client import Connection, Feed, Message, ensure_topics, first_since, headers_of, reading
from steppe.transport.kafka.dead_letters import DeadLetters

LOOK_S = 0.5
CLOCKS_S = 60.0  # that this clock and the brokers' may differ by
CURSOR = (
    "heard.json"  # how far the topic was heard: what is asked while no service is up is carried out by the next one
)
NAMED = 100  # characters of a run's name that a stranger may put into the audit


class Hearing(Repeating):
    """Between `start` and `stop`. While no broker answers, or without the right to read commands, it waits."""

    needed = True

    def __init__(self, service: Service, config: KafkaConfig) -> None:
        super().__init__("hearing", LOOK_S, self.look)
        self._service, self._connection = service, Connection(config, "")
        self._topic, self._path = self._connection.topic(COMMANDS), service.private / CURSOR
        self._since_s = time.time() - CLOCKS_S  # before brokers first answer, a run may be made and asked for
        self._feed: Feed | None = None
        self._letters = DeadLetters(self._connection, SERVICE, self._note)
        self._next: int | None = None  # the offset of the first message that was not heard yet

    def stop(self) -> None:
        super().stop()
        self._leave()
        self._letters.close()

    def look(self) -> None:
        """Hear what is new; Unreachable while no broker answers. What was begun is answered by the CommandPublisher."""
        try:
            self._feed = self._feed or self._followed()
            before = self._next
            self._feed.progress()
            self._letters.progress()
        except SteppeError:
            self._leave()
            raise
        if self._next != before:
            write_json(self._path, {self._topic: self._next})

    def _followed(self) -> Feed:
        ensure_topics(self._connection)
        if self._next is None:
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                self._next = read_json(self._path).get(self._topic)
        if self._next is None:
            with reading(self._connection) as consumer:
                self._next = first_since(consumer, self._topic, self._since_s)
            write_json(self._path, {self._topic: self._next})
        feed = Feed(self._connection)
        feed.follow(self._topic, 0, self._next, self._take)
        return feed

    def _leave(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _take(self, message: Message) -> None:
        try:
            record = checked(COMMANDS, message.value())
        except DamagedFile as error:
            self._letters.refuse(message, str(error))
        else:
            if record["command"] == START and not is_published(message):
                self._hear_safely(message, record)
        self._next = message.offset() + 1

    def _note(self, details: Mapping[str, Any]) -> None:
        """What was refused is in the audit: it is of no run, or of any."""
        self._service.ledger.audit("kafka", "control", "hear", None, f"refused: {details['message']}")

    def _hear_safely(self, message: Message, record: Mapping[str, Any]) -> None:
        """A command that cannot be carried out for whatever reason must not be in the way of the next."""
        try:
            self._hear(headers_of(message).get("run", b"").decode(errors="replace"), record)
        except (SteppeError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - it is told where it is parked
            self._letters.refuse(message, f"it could not be carried out: {type(error).__name__}: {error}"[:300])

    def _hear(self, named: str, record: Mapping[str, Any]) -> None:
        issuer = f"{OVER_KAFKA}{record.get('issuer')}"[:NAMED]
        run = self._own(named)
        try:
            reason = self._carry_out(run, record, issuer) if run else "there is no such run over Kafka here"
        except (Unreachable, RunFailed):
            raise  # it is heard again when brokers answer
        except SteppeError as error:
            reason = str(error)
        self._service.ledger.audit(
            issuer, "control", "start_run", named[:NAMED], f"refused: {reason}" if reason else "done"
        )
        if run is not None and reason is not None:
            self._tell(run, record, reason)

    def _own(self, named: str) -> str | None:
        """The run of that name, or name and key, if it is one of the service's; what others have is theirs to answer."""
        try:
            found = self._service.get_run(named.partition("~")[0])
        except (DamagedFile, RunNotFound):
            return None
        directory = self._directory(found.id)
        ours = found.config["runtime"] == "kafka" and named in (directory.id, wire_name(directory))
        return found.id if ours else None

    def _carry_out(self, run: str, record: Mapping[str, Any], issuer: str) -> str | None:
        """None when it is begun, otherwise why it is not."""
        directory, ledger, key = self._directory(run), self._service.ledger, f"kafka:{record.get('id')}"
        charter = find_charter(self._connection.config, wire_name(directory))
        reason = stale(record, directory.id, charter.generation if charter else 0, time.time())
        if reason is not None:
            return reason
        if ledger.begin_answer(key, run) is not None:
            return "it was carried out before"
        try:
            begun = self._service.start_run(run, issuer)
        except BaseException:
            ledger.keep_answer(key, None)
            raise
        ledger.keep_answer(key, {"operation": begun.id})
        ledger.keep_due(Due(str(record["id"]), begun.id, run, dict(record)))
        return None

    def _tell(self, run: str, record: Mapping[str, Any], reason: str | None) -> None:
        """In the run's event log, here and on Kafka."""
        directory = self._directory(run)
        tell(Connection(self._connection.config, wire_name(directory)), directory, record, reason)

    def _directory(self, run: str) -> RunDirectory:
        return RunDirectory(self._service.root / run)
