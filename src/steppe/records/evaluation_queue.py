"""Weights that wait for their evaluation: files in the run's directory, written by the learner, removed by the manager.

    evaluations/0000000120.safetensors    version 120

A file appears complete and stays until its evaluation has been reported, so that a manager that was killed loses none.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from steppe.core.contracts.weights import Weights
from steppe.core.io.atomic_files import remove_temporary_files
from steppe.records.checkpoints import load_weights, save_weights

_NAME = re.compile(r"(\d{10,})\.safetensors")


@dataclass(frozen=True)
class WaitingWeights:
    """One file of the queue."""

    path: Path
    version: int

    @property
    def queued_s(self) -> float:
        """When the learner queued it, in seconds since the epoch."""
        return self.path.stat().st_mtime

    def load(self) -> Weights:
        """Read the weights. DamagedFile if they are not intact."""
        return load_weights(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class EvaluationQueue:
    """The queue in one directory. Versions are evaluated in rising order."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def exists(self) -> bool:
        """Whether a learner has opened the queue where this process can see it."""
        return self.directory.is_dir()

    def open(self) -> None:
        """Create the queue if there is none, keeping what waits in it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(self.directory)

    def add(self, weights: Weights) -> None:
        """Append weights, whose version is above those that wait."""
        save_weights(self.directory / f"{weights.version:010d}.safetensors", weights)

    def waiting(self) -> list[WaitingWeights]:
        """Return what waits, the oldest version first."""
        if not self.exists:
            return []
        names = [name for name in map(_NAME.fullmatch, os.listdir(self.directory)) if name]
        found = [WaitingWeights(self.directory / name[0], int(name[1])) for name in names]
        return sorted(found, key=lambda entry: entry.version)

    def remove_above(self, version: int) -> None:
        """Remove newer versions than this, which a run that resumes will make again."""
        for entry in self.waiting():
            if entry.version > version:
                entry.remove()
