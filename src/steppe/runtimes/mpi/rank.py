"""One MPI rank: build the roles of a worker slot, step them in turn, end.

Rank 0 learns and controls the others (root.py), rank 1 is the manager, the rest are actors. If workers share a table,
every rank is a worker, and rank 0 is learner and manager as well. Ranks communicate by messages
(transport/mpi/links.py) and through the run directory, which must be visible to all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from steppe.core.config import references
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.transport import Role
from steppe.records.profiling.sampler import sample_roles
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import FINISH
from steppe.runtimes.handle import Fault, RoleScheduler
from steppe.runtimes.launch_spec import ROLE_KINDS, LaunchSpec, build_roles, open_directory, post_faults
from steppe.runtimes.plan import Plan
from steppe.runtimes.processes.worker import FAULT_EXIT_CODE, exit_after_grace
from steppe.transport.mpi.links import Comm, MpiChannel, MpiControl, MpiWeights, import_mpi

if TYPE_CHECKING:
    from steppe.transport.mpi.tables import MpiTable

BEGIN, END = "begin", "end"  # control words besides the role kinds: build the roles; close the links
LAUNCH_TAG = 1  # tag of LaunchSpec messages, in COMM_WORLD; an empty message ends the rank
HEARTBEAT_INTERVAL_S = 0.5
POLL_INTERVAL_S = 0.001  # how often a busy role polls for messages
SPIN_S = 0.00005
MAX_BACKOFF_S = {
    "learner": 0.001,
    "actor": 0.001,
    "worker": 0.001,
    "manager": 0.02,
}  # longest pause between two polls of an idle rank
SHM_DIR = Path("/dev/shm")


def slots_by_rank(plan: Plan) -> list[str]:
    """Return the worker slot of each rank."""
    worker_slots = list(plan.worker_slots())
    first = [worker_slot for worker_slot in ("learner", "manager") if worker_slot in worker_slots]
    return [*first, *(worker_slot for worker_slot in worker_slots if worker_slot not in first)]


class Backoff:
    """Wait without occupying a core: spin briefly, then sleep an eighth of the time waited so far, up to a limit."""

    def __init__(self, max_pause_s: float) -> None:
        self._max_pause_s = max_pause_s
        self._since_s: float | None = None

    def reset(self) -> None:
        """Reset the backoff after work was done."""
        self._since_s = None

    def wait(self) -> None:
        """Pause after an idle poll."""
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
        elif (waited := now - self._since_s) > SPIN_S:
            time.sleep(min(self._max_pause_s, waited / 8))


class MpiWorkerSlot:
    """One rank's worker slot in a run: its links to the other ranks and, once they are built, its roles."""

    def __init__(self, world: Comm, launch_spec: LaunchSpec) -> None:
        """Collective: all ranks must construct it at the same time."""
        self.launch_spec, self.plan = launch_spec, launch_spec.plan()
        worker_slots = slots_by_rank(self.plan)
        self.name = worker_slots[world.Get_rank()]
        self.is_root = world.Get_rank() == 0
        self.backoff = Backoff(MAX_BACKOFF_S[self.name.partition("-")[0]])
        self._other_ranks = range(1, world.Get_size())
        writers = [worker_slots.index(role.worker_slot) for role in self.plan.writers]
        self.channel = MpiChannel(world, _channel_spec(self.plan), launch_spec.run, writers, self.plan.slots_per_actor)
        self.weights = MpiWeights(world, self._other_ranks)
        self.control = MpiControl(world, (*ROLE_KINDS, BEGIN, END))
        self.table = self._make_table(world, worker_slots) if self.plan.uses_table else None
        self.scheduler = RoleScheduler([])
        self._stack = contextlib.ExitStack()
        self.run: RunDirectory | None = None
        self.ended = False
        self._host_role: Role | None = None
        self._polled_s = self._heartbeat_s = 0.0

    def _make_table(self, world: Comm, worker_slots: list[str]) -> MpiTable:
        from steppe.transport.mpi.tables import MpiTable  # compiled modules that only these runs need

        return MpiTable(
            world, [worker_slots.index(role.worker_slot) for role in self.plan.roles if role.kind == "worker"]
        )

    @property
    def settled(self) -> bool:
        """Whether no segment or table message of this rank is in flight."""
        return self.channel.settled and (self.table is None or self.table.settled)

    def build(self, run: Callable[[], RunDirectory]) -> None:
        """Build the roles in the run directory. A role that cannot be built is reported like one that fails later."""
        try:
            self.run = run()
            profile_dir = self.run.profile if self.plan.config.flow.profile else None
            self.scheduler.roles = self._stack.enter_context(
                sample_roles(self._roles(self.run), profile_dir, waiting=self.name)
            )
            self._host_role = next(role for role in self.scheduler.roles if role.name == self.name)
        except Exception as error:  # noqa: BLE001 - any exception becomes a fault with its traceback
            self.scheduler.faults.append(Fault.of(self.name, error))
            self._end()

    def step(self) -> bool:
        """Process messages and step every role of this worker slot once; return whether any made progress."""
        self.heartbeat(always=True)
        if self.ended or self._host_role is None:
            return False
        busy = self.scheduler.step()
        if self._host_role.done or self.scheduler.faults:  # the slot's other roles end with the host
            self._end()
        return busy

    def heartbeat(self, *, always: bool = False) -> None:
        """Send a heartbeat and process messages if due; called often, so it mostly does nothing."""
        now = time.monotonic()
        if now - self._polled_s >= POLL_INTERVAL_S or always:
            self._polled_s = now
            if now - self._heartbeat_s >= HEARTBEAT_INTERVAL_S and not self.is_root:
                self._heartbeat_s = now
                self.control.send_note({})
            self.progress()

    def progress(self) -> None:
        """Progress all links. Control words wait until weights are received: the last weights precede the end."""
        self.channel.progress()
        self.weights.progress()
        if self.table is not None:
            self.table.progress()
        if not self.weights.receiving:
            self.control.progress(skip=self._undelivered_ranks())

    def close(self) -> None:
        """Close the links; collective over all ranks."""
        for link in (self.channel, self.weights, self.control, self.table):
            if link is not None:
                link.close()

    def _undelivered_ranks(self) -> list[int]:
        if not self.is_root or all(self.control.get(kind) != FINISH for kind in ROLE_KINDS):
            return []
        return [rank for rank in self._other_ranks if not self.weights.delivered(rank)]

    def _roles(self, run: RunDirectory) -> list[Role]:
        links = (self.channel, self.weights)
        requested = self.control.get
        return build_roles(
            self.launch_spec, self.plan, self.name, run, links, requested, self.heartbeat, table=self.table
        )

    def _end(self) -> None:
        """Close the roles and post their faults to the event log."""
        self.scheduler.close()
        self._stack.close()
        self.ended = True
        if self.run is not None:
            post_faults(self.run, self.name, self.scheduler.faults)


