"""The dead-letter topic: records that failed validation, cut to 4 KiB, with the reason and where they came from.

The reader skips a rejected record: its offset advances. Writing to the dead-letter topic never blocks or fails a
reader.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from steppe.core.contracts.errors import SteppeError
from steppe.transport.kafka.client import (
    DEAD_LETTERS,
    INT64,
    KafkaConnection,
    Message,
    decode_headers,
    get_logger,
    import_kafka,
)

KEPT_BYTES = 4 << 10  # of a record's value that are kept
REPORT_INTERVAL_S = 1.0  # minimum time between two reports
_HEADERS, _NAME, _VALUE, _REASON = 16, 64, 256, 500  # kept: number of headers; lengths of name, value, reason


class DeadLetterQueue:
    """Forwards records that one reader rejects, counts them by topic, and reports the counts at most once a second."""

    def __init__(
        self,
        connection: KafkaConnection,
        by: str,
        on_report: Callable[[dict[str, Any]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`by` names the reader. `on_report` receives the details of an event: a message, and the counts since the last one."""
        self.refused: Counter[str] = Counter()  # topic → records
        self._connection, self._by, self._on_report, self._clock = connection, by.encode(), on_report, clock
        self._topic = connection.topic(DEAD_LETTERS)
        self._producer: Any = None
        self._unreported: Counter[str] = Counter()
        self._last: tuple[str, str] = ("", "")  # topic and reason
        self._reported_s = float("-inf")

    def refuse(self, message: Message, reason: str) -> None:
        """Forward a rejected record to the dead-letter topic and count it."""
        topic = str(message.topic()).removeprefix(self._connection.config.prefix)
        self.refused[topic] += 1
        self._unreported[topic] += 1
        self._last = (topic, reason)
        with contextlib.suppress(BufferError, import_kafka().KafkaException):  # counted even if not sent
            self._send(message, topic, reason)

    def progress(self) -> None:
        """Serve the producer, and report rejections if the last report is at least REPORT_INTERVAL_S old.

        Cheap when nothing was rejected.
        """
        if self._producer is not None:
            self._producer.poll(0)
        if self._unreported and self._clock() - self._reported_s >= REPORT_INTERVAL_S:
            self.report_refused()

    def report_refused(self) -> None:
        """Report now what was rejected since the last report."""
        if not self._unreported:
            return
        counts, (topic, reason) = dict(self._unreported), self._last
        self._unreported.clear()
        self._reported_s = self._clock()
        if self._on_report is not None:
            total = sum(counts.values())
            text = f"{total} {'record was' if total == 1 else 'records were'} refused and parked in {self._topic}"
            self._on_report({"message": f"{text}; the last one on {topic}: {reason}"[:_REASON], "refused": counts})

    def close(self, timeout_s: float = 5.0) -> None:
        """Report and send what is pending."""
        with contextlib.suppress(SteppeError):
            self.report_refused()
        if self._producer is not None:
            self._producer.flush(timeout_s)

    def _send(self, message: Message, topic: str, reason: str) -> None:
        if self._producer is None:
            self._producer = self._connection.producer(**_SETTINGS)
        value = message.value() or b""
        headers = {name[:_NAME]: kept[:_VALUE] for name, kept in list(decode_headers(message).items())[:_HEADERS]}
        headers |= {
            "topic": topic.encode(),
            "partition": INT64.pack(message.partition()),
            "offset": INT64.pack(message.offset()),
            "size": INT64.pack(len(value)),
            "reason": reason.encode(errors="replace")[:_REASON],
            "by": self._by,
        }
        key = (message.key() or b"")[:_VALUE]
        self._producer.produce(
            self._topic, value[:KEPT_BYTES], key, 0, on_delivery=_on_delivery, headers=list(headers.items())
        )
        self._producer.poll(0)


_SETTINGS = {
    "enable.idempotence": False,
    "acks": 1,
    "linger.ms": 5,
    "message.timeout.ms": 30_000,
    "queue.buffering.max.kbytes": 8 << 10,
}


def _on_delivery(error: Any, message: Message) -> None:
    if error is not None:
        get_logger().info("kafka: a refused record was not parked: %s", error)
