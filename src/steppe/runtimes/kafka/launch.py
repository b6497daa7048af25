"""The `kafka` runtime: one process per place on this machine, linked by topics; actors may join from others.

The supervisor starts and watches the processes as on `processes`. It puts the run's charter on commands.control, and copies
what the roles report from Kafka's topics into the run's store, where views, summaries and `steppe watch` find it.
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
SCALE_S = 5.0  # how long brokers have to answer before a run is not scaled
SERVICE = (
    "service"  # the role of events that are in the store and on Kafka already: whoever started the run put them there
)


def require(plan: Plan) -> None:
    """Raise, before anything is written, unless this plan can run here."""
    if importlib.util.find_spec("confluent_kafka") is None:
        raise MissingExtra("runtime 'kafka'", "kafka")
    if plan.config.mode == "workers":
        raise ConfigError("mode 'workers' is not for runtime 'kafka': use --runtime processes or --runtime mpi")
    connection = KafkaConnection(plan.config.kafka, "")
    connection.fetch_metadata()
    if plan.segment.nbytes > connection.max_bytes:
        raise ConfigError(
            f"a segment has {plan.segment.nbytes >> 20} MiB, more than kafka.max_message_mb={plan.config.kafka.max_message_mb}: "
            "use fewer envs or segment_steps, or allow larger messages"
        )


def launch(plan: Plan, directory: RunDirectory) -> KafkaHandle:
    """Put the run's charter on Kafka and start a process per place."""
    require(plan)
    return KafkaHandle(plan, directory)


class KafkaHandle(ProcessHandle):
    """The processes of a run, and the copy of what they say on Kafka."""

    _work = staticmethod(worker.run_kafka_worker)

    def _open(self, plan: Plan) -> None:
        self._places = plan.places()
        self._control = ShmControl(self._room / "control", create=True, num_places=len(self._places))
        self._connection = KafkaConnection(plan.config.kafka, wire_name(self._directory))
        for words in ensure_topics(self._connection):
            self._note("warning", "kafka", {"message": words})
        earlier = find_manifest(plan.config.kafka, self._connection.run)
        self._manifest = earlier.updated(plan, self._directory) if earlier else RunManifest.of(plan, self._directory)
        self._mirror = StoreMirror(self._connection, self._directory, self._manifest)
        self._links = [self._mirror]
        self._manifest.post(self._mirror.board)
        connection = self._manifest.connection(plan.config.kafka)
        prime_channel(Primer(connection, count_partitions(connection)), plan, self._directory)
        self._caught: set[str] = set()
        start_fork_server(torch=not plan.config.agent.in_table)

    def _words(self) -> bytes:
        return msgspec.json.encode(self._manifest)

    def advance(self, timeout_s: float) -> None:
        super().advance(timeout_s)
        self._mirror.progress()

    def ended(self, kind: str) -> bool:
        """Whether it has, and everything that it said is here: while no broker answers, nobody has come to an end."""
        if not super().ended(kind):
            return False
        if kind not in self._caught and self._mirror.catch_up():
            self._caught.add(kind)
        return kind in self._caught

    def scale(self, num_actors: int) -> None:
        """Unreachable, and nothing changes, while no broker answers: an actor that is started could do nothing."""
        if num_actors > self._num_actors:
            try:
                self._connection.fetch_metadata(SCALE_S)
            except Unreachable:
                address = self._connection.config.address
                raise Unreachable(f"no Kafka broker answers at {address}: ask again when one does") from None
        super().scale(num_actors)

    def _is_transient(self, place: str, fault: Fault) -> bool:
        """One that could not reach a broker is started again for as long as the run goes on: that is no restart of its own."""
        passing = fault.reason == Unreachable.reason
        self._excused_restarts[place] += passing
        return passing

    def ask(self, kind: str, what: int) -> None:
        if kind == "manager" and what == FINISH:  # it has all reports before it hears that there will be no more
            self._mirror.catch_up()
        super().ask(kind, what)


class StoreMirror:
    """Copies what a run's roles say on Kafka into its store, and what its supervisor says there to Kafka."""

    def __init__(self, connection: KafkaConnection, directory: RunDirectory, charter: RunManifest) -> None:
        self.board = KafkaBoard(connection, SUPERVISOR)
        self._run, self._directory = connection.run.encode(), directory
        self._partition_reader = PartitionReader(connection)
        self._names = {connection.topic(name): name for name in TOPICS}
        earlier = directory.store.read(EVENTS, limit=1 << 40)
        self._told = earlier[-1][0] if earlier else 0
        self._copied: set[int] = set()
        self._validator = CommandValidator(charter, directory.config().agent, (*CONTROL_COMMANDS, SCALE))
        self._dead_letters = DeadLetterQueue(connection, SUPERVISOR, lambda details: self._say("warning", details))
        self._num_actors = charter.order.plan().num_writers
        with open_consumer(connection) as consumer:
            starts = {topic: get_watermarks(consumer, topic)[1] for topic in self._names}
        for topic, start in starts.items():
            self._partition_reader.follow(topic, 0, start, self._take)

    def progress(self) -> None:
        """Copy what is new."""
        self._partition_reader.progress()
        self._dead_letters.progress()
        for number, record in self._directory.store.read(EVENTS, self._told):
            self._told = number
            if number not in self._copied and record.get("role") != SERVICE:
                self.board.post(EVENTS, record)
            self._copied.discard(number)

    def catch_up(self) -> bool:
        """Copy everything that was said before this call; whether brokers answered in time."""
        try:
            whole = self._partition_reader.catch_up()
        except Unreachable:
            whole = False
        self.progress()
        return whole

    def close(self) -> None:
        """Copy what there still is, if a broker answers."""
        with contextlib.suppress(RunFailed):
            self.catch_up()
            self._dead_letters.close()
            self.progress()
        self.board.close()
        self._partition_reader.close()

    def _take(self, message: Message) -> None:
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
        """A command goes where the supervisor and the learner look for them; one that is not good is answered here."""
        if record.get("command") in (MANIFEST, MEMBERSHIP):
            return
        reason = self._validator.refusal(record, time.time())
        if reason is None:
            self._directory.store.post(COMMANDS, with_live_names(record))
            return
        self._say("command", command_result(record, reason))

    def _say(self, kind: str, details: dict[str, Any]) -> None:
        event = EventReport(run=self._directory.id, kind=kind, role=SUPERVISOR, details=details)
        self._directory.board.post(EVENTS, event.record())
