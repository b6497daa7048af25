"""Runs of `dhc` with several agents and a curriculum: the same weights on every runtime, and after a cut anywhere."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from steppe.core.config.run import resolve_config
from steppe.records.checkpoints import Checkpoints, load_weights
from steppe.training.resume import resume
from steppe.training.train import run_experiment

pytestmark = pytest.mark.integration

SMALL = {
    "env": "steppe/Pathfinding-v0", "environment.kwargs": {"num_agents": 3, "size": 4, "density": 0.0, "max_steps": 16},
    "algo": "dhc", "actors": 2, "envs": 3, "seed": 5, "mode": "sync", "channels": 8, "segment_steps": 8, "batch_size": 4,
    "sequence_length": 6, "burn_in": 2, "learning_starts": 60, "samples_per_insert": 1.0, "target_every": 5,
    "lesson_agents": (1, 3), "lesson_episodes": 4, "lesson_pass": 0.25, "epsilon_base": 0.9, "epsilon_power": 0.0,
    "steps": 9 * 48,
    "evaluation.episodes": 2, "evaluation.every_steps": 10**9,
}  # fmt: skip
EVERY_STEP = {"checkpoint.every_s": 1e-9, "checkpoint.keep": 10_000}


def train(path, **more):
    result = run_experiment(resolve_config(("call", {**SMALL, "runtime": "inline", "run_dir": path, **more})))
    assert result.state == "SUCCEEDED", result.message
    return result


def figures(result):
    names = ("weights_sha256", "env_steps", "updates", "version", "eval_return_mean")
    return {name: result.summary[name] for name in names}


def standing(result):
    return load_weights(result.path / "weights.safetensors").arrays()["lessons"]


def test_sync_is_the_same_in_processes(tmp_path):
    """MPI and Ray run the same in tests/runtimes/*_world_suite.py, in a world and on a cluster that are there already."""
    one, beside = train(tmp_path / "one"), train(tmp_path / "beside", runtime="processes")
    assert one.updates > 10
    assert (standing(one) > 0).all(), "the curriculum went on, on both"
    assert figures(one) == figures(beside)


@pytest.mark.slow
def test_resuming_is_exact_from_before_and_after_a_lesson(tmp_path):
    whole = train(tmp_path / "whole", **EVERY_STEP)
    checkpoints = Checkpoints(whole.path / "checkpoints")
    numbers = [info.number for info in checkpoints.list() if not info.best]
    known = [int(np.count_nonzero(checkpoints.load(n).weights.arrays()["lessons"])) for n in numbers]
    turn = next(place for place, opened in enumerate(known) if opened > 1)
    assert 0 < turn < len(numbers) - 4, "a lesson was passed on the way"
    for number in {numbers[turn - 1], numbers[turn + 3]}:
        path = tmp_path / f"from-{number}"
        shutil.copytree(whole.path, path)
        for later in numbers[numbers.index(number) + 1 :]:
            shutil.rmtree(path / "checkpoints" / f"{later:08d}")
        again = resume(path, steps=SMALL["steps"])
        assert again.resume == "exact"
        assert figures(again) == figures(whole), f"from checkpoint {number} of {numbers[-1]}"
        shutil.rmtree(path)


@pytest.mark.slow
def test_async_learns_from_everyone(tmp_path):
    result = train(tmp_path / "free", mode="async", runtime="processes", steps=600)
    assert result.updates > 10
    assert np.isfinite(result.summary["eval_return_mean"])
