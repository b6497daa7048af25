"""The life of one rank of an MPI world: build the roles of one place, let them take turns, end.

The first rank learns and directs the others (root.py), the second is the manager, the rest are actors. Where workers
share a table, every rank is one, and the first is the rest besides. Between them are messages (transport/mpi/links.py) and the run's directory, which all of them must see.
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
from steppe.records.profiling.sampler import sampled
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import FINISH
from steppe.runtimes.handle import Fault, Turns
from steppe.runtimes.launch_spec import KINDS, Order, build_roles, open_directory, tell_faults
from steppe.runtimes.plan import Plan
from steppe.runtimes.processes.worker import FAULT_EXIT, end_unless_asked
from steppe.transport.mpi.links import Comm, MpiChannel, MpiWeights, MpiWords, library

if TYPE_CHECKING:
    from steppe.transport.mpi.tables import MpiTable

BEGIN, END = "begin", "end"  # words besides those for kinds: build the roles; let go, everything is over
ORDER = 1  # the tag of orders, in the world's own communicator; an empty one is farewell
BEAT_S = 0.5
LOOK_S = 0.001  # how often a role that is at work looks for messages
SPIN_S = 0.00005
LONGEST_S = {
    "learner": 0.001,
    "actor": 0.001,
    "worker": 0.001,
    "manager": 0.02,
}  # between two looks of one that has nothing to do
SHM = Path("/dev/shm")


def seats(plan: Plan) -> list[str]:
    """The place on each rank, the first rank's first."""
    places = list(plan.places())
    first = [place for place in ("learner", "manager") if place in places]
    return [*first, *(place for place in places if place not in first)]


class Pause:
    """Waiting without burning a core: spin briefly, then sleep an eighth of the time waited so far, up to a limit."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._since_s: float | None = None

    def over(self) -> None:
        """There was something to do."""
        self._since_s = None

    def wait(self) -> None:
        """There was nothing to do."""
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
        elif (waited := now - self._since_s) > SPIN_S:
            time.sleep(min(self._longest_s, waited / 8))


class Seat:
    """One rank's place in a run: its links to the others and, once they are built, its roles."""

    def __init__(self, world: Comm, order: Order) -> None:
        """All ranks take theirs at the same time."""
        self.order, self.plan = order, order.plan()
        places = seats(self.plan)
        self.place = places[world.Get_rank()]
        self.first = world.Get_rank() == 0
        self.pause = Pause(LONGEST_S[self.place.partition("-")[0]])
        self._others = range(1, world.Get_size())
        writers = [places.index(role.place) for role in self.plan.writers]
        self.channel = MpiChannel(world, _link(self.plan), order.run, writers, self.plan.slots_per_actor)
        self.weights = MpiWeights(world, self._others)
        self.words = MpiWords(world, (*KINDS, BEGIN, END))
        self.table = self._make_table(world, places) if self.plan.by_table else None
        self.turns = Turns([])
        self._stack = contextlib.ExitStack()
        self.run: RunDirectory | None = None
        self.over = False
        self._host: Role | None = None
        self._looked_s = self._beat_s = 0.0

    def _make_table(self, world: Comm, places: list[str]) -> MpiTable:
        from steppe.transport.mpi.tables import MpiTable  # compiled parts, which only these runs need

        return MpiTable(world, [places.index(role.place) for role in self.plan.roles if role.kind == "worker"])

    @property
    def settled(self) -> bool:
        """Whether no segment, and nothing for a table, is under way from here."""
        return self.channel.settled and (self.table is None or self.table.settled)

    def build(self, run: Callable[[], RunDirectory]) -> None:
        """Build the roles in the run's directory. One that cannot be built is told like one that failed later."""
        try:
            self.run = run()
            into = self.run.profile if self.plan.config.flow.profile else None
            self.turns.live = self._stack.enter_context(sampled(self._roles(self.run), into, waiting=self.place))
            self._host = next(role for role in self.turns.live if role.name == self.place)
        except Exception as error:  # noqa: BLE001 - whatever it is becomes the run's fault, with its traceback
            self.turns.faults.append(Fault.of(self.place, error))
            self._end()

    def turn(self) -> bool:
        """Look for messages and let every role of this place do one step; False when there was nothing to do."""
        self.beat(always=True)
        if self.over or self._host is None:
            return False
        busy = self.turns.once()
        if self._host.done or self.turns.faults:  # when the host is done, its guests are too
            self._end()
        return busy

    def beat(self, *, always: bool = False) -> None:
        """Say that this rank is alive, and look for messages; called often, so mostly it does nothing."""
        now = time.monotonic()
        if now - self._looked_s >= LOOK_S or always:
            self._looked_s = now
            if now - self._beat_s >= BEAT_S and not self.first:
                self._beat_s = now
                self.words.tell({})
            self.progress()

    def progress(self) -> None:
        """Let messages come and go. The last weights come before the word that there will be no more."""
        self.channel.progress()
        self.weights.progress()
        if self.table is not None:
            self.table.progress()
        if not self.weights.receiving:
            self.words.progress(hold=self._hold())

    def close(self) -> None:
        """Let go of the links, together with the other ranks."""
        for link in (self.channel, self.weights, self.words, self.table):
            if link is not None:
                link.close()

    def _hold(self) -> list[int]:
        if not self.first or all(self.words.get(kind) != FINISH for kind in KINDS):
            return []
        return [rank for rank in self._others if not self.weights.delivered(rank)]

    def _roles(self, run: RunDirectory) -> list[Role]:
        links = (self.channel, self.weights)
        asked = self.words.get
        return build_roles(self.order, self.plan, self.place, run, links, asked, self.beat, table=self.table)

    def _end(self) -> None:
        """Close the roles, and put what went wrong into the event log."""
        self.turns.close()
        self._stack.close()
        self.over = True
        if self.run is not None:
            tell_faults(self.run, self.place, self.turns.faults)


