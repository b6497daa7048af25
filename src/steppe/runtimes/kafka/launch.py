"""The `kafka` runtime: one process per worker slot on this machine, linked by topics; actors may join from elsewhere.

The supervisor starts and monitors the processes as on `processes`. It posts the run's manifest to commands.control, and
copies the roles' reports from Kafka's topics into the run's store, where views, summaries and `steppe watch` read them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from typing import Any

import msgspec

from steppe.core.contracts.errors import ConfigError, DamagedFile, MissingExtra, RunFailed, Unreachable
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS, SCALE, TOPICS
from steppe.core.io.record_validation import validate_record
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import FINISH
from steppe.runtimes.handle import Fault
from steppe.runtimes.kafka import worker
from steppe.runtimes.kafka.manifest import (
    CONTROL_COMMANDS,
    MANIFEST,
    MEMBERSHIP,
    CommandValidator,
    RunManifest,
    command_result,
    find_manifest,
    is_published,
    wire_name,
    with_live_names,
)
from steppe.runtimes.plan import Plan
from steppe.runtimes.processes.supervisor import ProcessHandle, start_fork_server
from steppe.runtimes.resume import prime_channel
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.channel import Primer
from steppe.transport.kafka.client import (
    KafkaConnection,
    Message,
    PartitionReader,
    count_partitions,
    decode_headers,
    ensure_topics,
    get_watermarks,
    open_consumer,
)
from steppe.transport.kafka.dead_letters import DeadLetterQueue
from steppe.transport.shm import ShmControl

SUPERVISOR = "supervisor"
SCALE_S = 5.0  # how long to wait for brokers before a scale request is refused
SERVICE = "service"  # role of events that the service which started the run has already put into store and Kafka


def require(plan: Plan) -> None:
    """Raise, before anything is written, if this plan cannot run here."""
    if importlib.util.find_spec("confluent_kafka") is None:
        raise MissingExtra("runtime 'kafka'", "kafka")
    connection = KafkaConnection(plan.config.kafka, "")
    connection.fetch_metadata()
    if plan.segment.nbytes > connection.max_bytes:
        raise ConfigError(
            f"a segment has {plan.segment.nbytes >> 20} MiB, more than kafka.max_message_mb={plan.config.kafka.max_message_mb}: "
            "use fewer envs or segment_steps, or allow larger messages"
        )


def launch(plan: Plan, directory: RunDirectory) -> KafkaHandle:
    """Post the run's manifest to Kafka and start a process per worker slot."""
    require(plan)
    return KafkaHandle(plan, directory)


class KafkaHandle(ProcessHandle):
    """The processes of a run, and the mirror of their Kafka messages in the run's store."""

    _worker_main = staticmethod(worker.run_kafka_worker)

    def _open(self, plan: Plan) -> None:
        self._worker_slots = plan.worker_slots()
        self._control = ShmControl(self._shared_dir / "control", create=True, num_worker_slots=len(self._worker_slots))
        self._connection = KafkaConnection(plan.config.kafka, wire_name(self._directory))
        for warning in ensure_topics(self._connection):
            self._post_process_event("warning", "kafka", {"message": warning})
        earlier = find_manifest(plan.config.kafka, self._connection.run)
        self._manifest = earlier.updated(plan, self._directory) if earlier else RunManifest.of(plan, self._directory)
        self._mirror = StoreMirror(self._connection, self._directory, self._manifest)
        self._links = [self._mirror]
        self._manifest.post(self._mirror.board)
        connection = self._manifest.connection(plan.config.kafka)
        prime_channel(Primer(connection, count_partitions(connection)), plan, self._directory)
        self._caught_up: set[str] = set()
        start_fork_server(torch=not plan.config.agent.in_table)

    def _encoded_plan(self) -> bytes:
        return msgspec.json.encode(self._manifest)

    def advance(self, timeout_s: float) -> None:
        super().advance(timeout_s)
        self._mirror.progress()

    def ended(self, kind: str) -> bool:
        """Whether all roles of this kind have ended and their messages are copied; False while no broker responds."""
        if not super().ended(kind):
            return False
        if kind not in self._caught_up and self._mirror.catch_up():
            self._caught_up.add(kind)
        return kind in self._caught_up

    def scale(self, num_actors: int) -> None:
        """Scale the actors. Adding actors while no broker responds raises Unreachable, and changes nothing."""
        if num_actors > self._num_actors:
            try:
                self._connection.fetch_metadata(SCALE_S)
            except Unreachable:
                address = self._connection.config.address
                raise Unreachable(f"no Kafka broker answers at {address}: try again when one does") from None
        super().scale(num_actors)

    def _is_transient(self, worker_slot: str, fault: Fault) -> bool:
        """Whether the process could not reach a broker. Such restarts do not count against flow.max_restarts."""
        transient = fault.reason == Unreachable.reason
        self._excused_restarts[worker_slot] += transient
        return transient

    def ask(self, kind: str, what: int) -> None:
        if kind == "manager" and what == FINISH:  # the manager must have all reports before it receives FINISH
            self._mirror.catch_up()
        super().ask(kind, what)


