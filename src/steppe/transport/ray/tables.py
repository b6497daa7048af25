"""A table that workers on a Ray cluster share: its owner holds it, and workers call the owner.

A call carries one message (transport/tables/messages.py) and returns the reply, or nothing. A worker makes one call at
a time, so its messages arrive in order. Ray runs calls in its own threads; messages wait for `progress`, in the role's
thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from steppe.transport.ray.links import EMPTY_REPLY, Wake, is_actor_lost
from steppe.transport.tables.messages import BEGIN, CLAIM, CLAIM_EPISODES, REPLY, MessageTable

Message = tuple[int, int, np.ndarray]  # worker, kind, data
_REQUESTS = (BEGIN, CLAIM, CLAIM_EPISODES)


class RayTable(MessageTable):
    """A SharedTable over Ray calls. A worker's `call` calls the owner's `request` and returns a reference to the reply."""

    def __init__(self, wake: Wake, *, owns_table: bool) -> None:
        super().__init__(owns_table=owns_table)
        self.call: Callable[[int, int, np.ndarray], Any] | None = None
        self._wake, self._lock = wake, threading.Lock()
        self._inbox: deque[tuple[Message, Future[np.ndarray] | None]] = deque()
        self._outbox: deque[Message] = deque()
        self._waiting_calls: dict[int, Future[np.ndarray]] = {}
        self._calling = self._closed = False
        self._error: BaseException | None = None

    def request(self, worker: int, kind: int, data: np.ndarray) -> np.ndarray:
        """Return the reply to a message, once the owner's role has handled it. Runs in one of Ray's threads."""
        reply: Future[np.ndarray] = Future()
        self._inbox.append(((worker, kind, np.array(data)), reply))  # a copy: Ray's memory is read-only
        self._wake()
        return EMPTY_REPLY if self._closed else reply.result()

    def progress(self) -> None:
        """Handle the messages that arrived, and make the next call."""
        if self._error is not None:
            raise self._error
        while self._inbox:
            (worker, kind, data), reply = self._inbox.popleft()
            if reply is not None and kind in _REQUESTS:
                self._release_caller(worker)  # an earlier worker of that number, which is gone
                self._waiting_calls[worker] = reply
            self._handle(worker, kind, data)
            if reply is not None and kind not in _REQUESTS:
                reply.set_result(EMPTY_REPLY)
        self._call_next()

    @property
    def settled(self) -> bool:
        """Whether this worker has no message or reply in flight; always true for the owner.

        A call fails when the owner is gone, and is then no longer in flight.
        """
        return self._owned is not None or not (self._outbox or self._calling)

    def close(self) -> None:
        """Unblock calls that will get no reply."""
        self._closed = True
        while self._inbox:
            _, reply = self._inbox.popleft()
            if reply is not None:
                reply.set_result(EMPTY_REPLY)
        for worker in list(self._waiting_calls):
            self._release_caller(worker)

    def _release_caller(self, worker: int) -> None:
        if worker in self._waiting_calls:
            self._waiting_calls.pop(worker).set_result(EMPTY_REPLY)

    def _post(self, worker: int, kind: int, data: np.ndarray) -> None:
        if kind == REPLY:
            self._waiting_calls.pop(worker).set_result(data)
            return
        self._outbox.append((worker, kind, data))
        self._call_next()

    def _call_next(self) -> None:
        with self._lock:
            if self._calling or not self._outbox or self.call is None:
                return
            self._calling = True
            message = self._outbox.popleft()
        self.call(*message).future().add_done_callback(partial(self._on_reply, message[0]))

    def _on_reply(self, worker: int, reply: Future[np.ndarray]) -> None:
        """Handle the owner's reply. Runs in one of Ray's threads."""
        error = reply.exception()
        if error is not None:
            self._error = self._error or (None if is_actor_lost(error) else error)
        elif len(data := reply.result()):
            self._inbox.append(((worker, REPLY, data), None))
        self._calling = False
        self._wake()
