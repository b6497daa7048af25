"""Kafka: how a process connects to the brokers, which topics exist with which settings, and how they are read.

    experiences           16 partitions   key run/actor    a segment is one message; an actor stays in one partition
    experiences.progress  1, compacted    key run/actor    how far the learner has read each actor: the actor's credit
    dead_letters          1               records that failed validation, with the reason (dead_letters.py)
    model_updates         1, compacted    key run/policy   weights; written in transactions with the offsets behind them
    metrics.* events commands.control     1 partition each: a Board (board.py)

Segments are in channel.py, weights in weights.py. No consumer subscribes: every reader assigns partitions and offsets
itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.errors import ConfigError, MissingExtra, RunFailed, Unreachable
from steppe.core.contracts.transport import TOPICS

EXPERIENCES, PROGRESS, DEAD_LETTERS = "experiences", "experiences.progress", "dead_letters"
MODEL_UPDATES = "model_updates"
INT64 = struct.Struct("<q")  # an integer in a header
REACH_S = 10.0
IDLE_CHECK_S = 5.0  # idle time after which a reader checks that its topics still exist
ACL_HINT = "docs/kafka.md (Security) lists what each role must be allowed"
TOPIC_GONE_S = 5.0  # how long a topic may be unknown before it counts as deleted, unless a broker was lost lately
RETRY_S = 0.05  # between two attempts
HOUR_MS = 3_600_000
DEAD_LETTER_BYTES = 64 << 20  # retention of the dead-letter topic
MAX_DRAIN_S = 0.25  # how long one call may handle messages that keep arriving
QUEUE_KB = 64 << 10  # of messages that were fetched and not polled yet
MESSAGE_TIMEOUT_MS = 600_000  # how long a message waits for a broker that does not respond
Message: TypeAlias = Any  # confluent_kafka.Message
Headers: TypeAlias = Mapping[str, bytes]


def import_kafka() -> Any:
    """Import and return confluent_kafka. MissingExtra if it is not installed."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise MissingExtra("runtime 'kafka'", "kafka") from error
    return confluent_kafka


@dataclass(frozen=True)
class KafkaConnection:
    """How the processes of a run connect to the brokers, and how they name topics and keys."""

    config: KafkaConfig
    run: str
    start_offsets: tuple[tuple[str, int, int], ...] = ()  # topic, partition, first offset that may be this run's

    def topic(self, name: str) -> str:
        return self.config.prefix + name

    @property
    def name(self) -> str:
        """The run's name as the user knows it: `run` without the suffix that distinguishes runs of the same name."""
        return self.run.partition("~")[0]

    def ends(self, consumer: Any, topic: str, partition: int) -> tuple[int, int]:
        """Return first and end offset of what may be this run's; of the whole partition if the topic was recreated."""
        low, high = get_watermarks(consumer, topic, partition)
        run_start = max(
            (offset for name, number, offset in self.start_offsets if (name, number) == (topic, partition)), default=0
        )
        return (max(low, run_start) if run_start <= high else low), high

    def key(self, settings: object) -> bytes:
        """Return the key of messages that belong to a part of this run."""
        return f"{self.run}/{settings}".encode()

    def producer(self, **more: Any) -> Any:
        """Return an idempotent producer: while it lives, its messages arrive exactly once and in order."""
        settings = {
            "enable.idempotence": True,
            "acks": "all",
            "compression.type": self.config.compression,
            "linger.ms": self.config.linger_ms,
            "message.max.bytes": self.max_bytes,
            "message.timeout.ms": MESSAGE_TIMEOUT_MS,
            "queue.buffering.max.kbytes": max(QUEUE_KB, 4 * self.max_bytes >> 10),
        }
        return import_kafka().Producer({**self._client(), **settings, **more}, logger=get_logger())

    def consumer(self, group: str | None = None) -> Any:
        """Return a consumer of committed messages; the caller sets the offsets.

        `group` is only the name under which offsets are committed.
        """
        settings = {
            "group.id": group or f"steppe-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 100,
            "fetch.queue.backoff.ms": 5,
            "fetch.error.backoff.ms": 50,
            "fetch.message.max.bytes": max(1 << 20, self.max_bytes),
            "fetch.max.bytes": max(8 << 20, self.max_bytes),
            "queued.max.messages.kbytes": QUEUE_KB,
            "receive.message.max.bytes": max(16 << 20, 2 * self.max_bytes),
            "allow.auto.create.topics": False,
        }
        return import_kafka().Consumer({**self._client(), **settings}, logger=get_logger())

    def admin(self) -> Any:
        return import_kafka().admin.AdminClient(self._client(), logger=get_logger())

    @property
    def max_bytes(self) -> int:
        return self.config.max_message_mb << 20

    def fetch_metadata(self, timeout_s: float = REACH_S) -> Any:
        """Return the cluster's metadata. Unreachable if no broker responds."""
        try:
            return self.admin().list_topics(timeout=timeout_s)
        except import_kafka().KafkaException as error:
            raise Unreachable(
                f"no Kafka broker answers at {self.config.address} ({describe_error(error)}): start one with `steppe kafka up`, "
                "or give the right --kafka HOST:PORT"
            ) from None

    def _client(self) -> dict[str, Any]:
        if self.config.address is None:
            raise ConfigError("runtime 'kafka' needs the brokers' address: --kafka HOST:PORT, or kafka.address")
        # Not "rebootstrap": while all brokers are down, the client would drop those it knows, among them the group's
        # coordinator, to which a transaction's offsets would still be sent for a minute after it is back.
        quick = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 500, "metadata.recovery.strategy": "none"}
        known = {"bootstrap.servers": self.config.address, "client.id": "steppe", "error_cb": _on_client_error}
        return {**known, **quick, "log_level": 2, "topic.metadata.propagation.max.ms": 5_000, **security(self.config)}


