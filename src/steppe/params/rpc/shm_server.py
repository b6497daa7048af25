"""Shared-memory server of a parameter server, for processes of one machine, and the memory that server and clients map.

    <dir>/owner         locked by the server while its process runs
    <dir>/parameters    page 0: words (CLOSED …); then the description (core/io/codec.py); then three rows of parameters
    <dir>/wakeup          a FIFO: a slot number in it signals a request in that slot
    <dir>/seat-N        a client's request slot. Page 0: words (STATE …); then request or reply (msgpack); then a row
    <dir>/bell-seat-N   a FIFO that wakes that client

Versions are computed in the rows in turn, so a reader's copy is consistent unless two further versions were made during
the copy. A client fills the row of its slot and sends a request; the server uses the row without a copy and replies.
Each word has one writer, so a killed process does not block the others, and a restarted server closes its predecessor's
memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import Conflict, DamagedFile, SteppeError, UsageError
from steppe.core.contracts.weights import Weights
from steppe.core.io.codec import pack, unpack
from steppe.core.system.shared_dir import Wakeup, make_shared_dir, map_file, memory_fence, remove_shared_dir
from steppe.params.parameter_layout import ParameterLayout, Refusal
from steppe.params.rounds import Push

if TYPE_CHECKING:
    from steppe.params.server import ParameterServer

PAGE = mmap.PAGESIZE
# Longest request or reply that fits into a slot; a longer one is written to a file beside it.
MAX_INLINE_BYTES = 16 * PAGE
ROWS = 3
# Words of the parameters file; [version, updates] of each row follow at _ROW_WORDS.
CLOSED, SEQUENCE, VERSION, ROUND, DESCRIPTION = range(5)
_ROW_WORDS = 8
STATE, LENGTH = range(2)  # words of a slot; LENGTH is that of its request or reply in bytes
IDLE, REQUESTED, REPLIED = range(3)  # states of a slot
POLL_TIMEOUT_S = 0.2
# Methods and fields whose names in shared memory are those of Steppe 0.1.
FORMER_METHODS = {"SumOverWorkers": "Tally", "GetStats": "Stats", "SaveCheckpoint": "Checkpoint"}
FORMER_FIELDS = {"supports_sums": "tallies", "uses_weights": "weighs", "was_registered": "was"}


class ShmRequest(msgspec.Struct, array_like=True):
    """A request in a slot. The numbers of a push are in the slot's row, unless `refusal` says why they are invalid."""

    method: str
    worker: str | None = None
    weight: float = 1.0
    round_number: int | None = None
    version: int | None = None
    refusal: tuple[str, str] | None = None
    metrics: dict[str, float] = {}
    values: list[float] = []


