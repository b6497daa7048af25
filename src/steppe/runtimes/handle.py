"""Taking turns: how the roles of one process share it. `inline` has all roles in one process, `processes` mostly one."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from steppe.core.algorithms import AgentConfig
from steppe.core.config.run import RunConfig
from steppe.core.contracts.errors import EnvironmentFault, RunFailed, SteppeError, Unreachable
from steppe.core.contracts.transport import Channel, Role, WeightStore
from steppe.core.system import blas
from steppe.core.system.process import format_mib, rss_bytes
from steppe.records.telemetry.tracing import shutdown_tracing as finish_traces


@dataclass(frozen=True)
class Fault:
    """Why a role ended early, in words for the user and fields for the record."""

    role: str
    reason: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, role: str, error: BaseException) -> Fault:
        """The fault that an exception amounts to."""
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
    """A launched run, seen by whoever supervises it."""

    def advance(self, timeout_s: float) -> None:
        """Let the roles work for about this long; returns early when one of them has ended."""

    def ended(self, kind: str) -> bool:
        """Whether every role of this kind has come to its end."""

    def faults(self) -> list[Fault]:
        """The roles that ended early, first one first."""

    def ask(self, kind: str, what: int) -> None:
        """Tell all roles of a kind to RUN, PAUSE, FINISH or STOP (roles/context.py)."""

    def close(self, timeout_s: float) -> None:
        """Bring down what is still up, by force after `timeout_s`, and leave nothing behind."""


@runtime_checkable
class ScalableHandle(Protocol):
    """What can change the number of a run's actors while it goes on."""

    @property
    def max_actors(self) -> int:
        """How many actors there is room for; no more than there are where the mode does not allow others."""

    def scale(self, num_actors: int) -> None:
        """Have so many actors from now on; those that go hand over what they have finished. Returns at once."""


class CollectorHandle(Handle, Protocol):
    """A launched plan without a learner: the caller reads the channel and publishes the weights."""

    @property
    def channel(self) -> Channel: ...

    @property
    def weights(self) -> WeightStore: ...

    def wait_for_segment(self, timeout_s: float) -> None:
        """Let the actors work; returns when a segment may have come, or after about this long."""


class RoleScheduler:
    """Steps roles one after the other and closes each when it is done. One that raises is out, with a fault."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self.live = list(roles)
        self.faults: list[Fault] = []

    def once(self) -> bool:
        """One step each; whether any of them did something."""
        busy = False
        for role in list(self.live):
            with self._blaming(role):
                busy = role.step() or busy
                if role.done:
                    self._close(role)
                    busy = True
        if not self.live:
            finish_traces()
        return busy

    def close(self) -> None:
        """Close the roles that are still live, whatever becomes of each."""
        for role in list(self.live):
            with self._blaming(role):
                self._close(role)
        finish_traces()

    def _close(self, role: Role) -> None:
        self.live.remove(role)
        role.close()

    @contextlib.contextmanager
    def _blaming(self, role: Role) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - anything a role raises is told with its traceback, never swallowed
            role.done = True
            if role in self.live:
                self.live.remove(role)
            self.faults.append(Fault.of(role.name, error))


def configure_torch(config: RunConfig) -> None:
    """What every role needs for equal results: thread counts, and no denormals (Adam's step would take 13 × as long).

    Agents with tables do without torch, so it is not imported for them.
    """
    if not config.agent.in_table:
        _configure_threads(config.flow.threads)


def _configure_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    blas.set_threads(threads)
    torch.set_flush_denormal(True)


_saved_thread_counts: list[tuple[int, list[int]]] = []  # the thread counts to give back, innermost last


@contextlib.contextmanager
def temporary_torch_settings(threads: int, agent: AgentConfig | None = None) -> Iterator[None]:
    """`prepare_torch` for a process that is not ours: settings are given back. May be nested."""
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
    """Wait for time itself (a window to close) when no role of this process has anything to do."""
    time.sleep(0.0005)
