"""Mirror a run between Kafka and its local directory.

Reports of the roles are copied into the directory, where the service reads them like any other run's; commands of the
service are copied to Kafka.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from steppe.control.periodic import PeriodicTask
from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import ACTORS, COMMANDS, EVALUATIONS, EVENTS, TRAINING
from steppe.core.io.atomic_files import read_json, write_json
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.kafka.manifest import COMMAND_TTL_S, MANIFEST, RunManifest, find_manifest, newest_control_command
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import Message
from steppe.transport.kafka.dead_letters import DeadLetterQueue

POLL_INTERVAL_S = 1.0
MIRRORED_TOPICS = (TRAINING, ACTORS, EVALUATIONS, EVENTS)
BATCH = 2_000  # records of a topic per copy
CURSOR_FILE = "followed.json"  # offsets up to which each topic was copied: a restarted service continues there
ROLE = "service"


class KafkaMirror(PeriodicTask):
    """Mirrors between `start` and `stop`. Waits while no broker answers or the run has not started."""

    def __init__(self, directory: RunDirectory, config: KafkaConfig) -> None:
        super().__init__("kafka-mirror", POLL_INTERVAL_S, self.poll)
        self.run = directory.id
        self.manifest: RunManifest | None = None
        self.newest_command = MANIFEST  # the newest command to all roles
        self._store, self._path, self._config = directory.store, directory.path / CURSOR_FILE, config
        self._cursors = dict.fromkeys((*MIRRORED_TOPICS, COMMANDS), 0)
        with contextlib.suppress(DamagedFile, FileNotFoundError):
            self._cursors |= read_json(self._path)
        back = BATCH * len(MIRRORED_TOPICS)
        self._possibly_copied = {  # records that a killed service may have copied without saving its offsets
            topic: {
                _record_key(record) for _, record in self._store.read(topic, max(0, self._store.newest(topic) - back))
            }
            for topic in MIRRORED_TOPICS
        }
        self._board: KafkaBoard | None = None
        self._dead_letters: DeadLetterQueue | None = None
        self._commands = 0  # the end offset of commands.control at the last poll

    def stop(self) -> None:
        super().stop()
        self._leave()

    def poll(self) -> None:
        """Copy new records; raises Unreachable while no broker answers."""
        board = self._board = self._refresh_board(self._board) if self._board is not None else self._join()
        if board is None:
            return
        before = dict(self._cursors)
        self._send_commands(board)
        for topic in MIRRORED_TOPICS:
            self._copy(board, topic)
        if self._cursors != before:
            write_json(self._path, self._cursors)
        if self._dead_letters is not None:
            self._dead_letters.progress()

    def _join(self, manifest: RunManifest | None = None) -> KafkaBoard | None:
        """Join the run of the newest manifest: a restarted run is a different one on Kafka."""
        self._leave()
        self.manifest = manifest or find_manifest(self._config, self.run)
        if self.manifest is None:
            return None
        connection = self.manifest.connection(self._config)
        self._dead_letters = DeadLetterQueue(connection, ROLE, self._note)
        num_actors = self.manifest.launch_spec.plan().num_writers
        board = KafkaBoard(connection, ROLE, self._refuse, num_actors)
        self._commands = board.end(COMMANDS)
        self.newest_command = newest_control_command(connection) or MANIFEST
        return board

    def _refresh_board(self, board: KafkaBoard) -> KafkaBoard | None:
        """Return the same board, or that of a run that was restarted since; also reads newer control commands."""
        end, since = board.end(COMMANDS), self._commands
        if end == since:
            return board
        since = since if since < end else 0  # beyond its end: the topic was recreated
        newer = find_manifest(self._config, self.run, since)
        if newer is not None:
            return self._join(newer)
        assert self.manifest is not None
        self.newest_command = (
            newest_control_command(self.manifest.connection(self._config), since) or self.newest_command
        )
        self._commands = end
        return board

    def _send_commands(self, board: KafkaBoard) -> None:
        """Send new commands. A killed service may send one twice; its id makes it idempotent."""
        for number, command in self._store.read(COMMANDS, self._cursors[COMMANDS]):
            assert self.manifest is not None
            about = {"run": self.run, "generation": self.manifest.generation}
            board.post(COMMANDS, {"expires_s": command["time_s"] + COMMAND_TTL_S, **command, **about})
            self._cursors[COMMANDS] = number

    def _copy(self, board: KafkaBoard, topic: str) -> None:
        end, known = board.end(topic), self._possibly_copied.pop(topic, set())
        found = board.read(topic, self._cursors[topic], limit=BATCH)
        for _, record in found:
            own_event = topic == EVENTS and record.get("role") == ROLE
            if _record_key(record) not in known and not own_event:
                self._store.post(topic, record)
        last = found[-1][0] if found else 0
        # Records of other runs after the last one are skipped once.
        self._cursors[topic] = last if len(found) == BATCH else max(last, end)

    def _refuse(self, message: Message, reason: str) -> None:
        """Park an invalid record, except those of commands.control, which the learner parks."""
        if self._dead_letters is not None and message.topic() != self._config.prefix + COMMANDS:
            self._dead_letters.refuse(message, reason)

    def _note(self, details: dict[str, Any]) -> None:
        event = EventReport(run=self.run, kind="warning", role=ROLE, details=details)
        self._store.post(EVENTS, event.record())

    def _leave(self) -> None:
        if self._dead_letters is not None:
            self._dead_letters.close(0.0)
            self._dead_letters = None
        if self._board is not None:
            self._board.close(0.0)
            self._board = None


def _record_key(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True)
