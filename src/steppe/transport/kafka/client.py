"""Kafka: how a process reaches the brokers, the topics and what they must be like, and reading them.

    experiences           16 partitions   key run/actor    a segment is one message; an actor stays in one partition
    experiences.progress  1, compacted    key run/actor    how far the learner has read each actor: the actor's credit
    dead_letters          1               records that failed validation, with the reason (dead_letters.py)
    model_updates         1, compacted    key run/policy   weights; written in transactions with the offsets behind them
    metrics.* events commands.control     1 partition each: a Board (board.py)

Segments are in channel.py, weights in weights.py. Nothing here subscribes: every reader says itself which offsets it is at.
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
INT64 = struct.Struct("<q")  # a number in a header
REACH_S = 10.0
IDLE_CHECK_S = 5.0  # after which a reader looks whether its topics are still there
ACL_HINT = "docs/kafka.md (Security) lists what each role must be allowed"
TOPIC_GONE_S = 5.0  # how long a topic may be unknown before it counts as deleted, while no broker was lost lately
RETRY_S = 0.05  # between two tries
HOUR_MS = 3_600_000
DEAD_LETTER_BYTES = 64 << 20  # of the dead-letter topic that are kept
MAX_DRAIN_S = 0.25  # how long one call may hand on messages that keep coming
QUEUE_KB = 64 << 10  # of messages that have come and were not asked for yet
MESSAGE_TIMEOUT_MS = 600_000  # how long a message waits for a broker that does not answer
Message: TypeAlias = Any  # confluent_kafka.Message
Headers: TypeAlias = Mapping[str, bytes]


def import_kafka() -> Any:
    """The module confluent_kafka; MissingExtra where it is not installed."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise MissingExtra("runtime 'kafka'", "kafka") from error
    return confluent_kafka


@dataclass(frozen=True)
class KafkaConnection:
    """How the processes of a run reach the brokers, and what they call the topics."""

    config: KafkaConfig
    run: str
    since: tuple[
        tuple[str, int, int], ...
    ] = ()  # topic, partition, and the offset in front of which nothing is this run's

    def topic(self, name: str) -> str:
        return self.config.prefix + name

    @property
    def name(self) -> str:
        """The run's own; behind it, `run` has what tells it from others of the same name."""
        return self.run.partition("~")[0]

    def ends(self, consumer: Any, topic: str, partition: int) -> tuple[int, int]:
        """Of what may be this run's in a partition; all of it where the topic was made anew since."""
        low, high = get_watermarks(consumer, topic, partition)
        begun = max((offset for name, number, offset in self.since if (name, number) == (topic, partition)), default=0)
        return (max(low, begun) if begun <= high else low), high

    def key(self, what: object) -> bytes:
        """Of messages that belong to a part of this run."""
        return f"{self.run}/{what}".encode()

    def producer(self, **more: Any) -> Any:
        """Idempotent: what it sends arrives once and in order, as long as it lives."""
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
        """Reads what is committed, from offsets that the caller sets; a group is only a name to commit under."""
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
        """The cluster's metadata; Unreachable when no broker answers."""
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
        # Not "rebootstrap": while all brokers are away the client would give up those it knows, and a transaction's offsets
        # go on to the group's coordinator among them for a minute after it is back.
        quick = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 500, "metadata.recovery.strategy": "none"}
        known = {"bootstrap.servers": self.config.address, "client.id": "steppe", "error_cb": _on_client_error}
        return {**known, **quick, "log_level": 2, "topic.metadata.propagation.max.ms": 5_000, **security(self.config)}


def security(config: KafkaConfig) -> dict[str, Any]:
    """What a client must know to be let in; secrets come from the environment alone."""
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
    """Create the topics that are missing. Returns in words what those that were there are not like they should be."""
    kafka, wanted = import_kafka(), topic_settings(connection)
    there = connection.fetch_metadata().topics
    missing = [name for name in wanted if name not in there]
    admin = connection.admin()
    fresh = [
        kafka.admin.NewTopic(name, wanted[name][0], connection.config.replicas, config=wanted[name][1])
        for name in missing
    ]
    for name, made in admin.create_topics(fresh, request_timeout=timeout_s).items() if fresh else ():
        try:
            made.result()
        except kafka.KafkaException as error:
            if error.args[0].code() != kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                raise Unreachable(f"the topic {name} cannot be created: {describe_error(error)}") from None
    _await_topics(connection, list(wanted), timeout_s)
    return _find_config_drift(connection, admin, {name: wanted[name] for name in wanted if name in there}, there)


