"""The child's end of two pipes: it receives the supervisor's requests, and sends the state of the roles.

The supervisor's end is parent.py. Messages are lines of JSON.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from steppe.core.config import references
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.handle import Handle
from steppe.runtimes.launch_spec import LaunchSpec
from steppe.runtimes.processes.worker import redirect_output

POLL_INTERVAL_S = 0.05  # between polls for the supervisor's requests


class ReportingHandle(Handle, Protocol):
    """A handle that reports the state of its roles as plain data."""

    def state(self) -> dict[str, Any]: ...


def reserve_stdout_for_replies() -> int:
    """Reserve standard output for replies and return its descriptor; other output now goes to standard error."""
    reply_fd = os.dup(1)
    os.dup2(2, 1)
    return reply_fd


def relay_commands(
    requests: LineReader, reply_fd: int, log: str, launch: Callable[[LaunchSpec, RunDirectory], ReportingHandle]
) -> None:
    """Launch the supervisor's LaunchSpec, then relay its requests and the roles' state until it sends `close_s`.

    Raises EOFError if the supervisor is gone.
    """
    launch_spec = msgspec.json.decode(requests.first(), type=LaunchSpec)
    references.set_main_script(launch_spec.script)
    directory = RunDirectory.open(Path(launch_spec.directory))
    redirect_output(directory.path / "logs" / log)
    handle = launch(launch_spec, directory)
    sent: dict[str, Any] = {}
    while True:
        handle.advance(POLL_INTERVAL_S)
        for line in requests.now():
            request = msgspec.json.decode(line)
            if "close_s" in request:
                handle.close(request["close_s"])
                directory.board.flush()
                directory.store.close()
                return
            handle.ask(request["kind"], request["what"])
        state = handle.state()
        if state != sent:
            send_reply(reply_fd, state)
            sent = state


def send_reply(reply_fd: int, message: dict[str, Any]) -> None:
    """Send a message to the supervisor."""
    data = memoryview(msgspec.json.encode(message) + b"\n")
    while data:
        data = data[os.write(reply_fd, data) :]


class LineReader:
    """Read lines from a pipe; raises EOFError at its end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._partial_line = b""

    def first(self) -> bytes:
        """Block until a line arrives and return it."""
        while not (lines := self.now(timeout_s=None)):
            pass
        (line,) = lines
        return line

    def now(self, timeout_s: float | None = 0.0) -> list[bytes]:
        """Return the complete lines that arrive within `timeout_s`; None waits indefinitely."""
        if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            return []
        data = os.read(self._descriptor, 1 << 20)
        if not data:
            raise EOFError
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return lines
