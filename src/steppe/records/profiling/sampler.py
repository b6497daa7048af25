"""The sampling profiler: which Python functions each role's time goes to, as collapsed stacks (`a;b;c microseconds`).

A timer signal samples the stack about every 5 ms and charges the time since the last sample to it. A sampling thread
would only see the role where it releases the GIL, which hides plain Python code. flamegraph.py draws the result. A run
that is not profiled uses none of this.
"""

from __future__ import annotations

import contextlib
import dis
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple, Self

from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.transport import Role
from steppe.core.io.atomic_files import write_atomic

INTERVAL_S = 0.005
WRITE_EVERY_S = 10.0  # at most this much is lost by kill -9
MAX_STACK_DEPTH = 100  # of a stack, from the role's step on
MAX_STACKS = 20_000
WAITING, DEEPER = "(waiting)", "(deeper)"

Stack = tuple[str, ...]


class SampledRole:
    """A role that tells the sampler when it is working."""

    def __init__(self, role: Role, sampler: Sampler) -> None:
        self.name = role.name
        self._role, self._sampler = role, sampler

    @property
    def done(self) -> bool:
        return self._role.done

    @done.setter
    def done(self, value: bool) -> None:
        self._role.done = value

    def step(self) -> bool:
        self._sampler.current_role = self.name
        return self._role.step()

    def close(self) -> None:
        self._sampler.current_role = self.name
        self._role.close()


_STEP, _CLOSE = SampledRole.step.__code__, SampledRole.close.__code__
_RESUME = bytes([dis.opmap["RESUME"]])


class FunctionInfo(NamedTuple):
    """Cached facts about a function."""

    code: CodeType  # referenced, so that its id is not reused
    label: str
    entry: int  # offset of its first instruction


class Sampler:
    """Samples the main thread inside its with block, which may be entered again. `write` saves the samples so far.

    Time outside any role's step is charged to the role `waiting`, or not at all. Samples of earlier attempts of the run
    are kept.
    """

    def __init__(self, directory: Path, waiting: str | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("flow.profile on 'inline' samples the main thread only: train there, or use processes")
        if signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, signal.SIG_IGN):
            raise UsageError("flow.profile needs the signal SIGALRM, which this program uses for something else")
        self.current_role = ""
        self.seconds: dict[str, dict[Stack, float]] = {}
        self._directory, self._waiting = directory, waiting
        self._functions: dict[int, FunctionInfo] = {}  # by id, as hashing a code object is slow
        self._random = random.Random(0)  # random intervals do not alias with periodic work of a role
        self._sampled_s = self._written_s = time.perf_counter()
        self._sampling = False

    def wrap(self, role: Role) -> Role:
        """Return the role wrapped for sampling; the caller steps the returned one."""
        self.seconds[role.name] = read_stacks(self._directory / f"{role.name}.txt")
        return SampledRole(role, self)

    def __enter__(self) -> Self:
        self._sampling = True
        signal.signal(signal.SIGALRM, self._sample)
        signal.siginterrupt(signal.SIGALRM, False)  # restart interrupted system calls: native code may not expect EINTR
        self._sampled_s = time.perf_counter()
        self._wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._sampling = False  # for a signal that is already pending
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def write(self) -> None:
        """Write one file per role. If that fails, the run continues and its log says why there is no profile."""
        try:
            self._write()
        except OSError as error:
            os.write(2, f"the profile could not be written: {error}\n".encode())

    def write_if_due(self) -> None:
        """Write every WRITE_EVERY_S, from within a role's step; a failure is left to the last `write`."""
        if time.perf_counter() - self._written_s >= WRITE_EVERY_S:
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        self._written_s = time.perf_counter()
        self._directory.mkdir(exist_ok=True)
        for role, seconds in self.seconds.items():
            write_atomic(self._directory / f"{role}.txt", format_collapsed(seconds).encode())

    def _wait(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_S * (0.5 + self._random.random()))

    def _sample(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal. A native call is sampled when it returns, and charged with all its time."""
        if not self._sampling:
            return
        now = time.perf_counter()
        role, stack = self._read_stack(frame)
        if role is not None:
            seconds = self.seconds[role]
            stack = stack if stack in seconds or len(seconds) < MAX_STACKS else stack[:1]
            seconds[stack] = seconds.get(stack, 0.0) + now - self._sampled_s
        self.write_if_due()
        self._sampled_s = time.perf_counter()
        self._wait()

    def _read_stack(self, frame: FrameType | None) -> tuple[str | None, Stack]:
        # Operators are not interrupted: the signal arrives on entry to the next function, which has used no time yet.
        if frame is not None and frame.f_lasti <= self._function(frame).entry:
            frame = frame.f_back
        stack: list[str] = []
        while frame is not None and frame.f_code is not _STEP and frame.f_code is not _CLOSE:
            stack.append(self._function(frame).label)
            frame = frame.f_back
        if frame is None:
            return self._waiting, (WAITING,)
        return self.current_role, _truncate(stack[::-1])

    def _function(self, frame: FrameType) -> FunctionInfo:
        code = frame.f_code
        known = self._functions.get(id(code))
        if known is None:
            label = f"{frame.f_globals.get('__name__', '?')}.{code.co_qualname}".replace(";", ",")
            entry = code.co_code[::2].find(_RESUME) * 2
            known = self._functions[id(code)] = FunctionInfo(code, label, entry)
        return known


def _truncate(stack: list[str]) -> Stack:
    return tuple(stack) if len(stack) <= MAX_STACK_DEPTH else (*stack[: MAX_STACK_DEPTH - 1], DEEPER)


@contextlib.contextmanager
def sample_roles(roles: Sequence[Role], directory: Path | None, waiting: str) -> Iterator[list[Role]]:
    """Yield the roles to step, sampled into `directory` until the end; without a directory, yield them unchanged."""
    if directory is None:
        yield list(roles)
        return
    sampler = Sampler(directory, waiting)
    wrapped = [sampler.wrap(role) for role in roles]
    try:
        with sampler:
            yield wrapped
    finally:
        sampler.write()


def format_collapsed(seconds: Mapping[Stack, float]) -> str:
    """Return one line per stack, outermost function first: the format of flame-graph tools."""
    lines = [f"{';'.join(stack)} {spent_s * 1e6:.0f}" for stack, spent_s in sorted(seconds.items()) if stack]
    return "".join(line + "\n" for line in lines)


def read_stacks(path: Path) -> dict[Stack, float]:
    """Return seconds by stack, from a file of `format_collapsed`; empty if there is no such file."""
    if not path.exists():
        return {}
    return dict(_parsed(path.read_text(errors="replace").splitlines()))


def _parsed(lines: Iterable[str]) -> Iterable[tuple[Stack, float]]:
    for line in lines:
        stack, _, micros = line.rpartition(" ")
        if stack and micros.isdigit():
            yield tuple(stack.split(";")), int(micros) / 1e6
