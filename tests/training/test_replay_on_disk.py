"""DQN whose replay lies on disk, and checkpoints that share what has not changed: the weights are those of any other run."""

from __future__ import annotations

import shutil

import pytest

import steppe
from steppe.core.contracts.errors import ConfigError
from steppe.core.io import row_chunks
from steppe.records.checkpoints import Checkpoints
from steppe.replay import ReplayBufferPool
from steppe.training.resume import resume

pytestmark = pytest.mark.integration

STEPS = 960
SHORT = {"runtime": "inline", "steps": STEPS, "seed": 4, "envs": 4, "evaluation.episodes": 1}
DQN = {
    "algo": "dqn", "segment_steps": 8, "buffer_size": 400, "batch_size": 16, "learning_starts": 100,
    "samples_per_insert": 1.0, "hidden": (16,), "prioritized": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "run"
    return steppe.train("CartPole-v1", **SHORT, **DQN, run_dir=path).weights_sha256


@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_cut_off_and_resumed(tmp_path, monkeypatch, expected, storage):
    """With chunks so small that checkpoints have many of them in common; after the ring came round."""
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", 2048)
    path = tmp_path / "run"
    often = {"checkpoint.every_s": 1e-9, "checkpoint.keep": 10_000}
    whole = steppe.train("CartPole-v1", **SHORT, **DQN, **often, run_dir=path, buffer_storage=storage)
    assert whole.weights_sha256 == expected
    assert [file for file in path.glob("checkpoints/0*/*.rows") if file.stat().st_nlink > 2]
    kept = sorted(path.glob("checkpoints/0*"))
    for later in kept[len(kept) * 3 // 4 :]:
        shutil.rmtree(later)
    newest = Checkpoints(path / "checkpoints").latest()
    assert newest.state["memory"]["store"]["rings"][0].record.added > 400
    again = resume(path, steps=STEPS)
    assert again.resume == "exact"
    assert again.weights_sha256 == expected
    assert all(info.damage is None for info in Checkpoints(path / "checkpoints").list())


def test_a_pool_of_the_callers_says_itself_where_it_lies(tmp_path):
    parts = steppe.DistributedEnvironment("CartPole-v1", 1), ReplayBufferPool(1, 700), steppe.DistributedAgent("dqn")
    config = {**SHORT, "run_dir": tmp_path / "run", "buffer_storage": "disk"}
    loop = steppe.MainLoop(*parts, config=config)
    with pytest.raises(ConfigError, match="needs a pool made with disk_path"):
        loop.run()