def _channel_spec(plan: Plan) -> SegmentSpec:
    """Return the channel's message layout; only gradients need an agent to know it."""
    if not plan.config.by_gradients:
        return plan.segment
    from steppe.runtimes.builder import channel_spec

    return channel_spec(plan)


def serve_rank(world: Comm) -> NoReturn:
    """Serve rank 0 from another rank: run its launches, one after the other, until an empty message; then exit."""
    ignore_stop_signals()
    try:
        while (launch_spec := _receive_launch_spec(world)) is not None:
            _run_launch(world, launch_spec)
    except BaseException:  # noqa: BLE001 - reported, and all ranks are aborted
        # Otherwise Python would wait in MPI_Finalize for the other ranks, and they for this one.
        sys.excepthook(*sys.exc_info())
        abort(world, FAULT_EXIT_CODE)
    sys.exit(0)


def ignore_stop_signals() -> None:
    """Ignore Ctrl-C and delay SIGTERM: both reach every rank, and the supervisor decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, exit_after_grace)


def _receive_launch_spec(world: Comm) -> LaunchSpec | None:
    mpi, status = import_mpi(), import_mpi().Status()
    backoff = Backoff(MAX_BACKOFF_S["manager"])
    while (message := world.Improbe(0, LAUNCH_TAG, status)) is None:
        backoff.wait()
    data = np.empty(status.Get_count(mpi.BYTE), np.uint8)
    message.Recv(data)
    return msgspec.json.decode(data.tobytes(), type=LaunchSpec) if len(data) else None


def _run_launch(world: Comm, launch_spec: LaunchSpec) -> None:
    references.set_main_script(launch_spec.script)
    slot = MpiWorkerSlot(world, launch_spec)
    slot.control.send_note(process_location())
    _progress_until(slot, lambda: bool(slot.control.get(BEGIN)))
    slot.build(lambda: open_directory(launch_spec.directory, slot.name))
    while not slot.ended:
        if slot.step():
            slot.backoff.reset()
        else:
            slot.backoff.wait()
    _progress_until(slot, lambda: slot.settled)
    slot.control.send_note({"ended": True, "faults": [asdict(fault) for fault in slot.scheduler.faults]})
    _progress_until(slot, lambda: bool(slot.control.get(END)))
    slot.close()
    if slot.run is not None:
        slot.run.store.close()


def _progress_until(slot: MpiWorkerSlot, condition: Callable[[], bool]) -> None:
    while not condition():
        slot.progress()
        slot.backoff.wait()


def process_location() -> dict[str, Any]:
    """Return this rank's pid, host and shared-memory files, for the process that cleans up after it."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "files": mapped_shm_files()}


def mapped_shm_files() -> list[str]:
    """Return the shared-memory files that this process has mapped: MPI leaves them behind if it is killed."""
    try:
        rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    return sorted({row[5] for row in rows if len(row) == 6 and row[5].startswith(f"{SHM_DIR}/")})


def abort(world: Comm, code: int) -> NoReturn:
    """Abort all ranks immediately."""
    sys.stdout.flush()
    sys.stderr.flush()
    for file in mapped_shm_files():
        Path(file).unlink(missing_ok=True)
    world.Abort(code)
    os._exit(code)
