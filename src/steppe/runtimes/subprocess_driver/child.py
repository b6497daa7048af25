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
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def relay_commands(
    words: LineReader, answers: int, log: str, launch: Callable[[LaunchSpec, RunDirectory], ReportingHandle]
) -> None:
    """Launch the supervisor's LaunchSpec, then relay its requests and the roles' state until it sends `close_s`.

    Raises EOFError if the supervisor is gone.
    """
    order = msgspec.json.decode(words.first(), type=LaunchSpec)
    references.set_main_script(order.script)
    directory = RunDirectory.open(Path(order.directory))
    redirect_output(directory.path / "logs" / log)
    handle = launch(order, directory)
    told: dict[str, Any] = {}
    while True:
        handle.advance(POLL_INTERVAL_S)
        for line in words.now():
            word = msgspec.json.decode(line)
            if "close_s" in word:
                handle.close(word["close_s"])
                directory.board.flush()
                directory.store.close()
                return
            handle.ask(word["kind"], word["what"])
        state = handle.state()
        if state != told:
            send_reply(answers, state)
            told = state


def send_reply(answers: int, words: dict[str, Any]) -> None:
    """Send a message to the supervisor."""
    data = memoryview(msgspec.json.encode(words) + b"\n")
    while data:
        data = data[os.write(answers, data) :]


class LineReader:
    """Read lines from a pipe; raises EOFError at its end."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._poll = select.poll()
        self._poll.register(handle, select.POLLIN)
        self._rest = b""

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
        data = os.read(self._handle, 1 << 20)
        if not data:
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