def topic_settings(connection: KafkaConnection) -> dict[str, tuple[int, dict[str, str]]]:
    """The partitions and settings that each topic is to have."""
    # The brokers' clock counts: what a sender with a wrong one wrote would be refused, or deleted at once.
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
                "segment.bytes": str(DEAD_LETTER_BYTES >> 2),  # only whole files of the log are deleted
            },
        ),
        MODEL_UPDATES: (1, compact),
    }
    for name in TOPICS:
        plan[name] = (1, kept if name.startswith("metrics") else {**kept, "retention.ms": "-1"})
    return {connection.topic(name): what for name, what in plan.items()}


def _find_config_drift(
    connection: KafkaConnection, admin: Any, wanted: Mapping[str, tuple[int, dict[str, str]]], there: Any
) -> list[str]:
    kafka, words = import_kafka(), []
    asked = [kafka.admin.ConfigResource(kafka.admin.ResourceType.TOPIC, name) for name in wanted]
    found = admin.describe_configs(asked, request_timeout=REACH_S) if asked else {}
    for resource, answer in found.items():
        partitions, settings = wanted[resource.name]
        have = len(there[resource.name].partitions)
        if have != partitions and resource.name != connection.topic(EXPERIENCES):
            words.append(f"topic {resource.name} has {have} partitions instead of {partitions}")
        try:
            actual = answer.result()
        except kafka.KafkaException as error:
            words.append(f"the settings of topic {resource.name} cannot be read: {describe_error(error)}")
            continue
        for name, value in settings.items():
            if name in actual and actual[name].value != value:
                words.append(f"topic {resource.name} has {name}={actual[name].value} instead of {value}")
    return words


def _await_topics(connection: KafkaConnection, names: list[str], timeout_s: float) -> None:
    """A topic that was just created has no leader for a moment."""
    until = time.monotonic() + timeout_s
    while True:
        there = connection.fetch_metadata().topics
        led = [name for name in names if name in there and _led(there[name])]
        if len(led) == len(names):
            return
        if time.monotonic() > until:
            missing = sorted(set(names) - set(led))
            raise Unreachable(f"the topic {missing[0]} has no leader after {timeout_s:g} s: is the cluster well?")
        time.sleep(0.05)


def _led(topic: Any) -> bool:
    return bool(topic.partitions) and all(one.leader >= 0 for one in topic.partitions.values())


def count_partitions(connection: KafkaConnection) -> int:
    """How many partitions experiences really has; RunFailed where it is gone."""
    name = connection.topic(EXPERIENCES)
    topic = connection.fetch_metadata().topics.get(name)
    if topic is None or not topic.partitions:
        with open_consumer(connection) as consumer:
            require_allowed(consumer, name)
        failure = Unreachable if lost_broker_within(connection.config.wait_s) else RunFailed
        raise failure(f"there is no topic {name} at {connection.config.address}: start the run's learner first")
    return len(topic.partitions)


def topic_id(connection: KafkaConnection) -> str:
    """What no other topic of the name of experiences had before or will have: offsets are those of one topic."""
    name, admin = connection.topic(EXPERIENCES), connection.admin()
    asked = admin.describe_topics(import_kafka().TopicCollection([name]), request_timeout=REACH_S)
    try:
        return str(asked[name].result().topic_id)
    except import_kafka().KafkaException as error:
        failure = Unreachable if is_transient(error) else RunFailed
        raise failure(f"the topic {name} cannot be described: {describe_error(error)}") from None


def partition_of(run: str, actor: int, num_partitions: int) -> int:
    """The partition of an actor's segments: neighbours in different ones, runs beginning in different ones."""
    return (zlib.crc32(run.encode()) + actor) % num_partitions


def decode_headers(message: Message) -> dict[str, bytes]:
    """Name → bytes; of a name that occurs twice the last. Nothing where a name is not text."""
    try:
        return {name: value or b"" for name, value in message.headers() or ()}
    except (UnicodeDecodeError, SystemError):
        return {}


def get_watermarks(consumer: Any, topic: str, partition: int = 0) -> tuple[int, int]:
    """The first offset of a partition and the one after its last."""
    kafka, until = import_kafka(), time.monotonic() + REACH_S
    while True:
        try:
            low, high = consumer.get_watermark_offsets(kafka.TopicPartition(topic, partition), timeout=REACH_S)
            return int(low), int(high)
        except kafka.KafkaException as error:  # a broker may not know yet that it leads a partition
            if time.monotonic() > until or not is_transient(error):
                require_allowed(consumer, topic)
                raise Unreachable(f"the end of {topic}[{partition}] cannot be found: {describe_error(error)}") from None
            time.sleep(RETRY_S)


def find_offset_at(consumer: Any, topic: str, since_s: float) -> int:
    """The offset of the first message that was written down at that time or later, by the brokers' clock; of the next one, if
    none was."""
    kafka, (_, end) = import_kafka(), get_watermarks(consumer, topic)
    try:
        (found,) = consumer.offsets_for_times([kafka.TopicPartition(topic, 0, int(since_s * 1000))], timeout=REACH_S)
    except kafka.KafkaException as error:
        raise Unreachable(f"what was last written to {topic} cannot be found: {describe_error(error)}") from None
    return int(found.offset) if found.offset >= 0 else end