def _link(plan: Plan) -> SegmentSpec:
    """What goes through the channel; only for gradients must there be an agent to say."""
    if not plan.config.by_gradients:
        return plan.segment
    from steppe.runtimes.builder import link_spec

    return link_spec(plan)


def serve(world: Comm) -> NoReturn:
    """Any rank but the first: carry out its orders, one after the other, until it says farewell."""
    quiet_signals()
    try:
        while (order := _next_order(world)) is not None:
            _carry_out(world, order)
    except BaseException:  # noqa: BLE001 - told, and the whole world ends with it
        # Python would wait in MPI_Finalize for the others, and they for this rank.
        sys.excepthook(*sys.exc_info())
        abort(world, FAULT_EXIT)
    sys.exit(0)


def quiet_signals() -> None:
    """Ctrl-C and SIGTERM reach every rank; the one that supervises decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_unless_asked)


def _next_order(world: Comm) -> Order | None:
    mpi, status = library(), library().Status()
    pause = Pause(LONGEST_S["manager"])
    while (message := world.Improbe(0, ORDER, status)) is None:
        pause.wait()
    data = np.empty(status.Get_count(mpi.BYTE), np.uint8)
    message.Recv(data)
    return msgspec.json.decode(data.tobytes(), type=Order) if len(data) else None


def _carry_out(world: Comm, order: Order) -> None:
    references.adopt_main(order.script)
    seat = Seat(world, order)
    seat.words.tell(whereabouts())
    _until(seat, lambda: bool(seat.words.get(BEGIN)))
    seat.build(lambda: open_directory(order.directory, seat.place))
    while not seat.over:
        if seat.turn():
            seat.pause.over()
        else:
            seat.pause.wait()
    _until(seat, lambda: seat.settled)
    seat.words.tell({"ended": True, "faults": [asdict(fault) for fault in seat.turns.faults]})
    _until(seat, lambda: bool(seat.words.get(END)))
    seat.close()
    if seat.run is not None:
        seat.run.store.close()


def _until(seat: Seat, true: Callable[[], bool]) -> None:
    while not true():
        seat.progress()
        seat.pause.wait()


def whereabouts() -> dict[str, Any]:
    """Where this rank is, for whoever has to clear up after it."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "files": own_files()}


def own_files() -> list[str]:
    """The files in shared memory that this process has mapped: MPI leaves them there when its processes are killed."""
    try:
        words = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    return sorted({row[5] for row in words if len(row) == 6 and row[5].startswith(f"{SHM}/")})


def abort(world: Comm, code: int) -> NoReturn:
    """End the whole world at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    for file in own_files():
        Path(file).unlink(missing_ok=True)
    world.Abort(code)
    os._exit(code)