class SharedParameters:
    """The mapped parameters file."""

    def __init__(self, path: Path, description: bytes | None = None, size: int = 0) -> None:
        """Create the file if a description is given, else open it."""
        start = PAGE + -(-len(description or b"") // PAGE) * PAGE
        mapped = map_file(path, None if description is None else start + ROWS * _stride(size), reserve=True)
        self.words = memoryview(mapped)[:PAGE].cast("q")
        if description is not None:
            mapped[PAGE : PAGE + len(description)] = description
            self.words[DESCRIPTION] = len(description)
        self.inode = os.stat(path).st_ino
        length = int(self.words[DESCRIPTION])
        found = unpack(mapped[PAGE : PAGE + length])
        self.space = ParameterLayout.described(found["fields"], found["carried"])
        self.whole = bool(found["whole"])
        begin, stride, size = PAGE + -(-length // PAGE) * PAGE, _stride(self.space.size) // 4, self.space.size
        rows = np.frombuffer(mapped, np.float32, ROWS * stride, begin)
        self.rows = rows.reshape(ROWS, stride)[:, :size]

    def show(self, version: int, updates: int, *, first: bool = False) -> None:
        """Publish the next row to readers; with `first`, row 0."""
        sequence = 0 if first else self.words[SEQUENCE] + 1
        row = _ROW_WORDS + 2 * (sequence % ROWS)
        self.words[row], self.words[row + 1] = version, updates
        memory_fence()
        self.words[SEQUENCE] = sequence
        self.words[VERSION] = version

    def newest(self) -> Weights:
        """Return a consistent copy of the newest version."""
        while True:
            sequence = self.words[SEQUENCE]
            memory_fence()
            row = _ROW_WORDS + 2 * (sequence % ROWS)
            found = self.space.weights(self.rows[sequence % ROWS], self.words[row], self.words[row + 1])
            memory_fence()
            if self.words[SEQUENCE] <= sequence + 1:
                return found


class RequestSlot:
    """A client's request slot: a file that client and server map."""

    def __init__(self, path: Path, size: int, *, create: bool = False) -> None:
        total = PAGE + MAX_INLINE_BYTES + _stride(size)
        mapped = map_file(path, total if create else None, reserve=True)
        if len(mapped) != total:
            raise DamagedFile(f"{path} is not a request slot of this server")
        self.path = path
        self.words = memoryview(mapped)[:PAGE].cast("q")
        self.row = np.frombuffer(mapped, np.float32, size, PAGE + MAX_INLINE_BYTES)
        self._text = memoryview(mapped)[PAGE : PAGE + MAX_INLINE_BYTES]

    def put(self, data: bytes, state: int) -> None:
        """Write a request or reply; one longer than MAX_INLINE_BYTES goes into a file beside the slot."""
        if len(data) > MAX_INLINE_BYTES:
            self._overflow_file.write_bytes(data)
        else:
            self._text[: len(data)] = data
        self.words[LENGTH] = len(data)
        memory_fence()
        self.words[STATE] = state

    def get(self) -> bytes:
        length = self.words[LENGTH]
        return self._overflow_file.read_bytes() if length > MAX_INLINE_BYTES else bytes(self._text[:length])

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._overflow_file.unlink(missing_ok=True)

    @property
    def _overflow_file(self) -> Path:
        return self.path.with_name(f"long-{self.path.name}")


class ShmServer:
    """Handle the requests in a shared directory, by calls of `step` or in its own thread."""

    def __init__(self, server: ParameterServer, directory: Path | None) -> None:
        self.server = server
        self._own_directory = directory is None
        self.directory = (
            make_shared_dir("params", 8 * PAGE + ROWS * _stride(server.num_parameters))
            if directory is None
            else directory
        )
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.url = f"shm://{self.directory.resolve()}"
        self._owner = None if self._own_directory else lock_directory(self.directory)
        self._wakeup = Wakeup(self.directory / "bell")
        self._slots_by_number: dict[int, tuple[RequestSlot, Wakeup]] = {}
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.remap()

    def remap(self) -> None:
        """Move the parameters to a new file and mark the old one closed, so that clients reconnect."""
        path = self.directory / "parameters"
        _mark_closed(path)
        description = pack(self.server.description())
        draft = path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        try:
            self._memory = SharedParameters(draft, description, self.server.num_parameters)
        except OSError as error:
            draft.unlink(missing_ok=True)
            need = ROWS * _stride(self.server.num_parameters) >> 20
            raise UsageError(f"{need} MiB of shared memory for parameters: {error.strerror}; free some") from None
        self.server.move(self._memory.rows)
        self._memory.show(self.server.version, self.server.updates, first=True)
        self._memory.words[ROUND] = self.server.round_number
        os.rename(draft, path)
        for slot, wakeup in self._slots_by_number.values():  # clients reconnect with new slots
            wakeup.close()
            slot.words[STATE] = IDLE
        self._slots_by_number.clear()

    def show(self) -> None:
        """Publish the server's newest version, which is in the next row, unless done already."""
        if self._memory.words[VERSION] < self.server.version:
            self._memory.words[ROUND] = self.server.round_number
            self._memory.show(self.server.version, self.server.updates)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="params-shared", daemon=True)
        self._thread.start()

    def step(self, timeout_s: float = 0.0) -> bool:
        """Handle all pending requests; return False if there was none within `timeout_s`."""
        words = self._wakeup.wait(timeout_s)
        self.server.tick()
        self._memory.words[ROUND] = self.server.round_number
        for number in set(np.frombuffer(words[: len(words) // 8 * 8], np.int64).tolist()):
            self._handle(number)
        return bool(words)

    def stop(self) -> None:
        """Mark the memory closed for clients and remove the server's files."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        _mark_closed(self.directory / "parameters")
        for _, wakeup in self._slots_by_number.values():
            wakeup.close()
        self._wakeup.close()
        if self._own_directory:
            remove_shared_dir(self.directory)
        elif self._owner is not None:
            for name in ("parameters", "bell"):
                (self.directory / name).unlink(missing_ok=True)
            os.close(self._owner)

    def _serve(self) -> None:
        while not self._ending.is_set():
            self.step(POLL_TIMEOUT_S)

    def _handle(self, number: int) -> None:
        """Handle the request in one slot; ignore slots of terminated clients and invalid numbers from the FIFO."""
        try:
            slot, wakeup = self._slots_by_number.get(number) or self._open_slot(number)
        except (OSError, ValueError, DamagedFile):
            return
        if slot.words[STATE] != REQUESTED:
            return  # a repeated wakeup
        try:
            request = msgspec.msgpack.decode(slot.get(), type=ShmRequest)
            reply: tuple[str, Any] = ("ok", _HANDLERS[request.method](self.server, request, slot))
        except UsageError as error:
            reply = ("usage", str(error))
        except (SteppeError, msgspec.MsgspecError, KeyError) as error:
            reply = ("error", str(error))
        self._memory.words[ROUND] = self.server.round_number
        slot.put(msgspec.msgpack.encode(reply), REPLIED)
        wakeup.ring()

    def _open_slot(self, number: int) -> tuple[RequestSlot, Wakeup]:
        self._slots_by_number = {
            known: found for known, found in self._slots_by_number.items() if _is_client_alive(*found)
        }
        name = slot_name(number)
        self._slots_by_number[number] = (
            RequestSlot(self.directory / name, self.server.num_parameters),
            Wakeup(self.directory / f"bell-{name}"),
        )
        return self._slots_by_number[number]


def slot_name(number: int) -> str:
    """Return the name of a slot's file."""
    return f"seat-{number:016x}"


def lock_directory(directory: Path) -> int:
    """Take the lock that shows clients that a server is running; raise Conflict if another server holds it."""
    handle = os.open(directory / "owner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + POLL_TIMEOUT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(handle)
                words = f"another parameter server is in {directory}: stop it, or share this one in another directory"
                raise Conflict(words) from None
        time.sleep(0.005)  # a client holds the lock briefly while it checks for a server


def is_server_alive(directory: Path) -> bool:
    """Return whether a running server holds the directory's lock."""
    try:
        with (directory / "owner").open() as owner:
            fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _stride(size: int) -> int:
    """Return the bytes of a row of `size` numbers, rounded up to whole pages."""
    return -(-4 * size // PAGE) * PAGE


def _mark_closed(path: Path) -> None:
    """Mark a parameters file as closed, so that clients that map it reconnect."""
    with contextlib.suppress(FileNotFoundError):
        memoryview(map_file(path))[:PAGE].cast("q")[CLOSED] = 1


def _is_client_alive(slot: RequestSlot, wakeup: Wakeup) -> bool:
    """Return whether a slot's client is running; if not, remove its files. A client locks its slot while it runs."""
    with contextlib.suppress(OSError), slot.path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    wakeup.close()
    slot.remove()
    slot.path.with_name(f"bell-{slot.path.name}").unlink(missing_ok=True)
    return False


def _register(server: ParameterServer, request: ShmRequest, _: RequestSlot) -> Any:
    assert request.worker is not None
    new, about = server.register_worker(request.worker), server.description()
    fields = {FORMER_FIELDS.get(name, name): about[name] for name in ("deltas", "run", "supports_sums", "uses_weights")}
    return {"new": new, **server.standing(request.worker), **fields}


def _push(server: ParameterServer, request: ShmRequest, slot: RequestSlot) -> Any:
    push = Push(request.worker or "", request.weight, request.round_number, request.version)
    if request.refusal is not None:
        return msgspec.to_builtins(server.refuse_push(push, Refusal(*request.refusal)))
    return msgspec.to_builtins(server.take_row(push, slot.row, finite=True))


def _sum_over_workers(server: ParameterServer, request: ShmRequest, _: RequestSlot) -> Any:
    number, total = server.sum_over_workers(request.worker or "", request.round_number or 0, request.values)
    return {"round_number": number, "total": total}


def _unregister(server: ParameterServer, request: ShmRequest, _: RequestSlot) -> Any:
    return {"was": server.unregister_worker(request.worker or "")}


def _report(server: ParameterServer, request: ShmRequest, _: RequestSlot) -> Any:
    server.report(request.worker or "", request.metrics)


def _get_stats(server: ParameterServer, _: ShmRequest, __: RequestSlot) -> Any:
    return server.get_server_stats()


def _save_checkpoint(server: ParameterServer, _: ShmRequest, __: RequestSlot) -> Any:
    return {"path": str(server.save_checkpoint())}


_HANDLERS: dict[str, Callable[[ParameterServer, ShmRequest, RequestSlot], Any]] = {
    "Register": _register,
    "Unregister": _unregister,
    "Push": _push,
    "Tally": _sum_over_workers,
    "Report": _report,
    "Stats": _get_stats,
    "Checkpoint": _save_checkpoint,
}
