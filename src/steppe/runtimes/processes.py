"""One process per place, linked by shared memory, started from a preloaded fork server.

The supervisor (this process) never imports torch: it starts the processes, watches them, and tells them when to end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from steppe.core import factory
from steppe.core.config import flatten, unflatten
from steppe.core.links import EVENTS
from steppe.core.reports import EventReport
from steppe.core.specs import EnvSpec
from steppe.core.timing import RunClock
from steppe.records.directory import RunDirectory
from steppe.roles.context import STOP, Context
from steppe.runtimes.plan import Plan, make_plan
from steppe.runtimes.turns import Fault, Turns, prepare_torch
from steppe.transport.shm import Bell, Control, ShmChannel, ShmWeights, make_room, remove_room

WEIGHTS_BYTES = 64 << 20  # room to keep free for weights, whose size only the learner knows
IDLE_S = {"actor": 0.2, "learner": 0.002, "manager": 0.05}  # bells wake actors; windows and evaluations go by time
FAULT_EXIT = 70
Surroundings = tuple[str, dict[str, str], factory.Script | None]  # directory, environment variables, user's script
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERM_GRACE_S = 8.0  # for the supervisor, which heard the same signal, to end a process in good order


def warm_up() -> None:
    """Start the fork server and its imports now, while the caller does something else."""
    from multiprocessing import resource_tracker
    from multiprocessing.forkserver import ensure_running

    _context().set_forkserver_preload(["steppe.runtimes.preload"])
    resource_tracker.ensure_running()  # here already: starting it unblocks the signals that are blocked below
    # Stop signals reach the whole group. The server inherits this mask: it must outlive the end it helps to bring about,
    # and while it imports it has no handlers of its own yet.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with _without_main():
            ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launch(plan: Plan, directory: RunDirectory) -> ProcessHandle:
    """Start a process per place; they begin to work at once."""
    return ProcessHandle(plan, directory)


class ProcessHandle:
    """The processes of a run, their shared memory, and what became of them."""

    def __init__(self, plan: Plan, directory: RunDirectory) -> None:
        self._directory = directory
        self._room = make_room(directory.id, plan.channel_bytes + WEIGHTS_BYTES)
        self._processes: dict[str, BaseProcess] = {}
        self._faults: dict[str, Fault] = {}
        self._bells: list[Bell] = []
        self._links: list[ShmChannel | ShmWeights] = []
        try:
            self._start(plan)
        except BaseException:
            self.close(timeout_s=1.0)
            raise

    def _start(self, plan: Plan) -> None:
        self._control = Control(self._room / "control", create=True)
        config = plan.config
        slots = plan.slots_per_actor
        self.channel = ShmChannel(self._room, plan.segment, self._directory.id, config.actors, slots, create=True)
        self.weights = ShmWeights(self._room, tuple(role.name for role in plan.roles if role.kind == "actor"))
        self._links = [self.channel, self.weights]
        self._bells = [Bell(self._room / f"bell-{role.name}") for role in plan.roles]
        self._places = plan.places()
        warm_up()
        order = msgspec.json.encode({"config": flatten(config), "spec": asdict(plan.spec)})
        surroundings = (os.getcwd(), dict(os.environ), factory.main_script())
        for place in self._places:
            arguments = (order, place, str(self._room), str(self._directory.path.resolve()), surroundings)
            process = _context().Process(target=_live, args=arguments, name=f"steppe-{place}", daemon=True)
            with _without_main():
                process.start()
            self._processes[place] = process

    def advance(self, timeout_s: float) -> None:
        live = [process.sentinel for process in self._processes.values() if process.is_alive()]
        if live:
            multiprocessing.connection.wait(live, timeout_s)

    def await_segment(self, timeout_s: float) -> None:
        self.channel.wait(timeout_s)

    def ended(self, kind: str) -> bool:
        places = [place for place, roles in self._places.items() if any(role.kind == kind for role in roles)]
        return all(self._processes[place].exitcode is not None for place in places)

    def faults(self) -> list[Fault]:
        for place, process in self._processes.items():
            if process.exitcode not in (None, 0) and place not in self._faults:
                self._faults[place] = self._explain(place, process)
        return list(self._faults.values())

    def ask(self, kind: str, what: int) -> None:
        self._control.set(kind, what)
        for bell in self._bells:
            bell.ring()

    def close(self, timeout_s: float) -> None:
        try:
            if self._processes:
                for kind in ("actor", "learner", "manager"):
                    self.ask(kind, STOP)
            deadline = time.monotonic() + timeout_s
            for process in self._processes.values():
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also when a second Ctrl-C ends the waiting
            for process in self._processes.values():
                if process.is_alive():
                    process.kill()
                    process.join()
            while self._bells:
                self._bells.pop().close()
            while self._links:
                self._links.pop().close()
            remove_room(self._room)

    def _explain(self, place: str, process: BaseProcess) -> Fault:
        """What a process said before it ended, or what can be said of one that could not say anything."""
        after = 0
        while page := self._directory.store.read(EVENTS, after):
            after = page[-1][0]
            for event in (EventReport.read(record) for _, record in page):
                if event.kind == "fault" and event.details.get("place") == place:
                    told = event.details
                    return Fault(event.role, told["reason"], told["message"], told["details"])
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Fault(place, "role_died", f"the process of {place} {how}; its output is in logs/{place}.log")


def _context() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script again in the child: it may have no main guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _live(order: bytes, place: str, room: str, directory: str, surroundings: Surroundings) -> None:
    """A process's whole life: build the roles of one place and let them take turns until they are done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    signal.signal(signal.SIGTERM, _end_unless_asked)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _settle(*surroundings)
    run = RunDirectory.open(Path(directory))
    _redirect_output(run.path / "logs" / f"{place}.log")
    turns = Turns([])
    try:
        told = msgspec.json.decode(order)
        plan = make_plan(unflatten(told["config"]), msgspec.convert(told["spec"], EnvSpec))
        _work(plan, place, Path(room), run, turns)
    except Exception as error:  # noqa: BLE001 - a role that cannot even be built is told like one that failed later
        turns.faults.append(Fault.of(place, error))
    for fault in turns.faults:
        _tell(run, place, fault)
    run.store.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAULT_EXIT if turns.faults else 0)  # nothing is left to do, and torch's threads need no farewell


