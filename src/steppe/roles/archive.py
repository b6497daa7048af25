"""What the manager leaves in the run's directory: curves, best and final weights, recordings."""

from __future__ import annotations

from steppe.core.reports import Report
from steppe.core.weights import Weights
from steppe.records.checkpoints import Checkpoints, save_weights
from steppe.records.directory import RunDirectory
from steppe.records.metrics import Recorder
from steppe.records.recording import save_gif
from steppe.roles.evaluation import Evaluation


class RunArchive:
    """The manager's Archive on a run directory."""

    def __init__(self, directory: RunDirectory, keep: int) -> None:
        self._directory = directory
        self._checkpoints = Checkpoints(directory.checkpoints, keep)
        self._recorder = Recorder(directory.path)

    def record(self, report: Report) -> None:
        """Add a report to the curves."""
        self._recorder.record(report)

    def keep_best(self, weights: Weights, score: float) -> None:
        """Replace the best weights so far."""
        self._checkpoints.save_best(weights, score)

    def keep_result(self, weights: Weights) -> None:
        """The weights the run is judged by: what `steppe eval` and `steppe.load` take."""
        save_weights(self._directory.result, weights)

    def keep_recording(self, evaluation: Evaluation, version: int) -> str:
        """Write the frames as a GIF; returns its path within the run."""
        path = self._directory.recordings / f"version-{version:08d}.gif"
        save_gif(path, evaluation.frames)
        return str(path.relative_to(self._directory.path))

    def close(self) -> None:
        """Flush the curves."""
        self._recorder.close()
