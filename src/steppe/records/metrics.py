"""Curves: every report as a line of metrics.jsonl, and as TensorBoard events in tb/ with environment steps as x axis.

metrics.jsonl is strict JSON: NaN and the infinities, which it lacks, are the texts "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import math
import os
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from steppe.core.reports import ActorReport, EvaluationReport, EventReport, Report, TrainingReport

KINDS: dict[type[Report], str] = {
    TrainingReport: "training",
    ActorReport: "actor",
    EvaluationReport: "evaluation",
    EventReport: "event",
}
WINDOW = 100  # episodes that train/return_mean looks back on


class Recorder:
    """The one writer of a run's curves. A line is handed to the system before `record` returns: a kill loses nothing."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        descriptor = os.open(directory / "metrics.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        _end_last_line(descriptor)
        self._lines = descriptor
        self._events = EventFileWriter(str(directory / "tb"), flush_secs=5)
        self._episodes: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._env_steps = 0
        self._before: TrainingReport | None = None

    def record(self, report: Report) -> None:
        """Add one report to both."""
        line = {"kind": KINDS[type(report)], **report.record()}
        os.write(self._lines, msgspec.json.encode(spoken(line)) + b"\n")
        scalars = self._scalars(report)
        if scalars:
            self._write_event(scalars, report.time_s)

    def close(self) -> None:
        """Flush and close both; may be called again."""
        if self._lines >= 0:
            os.close(self._lines)
            self._lines = -1
            self._events.close()

    def _scalars(self, report: Report) -> dict[str, float]:
        if isinstance(report, ActorReport):
            self._episodes.extend(report.episodes)
            return {}
        if isinstance(report, EvaluationReport):
            self._env_steps = max(self._env_steps, report.env_steps)
            return {"eval/return_mean": report.return_mean, "eval/return_std": report.return_std}
        if isinstance(report, TrainingReport):
            return self._training_scalars(report)
        if isinstance(report, EventReport) and report.kind == "metric":  # numbers of the user's own
            self._env_steps = max(self._env_steps, int(report.details["env_steps"]))
            return {f"custom/{name}": float(value) for name, value in report.details["values"].items()}
        return {}

    def _training_scalars(self, report: TrainingReport) -> dict[str, float]:
        self._env_steps = max(self._env_steps, report.env_steps)
        scalars = {f"loss/{name}": value for name, value in report.stats.items()}
        scalars |= {f"memory/{name}": value for name, value in report.memory.items()}
        scalars |= {"train/updates": report.updates, "train/version": report.version}
        if self._episodes:
            scalars["train/return_mean"] = sum(score for score, _ in self._episodes) / len(self._episodes)
            scalars["train/length_mean"] = sum(length for _, length in self._episodes) / len(self._episodes)
        segments = sum(report.lags.values())
        if segments:
            scalars["lag/mean"] = sum(lag * count for lag, count in report.lags.items()) / segments
            scalars["lag/max"] = max(report.lags)
        scalars |= {f"dropped/{cause}": count for cause, count in report.dropped.items()}
        scalars |= self._pace(report)
        self._before = report
        return scalars

    def _pace(self, report: TrainingReport) -> dict[str, float]:
        """Speed and time shares since the last report."""
        before = self._before
        elapsed = report.train_s - (before.train_s if before else 0.0)
        pace = {}
        if elapsed > 0:
            pace["time/steps_per_s"] = (report.env_steps - (before.env_steps if before else 0)) / elapsed
        spent = {phase: s - (before.phases.get(phase, 0.0) if before else 0.0) for phase, s in report.phases.items()}
        total = sum(spent.values())
        return pace | ({f"time/{phase}": s / total for phase, s in spent.items()} if total > 0 else {})

    def _write_event(self, scalars: dict[str, float], time_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
        self._events.add_event(Event(wall_time=time_s, step=self._env_steps, summary=Summary(value=values)))
        self._events.flush()


def spoken(value: Any) -> Any:
    """Plain values with NaN and the infinities as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: spoken(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spoken(item) for item in value]
    return value


def _end_last_line(descriptor: int) -> None:
    """A writer that was killed may have left half a line; the next one begins on its own."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
