"""Supervise a launched run until its outcome: execute commands, detect the target, shut down in order in every case."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np

from steppe.core.config.run import RunConfig
from steppe.core.config.runtime_table import capabilities_of, runtimes_with
from steppe.core.contracts.errors import DiskFull, Unreachable, UsageError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS, SCALE, SET
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from steppe.roles.context import FINISH, PAUSE, RUN, STOP
from steppe.runtimes.handle import Fault, Handle, ScalableHandle

TICK_S = 0.2
STOP_S = 4.0  # shared by all roles to shut down after the user asked for the end
KILL_S = 0.2  # left for the roles when STOP_S is used up
FINISH_S = 600.0  # for the last evaluation of a run that completed

Observer = Callable[[RunView], object]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: str  # SUCCEEDED | FAILED | STOPPED
    reason: str
    message: str = ""
    fault: Fault | None = None
    evaluate: bool = False  # whether the newest weights get a final evaluation


class StopSignalHandler:
    """Handler of SIGINT and SIGTERM: the first asks for an orderly end, the second raises KeyboardInterrupt.

    Later signals do nothing. Outside the main thread it installs no handlers.
    """

    def __init__(self) -> None:
        self.count = 0
        self.on_first_signal: Callable[[], None] = lambda: None
        self._ignoring = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Ignore signals from now on: the run is over, and its end is being recorded."""
        self._ignoring = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._ignoring:
            return
        self.count += 1
        if self.count == 1:
            self.on_first_signal()
        elif self.count == 2:  # a third would interrupt the cleanup after the second
            raise KeyboardInterrupt


