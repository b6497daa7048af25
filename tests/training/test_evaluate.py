"""`steppe.evaluate`: videos of several episodes, sampled actions, and what is said when MP4 cannot be written."""

from __future__ import annotations

import sys

import pytest
from PIL import Image

import steppe
from steppe.core.contracts.errors import ConfigError, UsageError

pytestmark = pytest.mark.integration

SHORT = {
    "runtime": "inline", "steps": 64, "envs": 2, "hidden": (8,), "segment_steps": 16, "minibatch_size": 16, "epochs": 1,
    "evaluation.episodes": 1, "environment.time_limit": 60,
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path))
    return str(steppe.train("CartPole-v1", name="run", **SHORT).path)


def test_as_many_episodes_are_recorded_as_asked_for(run, tmp_path):
    plain = steppe.evaluate(run, episodes=2, seed=3)
    found = steppe.evaluate(run, episodes=2, seed=3, render_dir=tmp_path / "videos", videos=3)
    assert found["return_mean"] == plain["return_mean"], "recording changes no episode"
    names = [f"run-seed-3-{number}.gif" for number in (1, 2, 3)]
    assert found["recordings"] == [str(tmp_path / "videos" / name) for name in names]
    assert found["recording"] == found["recordings"][0]
    for path in found["recordings"]:
        with Image.open(path) as video:
            assert video.n_frames > 1


def test_mp4_needs_a_package(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(UsageError, match=r"pip install 'imageio\[ffmpeg\]', or write GIF files"):
        steppe.evaluate(run, render_dir=tmp_path, video_format="mp4")


def test_sampled_actions_give_other_returns(run):
    greedy, sampled = (steppe.evaluate(run, episodes=5, seed=1, explore=explore) for explore in (False, True))
    assert (greedy["explore"], sampled["explore"]) == (False, True)
    assert greedy["return_mean"] != sampled["return_mean"]


def test_at_least_one(run):
    with pytest.raises(ConfigError, match="episodes=5, videos=0: must be at least 1"):
        steppe.evaluate(run, episodes=5, videos=0)