def security(config: KafkaConfig) -> dict[str, Any]:
    """Return the client settings for encryption and authentication; secrets come only from environment variables."""
    sasl, tls = config.security.startswith("sasl"), config.security.endswith("tls")
    protocol = {
        (False, False): "plaintext",
        (False, True): "ssl",
        (True, False): "sasl_plaintext",
        (True, True): "sasl_ssl",
    }
    found: dict[str, Any] = {"security.protocol": protocol[sasl, tls]}
    if sasl:
        password = os.environ.get("STEPPE_KAFKA_PASSWORD")
        if not password:
            raise ConfigError("kafka.security=sasl needs the password of kafka.username in STEPPE_KAFKA_PASSWORD")
        found |= {"sasl.mechanism": config.mechanism, "sasl.username": config.username, "sasl.password": password}
    paths = {
        "ssl.ca.location": config.ca,
        "ssl.certificate.location": config.certificate,
        "ssl.key.location": config.key,
    }
    found |= {name: str(path) for name, path in paths.items() if path is not None}
    if tls and (secret := os.environ.get("STEPPE_KAFKA_KEY_PASSWORD")):
        found["ssl.key.password"] = secret
    return found


def ensure_topics(connection: KafkaConnection, timeout_s: float = 30.0) -> list[str]:
    """Create missing topics. Returns one sentence for each setting in which an existing topic differs."""
    kafka, expected = import_kafka(), topic_settings(connection)
    existing = connection.fetch_metadata().topics
    missing = [name for name in expected if name not in existing]
    admin = connection.admin()
    new_topics = [
        kafka.admin.NewTopic(name, expected[name][0], connection.config.replicas, config=expected[name][1])
        for name in missing
    ]
    for name, future in admin.create_topics(new_topics, request_timeout=timeout_s).items() if new_topics else ():
        try:
            future.result()
        except kafka.KafkaException as error:
            if error.args[0].code() != kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                raise Unreachable(f"the topic {name} cannot be created: {describe_error(error)}") from None
    _await_topics(connection, list(expected), timeout_s)
    return _find_config_drift(
        connection, admin, {name: expected[name] for name in expected if name in existing}, existing
    )


