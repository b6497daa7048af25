"""What places on other ranks or nodes are told to run, and what they all do with it: build roles, take turns, tell faults."""

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
    """What a world is to run, as plain data."""

    config: dict[str, Any]
    spec: dict[str, Any]
    resume: int | None
    run: str
    directory: str
    script: references.Script | None = (
        None  # where `__main__:name` is found, unless the ranks run that script themselves
    )
    host: str = ""
    clock_s: float = 0.0  # on that host, when the order was given

    @classmethod
    def of(cls, plan: Plan, directory: RunDirectory, script: references.Script | None) -> LaunchSpec:
        """The order to run this plan in this directory."""
        path = str(directory.path.resolve())
        return cls(flatten(plan.config), asdict(plan.spec), plan.resume, directory.id, path, script)

    def stamped(self) -> LaunchSpec:
        """The same, given now and here."""
        return msgspec.structs.replace(self, host=socket.gethostname(), clock_s=time.monotonic())

    @property
    def env_spec(self) -> EnvSpec:
        """The spec of the run's environment."""
        return msgspec.convert(self.spec, EnvSpec)

    def plan(self) -> Plan:
        """The same plan again."""
        plan = make_plan(unflatten(self.config), self.env_spec)
        return replace(plan, resume=self.resume)

    def clock(self) -> RunClock:
        """The clock of the host where the order was given; on another one, as exact as the order came quickly."""
        clock = RunClock()
        if self.host != socket.gethostname():
            clock.exclude(time.monotonic() - self.clock_s)
        return clock


def open_directory(directory: str, worker_slot: str) -> RunDirectory:
    """The run's directory as a place on any host sees it, with the place's output going to its log."""
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
    shelves: Sequence[RpcClient] = (),
    desk: RpcServer | None = None,
    board: Board | None = None,
    commands: CommandReader | None = None,
) -> list[Role]:
    """The roles of one place; `asked` says what a kind of role is to do, `board` takes the place of the directory's.

    Without `commands`, those that were posted in the run's directory.
    """
    from steppe.runtimes.builder import build_role

    configure_torch(plan.config)
    clock, spans = order.clock(), plan.config.flow.trace_spans
    roles = []
    commands = commands or (lambda after: run.board.read(COMMANDS, after))
    for spec in plan.places()[worker_slot]:
        about = (run.id, spec.name, *links, board or run.board, _bind_kind(requested, spec.kind), clock, spans)
        context = Context(
            *about, epoch=epoch, heartbeat=heartbeat, table=table, shelves=shelves, desk=desk, commands=commands
        )
        roles.append(build_role(plan, spec, run, context))
    return roles


def _bind_kind(asked: Callable[[str], int], kind: str) -> Callable[[], int]:
    return lambda: asked(kind)


def post_faults(run: RunDirectory, worker_slot: str, faults: list[Fault]) -> None:
    """Put what went wrong at a place into the event log; on a full disk, whoever supervises it hears of it besides."""
    with contextlib.suppress(DiskFull):
        for fault in reversed(faults):
            details = {"place": worker_slot, "reason": fault.reason, "message": fault.message, "details": fault.details}
            run.board.post(EVENTS, EventReport(run=run.id, kind="fault", role=fault.role, details=details).record())
        run.board.flush()


def import_path() -> list[str]:
    """Where this process finds modules, for another one to find the same."""
    return [entry or os.getcwd() for entry in sys.path]
