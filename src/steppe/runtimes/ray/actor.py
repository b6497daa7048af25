"""The life of one Ray actor: build the roles of one place, let them take turns, end, and do it again when asked to.

`live` is one long call. Meanwhile other threads of the actor answer: the driver (driver.py), which asks and looks after
it, the learner, which takes an actor's segments, and the one who publishes weights. Runs are numbered, so that a call which
belongs to an earlier run does nothing in a later one.
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

START_S = 120.0  # how long roles may take to their first step: imports on a busy machine
FLUSH_TIMEOUT_S = 10.0  # how long the last weights may take to those who judge them
ROUNDS_IDLE_S = 0.02  # of a learner that waits for nothing but messages
SWITCH_S = 0.0005  # between threads of one process: a call should not wait for Python's 5 ms each time it needs a turn


class SlotAssignment(msgspec.Struct, frozen=True):
    """Which place a seat is to take in which run."""

    number: int  # of the run, in the driver's count
    place: str
    epoch: int
    order: LaunchSpec
    path: tuple[str, ...]  # where the driver finds modules
    directory: str  # the driver's current one


class RayWorkerActor:
    """What a Ray actor of ours is. Every method may be called while `live` is under way."""

    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        self._slot: _RayWorkerSlot | None = None
        self._number = 0
        self._thread = 0
        self._changed = threading.Condition()

    def process_location(self) -> dict[str, Any]:
        """Where this process is."""
        from steppe.transport.ray.links import import_ray

        node = import_ray().get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "host": socket.gethostname(), "node": node}

    def live(self, ticket: bytes, last: dict[int, LastSegment], peers: dict[str, Any]) -> bytes:
        """Run the roles of a place to their end. Returns their faults as JSON.

        `last` is what actors go on from; `peers` are the seats of the other places, for the learner.
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
        """Tell all roles of a kind here to RUN, PAUSE, FINISH or STOP."""
        if (stay := self._in(number)) is not None:
            stay.asked[kind] = what
            stay.wakeup.set()

    def pulse(self, number: int) -> tuple[float, int | None]:
        """How many seconds ago a role here last showed life, negative while it is being built; and the process's size."""
        stay = self._in(number)
        return (0.0 if stay is None or stay.over else time.monotonic() - stay.beat_s), rss_bytes()

    def where(self) -> str:
        """What the roles are doing at this moment."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def take_segment(self, number: int, released: int) -> np.ndarray:
        """For the learner: the next segment of the actor that lives here."""
        stay = self._in(number)
        if stay is None or not isinstance(stay.channel, RayWriter):
            return EMPTY_REPLY
        return stay.channel.take(released)

    def take_weights(self, number: int, data: np.ndarray) -> None:
        """For the learner: newer weights for the roles that live here."""
        if (stay := self._in(number)) is not None:
            stay.weights.take(data)

    def answer(self, number: int, ticket: int, question: np.ndarray) -> np.ndarray:
        """For the learner: what the replay role that lives here says to a question."""
        stay = self._in(number)
        return EMPTY_REPLY if stay is None or stay.desk is None else stay.desk.ask(ticket, question)

    def share(self, number: int, worker: int, what: int, data: np.ndarray) -> np.ndarray:
        """For a worker, at the keeper's seat: what is said to a message about the table."""
        stay = self._in(number)
        return EMPTY_REPLY if stay is None or stay.table is None or stay.over else stay.table.ask(worker, what, data)

    def attach(self, number: int, place: str, seat: Any) -> LastSegment | None:
        """For the driver, at the learner's seat: another has taken that place. Returns what it goes on from."""
        stay = self._in(number)
        return None if stay is None else stay.attach(place, seat)

    def _in(self, number: int) -> _RayWorkerSlot | None:
        """The stay during that run, as soon as it has begun; None when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._number >= number)
            return self._slot if self._number == number else None


class _RayWorkerSlot:
    """One place in one run: its links and its roles."""

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
        """Hand weights to that place and, where it is an actor's, take its segments; a replay role is asked."""
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
            return None  # these call, and have what they learn from the table
        every_s = 0.0 if kind in WRITERS else IDLE_S[kind]  # who evaluates looks no more often than that
        self.weights.attach(place, lambda letter: seat.take_weights.remote(number, letter), every_s)
        if kind not in WRITERS or not isinstance(self.channel, RayReader):
            return None
        return self.channel.attach(int(index), lambda released: seat.take_segment.remote(number, released))

    def live(self) -> list[Fault]:
        """Build the roles, let them take turns until they are done, and return what went wrong."""
        turns, run = RoleScheduler([]), None
        try:
            run = open_directory(self.assignment.order.directory, self.assignment.place)
            self._work(run, turns)
        except Exception as error:  # noqa: BLE001 - a role that cannot even be built is told like one that failed later
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
            "epoch": ticket.epoch, "shelves": self.lines, "desk": self.desk, "table": self.table,
        }  # fmt: skip
        roles = build_roles(ticket.order, plan, place, run, links, self.asked.__getitem__, self._beat, **more)
        with sample_roles(roles, run.profile if plan.config.flow.profile else None, waiting=place) as turns.live:
            host = next(role for role in turns.live if role.name == place)  # when it is done, its guests are too
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
        """At most: all that comes rings, but a window that closes."""
        kind = self.assignment.place.partition("-")[0]
        return ROUNDS_IDLE_S if kind == "learner" and self.plan.lockstep else IDLE_S[kind]

    def _rest(self, timeout_s: float) -> None:
        self.wakeup.wait(timeout_s)
        self.wakeup.clear()

    def _deliver(self) -> None:
        """Wait until those who read weights have the last ones, and the table what was learned last: nobody is told before that
        there will be no more."""
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
    """The end of the channel that belongs at this place; where writer and reader share it, it never leaves their memory."""
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
    """A place's end of what workers learn together; nothing in other modes, and for the manager."""
    if not plan.uses_table or place == "manager":
        return None
    from steppe.transport.ray.tables import RayTable  # compiled parts, which only these runs need

    return RayTable(ring, keeps=place == "learner")


def _adopt_driver_environment(ticket: SlotAssignment) -> None:
    """Find modules and files where the driver finds them, as far as they are on this host."""
    references.set_main_script(ticket.order.script)
    here = [entry for entry in ticket.path if os.path.exists(entry)]
    sys.path[:] = here + [entry for entry in sys.path if entry not in here]
    with contextlib.suppress(OSError):
        os.chdir(ticket.directory)