def topic_settings(connection: KafkaConnection) -> dict[str, tuple[int, dict[str, str]]]:
    """Return the partitions and settings that each topic should have."""
    # Use the brokers' clock: with a sender's wrong clock, messages would be rejected, or deleted at once.
    ours = {"message.timestamp.type": "LogAppendTime"}
    config, most = connection.config, {"max.message.bytes": str(connection.max_bytes + (64 << 10)), **ours}
    compact = {"cleanup.policy": "compact", "segment.ms": str(HOUR_MS), **most}
    kept = {"cleanup.policy": "delete", "retention.ms": str(7 * 24 * HOUR_MS), **ours}
    plan: dict[str, tuple[int, dict[str, str]]] = {
        EXPERIENCES: (
            config.partitions,
            {
                "cleanup.policy": "delete",
                "retention.ms": str(int(config.retention_hours * HOUR_MS)),
                "retention.bytes": str(config.retention_mb << 20),
                **most,
            },
        ),
        PROGRESS: (1, compact),
        DEAD_LETTERS: (
            1,
            {
                **kept,
                "retention.bytes": str(DEAD_LETTER_BYTES),
                "segment.bytes": str(DEAD_LETTER_BYTES >> 2),  # retention deletes whole log segments only
            },
        ),
        MODEL_UPDATES: (1, compact),
    }
    for name in TOPICS:
        plan[name] = (1, kept if name.startswith("metrics") else {**kept, "retention.ms": "-1"})
    return {connection.topic(name): settings for name, settings in plan.items()}


def _find_config_drift(
    connection: KafkaConnection, admin: Any, expected: Mapping[str, tuple[int, dict[str, str]]], existing: Any
) -> list[str]:
    kafka, problems = import_kafka(), []
    resources = [kafka.admin.ConfigResource(kafka.admin.ResourceType.TOPIC, name) for name in expected]
    found = admin.describe_configs(resources, request_timeout=REACH_S) if resources else {}
    for resource, future in found.items():
        partitions, settings = expected[resource.name]
        have = len(existing[resource.name].partitions)
        if have != partitions and resource.name != connection.topic(EXPERIENCES):
            problems.append(f"topic {resource.name} has {have} partitions instead of {partitions}")
        try:
            actual = future.result()
        except kafka.KafkaException as error:
            problems.append(f"the settings of topic {resource.name} cannot be read: {describe_error(error)}")
            continue
        for name, value in settings.items():
            if name in actual and actual[name].value != value:
                problems.append(f"topic {resource.name} has {name}={actual[name].value} instead of {value}")
    return problems


def _await_topics(connection: KafkaConnection, names: list[str], timeout_s: float) -> None:
    """Wait until the topics have leaders: a new topic has none for a moment."""
    until = time.monotonic() + timeout_s
    while True:
        existing = connection.fetch_metadata().topics
        ready = [name for name in names if name in existing and _has_leaders(existing[name])]
        if len(ready) == len(names):
            return
        if time.monotonic() > until:
            missing = sorted(set(names) - set(ready))
            raise Unreachable(f"the topic {missing[0]} has no leader after {timeout_s:g} s: are all brokers running?")
        time.sleep(0.05)


def _has_leaders(topic: Any) -> bool:
    return bool(topic.partitions) and all(partition.leader >= 0 for partition in topic.partitions.values())


def count_partitions(connection: KafkaConnection) -> int:
    """Return how many partitions experiences has at the broker. RunFailed if the topic does not exist."""
    name = connection.topic(EXPERIENCES)
    topic = connection.fetch_metadata().topics.get(name)
    if topic is None or not topic.partitions:
        with open_consumer(connection) as consumer:
            require_allowed(consumer, name)
        failure = Unreachable if lost_broker_within(connection.config.wait_s) else RunFailed
        raise failure(f"there is no topic {name} at {connection.config.address}: start the run's learner first")
    return len(topic.partitions)


def topic_id(connection: KafkaConnection) -> str:
    """Return the unique ID of the topic experiences. Offsets are valid for one ID: a recreated topic has another."""
    name, admin = connection.topic(EXPERIENCES), connection.admin()
    futures = admin.describe_topics(import_kafka().TopicCollection([name]), request_timeout=REACH_S)
    try:
        return str(futures[name].result().topic_id)
    except import_kafka().KafkaException as error:
        failure = Unreachable if is_transient(error) else RunFailed
        raise failure(f"the topic {name} cannot be described: {describe_error(error)}") from None


def partition_of(run: str, actor: int, num_partitions: int) -> int:
    """Return the partition of an actor's segments, which spreads consecutive actors, and runs, over partitions."""
    return (zlib.crc32(run.encode()) + actor) % num_partitions


def decode_headers(message: Message) -> dict[str, bytes]:
    """Return the headers by name; of duplicates the last one. Empty if a name is not valid text."""
    try:
        return {name: value or b"" for name, value in message.headers() or ()}
    except (UnicodeDecodeError, SystemError):
        return {}


