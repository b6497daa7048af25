"""Whole runs on images: both algorithms learn, a run of Atari is reproducible, a stopped one resumes exactly."""

import pytest

import steppe
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError
from steppe.replay import factory
from steppe.training.resume import resume
from steppe.training.train import run_experiment
from tests.support.cases import rest_slow

pytestmark = pytest.mark.integration

JUDGED = {"evaluation.episodes": 8, "evaluation.every_steps": 1_000_000, "evaluation.max_episode_steps": 30}
PONG = {"env": "ALE/Pong-v5", "envs": 2, "seed": 5, "hidden": (16,), **JUDGED, "evaluation.episodes": 1}
PONG |= {"environment.kwargs": {"max_num_frames_per_episode": 70}}
PPO = {"algo": "ppo", "segment_steps": 16, "minibatch_size": 16, "epochs": 1}
DQN = {"algo": "dqn", "segment_steps": 8, "batch_size": 8, "learning_starts": 32, "samples_per_insert": 2.0}
DQN |= {"buffer_size": 200, "epsilon_start": 0.3, "epsilon_end": 0.3}  # a schedule would depend on the run's length
ALGORITHMS = {"ppo": PPO, "dqn": DQN}


def run(tmp_path, name, **settings):
    result = run_experiment(resolve_config(("call", {"run_dir": tmp_path / name, **PONG, **settings})))
    assert result.state == "SUCCEEDED", result.message
    assert result.updates > 0
    return result


@pytest.mark.parametrize(
    ("algo", "settings"),
    rest_slow(
        ("ppo", {"segment_steps": 64, "minibatch_size": 128}),
        ("dqn", {"samples_per_insert": 8, "learning_starts": 256, "target_every": 200, "exploration_fraction": 0.5}),
    ),
)
def test_training_on_images_finds_the_bright_spot(algo, settings, tmp_path):
    """Seed 0, 4,096 steps, 8 episodes of 16 images each: random answers find 4 of 16, a learner at least 15."""
    result = steppe.train(
        "steppe/ImageIdentity-v0",
        algo=algo,
        runtime="inline",
        steps=4_096,
        learning_rate=1e-3,
        gamma=0.0,
        hidden=(64,),
        run_dir=tmp_path / "run",
        **settings,
        **JUDGED,
    )
    assert result.eval_return_mean >= 15


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_same_seed_gives_the_same_weights_on_every_runtime(algo, tmp_path):
    settings = {"mode": "sync", "actors": 2, "steps": 192, **ALGORITHMS[algo]}
    runs = [
        run(tmp_path, name, runtime=runtime, **settings)
        for name, runtime in (("one", "inline"), ("two", "inline"), ("beside", "processes"))
    ]
    assert len({found.summary["weights_sha256"] for found in runs}) == 1
    other = run(tmp_path, "other", runtime="inline", **{**settings, "seed": 6})
    assert other.summary["weights_sha256"] != runs[0].summary["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_resumed_run_ends_with_the_same_weights(algo, tmp_path):
    settings = {"runtime": "inline", "mode": "sync", "actors": 1, **ALGORITHMS[algo]}
    whole = run(tmp_path, "whole", steps=192, **settings)
    run(tmp_path, "halves", steps=96, **settings)
    rest = resume(tmp_path / "halves", steps=192)
    assert rest.env_steps == whole.env_steps
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_replay_of_images_that_cannot_fit_is_refused_with_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "available_bytes", lambda: 2**29)
    words = (
        r"100,000 transitions \(buffer_size\) needs 0\.8 GiB .* but 0\.5 GiB .* at most about \d+,\d+ transitions fit"
    )
    settings = {"runtime": "inline", "steps": 64, **DQN, "buffer_size": 100_000}
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, "large", **settings)
