"""What a run needs is estimated and refused before anything is made of it, whoever asks."""

from __future__ import annotations

import pytest

from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError
from steppe.replay import factory
from steppe.runtimes.memory_need import require_memory, smallest_env_spec
from steppe.training.train import train

pytestmark = pytest.mark.unit
GIB = 2**30


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    monkeypatch.setattr(factory, "available_bytes", lambda: 8 * GIB)


def required(algo="ppo", **more):
    config = resolve_config(("call", {"env": "CartPole-v1", "algo": algo, **more})).config
    require_memory(config, smallest_env_spec(config))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_usual_run_of_every_algorithm_fits(algo):
    required(algo)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"hidden": (65_536, 65_536)}, r"about \d+\.\d GiB .* networks \(hidden\) .* but 8\.0 GiB are available here"),
        ({"envs": 10**6, "segment_steps": 10_000}, r"segments \(actors × envs × segment_steps\)"),
        ({"algo": "dqn", "buffer_size": 10**9}, r"buffer_size\) needs .* but 8\.0 GiB of memory are available"),
        ({"algo": "dqn", "env": "ALE/Pong-v5", "buffer_size": 2_000_000}, r"buffer_size\) needs"),
        ({"algo": "r2d2", "cell_size": 65_536, "buffer_size": 2_000}, r"networks"),
        ({"algo": "dqn", "batch_size": 10**6, "hidden": (4_096,)}, r"a batch"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_estimate(more, words):
    with pytest.raises(ConfigError, match=words):
        required(**more)


def test_the_python_api_asks_before_a_run_is_made(tmp_path):
    with pytest.raises(ConfigError, match="networks"):
        train("CartPole-v1", hidden=(65_536, 65_536), run_dir=tmp_path / "run", runtime="inline")
    assert not (tmp_path / "run").exists()
