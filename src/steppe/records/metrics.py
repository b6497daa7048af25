"""Curves: every report as a line of metrics.jsonl, and as TensorBoard events in tb/ with environment steps as x axis.

A line carries the number its report has on the Board, so that whoever writes next knows what has been written. Where a
resumed run goes back to an older checkpoint there is a line of kind "resume". metrics.jsonl is strict JSON: NaN and the infinities, which it lacks, are the texts "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, Report, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING
from steppe.core.io.atomic_files import is_disk_full
from steppe.records.scalars import WINDOW_EPISODES, Scalars, is_rewind

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

KINDS: dict[type[Report], str] = {
    TrainingReport: "training",
    ActorReport: "actor",
    EvaluationReport: "evaluation",
    EventReport: "event",
}
MAX_PENDING_LINES = 10_000  # what waits for room on a full disk
_TOPICS = {"training": TRAINING, "actor": ACTORS, "evaluation": EVALUATIONS}  # the rest are events


class MetricsWriter:
    """The one writer of a run's curves. A line is handed to the system before `record` returns: a kill loses nothing.

    What finds no room on a full disk waits in memory and goes out before the next report.
    """

    def __init__(self, directory: Path) -> None:
        self.written: dict[str, int] = {}  # topic → number of the newest report that the curves have
        self._scalars = Scalars()
        self._read_existing(directory / "metrics.jsonl")
        self._lines = _AppendOnly(directory / "metrics.jsonl")
        self._lines.end_last_line()
        self._events = _AppendOnly(_event_file(directory / "tb"))
        self._waiting: deque[tuple[bytes, bytes]] = deque([(b"", _tfrecord(_header()))], MAX_PENDING_LINES)

    def record(self, report: Report, number: int = 0) -> None:
        """Add one report, with its number on the Board, to both."""
        line = {"kind": KINDS[type(report)], "number": number, **report.record()}
        event = self._event(report)
        framed = _tfrecord(event.SerializeToString()) if event is not None else b""
        self._waiting.append((msgspec.json.encode(nonfinite_to_text(line)) + b"\n", framed))
        self._flush()

    def close(self) -> None:
        """Close both; may be called again."""
        if not self._lines.closed:
            self._flush()
            self._lines.close()
            self._events.close()

    def _flush(self) -> None:
        while self._waiting:
            line, event = self._waiting[0]
            if not self._lines.append(line):
                return
            if not self._events.append(event):
                self._lines.undo_append(line)
                return
            self._waiting.popleft()

    def _read_existing(self, path: Path) -> None:
        """Go on from what an earlier writer left: the numbers it came to, and the episodes that averages look back on."""
        if not path.exists():
            return
        actors: deque[bytes] = deque(maxlen=WINDOW_EPISODES)
        with path.open("rb") as lines:
            for line in lines:
                try:
                    seen = msgspec.json.decode(line, type=_MetricsLine)
                except msgspec.DecodeError:
                    continue  # half a line of a writer that was killed, or a line of somebody else's
                topic = _TOPICS.get(seen.kind, EVENTS)
                self.written[topic] = max(self.written.get(topic, 0), seen.number)
                self._scalars.env_steps = max(seen.env_steps or 0, self._scalars.env_steps)
                if seen.kind == "resume" and seen.role == "supervisor":
                    self._scalars.rewind(int(seen.details.get("env_steps", 0)))
                if seen.kind == "actor":
                    actors.append(line)
        for line in actors:
            self._scalars.of(msgspec.json.decode(line, type=ActorReport, strict=False))

    def _event(self, report: Report) -> Event | None:
        """What TensorBoard is told of a report, if anything."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = self._scalars.of(report)
        if isinstance(report, EventReport) and is_rewind(report):
            # Its readers then forget what earlier sessions said of later steps.
            session = SessionLog(status=SessionLog.START)
            return Event(wall_time=report.time_s, step=self._scalars.env_steps, session_log=session)
        if not scalars:
            return None
        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
        return Event(wall_time=report.time_s, step=self._scalars.env_steps, summary=Summary(value=values))


class _MetricsLine(msgspec.Struct):
    """What of a line has to be known to go on after it."""

    kind: str
    number: int = 0
    env_steps: int | None = None
    role: str = ""
    details: dict[str, Any] = {}


class _AppendOnly:
    """A file that grows by whole pieces: one that finds no room leaves it as it was."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def append(self, data: bytes) -> bool:
        """Whether there was room for it."""
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, data) == len(data):
                return True
        except OSError as error:
            if not is_disk_full(error):
                raise
        os.ftruncate(self._descriptor, size)
        return False

    def undo_append(self, data: bytes) -> None:
        """Remove what was appended last."""
        os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(data))

    def end_last_line(self) -> None:
        """A writer that was killed may have left half a line; the next one begins on its own."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self.append(b"\n")

    def close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def _event_file(directory: Path) -> Path:
    """A new file of the name that TensorBoard looks for; its readers order files by name, hence the time first."""
    directory.mkdir(exist_ok=True)
    return directory / f"events.out.tfevents.{time.time_ns() // 1000:020d}.{socket.gethostname()}.{os.getpid()}"


def _header() -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event

    return bytes(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())


def _tfrecord(data: bytes) -> bytes:
    """A record of an event file: length, its checksum, data, its checksum."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def nonfinite_to_text(value: Any) -> Any:
    """Plain values with NaN and the infinities as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: nonfinite_to_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_text(item) for item in value]
    return value