def is_transient(error: Any) -> bool:
    """Whether the same may work in a moment: brokers that are away, start, or elect, and do not know their topics yet."""
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
    """Whether a broker says that it does not know a topic or a partition."""
    known = import_kafka().KafkaError
    return error.code() in (known._UNKNOWN_PARTITION, known._UNKNOWN_TOPIC, known.UNKNOWN_TOPIC_OR_PART)


def lost_broker_within(within_s: float) -> bool:
    """Whether this process lost a broker so lately: one that has just come back may not know its topics yet."""
    return time.monotonic() - _broker_lost_s[0] < within_s


def find_newest(
    connection: KafkaConnection,
    topic: str,
    partition: int,
    wanted: Callable[[Message], bool],
    before: int | None = None,
    since: int = 0,
) -> tuple[Message | None, int]:
    """The last message of a partition that is wanted, from `since` on, and the partition's end (or `before`)."""
    with open_consumer(connection) as consumer:
        low, high = connection.ends(consumer, topic, partition)
        low, high = max(low, since), high if before is None else before
        for messages in read_backwards(consumer, topic, partition, low, high):
            found = [message for message in messages if wanted(message)]
            if found:
                return found[-1], high
        return None, high


def read_backwards(consumer: Any, topic: str, partition: int, low: int, end: int) -> Iterator[list[Message]]:
    """What is in a partition in front of an offset, from there on back, in growing steps."""
    step = 8
    while end > low:
        start = max(low, end - step)
        yield read_range(consumer, topic, partition, start, end)
        end, step = start, step * 4


@contextlib.contextmanager
def open_consumer(connection: KafkaConnection) -> Iterator[Any]:
    """A consumer for a moment."""
    consumer = connection.consumer()
    try:
        yield consumer
    finally:
        consumer.close()


def read_range(consumer: Any, topic: str, partition: int, start: int, end: int) -> list[Message]:
    """The messages from one offset to before another, as far as they are there."""
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
    """What comes in on several partitions through one connection: each message goes to whoever follows its topic."""

    def __init__(self, connection: KafkaConnection, group: str | None = None) -> None:
        self._kafka = import_kafka()
        self._consumer, self._wait_s = connection.consumer(group), connection.config.wait_s
        self._handlers: dict[tuple[str, int], Callable[[Message], None]] = {}
        self._read: dict[tuple[str, int], int] = {}  # the offset up to which everything was handed on
        self.failure: str | None = None  # what the broker said last, while it does not answer
        self._seen_s = time.monotonic()  # when something came last, or was looked for

    def follow(self, topic: str, partition: int, offset: int, take: Callable[[Message], None]) -> None:
        """Hand every message from this offset on to `take`."""
        if all(topic != known for known, _ in self._handlers):
            # The client asks once who leads a new topic: if its connections are not up by then, again after a second.
            with contextlib.suppress(self._kafka.KafkaException):
                self._consumer.list_topics(topic, timeout=1.0)
        self._handlers[topic, partition] = take
        self._read[topic, partition] = offset
        # Not all of them anew: what is held stays so, and nothing is fetched twice.
        self._consumer.incremental_assign([self._kafka.TopicPartition(topic, partition, offset)])

    def one(self, timeout_s: float = 0.0) -> bool:
        """Hand on the next message, waiting for it if asked to; whether there was something."""
        message = self._consumer.poll(timeout_s)
        if message is None:
            self._check_topics()
            return False
        self._seen_s = time.monotonic()
        where = (message.topic(), message.partition())
        error = message.error()
        if error is not None:
            self._heed(error, where, message.offset())
            return True
        self.failure = None
        self._read[where] = message.offset() + 1
        self._handlers[where](message)
        return True

    def progress(self, timeout_s: float = 0.0) -> bool:
        """Hand on what is here, for a bounded time, waiting for the first if asked to; whether there was something."""
        if not self.one(timeout_s):
            return False
        until = time.monotonic() + MAX_DRAIN_S
        while time.monotonic() < until and self.one():
            pass
        return True

    def catch_up(self, timeout_s: float = REACH_S) -> bool:
        """Hand on everything that was committed before this call; whether brokers answered and that was done in time."""
        until = time.monotonic() + timeout_s
        for topic, partition in self._handlers:
            try:
                _, high = get_watermarks(self._consumer, topic, partition)
            except Unreachable:
                return False
            while self._read[topic, partition] < high:
                if time.monotonic() > until:
                    return False
                self.one(0.1)
        return True

    def hold(self, topic: str, partition: int, *, on: bool) -> None:
        """Bring no more of a partition for now; or again."""
        places = [self._kafka.TopicPartition(topic, partition, self._read[topic, partition])]
        if on:
            self._consumer.pause(places)
        else:
            self._consumer.resume(places)

    def end(self, topic: str, partition: int) -> int:
        """The offset behind a partition's last message, as the broker said with what it sent last."""
        place = self._kafka.TopicPartition(topic, partition)
        return int(self._consumer.get_watermark_offsets(place, cached=True)[1])

    def metadata(self) -> Any:
        """Whose offsets these are, for a transaction."""
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        self._consumer.close()

    def _heed(self, error: Any, where: tuple[str | None, int | None], offset: int | None) -> None:
        if _is_partition_eof(error):
            if where in self._read and offset is not None and offset >= 0:
                self._read[where] = max(self._read[where], offset)  # past what a transaction left besides messages
            return
        code = error.code()
        if code in (self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART, self._kafka.KafkaError._UNKNOWN_TOPIC):
            self._require(str(where[0]))
            return
        if error.fatal() or is_denied(error) or code == self._kafka.KafkaError._AUTHENTICATION:
            raise RunFailed(f"{where[0] or 'the broker'} cannot be read: {describe_error(error)}")
        self.failure = error.str()

    def _check_topics(self) -> None:
        """Where nothing comes for long: a topic that was deleted is not an error to the client, only silent."""
        if time.monotonic() - self._seen_s < IDLE_CHECK_S:
            return
        self._seen_s = time.monotonic()
        for topic in dict.fromkeys(topic for topic, _ in self._handlers):
            with contextlib.suppress(self._kafka.KafkaException):
                known = self._consumer.list_topics(topic, timeout=1.0).topics.get(topic)
                if known is None or known.error is not None:
                    self._require(topic)

    def _require(self, topic: str) -> None:
        """RunFailed when brokers say for a while that there is no such topic; one that does not answer says nothing."""
        if lost_broker_within(self._wait_s):
            return  # it is looked for again
        until = time.monotonic() + TOPIC_GONE_S
        while time.monotonic() < until:
            try:
                known = self._consumer.list_topics(topic, timeout=TOPIC_GONE_S).topics.get(topic)
            except self._kafka.KafkaException:
                return  # it is away: its topics are looked for when it is back
            if known is not None and known.error is None:
                return
            time.sleep(0.25)
        require_allowed(self._consumer, topic)
        raise RunFailed(f"the topic {topic} is gone: somebody deleted it, and what it held is lost")