class Supervisor:
    """Supervises one run. `stop`, `pause` and `resume` may be called from another thread."""

    def __init__(
        self,
        handle: Handle,
        directory: RunDirectory,
        config: RunConfig,
        interrupts: StopSignalHandler,
        *,
        commands_after: int = 0,
        at_end: Outcome | None = None,
    ) -> None:
        """`at_end` is the outcome when the learner ends; default: derived from its counters."""
        self.handle, self.directory, self.config, self.interrupts = handle, directory, config, interrupts
        self.view = RunView(directory)
        self._stop: Outcome | None = None
        self._pause_requested = self._paused = False
        self._recording = True  # while the manager can still record metrics
        self._ending = False  # from then on the return values of callbacks cannot end the run
        self.commands_after = commands_after  # newest command that was executed, or was for an earlier attempt
        self._pending_status: tuple[str, str | None] | None = None
        self._at_end = at_end
        interrupts.on_first_signal = self._request_stop

    def stop(self, reason: str, message: str = "") -> None:
        """Ask the run to end in order."""
        self._stop = Outcome("STOPPED", reason, message)

    def pause(self) -> None:
        """Pause actors, workers and learner."""
        self._pause_requested = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._pause_requested = False

    def run(self, observers: Sequence[Observer]) -> Outcome:
        """Supervise until the run is over, then terminate all roles."""
        self._set_status("RUNNING")
        self._restore_scale()
        deadline: float | None = None
        try:
            outcome = self._watch(observers)
            self._set_status("STOPPING", outcome.reason)
            deadline = time.monotonic() + STOP_S
            return self._shut_down(outcome, deadline, observers)
        finally:
            left_s = STOP_S if deadline is None else max(KILL_S, deadline - time.monotonic())
            self.handle.close(timeout_s=left_s if self.interrupts.count < 2 else 0.0)

    def _watch(self, observers: Sequence[Observer]) -> Outcome:
        while True:
            self.handle.advance(TICK_S)
            outcome = self._check()
            self._ending = outcome is not None
            self._notify_observers(observers)
            if outcome is not None:
                return outcome

    def _set_status(self, state: str, reason: str | None = None) -> None:
        """Set the run's state; if the disk is full, retry later."""
        self._pending_status = (state, reason)
        self._flush_pending()

    def _flush_pending(self) -> None:
        with contextlib.suppress(DiskFull):
            if self._pending_status is not None:
                self.directory.store.set_status(*self._pending_status)
                self._pending_status = None
        self.directory.board.flush()

    def _request_stop(self) -> None:
        """Send STOP to all roles on the first signal, at once: a role in this process may be inside a long step."""
        for kind in ("actor", "worker", "learner", "manager"):
            self.handle.ask(kind, STOP)

    def _check(self) -> Outcome | None:
        """Return the outcome, once it is decided."""
        if faults := self.handle.faults():
            return Outcome("FAILED", faults[0].reason, faults[0].message, faults[0])
        if self.interrupts.count:
            return Outcome("STOPPED", "interrupted", "stopped by a signal")
        self.view.refresh()
        if self.view.target_reached:
            return Outcome("SUCCEEDED", "target_reached")
        self._flush_pending()
        self._execute_commands()
        self._apply_pause()
        if self._stop is not None:
            return self._stop
        if self.handle.ended("learner"):
            return self._at_end or self._completed()
        return None

    def _apply_pause(self) -> None:
        if self._pause_requested == self._paused:
            return
        self._paused = self._pause_requested
        for kind in ("actor", "worker", "learner"):
            self.handle.ask(kind, PAUSE if self._paused else RUN)
        self._set_status("PAUSED" if self._paused else "RUNNING")

    def _completed(self) -> Outcome:
        self.view.refresh()
        steps = self.config.steps
        reason = "episodes_done" if steps is None or self.view.env_steps < steps else "steps_done"
        return Outcome("SUCCEEDED", reason, evaluate=True)

    def _shut_down(self, outcome: Outcome, deadline: float, observers: Sequence[Observer]) -> Outcome:
        """Stop the actors, let the learner write its checkpoint, and run the final evaluation of a completed run."""
        self.handle.ask("actor", STOP)
        if self.config.mode == "workers":  # their last updates must be in the table before it is written
            self.handle.ask("worker", STOP)
            self._wait_for("worker", deadline, observers)
        self.handle.ask("learner", STOP)
        complete = outcome.evaluate
        self._wait_for("learner", deadline, observers)
        # The manager ends last, to record the final reports of the others; half of the remaining time is for it.
        self._wait_for("actor", (time.monotonic() + deadline) / 2, observers)
        self._notify_observers(observers)
        self._recording = False
        if complete and (interrupted := self._run_final_evaluation(observers)):
            return interrupted
        if not complete:
            self.handle.ask("manager", STOP)
            self._wait_for("manager", deadline, observers)
        if self._changes_outcome(outcome) and (faults := self.handle.faults()):
            return Outcome("FAILED", faults[0].reason, faults[0].message, faults[0])
        if not complete:
            return outcome
        self.view.refresh()
        if self.view.target_reached:
            return Outcome("SUCCEEDED", "target_reached")
        if self.config.target_return is not None:
            return Outcome("FAILED", "target_not_reached", f"no evaluation reached {self.config.target_return:g}")
        return outcome

    def _run_final_evaluation(self, observers: Sequence[Observer]) -> Outcome | None:
        """Wait for the final evaluation; return an outcome only if the user stopped the run meanwhile."""
        self.handle.ask("manager", FINISH)
        deadline = time.monotonic() + FINISH_S
        while not self.handle.ended("manager") and time.monotonic() < deadline:
            self.handle.advance(TICK_S)
            self._notify_observers(observers)
            self._execute_commands()
            if self.interrupts.count:
                self._stop = Outcome("STOPPED", "interrupted", "stopped by a signal")
            if self._stop is not None:
                self.handle.ask("manager", STOP)
                self._wait_for("manager", time.monotonic() + STOP_S, observers)
                return replace(self._stop, message=f"{self._stop.message} during the last evaluation")
        return None

    def _changes_outcome(self, outcome: Outcome) -> bool:
        """Return whether a fault during shutdown changes the outcome: results that could not be saved always do."""
        if outcome.evaluate:
            return True
        return outcome.state == "SUCCEEDED" and any(fault.reason == DiskFull.reason for fault in self.handle.faults())

    def _wait_for(self, kind: str, deadline: float, observers: Sequence[Observer]) -> None:
        while not self.handle.ended(kind) and time.monotonic() < deadline:
            self.handle.advance(TICK_S)
            self._notify_observers(observers)

    def _notify_observers(self, observers: Sequence[Observer]) -> None:
        self.view.refresh()
        for observer in observers:
            self._handle_answer(observer(self.view))

    def _handle_answer(self, value: object) -> None:
        """Handle an observer's return value: True ends the run, a dictionary of numbers is added to its curves."""
        if isinstance(value, Mapping):
            if self._recording:
                values = {str(name): _require_number(name, number) for name, number in value.items()}
                details = {"env_steps": self.view.env_steps, "values": values}
                event = EventReport(run=self.directory.id, kind="metric", role="callback", details=details)
                self.directory.board.post(EVENTS, event.record())
        elif isinstance(value, bool | np.bool_) and value and not self._ending and self._stop is None:
            self.stop("stopped_by_callback", "a callback ended the run")

    def _execute_commands(self) -> None:
        """Execute commands from the run's store, each once, and post the result to the event log."""
        for number, command in self.directory.store.read(COMMANDS, self.commands_after):
            self.commands_after = number
            name = str(command.get("command"))
            if name == SET and capabilities_of(self.config.runtime).live_tuning:
                continue  # the learner itself reports which values it applied, and when
            refusal = self._execute(name, command)
            details = {"id": command.get("id"), "command": name, "obeyed": refusal is None, "message": refusal}
            event = EventReport(run=self.directory.id, kind="command", role="supervisor", details=details)
            self.directory.board.post(EVENTS, event.record())

    def _execute(self, name: str, command: Mapping[str, Any]) -> str | None:
        """Return None if the command was executed or started, otherwise the reason why not."""
        if name == "stop":
            self.stop("stop_requested", f"stopped by {command.get('issuer', 'a command')}")
        elif name in ("pause", "resume"):
            self._pause_requested = name == "pause"
        elif name == SCALE:
            return self._scale(command.get("actors"))
        else:
            return f"a run on {self.config.runtime} does not understand {name!r}"
        return None

    def _scale(self, num_actors: object) -> str | None:
        max_actors = self.handle.max_actors if isinstance(self.handle, ScalableHandle) else 0
        if not max_actors:
            supported = " and ".join(map(repr, runtimes_with("scales_actors")))
            return f"the number of actors can change in mode 'async' on runtimes {supported} only"
        if not isinstance(num_actors, int) or not 0 <= num_actors <= max_actors:
            return f"actors={num_actors!r}: must be from 0 to {max_actors}, the limit that flow.max_actors sets"
        assert isinstance(self.handle, ScalableHandle)
        try:
            self.handle.scale(num_actors)
        except Unreachable as error:
            return str(error)
        return None

    def _restore_scale(self) -> None:
        """Restore the number of actors that a resumed run was scaled to in an earlier attempt."""
        earlier = self.directory.store.read(COMMANDS)
        executed = [command for number, command in earlier if number <= self.commands_after]
        counts = [command.get("actors") for command in executed if command.get("command") == SCALE]
        if counts:
            self._scale(counts[-1])


def _require_number(name: object, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(f"a callback returned {name!r}: {value!r}, which is no number") from None