class StoreMirror:
    """Copies the roles' Kafka messages into the run's store, and the supervisor's events from the store to Kafka."""

    def __init__(self, connection: KafkaConnection, directory: RunDirectory, manifest: RunManifest) -> None:
        self.board = KafkaBoard(connection, SUPERVISOR)
        self._run, self._directory = connection.run.encode(), directory
        self._partition_reader = PartitionReader(connection)
        self._names = {connection.topic(name): name for name in TOPICS}
        earlier = directory.store.read(EVENTS, limit=1 << 40)
        self._last_event = earlier[-1][0] if earlier else 0
        self._copied: set[int] = set()
        self._validator = CommandValidator(manifest, directory.config().agent, (*CONTROL_COMMANDS, SCALE))
        self._dead_letters = DeadLetterQueue(
            connection, SUPERVISOR, lambda details: self._post_event("warning", details)
        )
        self._num_actors = manifest.launch_spec.plan().num_writers
        with open_consumer(connection) as consumer:
            starts = {topic: get_watermarks(consumer, topic)[1] for topic in self._names}
        for topic, start in starts.items():
            self._partition_reader.follow(topic, 0, start, self._receive)

    def progress(self) -> None:
        """Copy new messages in both directions."""
        self._partition_reader.progress()
        self._dead_letters.progress()
        for number, record in self._directory.store.read(EVENTS, self._last_event):
            self._last_event = number
            if number not in self._copied and record.get("role") != SERVICE:
                self.board.post(EVENTS, record)
            self._copied.discard(number)

    def catch_up(self) -> bool:
        """Copy everything that was posted before this call; return whether brokers responded in time."""
        try:
            complete = self._partition_reader.catch_up()
        except Unreachable:
            complete = False
        self.progress()
        return complete

    def close(self) -> None:
        """Copy the remaining messages if a broker responds, and close."""
        with contextlib.suppress(RunFailed):
            self.catch_up()
            self._dead_letters.close()
            self.progress()
        self.board.close()
        self._partition_reader.close()

    def _receive(self, message: Message) -> None:
        about = decode_headers(message)
        if about.get("run") != self._run or about.get("origin") == SUPERVISOR.encode() or is_published(message):
            return
        topic = self._names[message.topic()]
        try:
            record = validate_record(topic, message.value(), self._directory.id, self._num_actors)
        except DamagedFile as error:
            self._dead_letters.refuse(message, str(error))
            return
        if topic == COMMANDS:
            self._forward_command(record)
            return
        number = self._directory.store.post(topic, record)
        if topic == EVENTS:
            self._copied.add(number)

    def _forward_command(self, record: dict[str, Any]) -> None:
        """Post a valid command to the store, where supervisor and learner read it; answer an invalid one here."""
        if record.get("command") in (MANIFEST, MEMBERSHIP):
            return
        reason = self._validator.refusal(record, time.time())
        if reason is None:
            self._directory.store.post(COMMANDS, with_live_names(record))
            return
        self._post_event("command", command_result(record, reason))

    def _post_event(self, kind: str, details: dict[str, Any]) -> None:
        event = EventReport(run=self._directory.id, kind=kind, role=SUPERVISOR, details=details)
        self._directory.board.post(EVENTS, event.record())
