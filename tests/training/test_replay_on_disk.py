"""DQN with replay on disk, and checkpoints that share unchanged rows: the weights are those of any other run."""

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
def test_an_interrupted_run_resumes_exactly(tmp_path, monkeypatch, expected, storage):
    """With chunks so small that checkpoints share many of them; after the ring buffer wrapped around."""
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


def test_the_callers_pool_decides_where_it_is_stored(tmp_path):
    parts = steppe.DistributedEnvironment("CartPole-v1", 1), ReplayBufferPool(1, 700), steppe.DistributedAgent("dqn")
    config = {**SHORT, "run_dir": tmp_path / "run", "buffer_storage": "disk"}
    loop = steppe.MainLoop(*parts, config=config)
    with pytest.raises(ConfigError, match="needs a pool made with disk_path"):
        loop.run()
