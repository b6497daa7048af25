"""arrivals.jsonl: which segments an async learner took, in which groups, so that its learning can be repeated.

    {"begin": {"steps": 200000, "env_steps": 0, "updates": 0}}       an attempt of the run: its first, or a resumed one
    {"take": [[actor, sequence, version, kept], …]}                  one group; segments that were not kept were too old
    {"mark": {"env_steps": …, "updates": …, "version": …, "weights_sha256": …}}     the learner at a checkpoint

The learner is the only writer. A line is passed to the kernel before its segments are learned from, and synced to disk
with each mark, so a kill loses nothing that matters. A checkpoint stores the length of the log after its mark; resuming
truncates the log there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from steppe.core.contracts.errors import DamagedFile


class Arrival(NamedTuple):
    """A segment that the learner took from the channel, and whether it learned from it."""

    actor: int
    sequence: int
    version: int  # of the weights that it was collected with
    kept: bool = True


class AttemptStart(msgspec.Struct, frozen=True):
    """Where an attempt of the run began, and how many steps it was asked for."""

    steps: int | None
    env_steps: int = 0
    updates: int = 0


class LearnerMark(msgspec.Struct, frozen=True):
    """Where the learner was at a checkpoint."""

    env_steps: int
    updates: int
    version: int
    weights_sha256: str


@dataclass
class RunAttempt:
    """What a run did from its start, or from a checkpoint, up to its newest mark."""

    begin: AttemptStart
    batches: list[list[Arrival]] = field(default_factory=list)
    end: LearnerMark | None = None


class _LogEntry(msgspec.Struct, forbid_unknown_fields=True):
    begin: AttemptStart | None = None
    take: list[Arrival] | None = None
    mark: LearnerMark | None = None


class ArrivalLog:
    """The writer. If a line cannot be written, `on_write_error` is called once and recording stops."""

    def __init__(self, path: Path, length: int, on_write_error: Callable[[str], object]) -> None:
        """`length` is where to continue: 0 for a new log, otherwise what `mark` returned for the checkpoint."""
        self._path, self._on_write_error = path, on_write_error
        self._recording = True
        try:
            with open(path, "ab") as file:
                if not 0 <= length <= file.tell():
                    raise OSError("it is shorter than the checkpoint says")
                file.truncate(length)
        except OSError as error:
            self._stop_recording(error.strerror or str(error))

    def begin(self, steps: int | None, env_steps: int, updates: int) -> None:
        """Record the start of an attempt."""
        self._write("begin", AttemptStart(steps, env_steps, updates))

    def take(self, arrivals: Sequence[Arrival]) -> None:
        """Record one group of segments."""
        self._write("take", arrivals)

    def mark(self, mark: LearnerMark) -> int:
        """Record the learner at a checkpoint, synced to disk; return the log's length, -1 if recording has stopped."""
        return self._write("mark", mark, synced=True)

    def _write(self, kind: str, value: object, *, synced: bool = False) -> int:
        if not self._recording:
            return -1
        try:
            with open(self._path, "ab") as file:  # reopened per line: nothing stays open if the learner dies
                file.write(msgspec.json.encode({kind: value}) + b"\n")
                file.flush()
                if synced:
                    os.fsync(file.fileno())
                return file.tell()
        except OSError as error:
            self._stop_recording(error.strerror or str(error))
            return -1

    def _stop_recording(self, reason: str) -> None:
        self._recording = False
        self._on_write_error(f"arrivals are not recorded any more: {self._path} cannot be written ({reason})")


def read_arrivals(path: Path) -> list[RunAttempt]:
    """Return the attempts that reached a mark, each up to its newest mark; the rest is ignored, also a partial line."""
    attempts: list[RunAttempt] = []
    pending: list[list[Arrival]] = []
    for number, line in enumerate(_complete_lines(path), start=1):
        try:
            entry = msgspec.json.decode(line, type=_LogEntry)
        except msgspec.MsgspecError as error:
            raise DamagedFile(f"{path} is damaged in line {number}: {error}") from None
        if entry.begin is not None:
            pending = []
            if attempts and attempts[-1].end is None:
                attempts.pop()
            attempts.append(RunAttempt(entry.begin))
        elif not attempts:
            raise DamagedFile(f"{path} is damaged: it does not begin with the beginning of a run")
        elif entry.take is not None:
            pending.append(entry.take)
        elif entry.mark is not None:
            attempts[-1].batches += pending
            attempts[-1].end, pending = entry.mark, []
    attempts = [attempt for attempt in attempts if attempt.end is not None]
    _require_contiguous(path, attempts)
    return attempts


def _complete_lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None


def _require_contiguous(path: Path, attempts: list[RunAttempt]) -> None:
    """Raise DamagedFile unless each actor's segments are numbered 0, 1, 2, …: others cannot be collected again."""
    expected: dict[int, int] = {}
    for arrival in (arrival for attempt in attempts for batch in attempt.batches for arrival in batch):
        due = expected.get(arrival.actor, 0)
        if arrival.sequence != due:
            raise DamagedFile(
                f"{path} lacks segment {due} of actor {arrival.actor}: the run cannot be repeated from it"
            )
        expected[arrival.actor] = due + 1
