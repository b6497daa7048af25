"""The dead-letter topic: records that failed validation, cut to 4 KiB, with the reason and where they came from.

A record that is refused here has been passed over by its reader, whose offset moves on. Parking never blocks or fails a reader.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from steppe.core.contracts.errors import SteppeError
from steppe.transport.kafka.client import DEAD_LETTERS, WORD, Connection, Message, headers_of, library, log

KEPT_BYTES = 4 << 10  # of a record's value
TELL_S = 1.0  # between two sums
_HEADERS, _NAME, _VALUE, _REASON = 16, 64, 256, 500  # the original headers that are kept, and how much of them


class DeadLetters:
    """Parks what one reader refuses, counts it by topic, and tells the sum at most once a second."""

    def __init__(
        self,
        connection: Connection,
        by: str,
        tell: Callable[[dict[str, Any]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`by` names the reader. `tell` gets the details of an event: a message, and the counts since the last one."""
        self.refused: Counter[str] = Counter()  # topic → records
        self._connection, self._by, self._tell, self._clock = connection, by.encode(), tell, clock
        self._topic = connection.topic(DEAD_LETTERS)
        self._producer: Any = None
        self._untold: Counter[str] = Counter()
        self._last: tuple[str, str] = ("", "")  # topic and reason
        self._told_s = float("-inf")

    def refuse(self, message: Message, reason: str) -> None:
        """Park a record and count it."""
        topic = str(message.topic()).removeprefix(self._connection.config.prefix)
        self.refused[topic] += 1
        self._untold[topic] += 1
        self._last = (topic, reason)
        with contextlib.suppress(BufferError, library().KafkaException):  # counted all the same
            self._send(message, topic, reason)

    def progress(self) -> None:
        """Send, and tell what was refused if the last time is long enough ago. Cheap when nothing was."""
        if self._producer is not None:
            self._producer.poll(0)
        if self._untold and self._clock() - self._told_s >= TELL_S:
            self.sum_up()

    def sum_up(self) -> None:
        """Tell now what was refused since the last sum."""
        if not self._untold:
            return
        counts, (topic, reason) = dict(self._untold), self._last
        self._untold.clear()
        self._told_s = self._clock()
        if self._tell is not None:
            total = sum(counts.values())
            words = f"{total} {'record was' if total == 1 else 'records were'} refused and parked in {self._topic}"
            self._tell({"message": f"{words}; the last one on {topic}: {reason}"[:_REASON], "refused": counts})

    def close(self, timeout_s: float = 5.0) -> None:
        """Tell and send what is left."""
        with contextlib.suppress(SteppeError):
            self.sum_up()
        if self._producer is not None:
            self._producer.flush(timeout_s)

    def _send(self, message: Message, topic: str, reason: str) -> None:
        if self._producer is None:
            self._producer = self._connection.producer(**_SETTINGS)
        value = message.value() or b""
        about = {name[:_NAME]: kept[:_VALUE] for name, kept in list(headers_of(message).items())[:_HEADERS]}
        about |= {
            "topic": topic.encode(),
            "partition": WORD.pack(message.partition()),
            "offset": WORD.pack(message.offset()),
            "size": WORD.pack(len(value)),
            "reason": reason.encode(errors="replace")[:_REASON],
            "by": self._by,
        }
        key = (message.key() or b"")[:_VALUE]
        self._producer.produce(self._topic, value[:KEPT_BYTES], key, 0, on_delivery=_noted, headers=list(about.items()))
        self._producer.poll(0)


_SETTINGS = {
    "enable.idempotence": False,
    "acks": 1,
    "linger.ms": 5,
    "message.timeout.ms": 30_000,
    "queue.buffering.max.kbytes": 8 << 10,
}


def _noted(error: Any, message: Message) -> None:
    if error is not None:
        log().info("kafka: a refused record was not parked: %s", error)
