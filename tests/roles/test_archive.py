"""The archive on a run directory: what it keeps, and what happens on a full disk."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import DiskFull
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.transport import TRAINING
from steppe.core.io import atomic_files
from steppe.records.checkpoints import Checkpoints, load_weights
from steppe.records.run_directory import RunDirectory
from steppe.roles.archive import RunArchive
from steppe.roles.evaluation import Evaluation
from tests.support.role_fakes import weights_of

pytestmark = pytest.mark.integration


@pytest.fixture
def directory(tmp_path):
    made = resolve_config(("call", {"env": "CartPole-v1", "run_dir": tmp_path / "run"}))
    directory = RunDirectory.create(made.config, made.sources)
    yield directory
    directory.store.close()
    directory.release()


@pytest.fixture
def full(monkeypatch):
    """A full disk until `full.undo()`."""

    def refuse(descriptor, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        yield patch


def report(version=0):
    return TrainingReport(run="run", version=version, updates=0, env_steps=0, train_s=0.0)


def test_a_new_archive_continues_after_the_previous_one(directory):
    archive = RunArchive(directory, 3)
    assert (archive.best_score(), dict(archive.written)) == (-math.inf, {})
    archive.save_best(weights_of(3, value=1.0), 12.5)
    archive.record(report(), 7)
    archive.close()
    again = RunArchive(directory, 3)
    assert (again.best_score(), dict(again.written)) == (12.5, {TRAINING: 7})
    again.close()


def test_a_damaged_best_checkpoint_is_ignored(directory):
    archive = RunArchive(directory, 3)
    archive.save_best(weights_of(3), 12.5)
    (directory.checkpoints / "best" / "00000001" / "weights.safetensors").unlink()
    assert archive.best_score() == -math.inf
    archive.close()


def test_weights_are_kept_until_there_is_space_and_the_newest_replace_older_ones(directory, full):
    archive = RunArchive(directory, 3)
    archive.save_best(weights_of(1, value=1.0), 1.0)
    archive.save_best(weights_of(2, value=2.0), 2.0)
    archive.save_result(weights_of(2, value=2.0))
    assert Checkpoints(directory.checkpoints).best() is None
    full.undo()
    archive.record(report(), 1)
    best = Checkpoints(directory.checkpoints, run=directory.key).best()
    assert (best.weights.version, best.counters["score"], best.number) == (2, 2.0, 1)
    assert load_weights(directory.result).version == 2
    archive.close()


def test_a_final_result_that_cannot_be_saved_is_reported(directory, full):
    archive = RunArchive(directory, 3)
    archive.save_result(weights_of(2))
    with pytest.raises(DiskFull, match="no disk space for the result weights"):
        archive.close()


def test_a_video_is_dropped_on_a_full_disk(directory, full):
    archive = RunArchive(directory, 3)
    frames = [np.zeros((8, 8, 3), np.uint8)]
    assert archive.save_video(Evaluation([1.0], [1], frames=frames), 5) is None
    full.undo()
    assert archive.save_video(Evaluation([1.0], [1], frames=frames), 5) == "recordings/version-00000005.gif"
    archive.close()


def test_other_errors_are_raised(directory, monkeypatch):
    archive = RunArchive(directory, 3)

    def broken(descriptor):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, "fsync", broken)
        with pytest.raises(OSError, match="Input/output"):
            archive.save_result(weights_of(2))
    archive.close()
