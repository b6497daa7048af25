"""Batches drawn ahead by a thread: the same weights every time, and exactly resumed from every checkpoint."""

from __future__ import annotations

import shutil

import pytest

from steppe.core.config.run import resolve_config
from steppe.records.checkpoints import Checkpoints
from steppe.replay import prefetch
from steppe.training.resume import resume
from steppe.training.train import run_experiment

pytestmark = pytest.mark.integration

SETTINGS = {
    "env": "CartPole-v1", "environment.vector": "loop", "actors": 2, "envs": 2, "seed": 5, "hidden": (8,), "algo": "dqn",
    "mode": "sync", "evaluation.episodes": 2, "evaluation.max_episode_steps": 20, "evaluation.every_steps": 10**9,
    "segment_steps": 8, "batch_size": 16, "learning_starts": 70, "samples_per_insert": 2.0, "prioritized": True,
    "n_step": 3, "steps": 7 * 32, "exploration_fraction": 0.5, "runtime": "inline",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _every_batch_is_worth_a_thread(monkeypatch):
    monkeypatch.setattr(prefetch, "MIN_THREADED_BYTES", 1)


def train(path, **more):
    return run_experiment(resolve_config(("call", {**SETTINGS, "run_dir": path, **more})))


def figures(result):
    return {name: result.summary[name] for name in ("weights_sha256", "env_steps", "updates", "version")}


def test_the_same_weights_every_time(tmp_path):
    one, other = train(tmp_path / "one"), train(tmp_path / "other")
    assert figures(one) == figures(other)


@pytest.mark.parametrize("ahead", [0, 1])
def test_from_each_of_its_checkpoints(ahead, tmp_path):
    more = {"checkpoint.every_s": 1e-9, "checkpoint.keep": 10_000, "flow.ahead": ahead}
    whole = train(tmp_path / "whole", **more)
    numbers = [info.number for info in Checkpoints(whole.path / "checkpoints").list() if not info.best]
    assert len(numbers) > 2 * whole.version, (
        "within the blocks of updates, too, where a batch waits that was drawn ahead"
    )
    for number in numbers[2:-1:5]:
        path = tmp_path / f"from-{number}"
        shutil.copytree(whole.path, path)
        for later in numbers[numbers.index(number) + 1 :]:
            shutil.rmtree(path / "checkpoints" / f"{later:08d}")
        again = resume(path, steps=SETTINGS["steps"])
        assert again.resume == "exact"
        assert figures(again) == figures(whole), f"from checkpoint {number} of {numbers[-1]}"
        shutil.rmtree(path)
