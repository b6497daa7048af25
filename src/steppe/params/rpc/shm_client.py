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
from steppe.params.rounds import Push, Receipt
from steppe.params.rpc import shm_server
from steppe.params.rpc.shm_server import RequestSlot, SharedParameters, ShmRequest


class ShmClient:
    """Client in one process; requests of its threads are serialized, pulls never wait."""

    MIN_POLL_S, MAX_POLL_S = 0.0001, 0.002  # pause between polls for a newer version
    sends_version = True  # the server does not see pulls

    def __init__(self, directory: Path, timeout_s: float, retry_s: float) -> None:
        self._directory, self._timeout_s, self._retry_s = directory, timeout_s, retry_s
        self._number = 0
        self._lock = threading.Lock()
        self._memory: SharedParameters | None = None
        self._slot: RequestSlot | None = None
        self._slot_lock: int | None = None
        self._wakeups: tuple[Wakeup, Wakeup] | None = None

    def close(self) -> None:
        with self._lock:
            self._close_slot()

    def is_serving(self) -> bool:
        return shm_server.is_server_alive(self._directory)

    def pull(self, worker: str | None, newer_than: int) -> tuple[Weights | None, int | None]:
        memory = self._memory
        if memory is None or memory.words[shm_server.CLOSED]:
            memory = self._reconnect()
        if memory.words[shm_server.VERSION] <= newer_than:
            return None, memory.words[shm_server.ROUND]
        return memory.newest(), memory.words[shm_server.ROUND]

    def call(self, method: str, request: Mapping[str, Any]) -> Any:
        with self._lock:
            self._open_slot()
            reply, _ = self._request(ShmRequest(shm_server.FORMER_METHODS.get(method, method), **request))
        former = {old: new for new, old in shm_server.FORMER_FIELDS.items()}
        return {former.get(name, name): value for name, value in (reply or {}).items()}

    def push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> tuple[Receipt, int]:
        with self._lock:
            slot = self._open_slot()
            assert self._memory is not None
            space, whole = self._memory.space, self._memory.whole
            if isinstance(update, np.ndarray):
                refusal = space.copy_row(update, slot.row)
            else:
                refusal = space.fill(slot.row, update, whole=whole)
            reply, tries = self._request(ShmRequest("Push", *push, refusal=refusal))
        return msgspec.convert(reply, Receipt), tries

    def _request(self, request: ShmRequest) -> tuple[Any, int]:
        """Send a request; return the reply and the number of attempts. Retries if another server took over."""
        data, tries = msgspec.msgpack.encode(request), 1
        while not self._exchange(data):
            assert self._slot is not None
            row = self._slot.row
            slot = self._open_slot(renew=True)
            if len(row) == len(slot.row):
                slot.row[:] = row
            tries += 1
        assert self._slot is not None
        kind, reply = msgspec.msgpack.decode(self._slot.get())
        self._slot.words[shm_server.STATE] = shm_server.IDLE
        if kind != "ok":
            raise (UsageError if kind == "usage" else SteppeError)(reply)
        return reply, tries

    def _exchange(self, data: bytes) -> bool:
        """Write a request and wait for its reply; return False if the server is gone."""
        assert self._slot is not None
        assert self._wakeups is not None
        words, (server_wakeup, own_wakeup) = self._slot.words, self._wakeups
        until = time.monotonic() + self._timeout_s
        self._slot.put(data, shm_server.REQUESTED)
        while words[shm_server.STATE] != shm_server.REPLIED:
            server_wakeup.ring(struct.pack("<q", self._number))  # repeated: a full FIFO drops a wakeup
            own_wakeup.wait(shm_server.POLL_TIMEOUT_S)
            if words[shm_server.STATE] == shm_server.REPLIED:
                break
            if self._is_closed() or not shm_server.is_server_alive(self._directory):
                return False
            if time.monotonic() >= until:
                raise Unreachable(f"the parameter server in {self._directory} does not answer: is its process stopped?")
        return True

    def _is_closed(self) -> bool:
        return self._memory is None or bool(self._memory.words[shm_server.CLOSED])

    def _open_slot(self, *, renew: bool = False) -> RequestSlot:
        """Return a request slot of the running server; `renew` forces a new one."""
        if self._slot is not None and not renew and not self._is_closed():
            return self._slot
        memory = self._reconnect()
        self._close_slot()
        self._number = secrets.randbits(63)
        name = shm_server.slot_name(self._number)
        path = self._directory / name
        try:
            slot = RequestSlot(path, memory.space.size, create=True)
        except OSError as error:
            raise UsageError(f"{memory.space.size >> 18} MiB of shared memory for updates: {error.strerror}") from None
        self._slot_lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._slot_lock, fcntl.LOCK_EX)
        self._wakeups = Wakeup(self._directory / "bell"), Wakeup(self._directory / f"bell-{name}")
        self._slot = slot
        return slot

    def _reconnect(self) -> SharedParameters:
        """Map the memory of the running server; wait up to `retry_s` for one, then raise Unreachable."""
        until, pause = time.monotonic() + self._retry_s, 0.005
        while True:
            with contextlib.suppress(OSError, DamagedFile, ValueError):
                memory = SharedParameters(self._directory / "parameters")
                if not memory.words[shm_server.CLOSED] and shm_server.is_server_alive(self._directory):
                    self._memory = memory
                    return memory
            left = until - time.monotonic()
            if left <= 0:
                raise Unreachable(f"no parameter server is in {self._directory}: is it running?")
            time.sleep(min(left, pause))
            pause = min(2 * pause, 0.2)

    def _close_slot(self) -> None:
        if self._slot is not None:
            self._slot.remove()
            self._slot = None
        for wakeup in self._wakeups or ():
            wakeup.close()
            (self._directory / f"bell-{shm_server.slot_name(self._number)}").unlink(missing_ok=True)
        self._wakeups = None
        if self._slot_lock is not None:
            os.close(self._slot_lock)
            self._slot_lock = None
