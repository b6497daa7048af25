"""A run whose roles are controlled by a child process at the other end of two pipes (child.py).

The child is mpiexec's rank 0, or the driver of a Ray cluster. This process supervises without joining MPI or Ray, and
survives any failure there.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from steppe.core.config import references
from steppe.core.system.process import oom_kills, rss_bytes
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import STOP
from steppe.runtimes.handle import Fault
from steppe.runtimes.launch_spec import ROLE_KINDS, LaunchSpec
from steppe.runtimes.plan import REPLAY, Plan

REAP_S = 2.0  # how long the child process has to shut down the rest


class SubprocessHandle:
    """Send requests to the child's standard input, and read the state of the roles from its standard output."""

    name = "the process"  # its name in messages
    log = "process.log"
    reap_s = REAP_S

    def __init__(self, plan: Plan, directory: RunDirectory, command: Sequence[str]) -> None:
        self._plan, self._directory = plan, directory
        self._state: dict[str, Any] = {"ended": [], "faults": [], "ranks": {}}
        self._partial_line = b""
        self._rss_bytes: dict[str, int | None] = {}
        self._pidfds: dict[tuple[str, int], int] = {}  # worker slot and pid → pidfd of its process
        self._exit_announced = self._closed = False
        self._fault: Fault | None = None
        self._oom_kills = oom_kills()
        self._selector = selectors.DefaultSelector()
        self._process = self._start(command)
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._send(msgspec.to_builtins(LaunchSpec.of(plan, directory, references.main_script())))

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        logs = self._directory.path / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / self.log).open("ab") as log:
            # In its own session, so that Ctrl-C reaches only this process, which decides what to do.
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True, bufsize=0)

    def advance(self, timeout_s: float) -> None:
        for worker_slot, rank in self._state["ranks"].items():
            self._rss_bytes[worker_slot] = rss_bytes(rank["pid"]) or self._rss_bytes.get(worker_slot)
        self._wait_for_messages(timeout_s)

    def ended(self, kind: str) -> bool:
        worker_slots = {role.worker_slot for role in self._plan.roles if role.kind == kind}
        return self._child_ended or worker_slots <= set(self._state["ended"])

    def faults(self) -> list[Fault]:
        self._wait_for_messages(0.0)
        if self._child_ended and not self._closed and self._fault is None:
            self._fault = self._explain()
        reported = [msgspec.convert(fault, Fault) for fault in self._state["faults"]]
        return reported + ([self._fault] if self._fault is not None else [])

    def ask(self, kind: str, what: int) -> None:
        self._send({"kind": kind, "what": what})

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        gone, self._closed = self._child_ended, True
        try:
            if not gone:
                for kind in ROLE_KINDS:
                    if kind != REPLAY:  # ends after the learner: the child's `close` takes care of that
                        self.ask(kind, STOP)
                self._send({"close_s": timeout_s})
                self._wait_for_exit(timeout_s)
        finally:  # also if a second Ctrl-C interrupts the wait
            self._terminate()

    @property
    def _child_ended(self) -> bool:
        """Whether the child process has ended."""
        return self._process.poll() is not None

    def _explain(self) -> Fault:
        """Return the fault of a child that ended without reporting one: its exit code and the end of its log."""
        code = self._process.wait(self.reap_s)
        log = (self._directory.path / "logs" / self.log).read_text(errors="replace")
        message = f"{self.name} ended with exit code {code}; its output is in logs/{self.log}"
        return Fault(self.name, "role_died", message, {"traceback": log[-4000:]})

    def _process_found(self, worker_slot: str, pidfd: int) -> None:
        """Handle a newly reported process of a role on this host; `handle` is its pidfd."""

    def _process_ended(self, worker_slot: str) -> None:
        """Handle the end of a process that `_found` registered with the selector."""

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the child is gone
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    def _wait_for_messages(self, timeout_s: float) -> None:
        if self._child_ended:
            return
        for key, _ in self._selector.select(timeout_s):  # in the order in which they happened
            if key.fileobj is self._process.stdout:
                self._receive()
            elif not self._closed:
                self._process_ended(key.data)

    def _receive(self) -> None:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), 1 << 20)
        if not data:
            self._selector.unregister(self._process.stdout)
            self._process.wait(self.reap_s)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            message = msgspec.json.decode(line)
            self._exit_announced = self._exit_announced or "exiting" in message
            self._state.update(message)
        self._open_pidfds()

    def _open_pidfds(self) -> None:
        """Open a pidfd of every role's process on this host, if the system supports it."""
        if not hasattr(os, "pidfd_open"):
            return
        for worker_slot, rank in self._state["ranks"].items():
            key = (worker_slot, rank["pid"])
            if key not in self._pidfds and rank["host"] == socket.gethostname():
                with contextlib.suppress(ProcessLookupError):
                    self._pidfds[key] = os.pidfd_open(rank["pid"])
                    self._process_found(worker_slot, self._pidfds[key])

    def _wait_for_exit(self, timeout_s: float) -> None:
        all_ended = set(self._plan.worker_slots()) <= set(self._state["ended"])
        deadline = time.monotonic() + (max(timeout_s, self.reap_s) if all_ended else timeout_s)
        while not self._exit_announced and self._process.poll() is None and (left_s := deadline - time.monotonic()) > 0:
            self._wait_for_messages(left_s)

    def _terminate(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.reap_s if self._exit_announced or self._child_ended else 0.0)
        self._process.kill()
        self._process.wait()
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], self.reap_s)
            os.close(pidfd)
        self._pidfds.clear()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
