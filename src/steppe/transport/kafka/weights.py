"""Weights through Kafka: small ones in messages, large ones in files that messages name.

Each publication is one transaction with the offsets of the segments that it was learned from.

    learner ── begin ─ weights ─ offsets ─ commit ▶ model_updates[0] ▶ actors, manager
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from steppe.core.contracts.errors import DamagedFile, Overtaken, RunFailed, Unreachable
from steppe.core.contracts.weights import Weights, WeightsLayout
from steppe.core.io.atomic_files import write_atomic
from steppe.core.io.codec import WEIGHTS_SCHEMA, decode_weights, encode_weights
from steppe.transport.kafka.channel import KafkaReader
from steppe.transport.kafka.client import (
    INT64,
    MODEL_UPDATES,
    RETRY_S,
    KafkaConnection,
    Message,
    PartitionReader,
    decode_headers,
    describe_error,
    find_newest,
    get_logger,
    get_watermarks,
    import_kafka,
    is_denied,
    is_transient,
    open_consumer,
)
from steppe.transport.kafka.dead_letters import DeadLetterQueue

UNREADABLE_S = 30.0  # how long a reader without any weights tries to read some
KEPT_CLAIMS = 4  # files of weights that are kept for late readers
PUBLISHER_KEY = "learner"  # the key in model_updates of the newest publisher's name
MAX_UNDECODED = 32  # messages of a policy that are kept undecoded
CALL_TIMEOUT_S = 30.0  # how long one call of a transaction may take before it is repeated


class KafkaWeights:
    """A WeightStore, reader side; the learner's also has a publisher, which writes."""

    def __init__(
        self,
        connection: KafkaConnection,
        partition_reader: PartitionReader | None,
        claims: Path,
        publisher: WeightPublisher | None = None,
        dead_letters: DeadLetterQueue | None = None,
    ) -> None:
        """`dead_letters` receives messages that are not valid weights."""
        self._connection, self._claims, self._publisher = connection, claims, publisher
        self._dead_letters = dead_letters or DeadLetterQueue(connection, "weights")
        self._newest: dict[str, Weights] = {}
        self._undecoded: defaultdict[str, list[Message]] = defaultdict(list)  # oldest first, decoded on demand
        self.damaged: str | None = None  # why the newest message was rejected
        self._damaged_s = math.inf  # since when
        self._searched: set[str] = set()
        self._partition_reader = partition_reader
        self._published: dict[str, tuple[int, WeightsLayout]] = {}
        with open_consumer(connection) as consumer:
            _, self._start_offset = get_watermarks(consumer, connection.topic(MODEL_UPDATES))
        if partition_reader is not None:
            partition_reader.follow(connection.topic(MODEL_UPDATES), 0, self._start_offset, self._handle)

    def publish(self, policy: str, weights: Weights) -> None:
        if self._publisher is None:
            raise ValueError("only the learner publishes weights")
        version, layout = self._published.get(policy, (-1, weights.layout))
        if policy in self._published and weights.version <= version:
            raise ValueError(f"version {weights.version} is not newer than {version}")
        weights.require(layout, "those published before")
        copy = weights.copy()
        self._publisher.put(policy, copy)
        self._newest[policy], self._published[policy] = copy, (weights.version, layout)
        self._undecoded.pop(policy, None)

    def newer_than(self, policy: str, version: int) -> Weights | None:
        if self._partition_reader is not None:
            self._partition_reader.progress()
            self._find_earlier(policy)
        self._decode_newest(policy)
        self._dead_letters.progress()
        found = self._newest.get(policy)
        if found is None and time.monotonic() - self._damaged_s > UNREADABLE_S:
            raise RunFailed(f"no weights can be read: {self.damaged}")
        return found.copy() if found is not None and found.version > version else None

    def last_published_version(self, policy: str) -> int:
        """Return the newest version that an earlier learner of this run has published; -1 if there is none."""
        found = self._find_before_start(policy)
        return -1 if found is None else self._decoded(policy, found).version

    def _find_earlier(self, policy: str) -> None:
        """On the first request for a policy, look for weights that were published before this reader started."""
        if policy in self._searched:
            return
        try:
            found = None if self._undecoded[policy] else self._find_before_start(policy)
        except Unreachable:
            return  # the next call tries again
        self._searched.add(policy)
        if found is not None:
            self._undecoded[policy].append(found)

    def _find_before_start(self, policy: str) -> Message | None:
        def matches(message: Message) -> bool:
            try:
                return message.key() == self._connection.key(policy) and bool(self._decoded(policy, message))
            except DamagedFile as error:
                self.damaged, self._damaged_s = str(error), min(self._damaged_s, time.monotonic())
                return False

        return find_newest(self._connection, self._connection.topic(MODEL_UPDATES), 0, matches, self._start_offset)[0]

    def _handle(self, message: Message) -> None:
        headers = decode_headers(message)
        if headers.get("run") != self._connection.run.encode() or "press" in headers:
            return
        policy = headers.get("policy", b"").decode(errors="replace")
        if message.key() != self._connection.key(policy):
            self._dead_letters.refuse(message, "its key and its headers name different policies")
            return
        self._undecoded[policy].append(message)
        if len(self._undecoded[policy]) > MAX_UNDECODED:
            self._decode_newest(policy)

    def _decode_newest(self, policy: str) -> None:
        """Take the valid weights of the highest version; keep the present ones if no message has valid weights."""
        known = self._newest.get(policy)
        for message in sorted(self._undecoded.pop(policy, []), key=_version, reverse=True):
            try:
                found = self._decoded(policy, message)
                self._newest[policy] = found if known is None or found.version > known.version else known
                self.damaged, self._damaged_s = None, math.inf
                return
            except DamagedFile as error:
                self.damaged, self._damaged_s = str(error), min(self._damaged_s, time.monotonic())
                self._dead_letters.refuse(message, str(error))

    def _decoded(self, policy: str, message: Message) -> Weights:
        """Decode the weights of a message. DamagedFile unless version and layout are the expected ones."""
        headers = decode_headers(message)
        schema = headers.get("schema", b"")
        if len(schema) != INT64.size or INT64.unpack(schema)[0] > WEIGHTS_SCHEMA:
            raise DamagedFile("weights of a schema that is not known here")
        data = self._claimed(headers) if "sha256" in headers else message.value() or b""
        weights, known = decode_weights(data), self._newest.get(policy)
        if weights.version != _version(message):
            raise DamagedFile("the weights' header and contents name different versions")
        if known is not None and weights.layout != known.layout:
            raise DamagedFile("the weights have another layout than those before")
        return weights

    def _claimed(self, headers: Mapping[str, bytes]) -> bytes:
        name = headers["sha256"].hex()
        try:
            data = (self._claims / f"{name}.weights").read_bytes()
        except OSError as error:
            raise DamagedFile(f"the weights' file {name} cannot be read in {self._claims}: {error.strerror}") from None
        if hashlib.sha256(data).digest() != headers["sha256"]:
            raise DamagedFile(f"the weights' file {name} does not match its name")
        return data


