"""Handles of launched runs, and the scheduler that steps the roles of one process in turn.

`inline` has all roles in one process, `processes` mostly one role per process.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import RunConfig
from steppe.core.contracts.errors import EnvironmentFault, RunFailed, SteppeError, Unreachable
from steppe.core.contracts.transport import Channel, Role, WeightStore
from steppe.core.system import blas
from steppe.core.system.process import format_mib, rss_bytes
from steppe.records.telemetry.tracing import shutdown_tracing as finish_traces


@dataclass(frozen=True)
class Fault:
    """Why a role ended early: a message for the user, and details for the event log."""

    role: str
    reason: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, role: str, error: BaseException) -> Fault:
        """Convert an exception to a fault."""
        reason = error.reason if isinstance(error, RunFailed | Unreachable) else "error"
        message = str(error) if isinstance(error, SteppeError) else f"{type(error).__name__}: {error}"
        if any(isinstance(cause, MemoryError) for cause in _causes(error)):
            reason, message = "out_of_memory", f"{role} ran out of memory at {format_mib(rss_bytes())}: {error}"
        details = dict(error.details) if isinstance(error, EnvironmentFault) else {}
        details.setdefault("traceback", "".join(traceback.format_exception(error)))
        return cls(role, reason, message, details)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


class Handle(Protocol):
    """A launched run, as its supervisor controls it."""

    def advance(self, timeout_s: float) -> None:
        """Let the roles work for about `timeout_s`; return early when one of them has ended."""

    def ended(self, kind: str) -> bool:
        """Whether every role of this kind has ended."""

    def faults(self) -> list[Fault]:
        """Return the faults of roles that ended early, oldest first."""

    def ask(self, kind: str, what: int) -> None:
        """Request all roles of a kind to RUN, PAUSE, FINISH or STOP (roles/context.py)."""

    def close(self, timeout_s: float) -> None:
        """Stop all roles, by force after `timeout_s`, and release all resources."""


@runtime_checkable
class ScalableHandle(Protocol):
    """A handle that can change the number of actors during the run."""

    @property
    def max_actors(self) -> int:
        """The largest number of actors; no more than the present number if the mode does not allow scaling."""

    def scale(self, num_actors: int) -> None:
        """Request `num_actors` actors and return at once. Dismissed actors first send their finished segments."""


class CollectorHandle(Handle, Protocol):
    """A launched plan without a learner: the caller reads the channel and publishes the weights."""

    @property
    def channel(self) -> Channel: ...

    @property
    def weights(self) -> WeightStore: ...

    def wait_for_segment(self, timeout_s: float) -> None:
        """Let the actors work; return when a segment may have arrived, or after about `timeout_s`."""


class RoleScheduler:
    """Step roles in turn and close each when it is done. A role that raises is removed, with a fault."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self.roles = list(roles)
        self.faults: list[Fault] = []

    def step(self) -> bool:
        """Step each role once; return whether any made progress."""
        busy = False
        for role in list(self.roles):
            with self._recording_faults(role):
                busy = role.step() or busy
                if role.done:
                    self._close(role)
                    busy = True
        if not self.roles:
            finish_traces()
        return busy

    def close(self) -> None:
        """Close the remaining roles; a failure of one does not keep the others from closing."""
        for role in list(self.roles):
            with self._recording_faults(role):
                self._close(role)
        finish_traces()

    def _close(self, role: Role) -> None:
        self.roles.remove(role)
        role.close()

    @contextlib.contextmanager
    def _recording_faults(self, role: Role) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any exception of a role is reported with its traceback
            role.done = True
            if role in self.roles:
                self.roles.remove(role)
            self.faults.append(Fault.of(role.name, error))


def configure_torch(config: RunConfig) -> None:
    """Set thread counts for equal results, and disable denormals (Adam's step would take 13 × as long).

    Tabular agents do not use torch, so it is not imported for them.
    """
    if not config.agent.in_table:
        _configure_threads(config.flow.threads)


def _configure_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    blas.set_threads(threads)
    torch.set_flush_denormal(True)


_saved_thread_counts: list[tuple[int, list[int]]] = []  # the thread counts to restore, innermost last


@contextlib.contextmanager
def temporary_torch_settings(threads: int, agent: AgentConfig | None = None) -> Iterator[None]:
    """Apply `configure_torch` in the caller's process and restore its settings afterwards. May be nested."""
    if agent is not None and agent.in_table:
        yield
        return
    import torch

    _saved_thread_counts.append((torch.get_num_threads(), blas.get_threads()))
    _configure_threads(threads)
    try:
        yield
    finally:
        of_torch, of_blas = _saved_thread_counts.pop()
        torch.set_num_threads(of_torch)
        blas.set_threads(*of_blas)
        torch.set_flush_denormal(bool(_saved_thread_counts))


def sleep_briefly() -> None:
    """Sleep when no role of this process has work, for example until a batch window closes."""
    time.sleep(0.0005)
