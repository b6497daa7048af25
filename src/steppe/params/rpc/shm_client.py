"""Shared-memory client of a parameter server: pulls read memory, other calls are requests (layout: shm_server.py)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import DamagedFile, SteppeError, Unreachable, UsageError
from steppe.core.contracts.weights import Weights
from steppe.core.system.shared_dir import Wakeup
from steppe.params.push_api import Push
from steppe.params.rounds import Receipt
from steppe.params.rpc import shm_server
from steppe.params.rpc.shm_server import RequestSlot, SharedParameters, ShmRequest


class ShmClient:
    """Client in one process; requests of its threads are serialized, pulls never wait."""

    MIN_POLL_S, MAX_POLL_S = 0.0001, 0.002  # pause between polls for a newer version
    sends_version = True  # the server does not see pulls

    def __init__(self, room: Path, timeout_s: float, retry_s: float) -> None:
        self._room, self._timeout_s, self._retry_s = room, timeout_s, retry_s
        self._number = 0
        self._asking = threading.Lock()
        self._memory: SharedParameters | None = None
        self._seat: RequestSlot | None = None
        self._held: int | None = None
        self._wakeups: tuple[Wakeup, Wakeup] | None = None

    def close(self) -> None:
        with self._asking:
            self._leave()

    def is_serving(self) -> bool:
        return shm_server.is_server_alive(self._room)

    def pull(self, worker: str | None, newer_than: int) -> tuple[Weights | None, int | None]:
        memory = self._memory
        if memory is None or memory.words[shm_server.CLOSED]:
            memory = self._reconnect()
        if memory.words[shm_server.VERSION] <= newer_than:
            return None, memory.words[shm_server.ROUND]
        return memory.newest(), memory.words[shm_server.ROUND]

    def call(self, method: str, request: Mapping[str, Any]) -> Any:
        with self._asking:
            self._sit()
            return self._ask(ShmRequest(method, **request))[0]

    def push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> tuple[Receipt, int]:
        with self._asking:
            seat = self._sit()
            assert self._memory is not None
            space, whole = self._memory.space, self._memory.whole
            if isinstance(update, np.ndarray):
                refusal = space.copy_row(update, seat.row)
            else:
                refusal = space.fill(seat.row, update, whole=whole)
            answer, tries = self._ask(ShmRequest("Push", *push, refusal=refusal))
        return msgspec.convert(answer, Receipt), tries

    def _ask(self, question: ShmRequest) -> tuple[Any, int]:
        """Send a request; return the reply and the number of attempts. Retries if another server took over."""
        data, tries = msgspec.msgpack.encode(question), 1
        while not self._answered(data):
            assert self._seat is not None
            row = self._seat.row
            seat = self._sit(anew=True)
            if len(row) == len(seat.row):
                seat.row[:] = row
            tries += 1
        assert self._seat is not None
        kind, answer = msgspec.msgpack.decode(self._seat.get())
        self._seat.words[shm_server.STATE] = shm_server.IDLE
        if kind != "ok":
            raise (UsageError if kind == "usage" else SteppeError)(answer)
        return answer, tries

    def _answered(self, data: bytes) -> bool:
        """Write a request and wait for its reply; return False if the server is gone."""
        assert self._seat is not None
        assert self._wakeups is not None
        words, (theirs, mine) = self._seat.words, self._wakeups
        until = time.monotonic() + self._timeout_s
        self._seat.put(data, shm_server.REQUESTED)
        while words[shm_server.STATE] != shm_server.REPLIED:
            theirs.ring(struct.pack("<q", self._number))  # repeated: a full FIFO drops a wakeup
            mine.wait(shm_server.POLL_TIMEOUT_S)
            if words[shm_server.STATE] == shm_server.REPLIED:
                break
            if self._closed() or not shm_server.is_server_alive(self._room):
                return False
            if time.monotonic() >= until:
                raise Unreachable(f"the parameter server in {self._room} does not answer: is its process stopped?")
        return True

    def _closed(self) -> bool:
        return self._memory is None or bool(self._memory.words[shm_server.CLOSED])

    def _sit(self, *, anew: bool = False) -> RequestSlot:
        """Return a request slot of the running server; `anew` forces a new one."""
        if self._seat is not None and not anew and not self._closed():
            return self._seat
        memory = self._reconnect()
        self._leave()
        self._number = secrets.randbits(63)
        name = shm_server.slot_name(self._number)
        path = self._room / name
        try:
            seat = RequestSlot(path, memory.space.size, create=True)
        except OSError as error:
            raise UsageError(f"{memory.space.size >> 18} MiB of shared memory for updates: {error.strerror}") from None
        self._held = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_EX)
        self._wakeups = Wakeup(self._room / "bell"), Wakeup(self._room / f"bell-{name}")
        self._seat = seat
        return seat

    def _reconnect(self) -> SharedParameters:
        """Map the memory of the running server; wait up to `retry_s` for one, then raise Unreachable."""
        until, pause = time.monotonic() + self._retry_s, 0.005
        while True:
            with contextlib.suppress(OSError, DamagedFile, ValueError):
                memory = SharedParameters(self._room / "parameters")
                if not memory.words[shm_server.CLOSED] and shm_server.is_server_alive(self._room):
                    self._memory = memory
                    return memory
            left = until - time.monotonic()
            if left <= 0:
                raise Unreachable(f"no parameter server is in {self._room}: is it running?")
            time.sleep(min(left, pause))
            pause = min(2 * pause, 0.2)

    def _leave(self) -> None:
        if self._seat is not None:
            self._seat.remove()
            self._seat = None
        for bell in self._wakeups or ():
            bell.close()
            (self._room / f"bell-{shm_server.slot_name(self._number)}").unlink(missing_ok=True)
        self._wakeups = None
        if self._held is not None:
            os.close(self._held)
            self._held = None
