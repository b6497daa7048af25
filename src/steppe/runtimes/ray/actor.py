"""One Ray actor: builds the roles of a worker slot, steps them in turn, and can be reused for another run.

`run` is one long call. Meanwhile other threads of the actor serve the driver (driver.py), which sends requests and
checks its health, and the learner, which takes segments and publishes weights. Runs are numbered, so that a late call
of an earlier run has no effect on a later one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from steppe.core.config import references
from steppe.core.contracts.transport import Channel
from steppe.core.system.process import rss_bytes
from steppe.records.profiling.sampler import sample_roles
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import RUN
from steppe.runtimes.handle import Fault, RoleScheduler
from steppe.runtimes.launch_spec import ROLE_KINDS, LaunchSpec, build_roles, open_directory, post_faults
from steppe.runtimes.plan import REPLAY, WRITERS, Plan
from steppe.runtimes.processes.worker import IDLE_S
from steppe.transport.local import LocalChannel
from steppe.transport.ray.links import (
    EMPTY_REPLY,
    LastSegment,
    RayReader,
    RayRpcClient,
    RayRpcServer,
    RayWeights,
    RayWriter,
)

if TYPE_CHECKING:
    from steppe.transport.ray.tables import RayTable

START_S = 120.0  # deadline of the roles' first step: imports are slow on a busy machine
FLUSH_TIMEOUT_S = 10.0  # how long delivery of the last weights may take
ROUNDS_IDLE_S = 0.02  # longest idle wait of a learner that only waits for messages
SWITCH_S = 0.0005  # thread switch interval: a call should not wait for Python's default of 5 ms


class SlotAssignment(msgspec.Struct, frozen=True):
    """Which worker slot of which run a Ray actor runs."""

    run_number: int  # counted by the driver
    worker_slot: str
    epoch: int
    launch_spec: LaunchSpec
    module_path: tuple[str, ...]  # the driver's module search path
    working_directory: str  # of the driver


class RayWorkerActor:
    """The Ray actor of a worker slot. Every method may be called while `run` is running."""

    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        self._slot: _RayWorkerSlot | None = None
        self._run_number = 0
        self._thread = 0
        self._changed = threading.Condition()

    def process_location(self) -> dict[str, Any]:
        """Return this process's pid, host and Ray node."""
        from steppe.transport.ray.links import import_ray

        node = import_ray().get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "host": socket.gethostname(), "node": node}

    def run(self, encoded: bytes, last: dict[int, LastSegment], peers: dict[str, Any]) -> bytes:
        """Run the roles of a worker slot to their end and return their faults as JSON.

        `last` is each actor's last segment, to resume from. `peers` are the Ray actors of the worker slots that this
        one calls.
        """
        assignment = msgspec.json.decode(encoded, type=SlotAssignment)
        _adopt_driver_environment(assignment)
        slot = _RayWorkerSlot(assignment, last)
        with self._changed:
            self._run_number, self._slot, self._thread = assignment.run_number, slot, threading.get_ident()
            self._changed.notify_all()
        for worker_slot, ray_actor in peers.items():
            slot.attach(worker_slot, ray_actor)
        try:
            return msgspec.json.encode([asdict(fault) for fault in slot.run()])
        finally:
            self._thread = 0

    def ask(self, run_number: int, kind: str, what: int) -> None:
        """Request all roles of a kind here to RUN, PAUSE, FINISH or STOP."""
        if (slot := self._slot_of_run(run_number)) is not None:
            slot.requested[kind] = what
            slot.wakeup.set()

    def health(self, run_number: int) -> tuple[float, int | None]:
        """Return the seconds since a role's last heartbeat, negative while it is being built, and the RSS in bytes."""
        slot = self._slot_of_run(run_number)
        return (0.0 if slot is None or slot.ended else time.monotonic() - slot.heartbeat_s), rss_bytes()

    def stack(self) -> str:
        """Return the present stack of the thread that runs the roles."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def take_segment(self, run_number: int, released: int) -> np.ndarray:
        """Return the next segment of this slot's actor. Called by the learner."""
        slot = self._slot_of_run(run_number)
        if slot is None or not isinstance(slot.channel, RayWriter):
            return EMPTY_REPLY
        return slot.channel.take(released)

    def take_weights(self, run_number: int, data: np.ndarray) -> None:
        """Receive newer weights for this slot's roles. Called by the learner."""
        if (slot := self._slot_of_run(run_number)) is not None:
            slot.weights.take(data)

    def answer(self, run_number: int, request_id: int, request: np.ndarray) -> np.ndarray:
        """Return the reply of this slot's replay role to a request. Called by the learner."""
        slot = self._slot_of_run(run_number)
        return EMPTY_REPLY if slot is None or slot.rpc_server is None else slot.rpc_server.call(request_id, request)

    def share(self, run_number: int, worker: int, what: int, data: np.ndarray) -> np.ndarray:
        """Return the table owner's reply to a worker's message. Called by workers on the learner's Ray actor."""
        slot = self._slot_of_run(run_number)
        return (
            EMPTY_REPLY if slot is None or slot.table is None or slot.ended else slot.table.request(worker, what, data)
        )

    def attach(self, run_number: int, worker_slot: str, ray_actor: Any) -> LastSegment | None:
        """Connect the learner to another Ray actor of a worker slot, and return the segment that it resumes from.

        Called by the driver on the learner's Ray actor.
        """
        slot = self._slot_of_run(run_number)
        return None if slot is None else slot.attach(worker_slot, ray_actor)

    def _slot_of_run(self, run_number: int) -> _RayWorkerSlot | None:
        """Block until that run has begun here and return its worker slot; None if a later run has begun."""
        with self._changed:
            self._changed.wait_for(lambda: self._run_number >= run_number)
            return self._slot if self._run_number == run_number else None


