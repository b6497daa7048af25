"""One process of the `processes` runtime: build the roles of a worker slot, step them in turn, exit.

The supervisor (supervisor.py) sends a WorkerSpec at the start; after that they communicate through shared memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steppe.core.config import references
from steppe.core.config.run import unflatten
from steppe.core.contracts.algorithm import Agent
from steppe.core.contracts.errors import DiskFull
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.core.io.atomic_files import is_disk_full
from steppe.core.system.shared_dir import Wakeup
from steppe.core.system.timing import RunClock
from steppe.records.profiling.sampler import sample_roles
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import FINISH, STOP, Context
from steppe.runtimes.handle import Fault, RoleScheduler, configure_torch
from steppe.runtimes.plan import Plan, make_plan
from steppe.runtimes.resume import prime_channel
from steppe.transport.shm import ShmChannel, ShmControl, ShmWeights
from steppe.transport.unix_socket import SocketRpcClient, SocketRpcServer

if TYPE_CHECKING:
    from steppe.transport.tables.shared import ShmTable

IDLE_S = {
    "actor": 0.2,
    "learner": 0.002,
    "manager": 0.05,
    "worker": 0.002,
    "replay": 0.0,
}  # longest idle wait: wakeups wake actors, and requests wake replay; the others poll
TABULAR_LEARNER_IDLE_S = 0.02  # of a learner that only monitors workers
POLL_INTERVAL_S = 0.005  # between checks for the channel that the learner's process creates
FAULT_EXIT_CODE = 70
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TRACEBACK_SIGNAL = signal.SIGUSR1  # makes a hung process write a traceback to its log
TERM_GRACE_S = 8.0  # for the supervisor, which received the same signal, to end the process gracefully


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a process needs to start, as plain data."""

    plan: bytes  # JSON of the resolved configuration and the environment's spec, to rebuild the plan
    resume: int | None
    worker_slot: str
    slot_index: int  # of the worker slot, for its heartbeat
    epoch: int
    shared_dir: str
    directory: str
    environment: tuple[dict[str, str], references.Script | None]  # environment variables, user's script


WorkerMain = Callable[[WorkerSpec, RunDirectory, RoleScheduler], None]


def run_worker(worker_spec: WorkerSpec, worker_main: WorkerMain | None = None) -> None:
    """Run the roles and exit the process.

    The exit code is 0 when they are done, or FAULT_EXIT_CODE with a fault in the event log. `worker_main` replaces the main
    function for roles that are not linked by shared memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    signal.signal(signal.SIGTERM, exit_after_grace)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _apply_environment(*worker_spec.environment)
    run = RunDirectory.open(Path(worker_spec.directory))
    redirect_output(run.path / "logs" / f"{worker_spec.worker_slot}.log")
    scheduler = RoleScheduler([])
    try:
        (worker_main or _run_roles)(worker_spec, run, scheduler)
    except Exception as error:  # noqa: BLE001 - a role that cannot be built is reported like one that fails later
        scheduler.faults.append(Fault.of(worker_spec.worker_slot, error))
    with contextlib.suppress(DiskFull):  # the fault is also in the shared directory
        for fault in reversed(scheduler.faults):
            _report_fault(run, worker_spec, fault)
        run.board.flush()
        run.store.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAULT_EXIT_CODE if scheduler.faults else 0)  # skip interpreter shutdown: torch's threads may block it


def _run_roles(worker_spec: WorkerSpec, run: RunDirectory, scheduler: RoleScheduler) -> None:
    received = msgspec.json.decode(worker_spec.plan)
    plan = make_plan(unflatten(received["config"]), msgspec.convert(received["spec"], EnvSpec))
    plan = replace(plan, resume=worker_spec.resume)
    configure_torch(plan.config)
    shared_dir = Path(worker_spec.shared_dir)
    control = ShmControl(shared_dir / "control")
    if not _wait_for_channel(plan, worker_spec, shared_dir, control):
        return
    profile_dir = run.profile if plan.config.flow.profile else None
    with sample_roles(
        _build_roles(plan, worker_spec, shared_dir, run, control), profile_dir, waiting=worker_spec.worker_slot
    ) as scheduler.roles:
        host_role = next(
            role for role in scheduler.roles if role.name == worker_spec.worker_slot
        )  # the slot's other roles end with it
        wakeup = Wakeup(shared_dir / f"wakeup-{worker_spec.worker_slot}")
        idle_s = IDLE_S[worker_spec.worker_slot.partition("-")[0]]
        if plan.config.mode == "workers" and not plan.config.by_gradients and worker_spec.worker_slot == "learner":
            idle_s = TABULAR_LEARNER_IDLE_S
        while not host_role.done and not scheduler.faults:
            control.heartbeat(worker_spec.slot_index)
            if not scheduler.step():
                wakeup.wait(idle_s)
        scheduler.close()


def _build_roles(
    plan: Plan, worker_spec: WorkerSpec, shared_dir: Path, run: RunDirectory, control: ShmControl
) -> list[Any]:
    from steppe.runtimes.builder import build_role

    channel = _open_channel(plan, worker_spec.worker_slot, shared_dir, run)
    weights, clock, table = ShmWeights(shared_dir, plan.readers), RunClock(), open_shared_table(shared_dir, plan)
    rpc_server = (
        SocketRpcServer(rpc_socket_path(shared_dir, worker_spec.worker_slot))
        if worker_spec.worker_slot in plan.replay
        else None
    )
    ending = _bind_kind(control, "learner", worker_spec.slot_index)
    rpc_clients = [
        SocketRpcClient(name, rpc_socket_path(shared_dir, name), lambda: ending() >= FINISH) for name in plan.replay
    ]
    roles = []
    for spec in plan.worker_slots()[worker_spec.worker_slot]:
        context = Context(
            run.id,
            spec.name,
            channel,
            weights,
            run.board,
            _bind_kind(control, spec.kind, worker_spec.slot_index),
            clock,
            trace_spans=plan.config.flow.trace_spans,
            epoch=worker_spec.epoch,
            heartbeat=lambda: control.heartbeat(worker_spec.slot_index),
            table=table,
            replay_clients=rpc_clients if spec.kind == "learner" else (),
            rpc_server=rpc_server,
            commands=lambda after: run.board.read(COMMANDS, after),
        )
        roles.append(build_role(plan, spec, run, context))
    return roles


def _open_channel(plan: Plan, worker_slot: str, shared_dir: Path, run: RunDirectory) -> ShmChannel:
    """Open the channel that the supervisor created.

    For gradients, whose size depends on the agent, the learner's process creates it.
    """
    if not plan.config.by_gradients:
        return ShmChannel(shared_dir, plan.segment, run.id, plan.num_writers, plan.slots_per_actor)
    if worker_slot == "learner":
        return create_gradient_channel(plan, shared_dir, run)
    from steppe.runtimes.builder import channel_spec

    channel_args = (shared_dir, channel_spec(plan), run.id, plan.num_writers, plan.slots_per_actor)
    return ShmChannel(*channel_args, writer="worker")


def create_gradient_channel(plan: Plan, shared_dir: Path, run: RunDirectory, agent: Agent | None = None) -> ShmChannel:
    """Create the channel for gradients of the agent's size, and make it visible to the workers when it is complete."""
    from steppe.runtimes.builder import channel_spec

    channel_args = (shared_dir, channel_spec(plan, agent), run.id, plan.num_writers, plan.slots_per_actor)
    channel = ShmChannel(*channel_args, create=True, hidden=True, writer="worker")
    prime_channel(channel, plan, run)
    channel.show()
    return channel


