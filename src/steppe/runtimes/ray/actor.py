"""One Ray actor: builds the roles of a worker slot, steps them in turn, and can be reused for another run.

`live` is one long call. Meanwhile other threads of the actor serve the driver (driver.py), which sends requests and
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

    number: int  # of the run, counted by the driver
    place: str
    epoch: int
    order: LaunchSpec
    path: tuple[str, ...]  # the driver's module search path
    directory: str  # the driver's working directory


class RayWorkerActor:
    """The Ray actor of a worker slot. Every method may be called while `live` is running."""

    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        self._slot: _RayWorkerSlot | None = None
        self._number = 0
        self._thread = 0
        self._changed = threading.Condition()

    def process_location(self) -> dict[str, Any]:
        """Return this process's pid, host and Ray node."""
        from steppe.transport.ray.links import import_ray

        node = import_ray().get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "host": socket.gethostname(), "node": node}

    def live(self, ticket: bytes, last: dict[int, LastSegment], peers: dict[str, Any]) -> bytes:
        """Run the roles of a worker slot to their end and return their faults as JSON.

        `last` is each actor's last segment, to resume from. `peers` are the Ray actors of the worker slots that this
        one calls.
        """
        told = msgspec.json.decode(ticket, type=SlotAssignment)
        _adopt_driver_environment(told)
        stay = _RayWorkerSlot(told, last)
        with self._changed:
            self._number, self._slot, self._thread = told.number, stay, threading.get_ident()
            self._changed.notify_all()
        for place, seat in peers.items():
            stay.attach(place, seat)
        try:
            return msgspec.json.encode([asdict(fault) for fault in stay.live()])
        finally:
            self._thread = 0

    def ask(self, number: int, kind: str, what: int) -> None:
        """Request all roles of a kind here to RUN, PAUSE, FINISH or STOP."""
        if (stay := self._in(number)) is not None:
            stay.asked[kind] = what
            stay.wakeup.set()

    def pulse(self, number: int) -> tuple[float, int | None]:
        """Return the seconds since a role's last heartbeat, negative while it is being built, and the RSS in bytes."""
        stay = self._in(number)
        return (0.0 if stay is None or stay.over else time.monotonic() - stay.beat_s), rss_bytes()

    def where(self) -> str:
        """Return the present stack of the thread that runs the roles."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def take_segment(self, number: int, released: int) -> np.ndarray:
        """Return the next segment of this slot's actor. Called by the learner."""
        stay = self._in(number)
        if stay is None or not isinstance(stay.channel, RayWriter):
            return EMPTY_REPLY
        return stay.channel.take(released)

    def take_weights(self, number: int, data: np.ndarray) -> None:
        """Receive newer weights for this slot's roles. Called by the learner."""
        if (stay := self._in(number)) is not None:
            stay.weights.take(data)

    def answer(self, number: int, ticket: int, question: np.ndarray) -> np.ndarray:
        """Return the reply of this slot's replay role to a request. Called by the learner."""
        stay = self._in(number)
        return EMPTY_REPLY if stay is None or stay.desk is None else stay.desk.ask(ticket, question)

    def share(self, number: int, worker: int, what: int, data: np.ndarray) -> np.ndarray:
        """Return the table owner's reply to a worker's message. Called by workers on the learner's Ray actor."""
        stay = self._in(number)
        return EMPTY_REPLY if stay is None or stay.table is None or stay.over else stay.table.ask(worker, what, data)

    def attach(self, number: int, place: str, seat: Any) -> LastSegment | None:
        """Connect the learner to another Ray actor of a worker slot, and return the segment that it resumes from.

        Called by the driver on the learner's Ray actor.
        """
        stay = self._in(number)
        return None if stay is None else stay.attach(place, seat)

    def _in(self, number: int) -> _RayWorkerSlot | None:
        """Block until that run has begun here and return its worker slot; None if a later run has begun."""
        with self._changed:
            self._changed.wait_for(lambda: self._number >= number)
            return self._slot if self._number == number else None