def get_watermarks(consumer: Any, topic: str, partition: int = 0) -> tuple[int, int]:
    """Return the first offset of a partition and its end offset. Unreachable if no broker knows them in time."""
    kafka, until = import_kafka(), time.monotonic() + REACH_S
    while True:
        try:
            low, high = consumer.get_watermark_offsets(kafka.TopicPartition(topic, partition), timeout=REACH_S)
            return int(low), int(high)
        except kafka.KafkaException as error:  # a broker may not know yet that it leads the partition
            if time.monotonic() > until or not is_transient(error):
                require_allowed(consumer, topic)
                raise Unreachable(f"the end of {topic}[{partition}] cannot be found: {describe_error(error)}") from None
            time.sleep(RETRY_S)


def find_offset_at(consumer: Any, topic: str, since_s: float) -> int:
    """Return the offset of the first message written at `since_s` or later (brokers' clock); else the end offset."""
    kafka, (_, end) = import_kafka(), get_watermarks(consumer, topic)
    try:
        (found,) = consumer.offsets_for_times([kafka.TopicPartition(topic, 0, int(since_s * 1000))], timeout=REACH_S)
    except kafka.KafkaException as error:
        raise Unreachable(f"what was last written to {topic} cannot be found: {describe_error(error)}") from None
    return int(found.offset) if found.offset >= 0 else end


def is_transient(error: Any) -> bool:
    """Whether a retry may succeed: a broker is down, starting, electing a leader, or does not know its topics yet."""
    inner = error.args[0] if isinstance(error, import_kafka().KafkaException) and error.args else error
    known = import_kafka().KafkaError
    names = [
        "_TRANSPORT",
        "_ALL_BROKERS_DOWN",
        "_TIMED_OUT",
        "_RESOLVE",
        "_WAIT_COORD",
        "_UNKNOWN_PARTITION",
        "_UNKNOWN_TOPIC",
        "_LEADER_NOT_AVAILABLE",
        "UNKNOWN_TOPIC_OR_PART",
        "LEADER_NOT_AVAILABLE",
        "NOT_LEADER_FOR_PARTITION",
        "BROKER_NOT_AVAILABLE",
        "REPLICA_NOT_AVAILABLE",
        "REQUEST_TIMED_OUT",
        "NETWORK_EXCEPTION",
        "COORDINATOR_NOT_AVAILABLE",
        "COORDINATOR_LOAD_IN_PROGRESS",
        "NOT_COORDINATOR",
        "NOT_ENOUGH_REPLICAS",
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        "OFFSET_NOT_AVAILABLE",
        "KAFKA_STORAGE_ERROR",
    ]
    return bool(inner.retriable() or inner.code() in {getattr(known, name, None) for name in names})


def is_unknown_topic(error: Any) -> bool:
    """Whether a broker reports an unknown topic or partition."""
    known = import_kafka().KafkaError
    return error.code() in (known._UNKNOWN_PARTITION, known._UNKNOWN_TOPIC, known.UNKNOWN_TOPIC_OR_PART)


def lost_broker_within(within_s: float) -> bool:
    """Whether this process lost a broker in the last `within_s`: after a restart it may not know its topics yet."""
    return time.monotonic() - _broker_lost_s[0] < within_s


def find_newest(
    connection: KafkaConnection,
    topic: str,
    partition: int,
    matches: Callable[[Message], bool],
    before: int | None = None,
    since: int = 0,
) -> tuple[Message | None, int]:
    """Return the last message from `since` on that `matches`, or None, and the end offset (or `before`)."""
    with open_consumer(connection) as consumer:
        low, high = connection.ends(consumer, topic, partition)
        low, high = max(low, since), high if before is None else before
        for messages in read_backwards(consumer, topic, partition, low, high):
            found = [message for message in messages if matches(message)]
            if found:
                return found[-1], high
        return None, high


def read_backwards(consumer: Any, topic: str, partition: int, low: int, end: int) -> Iterator[list[Message]]:
    """Yield the messages of a partition before `end`, newest batch first, in growing batches."""
    step = 8
    while end > low:
        start = max(low, end - step)
        yield read_range(consumer, topic, partition, start, end)
        end, step = start, step * 4


@contextlib.contextmanager
def open_consumer(connection: KafkaConnection) -> Iterator[Any]:
    """Open a consumer for the duration of a with block."""
    consumer = connection.consumer()
    try:
        yield consumer
    finally:
        consumer.close()


