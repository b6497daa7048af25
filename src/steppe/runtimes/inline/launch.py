"""The `inline` runtime: all roles in the caller's process, in turn; for debuggers, lambdas and small problems."""

from __future__ import annotations

import time
from contextlib import nullcontext

from steppe.core.contracts.transport import COMMANDS, Role, SharedTable
from steppe.core.system.timing import RunClock
from steppe.records.profiling.sampler import Sampler
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import RUN, STOP, Context
from steppe.runtimes.builder import SuppliedComponents, build_role, channel_spec
from steppe.runtimes.handle import Fault, RoleScheduler, sleep_briefly, temporary_torch_settings
from steppe.runtimes.plan import Plan
from steppe.runtimes.resume import prime_channel
from steppe.transport.local import LocalChannel, LocalWeights


def require(plan: Plan) -> None:
    """Do nothing: every plan can run here."""


def launch(plan: Plan, directory: RunDirectory, parts: SuppliedComponents | None = None) -> InlineHandle:
    """Build every role in this process; they work only during `advance`."""
    return InlineHandle(plan, directory, parts)


class InlineHandle:
    """The roles of a run in this process. The run's clock excludes the manager's time."""

    def __init__(self, plan: Plan, directory: RunDirectory, parts: SuppliedComponents | None = None) -> None:
        self._requested = dict.fromkeys(("actor", "worker", "learner", "manager"), RUN)
        self._clock = RunClock()
        self._roles: dict[str, list[Role]] = {}
        self._torch = plan.config.flow.threads, plan.config.agent
        with temporary_torch_settings(*self._torch):
            self._build(plan, directory, parts)
        self._sampler = self._profile_roles(directory) if plan.config.flow.profile else None
        self._training_scheduler = RoleScheduler(
            [role for kind in ("actor", "worker", "learner") for role in self._roles.get(kind, ())]
        )
        self._manager_scheduler = RoleScheduler(self._roles.get("manager", []))

    def _build(self, plan: Plan, directory: RunDirectory, parts: SuppliedComponents | None) -> None:
        spec = channel_spec(plan, parts.agent if parts is not None else None)
        self.channel = LocalChannel(spec, plan.num_writers, plan.slots_per_actor)
        self.weights = LocalWeights()
        prime_channel(self.channel, plan, directory)
        table: SharedTable | None = None
        if plan.config.mode == "workers" and not plan.config.by_gradients:
            from steppe.transport.tables.shared import LocalTable  # compiled modules that only these runs need

            table = LocalTable()
        for role_spec in plan.roles:
            context = Context(
                directory.id,
                role_spec.name,
                self.channel,
                self.weights,
                directory.board,
                lambda kind=role_spec.kind: self._requested[kind],  # type: ignore[misc]
                self._clock,
                plan.config.flow.trace_spans,
                table=table,
                commands=lambda after: directory.board.read(COMMANDS, after),
            )
            self._roles.setdefault(role_spec.kind, []).append(build_role(plan, role_spec, directory, context, parts))

    def _profile_roles(self, directory: RunDirectory) -> Sampler:
        sampler = Sampler(directory.profile)
        self._roles = {kind: [sampler.wrap(role) for role in roles] for kind, roles in self._roles.items()}
        return sampler

    def advance(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        before = self._num_live()
        with temporary_torch_settings(*self._torch), self._sampler or nullcontext():
            while time.monotonic() < until and self._num_live() == before:
                busy = self._training_scheduler.step()
                started = time.monotonic()
                busy = self._manager_scheduler.step() or busy
                self._clock.exclude(time.monotonic() - started)
                if not busy:
                    sleep_briefly()

    def wait_for_segment(self, timeout_s: float) -> None:
        with temporary_torch_settings(*self._torch):
            self._training_scheduler.step()

    def ended(self, kind: str) -> bool:
        return all(role.done for role in self._roles.get(kind, ()))

    def faults(self) -> list[Fault]:
        return self._training_scheduler.faults + self._manager_scheduler.faults

    def ask(self, kind: str, what: int) -> None:
        self._requested[kind] = what

    def close(self, timeout_s: float) -> None:
        for kind in self._requested:
            self.ask(kind, STOP)
        with temporary_torch_settings(*self._torch), self._sampler or nullcontext():
            self._training_scheduler.close()
            self._manager_scheduler.close()
        if self._sampler is not None:
            self._sampler.write()

    def _num_live(self) -> int:
        return len(self._training_scheduler.roles) + len(self._manager_scheduler.roles)
