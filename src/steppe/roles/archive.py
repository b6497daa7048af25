"""The manager's files in the run directory: curves, best and final weights, videos."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from steppe.core.contracts.errors import DamagedFile, DiskFull
from steppe.core.contracts.reports import Report
from steppe.core.contracts.weights import Weights
from steppe.core.io.atomic_files import raising_disk_full
from steppe.records.checkpoints import Checkpoints, save_weights
from steppe.records.metrics import MetricsWriter
from steppe.records.run_directory import RunDirectory
from steppe.records.video import save_gif
from steppe.roles.evaluation import Evaluation


class RunArchive:
    """The manager's Archive in a run directory. If the disk is full, writes of weights are retried later."""

    def __init__(self, directory: RunDirectory, keep: int) -> None:
        self._directory = directory
        self._checkpoints = Checkpoints(directory.checkpoints, keep, directory.key)
        self._recorder = MetricsWriter(directory.path)
        self._pending_writes: dict[str, Callable[[], object]] = {}

    @property
    def written(self) -> Mapping[str, int]:
        """Topic → number of the newest recorded report, those of an earlier manager included."""
        return self._recorder.written

    def best_score(self) -> float:
        """Return the score of the best saved weights, or minus infinity if there are none."""
        try:
            best = self._checkpoints.best()
        except DamagedFile:
            best = None
        return float(best.counters["score"]) if best else -math.inf

    def record(self, report: Report, number: int) -> None:
        """Add a report to the curves, with its number on the Board."""
        self._recorder.record(report, number)
        self._flush_pending_writes()

    def save_best(self, weights: Weights, score: float) -> None:
        """Replace the best weights so far."""
        self._write_when_possible("best", lambda: self._checkpoints.save_best(weights, score))

    def save_result(self, weights: Weights) -> None:
        """Save the run's final weights, which `steppe eval` and `steppe.load` use."""
        self._write_when_possible("result", lambda: save_weights(self._directory.result, weights))

    def save_video(self, evaluation: Evaluation, version: int) -> str | None:
        """Write the frames as a GIF; return its path relative to the run directory, or None if the disk is full."""
        path = self._directory.recordings / f"version-{version:08d}.gif"
        try:
            with raising_disk_full(path):
                save_gif(path, evaluation.frames)
        except DiskFull:
            return None
        return str(path.relative_to(self._directory.path))

    def close(self) -> None:
        """Flush pending writes. Raises DiskFull if the best or the final weights cannot be written."""
        self._flush_pending_writes()
        self._recorder.close()
        if self._pending_writes:
            raise DiskFull(
                f"there is no disk space for the {' and the '.join(self._pending_writes)} weights in {self._directory.path}"
            )

    def _write_when_possible(self, name: str, write: Callable[[], object]) -> None:
        self._pending_writes[name] = write
        self._flush_pending_writes()

    def _flush_pending_writes(self) -> None:
        for name, write in list(self._pending_writes.items()):
            try:
                with raising_disk_full(self._directory.path):
                    write()
            except DiskFull:
                continue
            del self._pending_writes[name]
