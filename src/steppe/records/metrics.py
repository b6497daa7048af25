"""Metrics: every report as a line of metrics.jsonl, and as TensorBoard events in tb/ with environment steps as x axis.

A line carries its report's number on the Board, so that the next writer knows what has been written. A line of kind
"resume" marks where a resumed run rewinds to an older checkpoint. metrics.jsonl is strict JSON: NaN and the infinities,
which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity".
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
MAX_PENDING_LINES = 10_000  # lines that wait for free space on a full disk
_TOPICS = {"training": TRAINING, "actor": ACTORS, "evaluation": EVALUATIONS}  # the rest are events


class MetricsWriter:
    """The only writer of a run's metrics. A line is passed to the kernel before `record` returns: a kill loses nothing.

    On a full disk, reports wait in memory and are written before the next one.
    """

    def __init__(self, directory: Path) -> None:
        self.written: dict[str, int] = {}  # topic → number of the newest report that was written
        self._scalars = Scalars()
        self._read_existing(directory / "metrics.jsonl")
        self._lines = _AppendOnly(directory / "metrics.jsonl")
        self._lines.end_last_line()
        self._events = _AppendOnly(_event_file(directory / "tb"))
        self._waiting: deque[tuple[bytes, bytes]] = deque([(b"", _tfrecord(_header()))], MAX_PENDING_LINES)

    def record(self, report: Report, number: int = 0) -> None:
        """Append one report, with its number on the Board, to both files."""
        line = {"kind": KINDS[type(report)], "number": number, **report.record()}
        event = self._event(report)
        framed = _tfrecord(event.SerializeToString()) if event is not None else b""
        self._waiting.append((msgspec.json.encode(nonfinite_to_text(line)) + b"\n", framed))
        self._flush()

    def close(self) -> None:
        """Close both files; may be called again."""
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
        """Restore an earlier writer's state: the numbers it reached, and the episodes that averages cover."""
        if not path.exists():
            return
        actors: deque[bytes] = deque(maxlen=WINDOW_EPISODES)
        with path.open("rb") as lines:
            for line in lines:
                try:
                    entry = msgspec.json.decode(line, type=_MetricsLine)
                except msgspec.DecodeError:
                    continue  # a partial line of a killed writer, or a line of another program
                topic = _TOPICS.get(entry.kind, EVENTS)
                self.written[topic] = max(self.written.get(topic, 0), entry.number)
                self._scalars.env_steps = max(entry.env_steps or 0, self._scalars.env_steps)
                if entry.kind == "resume" and entry.role == "supervisor":
                    self._scalars.rewind(int(entry.details.get("env_steps", 0)))
                if entry.kind == "actor":
                    actors.append(line)
        for line in actors:
            self._scalars.of(msgspec.json.decode(line, type=ActorReport, strict=False))

    def _event(self, report: Report) -> Event | None:
        """Return the TensorBoard event for a report, or None."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = self._scalars.of(report)
        if isinstance(report, EventReport) and is_rewind(report):
            # TensorBoard then discards what earlier sessions reported for later steps.
            session = SessionLog(status=SessionLog.START)
            return Event(wall_time=report.time_s, step=self._scalars.env_steps, session_log=session)
        if not scalars:
            return None
        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
        return Event(wall_time=report.time_s, step=self._scalars.env_steps, summary=Summary(value=values))


class _MetricsLine(msgspec.Struct):
    """The fields of a line that are needed to continue after it."""

    kind: str
    number: int = 0
    env_steps: int | None = None
    role: str = ""
    details: dict[str, Any] = {}


class _AppendOnly:
    """A file that is appended to atomically: data that does not fit on the disk leaves it unchanged."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def append(self, data: bytes) -> bool:
        """Append data; return whether there was disk space for it."""
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
        """Remove the data that was appended last."""
        os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(data))

    def end_last_line(self) -> None:
        """End a partial line that a killed writer may have left, so that the next line is separate."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self.append(b"\n")

    def close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


def _event_file(directory: Path) -> Path:
    """Return the path of a new event file; TensorBoard sorts files by name, so the time comes first."""
    directory.mkdir(exist_ok=True)
    return directory / f"events.out.tfevents.{time.time_ns() // 1000:020d}.{socket.gethostname()}.{os.getpid()}"


def _header() -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event

    return bytes(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())


def _tfrecord(data: bytes) -> bytes:
    """Return data framed as a TFRecord: length, its checksum, data, its checksum."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def nonfinite_to_text(value: Any) -> Any:
    """Return plain values with NaN and the infinities as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: nonfinite_to_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_text(item) for item in value]
    return value
