"""MPI rank 0: runs the learner and controls all other ranks.

If the user started mpiexec, rank 0 also supervises, with an MpiRootHandle. If Steppe started mpiexec (launch.py), the
supervisor is another process: `main` relays its requests, and reports the state of the roles to it.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from dataclasses import asdict
from typing import Any, NoReturn

import msgspec

from steppe.core.contracts.errors import UsageError
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import STOP
from steppe.runtimes.handle import Fault
from steppe.runtimes.launch_spec import ROLE_KINDS, LaunchSpec
from steppe.runtimes.mpi.rank import (
    BEGIN,
    END,
    LAUNCH_TAG,
    MpiWorkerSlot,
    abort,
    ignore_stop_signals,
    process_location,
    serve_rank,
    slots_by_rank,
)
from steppe.runtimes.plan import Plan
from steppe.runtimes.processes.worker import FAULT_EXIT_CODE, TRACEBACK_SIGNAL
from steppe.runtimes.resume import prime_channel
from steppe.runtimes.subprocess_driver.child import LineReader, relay_commands, reserve_stdout_for_replies, send_reply
from steppe.transport.mpi.links import Comm, import_mpi

START_S = 120.0  # deadline of a rank's first heartbeat: imports are slow on a busy machine
HANG_CHECK_INTERVAL_S = 0.5  # between checks for hung ranks
TRACEBACK_TIMEOUT_S = 2.0  # how long a hung rank has to write its traceback
INTERRUPTED = 130  # the exit code of a run that was stopped and has a rank that does not respond


def comm_world() -> Comm:
    """Return COMM_WORLD: all ranks that mpiexec started."""
    comm: Comm = import_mpi().COMM_WORLD
    return comm


def require_size(plan: Plan) -> None:
    """Raise unless mpiexec started as many ranks as the plan has worker slots."""
    needed, size = len(slots_by_rank(plan)), comm_world().Get_size()
    if needed != size:
        num = plan.config.actors
        if plan.config.mode == "workers" and not plan.config.by_gradients:
            ranks = f"{size} {'rank' if size == 1 else 'ranks'}"
            raise UsageError(
                f"mpiexec started {ranks}, but this run takes {num}, one for each worker: use mpiexec -n {num}, or --actors {size}"
            )
        kind = "worker" if plan.config.by_gradients else "actor"
        actors = "" if needed == 2 else f", {num} for {kind}s" if num > 1 else f", 1 for the {kind}"
        raise UsageError(
            f"mpiexec started {size} {'rank' if size == 1 else 'ranks'}, but this run takes {needed} (1 for the learner, "
            f"1 for the manager{actors}): use mpiexec -n {needed}, or another --actors"
        )


class MpiRootHandle:
    """A run over all ranks, controlled by rank 0. `advance` steps the learner in this process."""

    def __init__(self, launch_spec: LaunchSpec, directory: RunDirectory, comm: Comm) -> None:
        self._comm, self._directory = comm, directory
        launch_spec = launch_spec.stamped()
        data = msgspec.json.encode(launch_spec)
        for rank in range(1, comm.Get_size()):
            comm.Send(data, rank, LAUNCH_TAG)
        self._slot = MpiWorkerSlot(comm, launch_spec)
        self._worker_slots = slots_by_rank(self._slot.plan)
        self.ranks: dict[str, dict[str, Any]] = {"learner": process_location()}
        self._ended: set[str] = set()
        self._faults: dict[str, Fault] = {}
        self._last_heartbeat_s = dict.fromkeys(self._worker_slots[1:], time.monotonic() + START_S)
        self._hang_checked_s = time.monotonic()
        self._closed = False
        prime_channel(self._slot.channel, self._slot.plan, directory)
        while not self._slot.channel.settled:
            self._slot.progress()
        self._slot.control.set(BEGIN, 1)
        self._slot.progress()
        self._slot.build(lambda: directory)

    def advance(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        before = len(self._ended_slots())
        while time.monotonic() < until:
            if self._slot.step():
                self._slot.backoff.reset()
            else:
                self._slot.backoff.wait()
            self._receive_notes()
            if len(self._ended_slots()) != before:
                return

    def ended(self, kind: str) -> bool:
        worker_slots = {role.worker_slot for role in self._slot.plan.roles if role.kind == kind}
        return worker_slots <= self._ended_slots()

    def faults(self) -> list[Fault]:
        self._detect_hung()
        return [*self._slot.scheduler.faults, *self._faults.values()]

    def ask(self, kind: str, what: int) -> None:
        self._slot.control.set(kind, what)

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        for kind in ROLE_KINDS:
            self.ask(kind, STOP)
        deadline = time.monotonic() + timeout_s
        while len(self._ended_slots()) < len(self._worker_slots) and time.monotonic() < deadline:
            self.advance(max(0.0, deadline - time.monotonic()))
        if self._hung_slots() or len(self._ended_slots()) < len(self._worker_slots):
            _hung_worlds.append((self._comm, 1 if self.faults() else INTERRUPTED))
            return
        self._disconnect()

    def state(self) -> dict[str, Any]:
        """Return ended worker slots, faults and rank locations as plain data."""
        faults = [asdict(fault) for fault in self.faults()]
        return {"ended": sorted(self._ended_slots()), "faults": faults, "ranks": dict(self.ranks)}

    def _disconnect(self) -> None:
        """Deliver the last weights, send END and close the links; the other ranks receive messages until END."""
        slot = self._slot
        while not all(slot.weights.delivered(rank) for rank in range(1, self._comm.Get_size())):
            slot.progress()
        slot.control.set(END, 1)
        while not (slot.control.settled and slot.settled):
            slot.progress()
        slot.close()

    def _ended_slots(self) -> set[str]:
        """Return the worker slots that have ended or hang."""
        return self._ended | ({"learner"} if self._slot.ended else set()) | set(self._hung_slots())

    def _hung_slots(self) -> list[str]:
        return [worker_slot for worker_slot, fault in self._faults.items() if fault.reason == "hung"]

    def _receive_notes(self) -> None:
        now = time.monotonic()
        for rank, note in self._slot.control.notes():
            worker_slot = self._worker_slots[rank]
            if "pid" in note:
                self.ranks[worker_slot] = note
                continue
            self._last_heartbeat_s[worker_slot] = now
            if note.get("ended"):
                self._ended.add(worker_slot)
                for fault_data in note["faults"]:
                    self._faults.setdefault(worker_slot, msgspec.convert(fault_data, Fault))

    def _detect_hung(self) -> None:
        """Record ranks without a recent heartbeat as hung, after reading the pending heartbeats."""
        if self._closed or time.monotonic() - self._hang_checked_s < HANG_CHECK_INTERVAL_S:
            return
        self._slot.progress()
        self._receive_notes()
        self._hang_checked_s = time.monotonic()
        limit_s = self._slot.plan.config.flow.hang_s
        for worker_slot in self._worker_slots[1:]:
            if (
                worker_slot not in self._ended_slots()
                and self._hang_checked_s - self._last_heartbeat_s[worker_slot] > limit_s
            ):
                message = f"{worker_slot} took longer than flow.hang_s={limit_s:g} for one step"
                self._faults[worker_slot] = Fault(
                    worker_slot, "hung", message, {"traceback": self._request_traceback(worker_slot)}
                )

    def _request_traceback(self, worker_slot: str) -> str:
        """Return the traceback that a rank on this host writes to its log on request, or an empty string."""
        log = self._directory.path / "logs" / f"{worker_slot}.log"
        location = self.ranks.get(worker_slot)
        if location is None or location["host"] != self._slot.launch_spec.host or not log.exists():
            return ""
        start = log.stat().st_size
        os.kill(location["pid"], TRACEBACK_SIGNAL)
        deadline, text = time.monotonic() + TRACEBACK_TIMEOUT_S, ""
        while time.monotonic() < deadline and "most recent call first" not in text:
            time.sleep(0.05)
            text = log.read_bytes()[start:].decode(errors="replace")
        return text


_worlds_to_release: list[Comm] = []  # communicators whose other ranks still serve this one
_hung_worlds: list[tuple[Comm, int]] = []  # communicators with a rank that does not respond, and the exit code


def release_ranks() -> None:
    """Let the other ranks exit. If one does not respond, abort all: MPI would wait for it indefinitely."""
    if _hung_worlds:
        abort(*_hung_worlds[0])
    while _worlds_to_release:
        comm = _worlds_to_release.pop()
        for rank in range(1, comm.Get_size()):
            comm.Send(b"", rank, LAUNCH_TAG)


def join() -> None:
    """Initialize MPI. Returns only on rank 0; the other ranks serve it until it ends."""
    comm = comm_world()
    if comm.Get_rank():
        serve_rank(comm)
    if not _worlds_to_release:
        _worlds_to_release.append(comm)
        atexit.register(release_ranks)


def main() -> NoReturn:
    """Run a rank of an mpiexec that Steppe started."""
    reply_fd = reserve_stdout_for_replies()
    join()
    ignore_stop_signals()
    try:
        relay_commands(
            LineReader(0),
            reply_fd,
            "learner.log",
            lambda launch_spec, directory: MpiRootHandle(launch_spec, directory, comm_world()),
        )
    except EOFError:
        abort(comm_world(), FAULT_EXIT_CODE)  # the supervisor is gone: no role may be orphaned
    except BaseException:  # noqa: BLE001 - reported, and all ranks aborted: Python would wait for them at exit
        sys.excepthook(*sys.exc_info())
        abort(comm_world(), FAULT_EXIT_CODE)
    release_ranks()
    send_reply(reply_fd, {"exiting": True})
    sys.exit(0)