def _wait_for_channel(plan: Plan, worker_spec: WorkerSpec, shared_dir: Path, control: ShmControl) -> bool:
    """Wait until the learner's process has created the channel; return False if the run ends before that."""
    kind = worker_spec.worker_slot.partition("-")[0]
    if not plan.config.by_gradients or kind == "learner":
        return True
    wakeup = Wakeup(shared_dir / f"wakeup-{worker_spec.worker_slot}")
    while not (shared_dir / "channel").exists():
        if control.get(kind) >= FINISH:
            return False
        control.heartbeat(worker_spec.slot_index)
        wakeup.wait(POLL_INTERVAL_S)
    wakeup.close()
    return True


def rpc_socket_path(shared_dir: Path, worker_slot: str) -> Path:
    """Return the path of a replay role's RPC socket."""
    return shared_dir / f"rpc-{worker_slot}"


def open_shared_table(shared_dir: Path, plan: Plan) -> ShmTable | None:
    """Open the table that workers share; return None in other modes."""
    if plan.config.mode != "workers" or plan.config.by_gradients:
        return None
    from steppe.transport.tables.shared import ShmTable  # compiled modules that only these runs need

    return ShmTable(shared_dir)


def _bind_kind(control: ShmControl, kind: str, slot_index: int) -> Callable[[], int]:
    return lambda: STOP if control.dismissed(slot_index) else control.get(kind)


def _apply_environment(environ: dict[str, str], script: references.Script | None) -> None:
    """Apply the environment variables and main script, which may have changed since the fork server started."""
    os.environ.clear()
    os.environ.update(environ)
    references.set_main_script(script)


def exit_after_grace(number: int, frame: types.FrameType | None) -> None:
    """Exit TERM_GRACE_S after SIGTERM: the supervisor usually received it too, and requests a graceful end first."""
    signal.signal(number, signal.SIG_DFL)
    timer = threading.Timer(TERM_GRACE_S, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _report_fault(run: RunDirectory, worker_spec: WorkerSpec, fault: Fault) -> None:
    """Report a fault to the supervisor through a file in the shared directory, and post it to the event log."""
    with contextlib.suppress(FileNotFoundError):  # the supervisor has already removed the directory
        fault_file(Path(worker_spec.shared_dir), worker_spec.worker_slot).write_bytes(
            msgspec.json.encode(asdict(fault))
        )
    details = {
        "place": worker_spec.worker_slot,
        "reason": fault.reason,
        "message": fault.message,
        "details": fault.details,
    }
    run.board.post(EVENTS, EventReport(run=run.id, kind="fault", role=fault.role, details=details).record())


def fault_file(shared_dir: Path, worker_slot: str) -> Path:
    """Return the file in which a process reports its fault."""
    return shared_dir / f"fault-{worker_slot}"


def redirect_output(path: Path) -> None:
    """Redirect stdout and stderr to a log file, so that prints of environments do not disturb the live view."""
    path.parent.mkdir(exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_TolerantLogFile(n, "w", closefd=False)), line_buffering=True)
        for n in (1, 2)
    )
    faulthandler.enable()  # a crash in native code leaves its traceback in the log
    faulthandler.register(TRACEBACK_SIGNAL)


class _TolerantLogFile(io.FileIO):
    """A log file that discards output while the disk is full, so that printing never makes an environment fail."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if not is_disk_full(error):
                raise
            return len(data)


def _die_with_parent() -> None:
    """Exit when the supervisor is gone, so that no role is orphaned; the run resumes from a checkpoint."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(FAULT_EXIT_CODE)