class _RayWorkerSlot:
    """One worker slot in one run: its links and its roles."""

    def __init__(self, assignment: SlotAssignment, last: Mapping[int, LastSegment]) -> None:
        self.assignment, self.plan = assignment, assignment.launch_spec.plan()
        self.requested = dict.fromkeys(ROLE_KINDS, RUN)
        self.wakeup = threading.Event()
        self.heartbeat_s = time.monotonic() + START_S
        self.ended = False
        self.weights = RayWeights(self.wakeup.set)
        self.channel = _open_channel(self.plan, assignment, last, self.wakeup.set)
        self.rpc_server = RayRpcServer() if assignment.worker_slot in self.plan.replay else None
        self.rpc_clients: list[RayRpcClient] = []
        self.table = _open_table(self.plan, assignment.worker_slot, self.wakeup.set)

    def attach(self, worker_slot: str, ray_actor: Any) -> LastSegment | None:
        """Connect to another worker slot's Ray actor: send weights, take an actor's segments, call a replay role."""
        run_number = self.assignment.run_number
        if worker_slot in self.plan.replay:
            self.rpc_clients.append(
                RayRpcClient(
                    worker_slot, lambda request_id, request: ray_actor.answer.remote(run_number, request_id, request)
                )
            )
            return None
        if worker_slot == "learner":
            assert self.table is not None, "only workers that share a table call the learner"
            self.table.call = lambda *message: ray_actor.share.remote(run_number, *message)
            return None
        kind, _, index = worker_slot.partition("-")
        if kind in WRITERS and self.table is not None:
            return None  # workers call the learner, and get their values from the table
        min_interval_s = 0.0 if kind in WRITERS else IDLE_S[kind]  # the manager polls no more often than that
        self.weights.attach(worker_slot, lambda frame: ray_actor.take_weights.remote(run_number, frame), min_interval_s)
        if kind not in WRITERS or not isinstance(self.channel, RayReader):
            return None
        return self.channel.attach(int(index), lambda released: ray_actor.take_segment.remote(run_number, released))

    def run(self) -> list[Fault]:
        """Build the roles, step them until they are done, and return their faults."""
        scheduler, run = RoleScheduler([]), None
        try:
            run = open_directory(self.assignment.launch_spec.directory, self.assignment.worker_slot)
            self._step_roles(run, scheduler)
        except Exception as error:  # noqa: BLE001 - a role that cannot be built is reported like one that fails later
            scheduler.faults.append(Fault.of(self.assignment.worker_slot, error))
        self.ended = True
        if run is not None:
            post_faults(run, self.assignment.worker_slot, scheduler.faults)
            run.store.close()
        if isinstance(self.channel, RayWriter):
            self.channel.close()
        for link in (self.rpc_server, self.table):
            if link is not None:
                link.close()
        sys.stdout.flush()
        sys.stderr.flush()
        return scheduler.faults

    def _step_roles(self, run: RunDirectory, scheduler: RoleScheduler) -> None:
        assignment, plan, worker_slot = self.assignment, self.plan, self.assignment.worker_slot
        links = (self.channel, self.weights)
        options: dict[str, Any] = {
            "epoch": assignment.epoch, "replay_clients": self.rpc_clients, "rpc_server": self.rpc_server, "table": self.table,
        }  # fmt: skip
        roles = build_roles(
            assignment.launch_spec,
            plan,
            worker_slot,
            run,
            links,
            self.requested.__getitem__,
            self._heartbeat,
            **options,
        )
        with sample_roles(
            roles, run.profile if plan.config.flow.profile else None, waiting=worker_slot
        ) as scheduler.roles:
            host_role = next(
                role for role in scheduler.roles if role.name == worker_slot
            )  # the slot's other roles end with it
            while not host_role.done and not scheduler.faults:
                self._heartbeat()
                self._progress()
                if not scheduler.step():
                    self._wait_idle(self._idle_s)
            scheduler.close()
        self._deliver()

    def _heartbeat(self) -> None:
        self.heartbeat_s = time.monotonic()

    @property
    def _idle_s(self) -> float:
        """Longest idle wait: every message sets `wakeup`, but the end of a batch window does not."""
        kind = self.assignment.worker_slot.partition("-")[0]
        return ROUNDS_IDLE_S if kind == "learner" and self.plan.lockstep else IDLE_S[kind]

    def _wait_idle(self, timeout_s: float) -> None:
        self.wakeup.wait(timeout_s)
        self.wakeup.clear()

    def _deliver(self) -> None:
        """Wait, at most FLUSH_TIMEOUT_S, until readers have the last weights and the table has the last changes.

        Roles are requested to end only after that.
        """
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        while not self._delivered and time.monotonic() < deadline_s:
            self._progress()
            self._wait_idle(0.01)

    @property
    def _delivered(self) -> bool:
        return self.weights.delivered and (self.table is None or self.table.settled)

    def _progress(self) -> None:
        self.weights.progress()
        if self.table is not None:
            self.table.progress()