def _settle(directory: str, environ: dict[str, str], script: factory.Script | None) -> None:
    """Take over what may have changed since the fork server started."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    factory.adopt_main(script)


def _end_unless_asked(number: int, frame: types.FrameType | None) -> None:
    """On SIGTERM: mostly it went to the whole group, and the supervisor is about to ask for a good end."""
    signal.signal(number, signal.SIG_DFL)
    timer = threading.Timer(TERM_GRACE_S, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _work(plan: Plan, place: str, room: Path, run: RunDirectory, turns: Turns) -> None:
    from steppe.runtimes.wiring import build_role

    prepare_torch(plan.config.flow.threads)
    control = Control(room / "control")
    channel = ShmChannel(room, plan.segment, run.id, plan.config.actors, plan.slots_per_actor)
    readers = tuple(role.name for role in plan.roles if role.kind == "actor")
    weights, clock = ShmWeights(room, readers), RunClock()
    roles = plan.places()[place]
    for spec in roles:
        asked = _asker(control, spec.kind)
        context = Context(run.id, spec.name, channel, weights, run.store, asked, clock, plan.config.flow.trace_spans)
        turns.live.append(build_role(plan, spec, run, context))
    host = next(role for role in turns.live if role.name == place)  # when it is done, its guests are too
    bell = Bell(room / f"bell-{place}")
    while not host.done and not turns.faults:
        if not turns.once():
            bell.wait(IDLE_S[place.partition("-")[0]])
    turns.close()


def _asker(control: Control, kind: str) -> Any:
    return lambda: control.get(kind)


def _tell(run: RunDirectory, place: str, fault: Fault) -> None:
    details = {"place": place, "reason": fault.reason, "message": fault.message, "details": fault.details}
    run.store.post(EVENTS, EventReport(run=run.id, kind="fault", role=fault.role, details=details).record())


def _redirect_output(path: Path) -> None:
    """What environments and libraries print goes to the role's log, not between the lines of the live view."""
    path.parent.mkdir(exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _die_with_parent() -> None:
    """A supervisor that is gone takes its processes with it: they resume from a checkpoint, never live on alone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(FAULT_EXIT)
