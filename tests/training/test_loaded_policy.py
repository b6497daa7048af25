"""`steppe.evaluate` and `steppe.load`: the results of a run, evaluated and used."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

import steppe
from steppe.core.contracts.errors import ConfigError, RunNotFound, UsageError
from steppe.records.run_directory import RunDirectory

pytestmark = pytest.mark.integration

SHORT = {"evaluation.episodes": 2, "segment_steps": 16, "envs": 2}


class Mixed(gym.Env):
    """Observes a dictionary of a position, a number and a small image; acts on three wheels."""

    observation_space = gym.spaces.Dict(
        {
            "place": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
            "number": gym.spaces.Discrete(3, start=1),
            "pair": gym.spaces.Tuple((gym.spaces.MultiBinary(2), gym.spaces.Discrete(2))),
        }
    )
    action_space = gym.spaces.MultiDiscrete([2, 3, 4])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.left = 8
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action))
        self.left -= 1
        return self.observation_space.sample(), 1.0, self.left == 0, False, {}


class Wheel(gym.Env):
    """Shows how far it has been turned; actions are continuous."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turned = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.turned += 1
        return np.array([self.turned], np.float32), 0.0, False, self.turned == 9, {}


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    return steppe.train("CartPole-v1", runtime="inline", steps=12_000, seed=1, run_dir=str(path)).path


def test_evaluation_is_reproducible_and_names_the_weights(cartpole: Path) -> None:
    first, again, other = (steppe.evaluate(cartpole, episodes=4, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert first["return_mean"] != other["return_mean"] or first["return_std"] != other["return_std"]
    summary = RunDirectory.open(cartpole).summary()
    assert (first["episodes"], first["weights_sha256"]) == (4, summary["weights_sha256"])
    assert first["return_min"] <= first["return_mean"] <= first["return_max"]
    assert steppe.evaluate(str(cartpole), episodes=4, explore=True, seed=7)["return_mean"] <= 500


def test_videos_do_not_change_the_result(cartpole: Path, tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    plain = steppe.evaluate(cartpole, episodes=3, seed=3, explore=True)
    filmed = steppe.evaluate(cartpole, episodes=3, seed=3, explore=True, render_dir=tmp_path / "films")
    assert filmed["return_std"] > 0
    assert filmed | {"recording": None} == plain
    with Image.open(filmed["recording"]) as film:
        assert film.n_frames >= 2


def test_an_unwritable_video_directory_is_refused_in_one_sentence(cartpole: Path, tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    (tmp_path / "films").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write the recording .*films/.*gif: "):
        steppe.evaluate(cartpole, episodes=1, render_dir=tmp_path / "films")


def test_a_loaded_policy_plays_as_in_the_evaluation_of_the_run(cartpole: Path) -> None:
    policy = steppe.load(cartpole)
    env = gym.make("CartPole-v1")
    returns = []
    for seed in range(5):
        obs, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            action = policy.act(obs)
            assert type(action) is int
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
        returns.append(total)
    env.close()
    assert np.mean(returns) > 80, "an untrained policy gets about 20"
    assert policy.spec.obs.shape == (4,)
    assert policy.weights.sha256() == RunDirectory.open(cartpole).summary()["weights_sha256"]


def test_a_batch_gets_the_actions_of_its_rows(cartpole: Path) -> None:
    policy = steppe.load(cartpole)
    rows = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    actions = policy.act(rows)
    assert actions.shape == (6,)
    assert actions.tolist() == [policy.act(row) for row in rows]
    explored = {policy.act(rows[0] * 0, explore=True) for _ in range(200)}
    assert explored == {0, 1}
    with pytest.raises(UsageError, match=r"has shape \(4,\), a batch \('N', 4\); this one has \(3,\)"):
        policy.act(np.zeros(3))


def test_dictionaries_tuples_and_shifted_numbers_are_flattened_by_the_rules() -> None:
    result = steppe.train(Mixed, runtime="inline", steps=64, name="mixed", **SHORT)
    policy = steppe.load(result.path)
    env = Mixed()
    obs, _ = env.reset(seed=1)
    action = policy.act(obs)
    assert env.action_space.contains(action)
    assert policy.spec.obs.shape == (2 + 3 + 2 + 2,)
    several = {
        "place": np.stack([obs["place"]] * 3),
        "number": np.full(3, obs["number"]),
        "pair": (np.stack([obs["pair"][0]] * 3), np.full(3, obs["pair"][1])),
    }
    assert policy.act(several).tolist() == [action.tolist()] * 3
    # The independent result: the vector that the declared rules describe, given to the agent itself.
    vector = np.concatenate(
        [np.eye(3)[obs["number"] - 1], obs["pair"][0], np.eye(2)[obs["pair"][1]], obs["place"]]
    ).astype(np.float32)
    chosen = policy.agent.act(vector[None], np.ones(1, bool), explore=False)["action"][0]
    np.testing.assert_array_equal(action, chosen)


def test_stacked_frames_start_again_after_a_reset() -> None:
    result = steppe.train(
        Wheel, runtime="inline", steps=64, **SHORT, **{"environment.frame_stack": 3, "environment.time_limit": 9}
    )
    policy = steppe.load(result.path)
    first = policy.act(np.zeros(1, np.float32))
    later = [policy.act(np.full(1, turn, np.float32)) for turn in (5.0, 6.0)]
    assert policy.spec.obs.shape == (3,)
    assert not np.array_equal(first, policy.act(np.zeros(1, np.float32)))
    policy.reset()
    np.testing.assert_array_equal(policy.act(np.zeros(1, np.float32)), first)
    np.testing.assert_array_equal(policy.act(np.full(1, 5.0, np.float32)), later[0])
    assert first.shape == (1,)


def test_a_stopped_run_gives_its_newest_checkpoint() -> None:
    result = steppe.train("CartPole-v1", runtime="inline", callbacks=[lambda view: view.updates > 0], **SHORT)
    assert result.state == "STOPPED"
    assert not RunDirectory.open(result.path).result.exists()
    assert steppe.load(result.path).weights.sha256() == result.weights_sha256


def test_runs_without_weights_and_unknown_runs_are_refused_in_one_sentence(cartpole: Path, tmp_path: Path) -> None:
    config = RunDirectory.open(cartpole).config().model_copy(update={"run_dir": tmp_path / "empty", "name": "empty"})
    RunDirectory.create(config, {}).release()
    for call in (steppe.load, steppe.evaluate):
        with pytest.raises(RunNotFound, match="empty has no weights yet"):
            call(tmp_path / "empty")
        with pytest.raises(RunNotFound, match="there is no run 'nowhere'"):
            call("nowhere")
    with pytest.raises(ConfigError, match="episodes=0"):
        steppe.evaluate(cartpole, episodes=0)