def read_range(consumer: Any, topic: str, partition: int, start: int, end: int) -> list[Message]:
    """Return the messages from offset `start` to before `end` that exist. Unreachable if none arrive in time."""
    kafka, found = import_kafka(), []
    consumer.assign([kafka.TopicPartition(topic, partition, start)])
    until = time.monotonic() + REACH_S
    while time.monotonic() < until:
        message = consumer.poll(0.5)
        if message is None:
            continue
        error = message.error()
        if error is None:
            until = time.monotonic() + REACH_S
        if error is None and message.offset() < end:
            found.append(message)
        if (error is None and message.offset() >= end - 1) or (error is not None and _is_partition_eof(error)):
            return found
        if error is not None and not is_transient(error):
            raise RunFailed(f"{topic}[{partition}] cannot be read: {describe_error(error)}")
        if error is not None:
            time.sleep(RETRY_S)
    raise Unreachable(f"{topic}[{partition}] could not be read within {REACH_S:g} s")


class PartitionReader:
    """Reads several partitions over one connection and passes each message to the handler of its partition."""

    def __init__(self, connection: KafkaConnection, group: str | None = None) -> None:
        self._kafka = import_kafka()
        self._consumer, self._wait_s = connection.consumer(group), connection.config.wait_s
        self._handlers: dict[tuple[str, int], Callable[[Message], None]] = {}
        self._read: dict[tuple[str, int], int] = {}  # the offset before which every message was handled
        self.failure: str | None = None  # the broker's last error, while it does not respond
        self._active_s = time.monotonic()  # when a message last arrived, or the topics were last checked

    def follow(self, topic: str, partition: int, offset: int, handler: Callable[[Message], None]) -> None:
        """Pass every message from this offset on to `handler`."""
        if all(topic != known for known, _ in self._handlers):
            # The client looks up a new topic's leader once; if it is not connected by then, it retries after a second.
            with contextlib.suppress(self._kafka.KafkaException):
                self._consumer.list_topics(topic, timeout=1.0)
        self._handlers[topic, partition] = handler
        self._read[topic, partition] = offset
        # Not a full reassignment: paused partitions stay paused, and nothing is fetched twice.
        self._consumer.incremental_assign([self._kafka.TopicPartition(topic, partition, offset)])

    def handle_next(self, timeout_s: float = 0.0) -> bool:
        """Handle the next message, waiting up to `timeout_s` for it; return whether there was a message or an error."""
        message = self._consumer.poll(timeout_s)
        if message is None:
            self._check_topics()
            return False
        self._active_s = time.monotonic()
        source = (message.topic(), message.partition())
        error = message.error()
        if error is not None:
            self._handle_error(error, source, message.offset())
            return True
        self.failure = None
        self._read[source] = message.offset() + 1
        self._handlers[source](message)
        return True

    def progress(self, timeout_s: float = 0.0) -> bool:
        """Handle the messages that are available, for a bounded time; return whether there was one.

        Waits up to `timeout_s` for the first.
        """
        if not self.handle_next(timeout_s):
            return False
        until = time.monotonic() + MAX_DRAIN_S
        while time.monotonic() < until and self.handle_next():
            pass
        return True

    def catch_up(self, timeout_s: float = REACH_S) -> bool:
        """Handle every message committed before this call; return whether brokers responded and it was done in time."""
        until = time.monotonic() + timeout_s
        for topic, partition in self._handlers:
            try:
                _, high = get_watermarks(self._consumer, topic, partition)
            except Unreachable:
                return False
            while self._read[topic, partition] < high:
                if time.monotonic() > until:
                    return False
                self.handle_next(0.1)
        return True

    def set_paused(self, topic: str, partition: int, *, paused: bool) -> None:
        """Pause a partition, or resume it."""
        positions = [self._kafka.TopicPartition(topic, partition, self._read[topic, partition])]
        if paused:
            self._consumer.pause(positions)
        else:
            self._consumer.resume(positions)

    def end(self, topic: str, partition: int) -> int:
        """Return a partition's end offset, as the broker last reported it."""
        position = self._kafka.TopicPartition(topic, partition)
        return int(self._consumer.get_watermark_offsets(position, cached=True)[1])

    def metadata(self) -> Any:
        """Return the consumer group metadata, for committing offsets in a transaction."""
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        self._consumer.close()

    def _handle_error(self, error: Any, source: tuple[str | None, int | None], offset: int | None) -> None:
        if _is_partition_eof(error):
            if source in self._read and offset is not None and offset >= 0:
                self._read[source] = max(self._read[source], offset)  # past a transaction's control records
            return
        code = error.code()
        if code in (self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART, self._kafka.KafkaError._UNKNOWN_TOPIC):
            self._require_topic(str(source[0]))
            return
        if error.fatal() or is_denied(error) or code == self._kafka.KafkaError._AUTHENTICATION:
            raise RunFailed(f"{source[0] or 'the broker'} cannot be read: {describe_error(error)}")
        self.failure = error.str()

    def _check_topics(self) -> None:
        """Check the topics after a long idle time: the client reports no error for a deleted topic."""
        if time.monotonic() - self._active_s < IDLE_CHECK_S:
            return
        self._active_s = time.monotonic()
        for topic in dict.fromkeys(topic for topic, _ in self._handlers):
            with contextlib.suppress(self._kafka.KafkaException):
                known = self._consumer.list_topics(topic, timeout=1.0).topics.get(topic)
                if known is None or known.error is not None:
                    self._require_topic(topic)

    def _require_topic(self, topic: str) -> None:
        """Raise RunFailed if brokers keep reporting that the topic is unknown; no response proves nothing."""
        if lost_broker_within(self._wait_s):
            return  # checked again later
        until = time.monotonic() + TOPIC_GONE_S
        while time.monotonic() < until:
            try:
                known = self._consumer.list_topics(topic, timeout=TOPIC_GONE_S).topics.get(topic)
            except self._kafka.KafkaException:
                return  # the broker is down: the topic is checked when it is back
            if known is not None and known.error is None:
                return
            time.sleep(0.25)
        require_allowed(self._consumer, topic)
        raise RunFailed(f"the topic {topic} is gone: it was deleted, with its messages")