def _open_channel(
    plan: Plan, assignment: SlotAssignment, last: Mapping[int, LastSegment], wake: Callable[[], None]
) -> Channel:
    """Open this worker slot's end of the channel; if writer and reader share the slot, the channel is local."""
    kind, _, index = assignment.worker_slot.partition("-")
    actors, slots = plan.config.actors, plan.slots_per_actor
    if kind in ("manager", REPLAY):
        return RayWriter(plan.segment, 0, wake)
    from steppe.runtimes.builder import channel_spec

    spec = channel_spec(plan)
    if kind in WRITERS:
        return RayWriter(spec, slots, wake, last.get(int(index)))
    together = any(role.kind in WRITERS for role in plan.worker_slots()[assignment.worker_slot])
    channel: Channel = (
        LocalChannel(spec, actors, slots)
        if together
        else RayReader(spec, assignment.launch_spec.run, actors, slots, wake)
    )
    for actor, known in last.items():
        channel.prime(actor, *known)
    return channel


def _open_table(plan: Plan, worker_slot: str, wake: Callable[[], None]) -> RayTable | None:
    """Open this worker slot's end of the shared table; None in other modes and for the manager."""
    if not plan.uses_table or worker_slot == "manager":
        return None
    from steppe.transport.ray.tables import RayTable  # compiled modules that only these runs need

    return RayTable(wake, owns_table=worker_slot == "learner")


def _adopt_driver_environment(assignment: SlotAssignment) -> None:
    """Adopt the driver's main script, module search path and working directory, as far as they exist on this host."""
    references.set_main_script(assignment.launch_spec.script)
    existing = [entry for entry in assignment.module_path if os.path.exists(entry)]
    sys.path[:] = existing + [entry for entry in sys.path if entry not in existing]
    with contextlib.suppress(OSError):
        os.chdir(assignment.working_directory)
