"""One process per worker slot, linked by shared memory, started from a preloaded fork server.

The supervisor (this process) never imports torch: it starts and monitors the processes, restarts actors, workers and
the manager if they are killed or hang, and requests all of them to end. The processes run worker.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Protocol

import msgspec
import numpy as np

from steppe.core.config import references
from steppe.core.config.run import flatten
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS
from steppe.core.system.process import format_mib, oom_kills, rss_bytes
from steppe.core.system.shared_dir import Wakeup, make_shared_dir, remove_shared_dir
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import FINISH, RUN, STOP
from steppe.runtimes.handle import Fault
from steppe.runtimes.plan import REPLAY, Plan
from steppe.runtimes.processes.worker import (
    STOP_SIGNALS,
    TRACEBACK_SIGNAL,
    WorkerMain,
    WorkerSpec,
    fault_file,
    open_shared_table,
    run_worker,
)
from steppe.runtimes.resume import prime_channel
from steppe.transport.shm import ShmChannel, ShmControl, ShmWeights

WEIGHTS_BYTES = 64 << 20  # shared memory reserved for weights, whose size only the learner knows
START_S = 120.0  # deadline of a process's first heartbeat: imports are slow on a busy machine
TRACEBACK_TIMEOUT_S = 2.0  # how long a hung process has to write its traceback


class Closeable(Protocol):
    """A resource that a run keeps open until its processes have ended."""

    def close(self) -> None: ...


def start_fork_server(*, torch: bool = True) -> None:
    """Start the fork server and its imports in the background, with torch or only for tabular agents."""
    from multiprocessing import resource_tracker
    from multiprocessing.forkserver import ensure_running

    _context().set_forkserver_preload(["steppe.runtimes.preload" if torch else "steppe.runtimes.preload_tabular"])
    resource_tracker.ensure_running()  # first, because starting it unblocks the signals that are blocked below
    # Stop signals reach the whole process group. The server inherits this mask: it is needed until the run has shut
    # down, and has no handlers of its own yet while it imports.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with _without_main(), _without_output(), _safe_import_path():
            ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessHandle:
    """The processes of a run, their shared memory and their faults."""

    _worker_main: WorkerMain | None = None  # a process's main function if its roles are not linked by shared memory

    def __init__(self, plan: Plan, directory: RunDirectory) -> None:
        self._plan, self._directory = plan, directory
        self._shared_dir = make_shared_dir(directory.id, plan.channel_bytes + WEIGHTS_BYTES)
        self._processes: dict[str, BaseProcess] = {}
        self._faults: dict[str, Fault] = {}
        self._epochs: Counter[str] = Counter()
        self._excused_restarts: Counter[str] = Counter()  # those of `_epochs` that do not count against max_restarts
        self._lost: set[str] = set()  # dead workers that the others continue without
        self._rss_bytes: dict[str, int | None] = {}
        self._oom_kills = oom_kills()
        self._requested = RUN
        self._num_actors = plan.config.actors  # requested number
        self._wakeups: list[Wakeup] = []
        self._channel: ShmChannel | None = None  # of gradients, the learner's process creates it
        self._links: list[Closeable] = []
        try:
            self._open(plan)
            for worker_slot in self._worker_slots:
                if self._should_run(worker_slot):
                    self._start(worker_slot)
        except BaseException:
            self.close(timeout_s=1.0)
            raise

    def _open(self, plan: Plan) -> None:
        self._worker_slots = plan.worker_slots()
        self._control = ShmControl(self._shared_dir / "control", create=True, num_worker_slots=len(self._worker_slots))
        writers, slots = plan.num_writers, plan.slots_per_actor
        self.weights = ShmWeights(self._shared_dir, plan.readers)
        self._links = [self.weights]
        self._wakeups = [Wakeup(self._shared_dir / f"wakeup-{role.name}") for role in plan.roles]
        if not plan.config.by_gradients:
            self._channel = ShmChannel(self._shared_dir, plan.segment, self._directory.id, writers, slots, create=True)
            self._links.append(self._channel)
            prime_channel(self._channel, plan, self._directory)
        start_fork_server(torch=not plan.config.agent.in_table)

    def _start(self, worker_slot: str) -> None:
        worker_spec = WorkerSpec(
            plan=self._encoded_plan(),
            resume=self._plan.resume,
            worker_slot=worker_slot,
            slot_index=self._slot_index(worker_slot),
            epoch=self._epochs[worker_slot],
            shared_dir=str(self._shared_dir),
            directory=str(self._directory.path.resolve()),
            environment=(dict(os.environ), references.main_script()),
        )
        process = _context().Process(
            target=run_worker, args=(worker_spec, self._worker_main), name=f"steppe-{worker_slot}", daemon=True
        )
        self._control.dismiss(worker_spec.slot_index, dismissed=False)
        self._control.grace(worker_spec.slot_index, START_S)
        with _without_main():
            process.start()
        self._processes[worker_slot] = process

    def workers(self) -> list[BaseProcess]:
        """Return the workers' processes in order, including those that have ended."""
        return [process for worker_slot, process in self._processes.items() if worker_slot.startswith("worker-")]

    def shared_values(self) -> np.ndarray | None:
        """Return the table that workers share, in shared memory, or None."""
        table = open_shared_table(self._shared_dir, self._plan)
        return table.values if table is not None and table.created else None

    @property
    def channel(self) -> ShmChannel:
        """The channel of segments, for a caller that acts as the learner."""
        assert self._channel is not None, "the channel of gradients is in the learner's process"
        return self._channel

    def _encoded_plan(self) -> bytes:
        """Return the plan as every process receives it, as JSON."""
        return msgspec.json.encode({"config": flatten(self._plan.config), "spec": asdict(self._plan.spec)})

    def advance(self, timeout_s: float) -> None:
        alive = {worker_slot: process for worker_slot, process in self._processes.items() if process.is_alive()}
        for worker_slot, process in alive.items():
            self._rss_bytes[worker_slot] = rss_bytes(process.pid or 0)
        if alive:
            multiprocessing.connection.wait([process.sentinel for process in alive.values()], timeout_s)
        self._check_processes()

    def wait_for_segment(self, timeout_s: float) -> None:
        self.channel.wait(timeout_s)

    def ended(self, kind: str) -> bool:
        worker_slots = [
            worker_slot for worker_slot, roles in self._worker_slots.items() if any(role.kind == kind for role in roles)
        ]
        started = [self._processes[worker_slot] for worker_slot in worker_slots if worker_slot in self._processes]
        return all(process.exitcode is not None for process in started)

    def faults(self) -> list[Fault]:
        self._check_processes()
        return list(self._faults.values())

    def ask(self, kind: str, what: int) -> None:
        self._requested = max(self._requested, what if what >= FINISH else RUN)
        self._control.set(kind, what)
        for wakeup in self._wakeups:
            wakeup.ring()

    @property
    def max_actors(self) -> int:
        return self._plan.num_writers if self._plan.config.mode == "async" else 0

    def scale(self, num_actors: int) -> None:
        self._num_actors = num_actors
        self._reconcile_actors()

    def _reconcile_actors(self) -> None:
        """Dismiss actors beyond the requested number and start missing ones, unless the run is ending."""
        for worker_slot in self._worker_slots if self._requested == RUN and self.max_actors else ():
            process = self._processes.get(worker_slot)
            if not self._should_run(worker_slot):
                if process is not None and process.exitcode is None:
                    self._control.dismiss(self._slot_index(worker_slot))
            elif process is None or (process.exitcode == 0 and worker_slot.startswith("actor-")):
                self._epochs[worker_slot] += process is not None
                self._excused_restarts[worker_slot] += process is not None
                self._start(worker_slot)

    def _should_run(self, worker_slot: str) -> bool:
        kind, _, index = worker_slot.partition("-")
        return kind != "actor" or int(index) < self._num_actors

    def close(self, timeout_s: float) -> None:
        try:
            deadline = time.monotonic() + timeout_s
            for kinds in (("actor", "worker", "learner", "manager"), (REPLAY,)):  # the learner's end needs replay
                for kind in kinds if self._processes else ():
                    self.ask(kind, STOP)
                for worker_slot, process in self._processes.items():
                    if worker_slot.startswith(kinds):
                        process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also if a second Ctrl-C interrupts the wait
            for process in self._processes.values():
                if process.is_alive():
                    process.kill()
                    process.join()
            while self._wakeups:
                self._wakeups.pop().close()
            while self._links:
                self._links.pop().close()
            remove_shared_dir(self._shared_dir)

    def _check_processes(self) -> None:
        """Check every process: kill hung ones, restart killed ones, record permanent faults."""
        for worker_slot, process in list(self._processes.items()):
            hung = self._end_if_hung(worker_slot, process)
            if process.exitcode in (None, 0) or worker_slot in self._faults or worker_slot in self._lost:
                continue
            if not self._should_run(worker_slot):
                continue  # the actor was dismissed
            fault = hung or self._explain(worker_slot, process)
            if ((process.exitcode or 0) < 0 or self._is_transient(worker_slot, fault)) and self._may_restart(
                worker_slot
            ):
                self._epochs[worker_slot] += 1
                self._post_process_event(
                    "restart",
                    worker_slot,
                    {"message": fault.message, **fault.details, "epoch": self._epochs[worker_slot]},
                )
                self._start(worker_slot)
            elif (process.exitcode or 0) < 0 and self._others_can_continue(worker_slot):
                self._continue_without(worker_slot, fault)
            else:
                self._faults[worker_slot] = fault
        self._reconcile_actors()

    def _is_transient(self, worker_slot: str, fault: Fault) -> bool:
        """Whether a fault has an external cause that will pass."""
        return False

    def _others_can_continue(self, worker_slot: str) -> bool:
        """Whether this is a worker, and other workers can do its share without waiting for it."""
        if self._plan.config.by_gradients and (self._plan.lockstep or self._plan.config.episodes is not None):
            return False  # a round, or the episode quota, waits for it
        others = [name for name in self._processes if name.startswith("worker-") and name != worker_slot]
        return worker_slot.startswith("worker-") and any(self._processes[name].exitcode in (None, 0) for name in others)

    def _continue_without(self, worker_slot: str, fault: Fault) -> None:
        """Continue without a worker: its unmerged steps are lost, and other workers claim them again."""
        self._lost.add(worker_slot)
        table = open_shared_table(self._shared_dir, self._plan)
        if table is None:
            self._post_process_event(
                "warning", worker_slot, {**fault.details, "message": f"{fault.message}; the others continue without it"}
            )
            return
        lost = table.reclaim(int(worker_slot.rpartition("-")[2]))
        message = f"{fault.message}; the others continue, and take the {lost:,} steps that it had not merged"
        self._post_process_event("warning", worker_slot, {**fault.details, "message": message, "lost_steps": lost})

    def _may_restart(self, worker_slot: str) -> bool:
        """Whether to restart a process: not while the run is ending, and neither learner nor replay, whose state is
        only in checkpoints."""
        limit = self._plan.config.flow.max_restarts
        needed = (
            not worker_slot.startswith(("learner", REPLAY)) and self._requested == RUN and self._should_run(worker_slot)
        )
        return needed and self._epochs[worker_slot] - self._excused_restarts[worker_slot] < limit

    def _end_if_hung(self, worker_slot: str, process: BaseProcess) -> Fault | None:
        """Kill a process whose step exceeds flow.hang_s, and return the fault with its traceback; else None."""
        limit_s = self._plan.config.flow.hang_s
        if (
            worker_slot == "learner"
            or process.exitcode is not None
            or self._control.silence_s(self._slot_index(worker_slot)) < limit_s
        ):
            return None
        text = self._request_traceback(worker_slot, process)
        process.kill()
        process.join()
        message = f"{worker_slot} took longer than flow.hang_s={limit_s:g} for one step"
        return Fault(worker_slot, "hung", message, {"traceback": text})

    def _request_traceback(self, worker_slot: str, process: BaseProcess) -> str:
        log = self._directory.path / "logs" / f"{worker_slot}.log"
        start = log.stat().st_size if log.exists() else 0
        os.kill(process.pid or 0, TRACEBACK_SIGNAL)
        deadline = time.monotonic() + TRACEBACK_TIMEOUT_S
        text = ""
        while time.monotonic() < deadline and "most recent call first" not in text:
            time.sleep(0.05)
            text = log.read_bytes()[start:].decode(errors="replace") if log.exists() else ""
        return text

    def _explain(self, worker_slot: str, process: BaseProcess) -> Fault:
        """Return the fault that a process reported before it ended, or one inferred from its exit code."""
        if (process.exitcode or 0) >= 0 and (reported := self._read_fault(worker_slot)) is not None:
            return reported
        code, size = process.exitcode or 0, self._rss_bytes.get(worker_slot)
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            self._oom_kills = oom_kills()
            message = f"{worker_slot} was killed because memory ran out; it had {format_mib(size)}: use fewer or smaller environments"
            return Fault(worker_slot, "out_of_memory", message, {"rss_bytes": size})
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        message = (
            f"the process of {worker_slot} {how} (it had {format_mib(size)}); its output is in logs/{worker_slot}.log"
        )
        return Fault(worker_slot, "role_died", message, {"rss_bytes": size})

    def _read_fault(self, worker_slot: str) -> Fault | None:
        try:
            return msgspec.json.decode(fault_file(self._shared_dir, worker_slot).read_bytes(), type=Fault)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _post_process_event(self, kind: str, role: str, details: dict[str, object]) -> None:
        event = EventReport(run=self._directory.id, kind=kind, role=role, details=details)
        self._directory.board.post(EVENTS, event.record())

    def _slot_index(self, worker_slot: str) -> int:
        return list(self._worker_slots).index(worker_slot)


def _context() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Keep the fork server from inheriting the caller's output, whose reader would otherwise never see its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        for number, _ in kept:
            os.dup2(devnull, number)
        yield
    finally:
        os.close(devnull)
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


@contextlib.contextmanager
def _safe_import_path() -> Iterator[None]:
    """Keep files of the current directory (a random.py, a queue.py) from the fork server's imports."""
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script again in the child: it may have no main guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