def _is_partition_eof(error: Any) -> bool:
    return bool(error.code() == import_kafka().KafkaError._PARTITION_EOF)


def is_denied(error: Any) -> bool:
    """Whether brokers do not let this process do it: that will be so again."""
    codes = import_kafka().KafkaError
    return error.code() in (
        codes.TOPIC_AUTHORIZATION_FAILED,
        codes.GROUP_AUTHORIZATION_FAILED,
        codes.CLUSTER_AUTHORIZATION_FAILED,
        codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    )


def describe_error(error: Any) -> str:
    """What a client or a broker said, with what to do where something is not allowed."""
    inner = error.args[0] if isinstance(error, import_kafka().KafkaException) and error.args else error
    if not hasattr(inner, "str"):
        return str(inner)
    return f"{inner.str()}; {ACL_HINT}" if is_denied(inner) else str(inner.str())


@contextlib.contextmanager
def map_produce_errors(topic: str) -> Iterator[None]:
    """RunFailed where the client knows already that it may not write there; BufferError where it cannot just now."""
    try:
        yield
    except import_kafka().KafkaException as error:
        if is_transient(error):
            raise BufferError(describe_error(error)) from None
        if not is_denied(error.args[0]):
            raise
        raise RunFailed(f"nothing can be written to {topic}: {describe_error(error)}") from None


def require_allowed(consumer: Any, topic: str) -> None:
    """RunFailed where this process may not even know of the topic: brokers then say that there is none, unless asked for it."""
    try:
        known = consumer.list_topics(topic, timeout=REACH_S).topics.get(topic)
    except import_kafka().KafkaException:
        return  # brokers that do not answer do not forbid
    if known is not None and known.error is not None and is_denied(known.error):
        raise RunFailed(f"the topic {topic} cannot be used: {describe_error(known.error)}")


_broker_lost_s = [-math.inf]  # when a client of this process lost a broker last


def _on_client_error(error: Any) -> None:
    """Clients reconnect by themselves; what they say about it goes to the log. A missing topic is no lost broker."""
    if is_transient(error) and not is_unknown_topic(error):
        _broker_lost_s[0] = time.monotonic()
    get_logger().info("kafka: %s", error)


def get_logger() -> logging.Logger:
    """Where clients say what happens to their connections."""
    return logging.getLogger("steppe.kafka")
