"""A run that is cut off anywhere and resumed ends with the weights of one that never was: from each of its checkpoints,
after a good end at any moment, and beyond the end that it was first given."""

from __future__ import annotations

import multiprocessing
import shutil
import time

import gymnasium as gym
import pytest

from steppe.core.config.run import resolve_config
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.training.resume import resume
from steppe.training.train import run_experiment

pytestmark = pytest.mark.integration

SMALL = {
    "env": "CartPole-v1", "environment.vector": "loop", "actors": 2, "envs": 2, "seed": 5, "hidden": (8,),
    "mode": "sync", "evaluation.episodes": 2, "evaluation.max_episode_steps": 20, "evaluation.every_steps": 10**9,
}  # fmt: skip
ALGOS = {
    "ppo": {"algo": "ppo", "segment_steps": 16, "minibatch_size": 32, "epochs": 1, "steps": 6 * 64, "normalize_obs": True},
    "dqn": {
        "algo": "dqn", "segment_steps": 8, "batch_size": 16, "learning_starts": 70, "samples_per_insert": 2.0,
        "prioritized": True, "n_step": 3, "steps": 7 * 32, "exploration_fraction": 0.5,
    },
    "ppo, recurrent": {
        "algo": "ppo", "segment_steps": 16, "minibatch_size": 32, "epochs": 1, "steps": 6 * 64, "recurrent": True,
        "cell_size": 8,
    },
    "r2d2": {
        "algo": "r2d2", "segment_steps": 8, "batch_size": 4, "sequence_length": 5, "burn_in": 3, "learning_starts": 70,
        "samples_per_insert": 2.0, "steps": 7 * 32, "cell_size": 8, "buffer_size": 1_000,
    },
}  # fmt: skip
EVERY_STEP = {"checkpoint.every_s": 1e-9, "checkpoint.keep": 10_000}
both = pytest.mark.parametrize(("algo", "ahead"), [(algo, ahead) for ahead in (1, 0) for algo in ALGOS])
# Where actors are not ahead, a checkpoint holds less of them; `both` shows that for agents that remember.
most = pytest.mark.parametrize(
    ("algo", "ahead"),
    [(algo, 1) for algo in ALGOS] + [pytest.param(algo, 0, marks=pytest.mark.slow) for algo in ("ppo", "dqn")],
)


def train(path, algo, ahead, observers=(), **more):
    layer = {**SMALL, **ALGOS[algo], "flow.ahead": ahead, "runtime": "inline", "run_dir": path, **more}
    return run_experiment(resolve_config(("call", layer)), observers=observers)


def figures(result):
    return {name: result.summary[name] for name in ("weights_sha256", "env_steps", "updates", "version", "lag_mean")}


@pytest.mark.slow
@both
def test_from_each_of_its_checkpoints(algo, ahead, tmp_path):
    """What is left of a run that was killed before it wrote the next one, wherever within a round that was."""
    whole = train(tmp_path / "whole", algo, ahead, **EVERY_STEP)
    known = Checkpoints(whole.path / "checkpoints").list()
    numbers = [info.number for info in known if not info.best]
    assert len(numbers) >= whole.version, "at least one a round"
    assert algo.startswith("ppo") or len(numbers) > 2 * whole.version, "and within the blocks of updates between them"
    for number in numbers[:3] + numbers[3:-2:5] + numbers[-2:]:
        path = tmp_path / f"from-{number}"
        shutil.copytree(whole.path, path)
        for later in numbers[numbers.index(number) + 1 :]:
            shutil.rmtree(path / "checkpoints" / f"{later:08d}")
        again = resume(path, steps=ALGOS[algo]["steps"])
        assert again.resume == "exact"
        assert figures(again) == figures(whole), f"from checkpoint {number} of {numbers[-1]}"
        shutil.rmtree(path)


class Uneven(gym.Wrapper):
    """The second actor's steps take long: most of the time, a round is half there."""

    def step(self, action):
        if multiprocessing.current_process().name == "steppe-actor-1":
            time.sleep(0.005)
        return self.env.step(action)


UNEVEN = {"environment.wrappers": ("tests.determinism.test_exact_resume:Uneven",)}


@pytest.mark.regression
@most
def test_after_good_ends_while_a_round_is_half_there(algo, ahead, tmp_path):
    path, more = tmp_path / "stopped", {**UNEVEN, **timeless(algo)}
    once = train(path, algo, ahead, [lambda view: view.env_steps > 0], runtime="processes", **more | {"steps": 10**6})
    assert once.state == "STOPPED"
    twice = resume(path, observers=[lambda view: view.env_steps > once.env_steps])
    assert twice.state == "STOPPED"
    steps = twice.env_steps + 200
    last = resume(path, steps=steps)
    assert last.resume == "exact"
    assert figures(last) == figures(train(tmp_path / "whole", algo, ahead, **more | {"steps": steps}))


def timeless(algo):
    """Settings with nothing that goes by the length of the run."""
    settings = {"dqn": {"exploration_fraction": 1e-9, "prioritized": False}, "r2d2": {"prioritized": False}}
    return settings.get(algo, {})


@pytest.mark.parametrize(
    ("algo", "ahead", "runtime"),
    [(algo, 1, "inline") for algo in ALGOS]
    + [pytest.param(algo, 0, "inline", marks=pytest.mark.slow) for algo in ("ppo", "dqn")]
    + [pytest.param(algo, 1, "processes", marks=pytest.mark.slow) for algo in ("ppo", "dqn")],
)
def test_beyond_its_end(algo, ahead, runtime, tmp_path):
    more, steps = timeless(algo), 2 * ALGOS[algo]["steps"]
    train(tmp_path / "half", algo, ahead, runtime=runtime, **more)
    longer = resume(tmp_path / "half", steps=steps)
    assert longer.resume == "exact"
    assert figures(longer) == figures(train(tmp_path / "whole", algo, ahead, **more | {"steps": steps}))


def test_a_checkpoint_holds_what_actors_have_only_where_they_are_ahead(tmp_path):
    for ahead in (0, 1):
        result = train(tmp_path / str(ahead), "ppo", ahead)
        checkpoint = Checkpoints(result.path / "checkpoints", run=RunDirectory.open(result.path).key).latest()
        assert ("acting" in checkpoint.state) == bool(ahead)
        assert checkpoint.weights.sha256() == result.weights_sha256