class _RayWorkerSlot:
    """One worker slot in one run: its links and its roles."""

    def __init__(self, ticket: SlotAssignment, last: Mapping[int, LastSegment]) -> None:
        self.assignment, self.plan = ticket, ticket.order.plan()
        self.asked = dict.fromkeys(ROLE_KINDS, RUN)
        self.wakeup = threading.Event()
        self.beat_s = time.monotonic() + START_S
        self.over = False
        self.weights = RayWeights(self.wakeup.set)
        self.channel = _open_channel(self.plan, ticket, last, self.wakeup.set)
        self.desk = RayRpcServer() if ticket.place in self.plan.replay else None
        self.lines: list[RayRpcClient] = []
        self.table = _open_table(self.plan, ticket.place, self.wakeup.set)

    def attach(self, place: str, seat: Any) -> LastSegment | None:
        """Connect to another worker slot's Ray actor: send weights, take an actor's segments, call a replay role."""
        number = self.assignment.number
        if place in self.plan.replay:
            self.lines.append(
                RayRpcClient(place, lambda ticket, question: seat.answer.remote(number, ticket, question))
            )
            return None
        if place == "learner":
            assert self.table is not None, "only who shares a table calls the learner"
            self.table.call = lambda *message: seat.share.remote(number, *message)
            return None
        kind, _, index = place.partition("-")
        if kind in WRITERS and self.table is not None:
            return None  # workers call the learner, and get their values from the table
        every_s = 0.0 if kind in WRITERS else IDLE_S[kind]  # the manager polls no more often than that
        self.weights.attach(place, lambda letter: seat.take_weights.remote(number, letter), every_s)
        if kind not in WRITERS or not isinstance(self.channel, RayReader):
            return None
        return self.channel.attach(int(index), lambda released: seat.take_segment.remote(number, released))

    def live(self) -> list[Fault]:
        """Build the roles, step them until they are done, and return their faults."""
        turns, run = RoleScheduler([]), None
        try:
            run = open_directory(self.assignment.order.directory, self.assignment.place)
            self._work(run, turns)
        except Exception as error:  # noqa: BLE001 - a role that cannot be built is reported like one that fails later
            turns.faults.append(Fault.of(self.assignment.place, error))
        self.over = True
        if run is not None:
            post_faults(run, self.assignment.place, turns.faults)
            run.store.close()
        if isinstance(self.channel, RayWriter):
            self.channel.close()
        for link in (self.desk, self.table):
            if link is not None:
                link.close()
        sys.stdout.flush()
        sys.stderr.flush()
        return turns.faults

    def _work(self, run: RunDirectory, turns: RoleScheduler) -> None:
        ticket, plan, place = self.assignment, self.plan, self.assignment.place
        links = (self.channel, self.weights)
        more: dict[str, Any] = {
            "epoch": ticket.epoch, "replay_clients": self.lines, "rpc_server": self.desk, "table": self.table,
        }  # fmt: skip
        roles = build_roles(ticket.order, plan, place, run, links, self.asked.__getitem__, self._beat, **more)
        with sample_roles(roles, run.profile if plan.config.flow.profile else None, waiting=place) as turns.live:
            host = next(role for role in turns.live if role.name == place)  # the slot's other roles end with it
            while not host.done and not turns.faults:
                self._beat()
                self._progress()
                if not turns.once():
                    self._rest(self._idle_s)
            turns.close()
        self._deliver()

    def _beat(self) -> None:
        self.beat_s = time.monotonic()

    @property
    def _idle_s(self) -> float:
        """Longest idle wait: every message sets `wakeup`, but the end of a batch window does not."""
        kind = self.assignment.place.partition("-")[0]
        return ROUNDS_IDLE_S if kind == "learner" and self.plan.lockstep else IDLE_S[kind]

    def _rest(self, timeout_s: float) -> None:
        self.wakeup.wait(timeout_s)
        self.wakeup.clear()

    def _deliver(self) -> None:
        """Wait, at most FLUSH_TIMEOUT_S, until readers have the last weights and the table has the last changes.

        No role is told of the end before.
        """
        until_s = time.monotonic() + FLUSH_TIMEOUT_S
        while not self._delivered and time.monotonic() < until_s:
            self._progress()
            self._rest(0.01)

    @property
    def _delivered(self) -> bool:
        return self.weights.delivered and (self.table is None or self.table.settled)

    def _progress(self) -> None:
        self.weights.progress()
        if self.table is not None:
            self.table.progress()


def _open_channel(
    plan: Plan, ticket: SlotAssignment, last: Mapping[int, LastSegment], ring: Callable[[], None]
) -> Channel:
    """Open this worker slot's end of the channel; if writer and reader share the slot, the channel is local."""
    kind, _, index = ticket.place.partition("-")
    actors, slots = plan.config.actors, plan.slots_per_actor
    if kind in ("manager", REPLAY):
        return RayWriter(plan.segment, 0, ring)
    from steppe.runtimes.builder import channel_spec

    spec = channel_spec(plan)
    if kind in WRITERS:
        return RayWriter(spec, slots, ring, last.get(int(index)))
    together = any(role.kind in WRITERS for role in plan.places()[ticket.place])
    channel: Channel = (
        LocalChannel(spec, actors, slots) if together else RayReader(spec, ticket.order.run, actors, slots, ring)
    )
    for actor, known in last.items():
        channel.prime(actor, *known)
    return channel


def _open_table(plan: Plan, place: str, ring: Callable[[], None]) -> RayTable | None:
    """Open this worker slot's end of the shared table; None in other modes and for the manager."""
    if not plan.uses_table or place == "manager":
        return None
    from steppe.transport.ray.tables import RayTable  # compiled modules that only these runs need

    return RayTable(ring, keeps=place == "learner")


def _adopt_driver_environment(ticket: SlotAssignment) -> None:
    """Adopt the driver's main script, module search path and working directory, as far as they exist on this host."""
    references.set_main_script(ticket.order.script)
    here = [entry for entry in ticket.path if os.path.exists(entry)]
    sys.path[:] = here + [entry for entry in sys.path if entry not in here]
    with contextlib.suppress(OSError):
        os.chdir(ticket.directory)
