"""LaunchSpec describes a run to processes on other ranks or nodes, which build its roles and report faults here."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from steppe.core.config import references
from steppe.core.config.run import flatten, unflatten
from steppe.core.contracts.errors import DiskFull, RunNotFound
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.transport import (
    COMMANDS,
    EVENTS,
    Board,
    Channel,
    Role,
    RpcClient,
    RpcServer,
    SharedTable,
    WeightStore,
)
from steppe.core.system.timing import RunClock
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import CommandReader, Context
from steppe.runtimes.handle import Fault, configure_torch
from steppe.runtimes.plan import Plan, make_plan
from steppe.runtimes.processes.worker import redirect_output

ROLE_KINDS = ("actor", "worker", "learner", "manager", "replay")


class LaunchSpec(msgspec.Struct, frozen=True):
    """A plan and its run directory as plain data, to send to the processes that run it."""

    config: dict[str, Any]
    spec: dict[str, Any]
    resume: int | None
    run: str
    directory: str
    script: references.Script | None = (
        None  # the file that `__main__:name` refers to, unless the ranks run that script themselves
    )
    host: str = ""
    clock_s: float = 0.0  # monotonic clock of that host when the spec was sent

    @classmethod
    def of(cls, plan: Plan, directory: RunDirectory, script: references.Script | None) -> LaunchSpec:
        """Return the spec of this plan in this directory."""
        path = str(directory.path.resolve())
        return cls(flatten(plan.config), asdict(plan.spec), plan.resume, directory.id, path, script)

    def stamped(self) -> LaunchSpec:
        """Return a copy stamped with this host and its present clock."""
        return msgspec.structs.replace(self, host=socket.gethostname(), clock_s=time.monotonic())

    @property
    def env_spec(self) -> EnvSpec:
        """The spec of the run's environment."""
        return msgspec.convert(self.spec, EnvSpec)

    def plan(self) -> Plan:
        """Rebuild the plan."""
        plan = make_plan(unflatten(self.config), self.env_spec)
        return replace(plan, resume=self.resume)

    def clock(self) -> RunClock:
        """Return the clock of the sending host; on another host it is late by the time that the spec was in transit."""
        clock = RunClock()
        if self.host != socket.gethostname():
            clock.exclude(time.monotonic() - self.clock_s)
        return clock


def open_directory(directory: str, worker_slot: str) -> RunDirectory:
    """Open the run directory on this host, and redirect the process's output to the worker slot's log."""
    path = Path(directory)
    if not path.is_dir():
        host = socket.gethostname()
        raise RunNotFound(f"{path} cannot be seen on {host}: set STEPPE_RUNS to a directory that all hosts share")
    redirect_output(path / "logs" / f"{worker_slot}.log")
    return RunDirectory.open(path)


def build_roles(
    order: LaunchSpec,
    plan: Plan,
    worker_slot: str,
    run: RunDirectory,
    links: tuple[Channel, WeightStore],
    requested: Callable[[str], int],
    heartbeat: Callable[[], object],
    *,
    epoch: int = 0,
    table: SharedTable | None = None,
    replay_clients: Sequence[RpcClient] = (),
    rpc_server: RpcServer | None = None,
    board: Board | None = None,
    commands: CommandReader | None = None,
) -> list[Role]:
    """Build the roles of one worker slot.

    `requested` returns the control request for a kind of role. `board` defaults to the run directory's, and `commands`
    to those posted there.
    """
    from steppe.runtimes.builder import build_role

    configure_torch(plan.config)
    clock, spans = order.clock(), plan.config.flow.trace_spans
    roles = []
    commands = commands or (lambda after: run.board.read(COMMANDS, after))
    for spec in plan.worker_slots()[worker_slot]:
        about = (run.id, spec.name, *links, board or run.board, _bind_kind(requested, spec.kind), clock, spans)
        context = Context(
            *about,
            epoch=epoch,
            heartbeat=heartbeat,
            table=table,
            replay_clients=replay_clients,
            rpc_server=rpc_server,
            commands=commands,
        )
        roles.append(build_role(plan, spec, run, context))
    return roles


def _bind_kind(requested: Callable[[str], int], kind: str) -> Callable[[], int]:
    return lambda: requested(kind)


def post_faults(run: RunDirectory, worker_slot: str, faults: list[Fault]) -> None:
    """Post the faults of a worker slot to the event log; on a full disk they only reach the supervisor."""
    with contextlib.suppress(DiskFull):
        for fault in reversed(faults):
            details = {"place": worker_slot, "reason": fault.reason, "message": fault.message, "details": fault.details}
            run.board.post(EVENTS, EventReport(run=run.id, kind="fault", role=fault.role, details=details).record())
        run.board.flush()


def import_path() -> list[str]:
    """Return this process's module search path, for another process."""
    return [entry or os.getcwd() for entry in sys.path]
