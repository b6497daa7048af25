"""Shared memory between the processes of one machine: a directory of mapped files and wakeup FIFOs.

    <dir>/control        the command to each kind of role, and the heartbeat of each worker slot
    <dir>/channel        see ShmChannel
    <dir>/state-A-S      state of actor A just after its segment S
    <dir>/weights-NAME   see ShmWeights
    <dir>/table          see transport/tables/shared.py
    <dir>/wakeup-ROLE    a FIFO: a byte in it wakes the role

Every word has one writer at a time, and no lock is held (except the table's), so kill -9 of any process leaves the
others working. core/system/shared_dir.py makes the directory, the mapped files and the wakeups.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path

import msgspec
import numpy as np

from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.weights import Weights, WeightsEntry, WeightsLayout
from steppe.core.system.shared_dir import Wakeup, map_file, memory_fence

_PAGE = mmap.PAGESIZE


class ShmControl:
    """Commands and heartbeats in shared memory.

    One word per kind of role holds its command (the values are those of roles/context.py). Two words per worker slot
    hold its last heartbeat, in monotonic nanoseconds, and whether it is dismissed.
    """

    KINDS = ("actor", "learner", "manager", "worker", "replay")
    _HEARTBEATS = 8  # index of the first heartbeat word

    def __init__(self, path: Path, *, create: bool = False, num_worker_slots: int = 0) -> None:
        size = -(-(self._HEARTBEATS + 2 * num_worker_slots) * 8 // _PAGE) * _PAGE
        self._values = np.frombuffer(map_file(path, size if create else None), np.int64)

    def set(self, kind: str, value: int) -> None:
        self._values[self.KINDS.index(kind)] = value

    def get(self, kind: str) -> int:
        return int(self._values[self.KINDS.index(kind)])

    def heartbeat(self, slot_index: int) -> None:
        """Record that the process in this worker slot is alive."""
        self._values[self._HEARTBEATS + 2 * slot_index] = time.monotonic_ns()

    def dismiss(self, slot_index: int, *, dismissed: bool = True) -> None:
        """Request this worker slot alone to end, whatever the command to its kind; or undo that before it is restarted."""
        self._values[self._HEARTBEATS + 2 * slot_index + 1] = int(dismissed)

    def dismissed(self, slot_index: int) -> bool:
        return bool(self._values[self._HEARTBEATS + 2 * slot_index + 1])

    def grace(self, slot_index: int, seconds: float) -> None:
        """Expect no heartbeat from this worker slot for `seconds`, while its process starts."""
        self._values[self._HEARTBEATS + 2 * slot_index] = time.monotonic_ns() + int(seconds * 1e9)

    def silence_s(self, slot_index: int) -> float:
        """Return the time since the last heartbeat of this worker slot; negative within its grace period."""
        return (time.monotonic_ns() - int(self._values[self._HEARTBEATS + 2 * slot_index])) / 1e9


class ShmChannel:
    """A Channel in one mapped file. Each actor owns `slots_per_actor` slots; only states and headers are exchanged.

        page 0…   table, one row of 8 words per slot: state, offered_ns (monotonic time of the offer), epoch, sequence,
                  version, started_s, schema, and the sequence number that was released last, plus one
        then      slots, each `spec.nbytes` rounded up to pages

    state: FREE → (actor fills it) → READY → (learner polls it) → TAKEN → (learner releases it) → FREE.
    The actor writes columns, then the row, then READY; the learner reads in the opposite order. So the last segment
    offered in a slot is the row's while the slot is READY or TAKEN, and the released one while it is FREE, even after a
    kill.
    """

    FREE, READY, TAKEN = 0, 1, 2
    _STATE, _OFFERED_NS, _EPOCH, _SEQUENCE, _VERSION, _STARTED, _SCHEMA, _RELEASED = range(8)

    def __init__(
        self,
        shared_dir: Path,
        spec: SegmentSpec,
        run: str,
        num_actors: int,
        slots_per_actor: int = 1,
        *,
        create: bool = False,
        hidden: bool = False,
        writer: str = "actor",
    ) -> None:
        """`hidden`: others find a new channel only after `show`. `writer`: the kind of role that `release` wakes."""
        self._shared_dir, self._run, self._slots = shared_dir, run, slots_per_actor
        self._held: dict[int, int] = {}  # actor → the slot it is filling
        num_slots = num_actors * slots_per_actor
        table_bytes = max(1, -(-num_slots * 64 // _PAGE)) * _PAGE
        stride = -(-spec.nbytes // _PAGE) * _PAGE
        size = table_bytes + num_slots * stride if create else None
        view = memoryview(self._map(shared_dir / ("channel-hidden" if create else "channel"), size, reserve=hidden))
        self._table = np.frombuffer(view, np.int64, num_slots * 8).reshape(num_slots, 8)
        self._started = self._table.view(np.float64)
        self._segments = [
            Segment(spec, spec.columns(view[table_bytes + slot * stride :]), slot=slot) for slot in range(num_slots)
        ]
        self._reader = Wakeup(shared_dir / "wakeup-learner")
        self._writers = [Wakeup(shared_dir / f"wakeup-{writer}-{actor}") for actor in range(num_actors)]
        if create and not hidden:
            self.show()

    def show(self) -> None:
        """Rename the file so that other processes find it."""
        os.rename(self._shared_dir / "channel-hidden", self._shared_dir / "channel")

    def blank(self, actor: int) -> Segment | None:
        if actor not in self._held:
            free = np.flatnonzero(self._states(actor) == self.FREE)
            if not len(free):
                return None
            self._held[actor] = actor * self._slots + int(free[0])
        return self._segments[self._held[actor]]

    def offer(self, segment: Segment) -> bool:
        header = segment.header
        assert header is not None, "a segment is offered with its header set"
        self._save_state(header.actor, header.sequence, segment.state)
        row = self._table[segment.slot]
        row[1:5] = (time.monotonic_ns(), header.epoch, header.sequence, header.version)
        self._started[segment.slot, self._STARTED] = header.started_s
        row[self._SCHEMA] = header.schema
        memory_fence()
        row[self._STATE] = self.READY
        self._held.pop(segment.slot // self._slots, None)
        self._reader.ring()
        return True

    def poll(self) -> Segment | None:
        slot = self._oldest()
        if slot is None:
            return None
        _, _, epoch, sequence, version, _, schema, _ = self._table[slot].tolist()
        self._table[slot, self._STATE] = self.TAKEN
        segment = self._segments[slot]
        started_s = float(self._started[slot, self._STARTED])
        segment.header = SegmentHeader(self._run, slot // self._slots, epoch, sequence, version, started_s, schema)
        segment.state = self._state_of(segment.header.actor, sequence)
        return segment

    def release(self, segment: Segment) -> None:
        self._table[segment.slot, self._RELEASED] = self._table[segment.slot, self._SEQUENCE] + 1
        memory_fence()
        self._table[segment.slot, self._STATE] = self.FREE
        self._writers[segment.slot // self._slots].ring()

    def recall(self, actor: int) -> tuple[int, bytes | None] | None:
        rows = self._table[actor * self._slots : (actor + 1) * self._slots]
        offered = np.where(rows[:, self._STATE] == self.FREE, rows[:, self._RELEASED], rows[:, self._SEQUENCE] + 1)
        sequence = int(offered.max()) - 1
        return None if sequence < 0 else (sequence, self._state_of(actor, sequence))

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        self._save_state(actor, sequence, state)
        self._table[actor * self._slots, self._RELEASED] = sequence + 1

    def wait(self, timeout_s: float) -> None:
        """For the reader: return when a segment may have arrived, or after `timeout_s`."""
        self._reader.wait(timeout_s)

    def close(self) -> None:
        """Close the wakeups; the memory is unmapped with the last segment that is still in use."""
        for wakeup in (self._reader, *self._writers):
            wakeup.close()

    @staticmethod
    def _map(path: Path, size: int | None, *, reserve: bool) -> mmap.mmap:
        try:
            return map_file(path, size, reserve=reserve)
        except OSError as error:
            if size is None or error.errno == errno.EEXIST:
                raise
            raise UsageError(f"{size >> 20} MiB of shared memory for a channel: {error.strerror}; free some") from None

    def _save_state(self, actor: int, sequence: int, state: bytes | None) -> None:
        """Write the state to a file, as its size is not known beforehand; remove files that no segment needs."""
        if state is not None:
            (self._shared_dir / f"state-{actor}-{sequence}").write_bytes(state)
            (self._shared_dir / f"state-{actor}-{sequence - self._slots - 1}").unlink(missing_ok=True)

    def _state_of(self, actor: int, sequence: int) -> bytes | None:
        try:
            return (self._shared_dir / f"state-{actor}-{sequence}").read_bytes()
        except FileNotFoundError:
            return None

    def _states(self, actor: int) -> np.ndarray:
        return self._table[actor * self._slots : (actor + 1) * self._slots, self._STATE]

    def _oldest(self) -> int | None:
        """Return the slot that was offered first, or None.

        The scan is not atomic: an actor may fill a slot that was already scanned, and then the one that is found. So
        the slots of the actor found are scanned once more.
        """
        ready = np.flatnonzero(self._table[:, self._STATE] == self.READY)
        if not len(ready):
            return None
        actor = int(ready[np.argmin(self._table[ready, self._OFFERED_NS])]) // self._slots
        memory_fence()
        own = actor * self._slots + np.flatnonzero(self._states(actor) == self.READY)
        return int(own[np.argmin(self._table[own, self._OFFERED_NS])])


class ShmWeights:
    """A WeightStore: one mapped file per policy, created by the first publication (until then there is nothing newer).

        words 0–1  newest slot, newest version
        words 8–…  three rows of 8: turn, version, updates, env_steps, episodes, train_s
        page 1…    layout as JSON (its length is word 2), then three buffers

    The turn is a sequence lock: it is odd while its buffer is being written. A reader copies the newest buffer and
    keeps the copy only if the turn was even and is unchanged. The writer reuses a buffer only after two other
    publications.
    """

    _SLOTS = 3

    def __init__(self, shared_dir: Path, readers: tuple[str, ...] = ()) -> None:
        self._shared_dir = shared_dir
        self._readers = readers
        self._files: dict[str, _WeightsFile] = {}
        self._wakeups: list[Wakeup] | None = None

    def publish(self, policy: str, weights: Weights) -> None:
        file = self._open(policy) or self._create(policy, weights)
        file.write(weights)
        if self._wakeups is None:
            self._wakeups = [Wakeup(self._shared_dir / f"wakeup-{reader}") for reader in self._readers]
        for wakeup in self._wakeups:
            wakeup.ring()

    def close(self) -> None:
        """Close the wakeups; the memory is unmapped with its last user."""
        for wakeup in self._wakeups or ():
            wakeup.close()

    def newer_than(self, policy: str, version: int) -> Weights | None:
        file = self._open(policy)
        return None if file is None else file.newer_than(version)

    def _open(self, policy: str) -> _WeightsFile | None:
        if policy not in self._files:
            try:
                self._files[policy] = _WeightsFile(map_file(self._shared_dir / f"weights-{policy}"))
            except FileNotFoundError:
                return None
        return self._files[policy]

    def _create(self, policy: str, weights: Weights) -> _WeightsFile:
        path = self._shared_dir / f"weights-{policy}"
        draft = path.with_suffix(f".{os.getpid()}")
        layout = msgspec.json.encode(weights.layout.entries)
        size = _PAGE + -(-len(layout) // _PAGE) * _PAGE + self._SLOTS * -(-weights.layout.nbytes // _PAGE) * _PAGE
        try:
            mapped = map_file(draft, size, reserve=True)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise UsageError(f"{size >> 20} MiB of shared memory for weights: {error.strerror}; free some") from None
        words = np.frombuffer(mapped, np.int64, _PAGE // 8)
        words[1], words[2] = -1, len(layout)
        mapped[_PAGE : _PAGE + len(layout)] = layout
        memory_fence()
        os.rename(draft, path)
        file = self._open(policy)
        assert file is not None
        return file


class _WeightsFile:
    def __init__(self, mapped: mmap.mmap) -> None:
        self._values = np.frombuffer(mapped, np.int64, _PAGE // 8)
        self._rows = self._values[8:32].reshape(3, 8)
        self._train_s = self._rows.view(np.float64)[:, 5]
        length = int(self._values[2])
        self.layout = WeightsLayout(msgspec.json.decode(mapped[_PAGE : _PAGE + length], type=tuple[WeightsEntry, ...]))
        start = _PAGE + -(-length // _PAGE) * _PAGE
        stride = -(-self.layout.nbytes // _PAGE) * _PAGE
        self._buffers = [
            np.frombuffer(mapped, np.uint8, self.layout.nbytes, start + slot * stride) for slot in range(3)
        ]

    def write(self, weights: Weights) -> None:
        if weights.version <= self._values[1]:
            raise ValueError(f"version {weights.version} is not newer than {self._values[1]}")
        weights.require(self.layout, "those published before")
        slot = (int(self._values[0]) + 1) % 3
        row = self._rows[slot]
        row[0] |= 1  # not += 1: a writer that died here left the turn odd
        memory_fence()
        np.copyto(self._buffers[slot], weights.buffer)
        row[1:5] = (weights.version, weights.updates, weights.env_steps, weights.episodes)
        self._train_s[slot] = weights.train_s
        memory_fence()
        row[0] += 1
        self._values[0] = slot
        self._values[1] = weights.version

    def newer_than(self, version: int) -> Weights | None:
        while self._values[1] > version:
            slot = int(self._values[0])
            turn = int(self._rows[slot, 0])
            memory_fence()
            found, updates, env_steps, episodes = self._rows[slot, 1:5].tolist()
            train_s = float(self._train_s[slot])
            weights = Weights(self.layout, self._buffers[slot].copy(), found, updates, env_steps, episodes, train_s)
            memory_fence()
            if turn % 2 == 0 and turn == self._rows[slot, 0]:
                return weights
        return None
