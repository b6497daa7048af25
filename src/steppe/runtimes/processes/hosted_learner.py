"""The `processes` runtime with the learner in the caller's process.

Actors and workers are processes; the agent, the replay pool and the parameter server are the caller's own objects.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import nullcontext

from steppe.core.contracts.transport import COMMANDS
from steppe.core.system.shared_dir import Wakeup
from steppe.core.system.timing import RunClock
from steppe.records.profiling.sampler import Sampler
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import STOP, Context
from steppe.runtimes.builder import SuppliedComponents, build_role
from steppe.runtimes.handle import Fault, RoleScheduler, temporary_torch_settings
from steppe.runtimes.plan import Plan
from steppe.runtimes.processes.supervisor import ProcessHandle
from steppe.runtimes.processes.worker import IDLE_S, create_gradient_channel

LEARNER = "learner"


class InProcessLearnerHandle(ProcessHandle):
    """A ProcessHandle whose learner is stepped in `advance`."""

    def __init__(self, plan: Plan, directory: RunDirectory, parts: SuppliedComponents) -> None:
        self._scheduler = RoleScheduler([])
        self._torch = plan.config.flow.threads, plan.config.agent
        self._sampler = Sampler(directory.profile) if plan.config.flow.profile else None
        super().__init__(plan, directory)
        try:
            self._wakeup = Wakeup(self._shared_dir / f"wakeup-{LEARNER}")
            self._links.append(self._wakeup)
            with temporary_torch_settings(*self._torch):
                self._build(plan, directory, parts)
        except BaseException:
            self.close(timeout_s=1.0)
            raise

    def _build(self, plan: Plan, directory: RunDirectory, parts: SuppliedComponents) -> None:
        if plan.config.by_gradients:
            self._channel = create_gradient_channel(plan, self._shared_dir, directory, parts.agent)
            self._links.append(self._channel)
        spec = next(role for role in plan.roles if role.kind == LEARNER)
        context = Context(
            directory.id,
            spec.name,
            self.channel,
            self.weights,
            directory.board,
            lambda: self._control.get(LEARNER),
            RunClock(),
            trace_spans=plan.config.flow.trace_spans,
            heartbeat=lambda: self._control.heartbeat(self._slot_index(LEARNER)),
            commands=lambda after: directory.board.read(COMMANDS, after),
        )
        role = build_role(plan, spec, directory, context, parts)
        self._scheduler.roles = [role if self._sampler is None else self._sampler.wrap(role)]

    def advance(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        with temporary_torch_settings(*self._torch), self._sampler or nullcontext():
            while self._scheduler.roles and time.monotonic() < until:
                if not self._scheduler.step():
                    self._wakeup.wait(IDLE_S[LEARNER])
        super().advance(max(0.0, until - time.monotonic()))

    def ended(self, kind: str) -> bool:
        return not self._scheduler.roles if kind == LEARNER else super().ended(kind)

    def faults(self) -> list[Fault]:
        return self._scheduler.faults + super().faults()

    def close(self, timeout_s: float) -> None:
        try:
            with contextlib.suppress(AttributeError):  # `_open` failed: there is no control block
                self.ask(LEARNER, STOP)
            with temporary_torch_settings(*self._torch), self._sampler or nullcontext():
                self._scheduler.close()
            if self._sampler is not None:
                self._sampler.write()
        finally:
            super().close(timeout_s)

    def _should_run(self, worker_slot: str) -> bool:
        return worker_slot != LEARNER and super()._should_run(worker_slot)
