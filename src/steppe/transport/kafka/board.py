"""A Board on Kafka: one topic with one partition for each of the Board's topics, shared by all runs of a cluster.

A record's number is its offset plus one. Numbers survive every process; they restart if the topic is deleted.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from steppe.core.contracts.errors import DamagedFile, RunFailed
from steppe.core.io.record_validation import parse_record, validate_record
from steppe.transport.kafka.client import (
    KafkaConnection,
    Message,
    decode_headers,
    describe_error,
    get_watermarks,
    import_kafka,
    is_denied,
    map_produce_errors,
    read_range,
)

POLL_S = 0.05
POST_S = 5.0  # how long a post waits for its number
MAX_PENDING_RECORDS = 10_000  # records that are kept while a broker does not know its topics yet


OnRefused = Callable[[Message, str], object]


def decode_record(message: Message) -> dict[str, Any] | None:
    """Return the JSON object in a message, bounded in size but of any schema; None if there is none."""
    try:
        return parse_record(message.value())
    except DamagedFile:
        return None


class KafkaBoard:
    """The records of one run; those of other runs on the same topics are skipped. Not thread-safe."""

    def __init__(
        self,
        connection: KafkaConnection,
        origin: str = "role",
        refuse: OnRefused | None = None,
        num_actors: int | None = None,
    ) -> None:
        """`origin` is attached to every record, for processes that copy records from one Board to another.

        With `refuse`, only records with their topic's schema, of this run and one of `num_actors` are returned;
        `refuse` receives each of the others once.
        """
        self._connection, self._kafka, self._origin = connection, import_kafka(), origin.encode()
        self._refuse, self._num_actors = refuse, num_actors
        self._refused_up_to: dict[str, int] = {}  # topic → offset before which all invalid records were refused
        self._scanned_to: dict[str, tuple[int, int]] = {}  # topic → (number, offset): no record between them
        self._producer = connection.producer(**{"queue.buffering.max.kbytes": 16 << 10})
        self._consumer: Any = None
        self._waiting: deque[tuple[Any, ...]] = deque(maxlen=MAX_PENDING_RECORDS)  # not accepted by the client yet
        self._late = False  # the broker did not acknowledge the last post in time: further posts do not wait
        self._refused: str | None = None  # the error, if writing is denied

    def post(self, topic: str, record: dict[str, Any]) -> int:
        """Append a record and return its number; 0 if no broker responds in time.

        The record is then sent when a broker responds. RunFailed if writing is denied.
        """
        numbers: list[int] = []

        def delivered(error: Any, message: Message) -> None:
            self._late = error is not None
            if error is not None and is_denied(error):
                self._refused = f"nothing can be written to {message.topic()}: {describe_error(error)}"
            numbers.append(0 if error is not None else message.offset() + 1)

        text = json.dumps(record, separators=(",", ":")).encode()
        headers = [("run", self._connection.run.encode()), ("origin", self._origin)]
        name, key = self._connection.topic(topic), self._connection.key(topic)
        self._waiting.append((name, text, key, headers, delivered))
        self._send()
        until = time.monotonic() + POST_S
        while not numbers and not self._late and (left_s := until - time.monotonic()) > 0:
            self._producer.poll(min(left_s, POLL_S if self._waiting else left_s))
            self._send()
        if self._refused is not None:
            raise RunFailed(self._refused)
        self._late = not numbers
        return numbers[0] if numbers else 0

    def _send(self) -> None:
        """Pass waiting records to the client in order, until its queue is full or it does not know the topic yet."""
        try:
            while self._waiting:
                name, text, key, headers, delivered = self._waiting[0]
                with map_produce_errors(name):
                    self._producer.produce(name, text, key, 0, on_delivery=delivered, headers=headers)
                self._waiting.popleft()
        except BufferError:
            pass
        self._producer.poll(0)

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        """Return the records numbered above `after`, oldest first. Unreachable if no broker responds."""
        if self._consumer is None:
            self._consumer = self._connection.consumer()
        name, run = self._connection.topic(topic), self._connection.run.encode()
        low, high = get_watermarks(self._consumer, name)
        start = max(low, after if after <= high else 0)  # beyond its end: the topic was recreated
        since, passed = self._scanned_to.get(topic, (-1, 0))
        if since == after and passed <= high:
            start = max(start, passed)
        found: list[tuple[int, dict[str, Any]]] = []
        while start < high and len(found) < limit:
            stop = min(high, start + limit)
            messages = read_range(self._consumer, name, 0, start, stop)
            own = [message for message in messages if decode_headers(message).get("run") == run]
            records = [(message.offset() + 1, self._record(topic, message)) for message in own]
            found += [(number, record) for number, record in records if record is not None]
            start = stop
        if len(found) <= limit:
            self._scanned_to[topic] = (found[-1][0] if found else after, start)
        return found[:limit]

    def _record(self, topic: str, message: Message) -> dict[str, Any] | None:
        if self._refuse is None:
            return decode_record(message)
        try:
            return validate_record(topic, message.value(), self._connection.name, self._num_actors)
        except DamagedFile as error:
            if message.offset() >= self._refused_up_to.get(topic, 0):  # a reader may read the same range again
                self._refused_up_to[topic] = message.offset() + 1
                self._refuse(message, str(error))
            return None

    def end(self, topic: str) -> int:
        """Return the number of the newest record, of any run."""
        if self._consumer is None:
            self._consumer = self._connection.consumer()
        return get_watermarks(self._consumer, self._connection.topic(topic))[1]

    def flush(self, timeout_s: float = 10.0) -> int:
        """Wait until the broker has acknowledged everything; return how many records it has not."""
        until = time.monotonic() + timeout_s
        self._send()
        while self._waiting and time.monotonic() < until:
            self._producer.poll(POLL_S)
            self._send()
        return int(self._producer.flush(max(0.0, until - time.monotonic()))) + len(self._waiting)

    def close(self, timeout_s: float = 10.0) -> None:
        self.flush(timeout_s)
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