def _version(message: Message) -> int:
    """Return the version in the header; -1 if there is none."""
    value = decode_headers(message).get("version", b"")
    return int(INT64.unpack(value)[0]) if len(value) == INT64.size else -1


class WeightPublisher:
    """Publishes weights in a background thread, each in one transaction with the offsets learned from by then.

    A new publisher fences the previous one: of two learners of one run, only the later can publish. It writes its name
    to model_updates. So a fenced publisher can tell a later learner from a broker that aborted a slow transaction; in
    the second case it creates a new producer and writes the same again.
    """

    def __init__(self, connection: KafkaConnection, reader: KafkaReader | None, claims: Path) -> None:
        self._connection, self._reader, self._claims = connection, reader, claims
        self._kafka = import_kafka()
        self._topic, self._name = connection.topic(MODEL_UPDATES), uuid.uuid4().hex.encode()
        self._producer: Any = None
        self._announced = False
        self._waiting: dict[str, tuple[Weights, list[Any]]] = {}
        self._error: BaseException | None = None
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._commit(self._announce)
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    def put(self, policy: str, weights: Weights) -> None:
        """Publish these next, replacing waiting weights of this policy. Raises the error of an earlier publication."""
        with self._changed:
            self.require()
            self._waiting[policy] = (weights, self._reader.offsets() if self._reader is not None else [])
            self._changed.notify_all()

    def require(self) -> None:
        """Raise the error of an earlier publication, if there was one."""
        if self._error is not None:
            raise self._error

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is published; return whether it is."""
        with self._changed:
            done = self._changed.wait_for(lambda: (not self._waiting and not self._busy) or self._error, timeout_s)
            self.require()
            return bool(done)

    def close(self, timeout_s: float = 10.0) -> None:
        """Publish what is waiting, and stop the thread."""
        with self._changed:
            self._changed.wait_for(lambda: (not self._waiting and not self._busy) or self._error, timeout_s)
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (publication := self._next_publication()) is not None:
            try:
                self._publish_weights(*publication)
            except BaseException as error:  # noqa: BLE001 - raised again where the learner publishes next
                with self._changed:
                    self._error = error
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next_publication(self) -> tuple[str, Weights, list[Any]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and self._error is None))
            if self._closed and not self._waiting:
                return None
            if self._closed and self._error is not None:
                return None
            policy = next(iter(self._waiting))
            self._busy = True
            return (policy, *self._waiting.pop(policy))

    def _publish_weights(self, policy: str, weights: Weights, offsets: list[Any]) -> None:
        data = encode_weights(weights)
        headers = {
            "schema": INT64.pack(WEIGHTS_SCHEMA),
            "run": self._connection.run.encode(),
            "policy": policy.encode(),
            "version": INT64.pack(weights.version),
        }
        if len(data) > self._connection.config.claim_mb * (1 << 20):
            headers["sha256"], data = self._claim(data), b""
        key = self._connection.key(policy)
        self._commit(lambda: self._transact(data, key, headers, offsets))

    def _commit(self, action: Callable[[], None]) -> None:
        """Run `action` with a ready producer, recreated as often as needed. Overtaken if a later learner publishes."""
        while True:
            try:
                if self._producer is None:
                    self._producer = self._connection.producer(**self._settings())
                    self._retry(lambda: self._producer.init_transactions(CALL_TIMEOUT_S))
                self._announce()
                action()
                return
            except _TransactionAborted:
                continue
            except _ProducerFenced as error:
                self._require_newest_publisher(str(error))
                self._producer, self._announced = None, False

    def _settings(self) -> dict[str, Any]:
        name = f"steppe/{self._connection.config.prefix}{self._connection.run}/learner"
        return {"transactional.id": name, "transaction.timeout.ms": 60_000, "message.timeout.ms": 55_000}

    def _announce(self) -> None:
        """Announce this publisher in the topic as the newest, once per producer."""
        if not self._announced:
            headers = {"run": self._connection.run.encode(), "press": self._name}
            self._transact(b"", self._connection.key(PUBLISHER_KEY), headers, [])
            self._announced = True

    def _require_newest_publisher(self, reason: str) -> None:
        """Raise Overtaken if another publisher has announced itself later."""
        key = self._connection.key(PUBLISHER_KEY)
        matches = lambda message: message.key() == key and len(decode_headers(message).get("press", b"")) == 32  # noqa: E731
        while True:
            try:
                found, _ = find_newest(self._connection, self._topic, 0, matches)
                break
            except Unreachable:
                if self._closed:
                    raise
        if found is not None and decode_headers(found).get("press") != self._name:
            raise Overtaken(f"another learner has taken over {self._connection.run}: this one ends")
        get_logger().warning("kafka: the weight publisher starts again: %s", reason)

    def _transact(self, data: bytes, key: bytes, headers: Mapping[str, bytes], offsets: list[Any]) -> None:
        self._retry(self._producer.begin_transaction)
        self._retry(lambda: self._producer.produce(self._topic, data, key, 0, headers=list(headers.items())))
        if self._reader is not None and offsets:
            metadata = self._reader.metadata
            self._retry(lambda: self._producer.send_offsets_to_transaction(offsets, metadata, CALL_TIMEOUT_S))
        self._retry(lambda: self._producer.commit_transaction(CALL_TIMEOUT_S))

    def _retry(self, action: Any) -> None:
        """Repeat `action` until it succeeds, as a broker that is down may come back.

        _TransactionAborted: the transaction has to be repeated. _ProducerFenced: the producer has to be recreated.
        """
        until = time.monotonic() + self._connection.config.wait_s
        while True:
            try:
                action()
                return
            except BufferError:
                self._producer.poll(RETRY_S)
            except self._kafka.KafkaException as error:
                inner, known = error.args[0], self._kafka.KafkaError
                if is_denied(inner):
                    raise RunFailed(f"weights could not be published: {describe_error(inner)}") from None
                fenced = (known._FENCED, known.INVALID_PRODUCER_EPOCH, known.PRODUCER_FENCED, known.INVALID_TXN_STATE)
                if inner.code() in fenced or inner.fatal():
                    raise _ProducerFenced(inner.str()) from None
                if inner.txn_requires_abort():
                    self._retry(lambda: self._producer.abort_transaction(CALL_TIMEOUT_S))
                    raise _TransactionAborted from None
                may_retry = inner.retriable() or inner.code() == known._TIMED_OUT
                if self._closed or not (may_retry or (is_transient(inner) and time.monotonic() < until)):
                    raise RunFailed(f"weights could not be published: {inner.str()}") from None
                self._producer.poll(RETRY_S)

    def _claim(self, data: bytes) -> bytes:
        """Write weights to a file, return the digest that names it, and remove all but the newest files."""
        digest = hashlib.sha256(data).digest()
        self._claims.mkdir(parents=True, exist_ok=True)
        write_atomic(self._claims / f"{digest.hex()}.weights", data)
        for old in list(_by_age(self._claims))[:-KEPT_CLAIMS]:
            old.unlink(missing_ok=True)
        return digest


class _TransactionAborted(Exception):
    """The transaction was aborted and has to be repeated."""


class _ProducerFenced(Exception):
    """The producer is unusable: brokers know a newer one, or have aborted its transaction."""


def _by_age(claims: Path) -> Iterator[Path]:
    yield from sorted(claims.glob("*.weights"), key=lambda path: path.stat().st_mtime_ns)