def _is_partition_eof(error: Any) -> bool:
    return bool(error.code() == import_kafka().KafkaError._PARTITION_EOF)


def is_denied(error: Any) -> bool:
    """Whether brokers deny this process the operation, so that a retry is useless."""
    codes = import_kafka().KafkaError
    return error.code() in (
        codes.TOPIC_AUTHORIZATION_FAILED,
        codes.GROUP_AUTHORIZATION_FAILED,
        codes.CLUSTER_AUTHORIZATION_FAILED,
        codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    )


def describe_error(error: Any) -> str:
    """Return the message of a client or broker error, with a hint if the operation is denied."""
    inner = error.args[0] if isinstance(error, import_kafka().KafkaException) and error.args else error
    if not hasattr(inner, "str"):
        return str(inner)
    return f"{inner.str()}; {ACL_HINT}" if is_denied(inner) else str(inner.str())


@contextlib.contextmanager
def map_produce_errors(topic: str) -> Iterator[None]:
    """Raise RunFailed if writing to the topic is denied, BufferError if it is not possible at the moment."""
    try:
        yield
    except import_kafka().KafkaException as error:
        if is_transient(error):
            raise BufferError(describe_error(error)) from None
        if not is_denied(error.args[0]):
            raise
        raise RunFailed(f"nothing can be written to {topic}: {describe_error(error)}") from None


def require_allowed(consumer: Any, topic: str) -> None:
    """Raise RunFailed if the topic is denied: brokers list such a topic as missing, unless it is requested by name."""
    try:
        known = consumer.list_topics(topic, timeout=REACH_S).topics.get(topic)
    except import_kafka().KafkaException:
        return  # no response is no denial
    if known is not None and known.error is not None and is_denied(known.error):
        raise RunFailed(f"the topic {topic} cannot be used: {describe_error(known.error)}")


_broker_lost_s = [-math.inf]  # when a client of this process last lost a broker


def _on_client_error(error: Any) -> None:
    """Log a client error and record a lost broker; clients reconnect by themselves. An unknown topic does not count."""
    if is_transient(error) and not is_unknown_topic(error):
        _broker_lost_s[0] = time.monotonic()
    get_logger().info("kafka: %s", error)


def get_logger() -> logging.Logger:
    """Return the logger for connection events of Kafka clients."""
    return logging.getLogger("steppe.kafka")
