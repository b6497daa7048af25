"""Pathfinding under the interfaces of PettingZoo and Gymnasium, its registration, and its pictures."""

import subprocess
import sys
import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

from tests.support.pathfinding_oracle import SlowWorld

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its test module imports its own games in the old way
    from pettingzoo.test import parallel_api_test, parallel_seed_test

from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.core.io import codec
from steppe.envs import check_env, known_environments
from steppe.envs.pathfinding.drawing import colour_of, draw
from steppe.envs.pathfinding.parallel import PathfindingParallel, parallel_env
from steppe.envs.pathfinding.vector import PathfindingVectorEnv
from steppe.envs.pathfinding.worlds import PathfindingWorlds, Scenario
from steppe.envs.snapshot.snapshots import EnvSnapshots
from steppe.records.video import save_gif

pytestmark = pytest.mark.unit
ID = "steppe/Pathfinding-v0"


def test_pettingzoos_tests_pass(capsys):
    parallel_api_test(PathfindingParallel(5, size=10, max_steps=40), num_cycles=300)
    parallel_api_test(PathfindingParallel(1, size=5, density=0.0), num_cycles=300)
    parallel_seed_test(partial(parallel_env, num_agents=3, size=8))
    assert "Passed" in capsys.readouterr().out


def actions_of(env, stream):
    return {agent: int(stream.integers(5)) for agent in env.agents}


def test_the_parallel_environment_equals_the_slow_reference():
    env, stream = parallel_env(num_agents=6, size=7, density=0.1, max_steps=50), np.random.default_rng(0)
    obs, infos = env.reset(seed=3)
    slow = SlowWorld(env.worlds.obstacles(0), env.worlds.positions(0), env.worlds.goals(0))
    steps = 0
    while env.agents:
        assert list(obs) == list(infos) == env.agents == [f"agent_{i}" for i in range(6)]
        np.testing.assert_array_equal(list(obs.values()), slow.observe())
        np.testing.assert_array_equal([infos[agent]["comm_mask"] for agent in env.agents], slow.hears())
        actions = actions_of(env, stream)
        obs, rewards, terminated, truncated, infos = env.step(actions)
        expected, arrived = slow.step(list(actions.values()))
        steps += 1
        assert list(rewards.values()) == np.array(expected, np.float32).tolist()
        assert set(terminated.values()) == {arrived}
        assert set(truncated.values()) == {steps == 50 and not arrived}
    assert env.step({}) == ({}, {}, {}, {}, {})


def test_returned_observations_are_copies():
    env = parallel_env(num_agents=2, size=6)
    first, infos = env.reset(seed=0)
    kept, mask = first["agent_0"].copy(), infos["agent_0"]["comm_mask"].copy()
    for _ in range(5):
        env.step({"agent_0": 1, "agent_1": 4})
    np.testing.assert_array_equal(first["agent_0"], kept)
    np.testing.assert_array_equal(infos["agent_0"]["comm_mask"], mask)


def test_a_curriculum_by_options():
    env = parallel_env(num_agents=8, size=20)
    env.reset(seed=0, options={"num_agents": 2, "size": (6, 5)})
    assert env.agents == ["agent_0", "agent_1"]
    assert env.worlds.obstacles(0).shape == (6, 5)
    env.reset()
    assert len(env.agents) == 2
    env.reset(options={"num_agents": 8, "size": 20})
    assert env.num_agents == env.max_num_agents == 8
    with pytest.raises(ConfigError, match="1 to 8 agents"):
        env.reset(options={"num_agents": 9})


def test_exactly_the_present_agents_act():
    env = parallel_env(num_agents=2, size=6)
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="agent_1 has no action"):
        env.step({"agent_0": 0})
    with pytest.raises(ConfigError, match="agent_7 is not among the agents"):
        env.step({"agent_0": 0, "agent_1": 0, "agent_7": 0})
    with pytest.raises(ConfigError, match="not a number from 0 to 4"):
        env.step({"agent_0": 0, "agent_1": 5})


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
def test_snapshots_of_the_environment(render_mode):
    def make():
        return parallel_env(num_agents=3, size=8, max_steps=12, render_mode=render_mode)

    one, other, stream = make(), make(), np.random.default_rng(0)
    one.reset(seed=1)
    other.reset(seed=2)
    for _ in range(5):
        one.step(actions_of(one, stream))
    other.restore(codec.unpack(codec.pack(one.snapshot())))
    while one.agents:
        actions = actions_of(one, stream)
        own, its = one.step(actions), other.step(actions)
        assert own[1:4] == its[1:4]
        np.testing.assert_array_equal(list(own[0].values()), list(its[0].values()))
    assert other.agents == []
    np.testing.assert_array_equal(one.reset()[0]["agent_0"], other.reset()[0]["agent_0"])
    if render_mode:
        np.testing.assert_array_equal(one.render(), other.render())


def test_the_id_is_registered_and_gymnasium_builds_it():
    assert ID in known_environments()
    env = gym.make_vec(ID, 3, vectorization_mode="vector_entry_point", num_agents=4, size=10)
    assert isinstance(env.unwrapped, PathfindingVectorEnv)
    obs, info = env.reset(seed=0)
    assert obs.shape == (3, 4, 6, 9, 9)
    assert env.observation_space.contains(obs)
    assert info["comm_mask"].shape == (3, 4, 4)
    obs, rewards, terminated, truncated, _ = env.step(env.action_space.sample())
    assert (rewards.shape, terminated.shape, truncated.shape) == ((3, 4), (3,), (3,))


def test_check_finds_nothing():
    assert check_env(ID, steps=50) == []


def test_the_vector_environment_equals_the_worlds():
    env, worlds = (
        PathfindingVectorEnv(4, num_agents=3, size=7, max_episode_steps=9),
        PathfindingWorlds(4, 3, size=7, max_steps=9),
    )
    obs, _ = env.reset(seed=5)
    np.testing.assert_array_equal(obs, worlds.reset(5).obs)
    stream, ends = np.random.default_rng(0), 0
    for _ in range(40):
        actions = stream.integers(0, 5, (4, 3))
        obs, rewards, terminated, truncated, info = env.step(actions)
        output = worlds.step(actions)
        for own, its in zip((obs, info["comm_mask"], rewards, terminated, truncated), output[:5], strict=True):
            np.testing.assert_array_equal(own, its)
        ended = terminated | truncated
        ends += ended.sum()
        assert ("final_obs" in info) == ended.any()
        if ended.any():
            np.testing.assert_array_equal(info["final_obs"][ended], output.final_obs[ended])
            np.testing.assert_array_equal(info["_final_obs"], ended)
    assert ends > 8
    with pytest.raises(ConfigError, match="not a list"):
        env.reset(seed=[1, 2, 3, 4])


def test_the_vector_is_read_as_other_environments_are():
    one, other = (PathfindingVectorEnv(2, num_agents=3, size=7) for _ in range(2))
    one.reset(seed=0)
    other.reset(seed=1)
    one.step(np.ones((2, 3), int))
    readers = EnvSnapshots([one]), EnvSnapshots([other])
    tree = codec.unpack(codec.pack(readers[0].take()))
    assert readers[0].kind == "exact"
    readers[1].give(tree)
    actions = np.full((2, 3), 2)
    np.testing.assert_array_equal(one.step(actions)[0], other.step(actions)[0])


def test_a_picture_shows_everything():
    """Looked at pixel by pixel: an obstacle, a goal's frame, an agent, its way, and a line between two who talk."""
    obstacles = np.zeros((3, 6), bool)
    obstacles[0, 5] = True
    positions, goals = np.array([[0, 2], [0, 4]]), np.array([[2, 0], [2, 4]])
    trail = np.array([[[0, 0], [2, 5]], [[0, 1], [1, 5]], [[0, 2], [0, 4]]])
    mask = np.array([[True, True], [False, True]])
    quiet = draw(obstacles, positions, goals, np.eye(2, dtype=bool), None, cell=16)
    full = draw(obstacles, positions, goals, mask, trail, cell=16)
    assert full.shape == (48, 96, 3)
    assert full.dtype == np.uint8
    ground = full[40, 40]

    def middle(row, column):
        return full[16 * row + 8, 16 * column + 8].tolist()

    assert middle(0, 2) == list(colour_of(0))
    assert middle(0, 4) == list(colour_of(1))
    assert middle(0, 5) != ground.tolist()
    assert (full[32:48, 0:16] == colour_of(0)).all(axis=-1).any()
    assert (full[8, 16:24] != ground).any()  # the way of agent 0 comes from the left
    assert (quiet[8, 17:24] == ground).all()
    assert (full[8, 57:63] != quiet[8, 57:63]).any()  # between the two
    assert len({colour_of(agent) for agent in range(64)}) == 64


def test_frames_and_a_film(tmp_path):
    given = Scenario(np.zeros((4, 5)), np.array([[0, 0], [3, 4]]), np.array([[0, 2], [3, 1]]))
    env = parallel_env(num_agents=2, maps=[given], render_mode="rgb_array")
    with pytest.raises(WorldError, match="call reset"):
        env.render()
    env.reset(seed=0)
    frames = [env.render()]
    while env.agents:
        env.step({"agent_0": 4 if len(frames) < 3 else 0, "agent_1": 3})
        frames.append(env.render())
    assert len(frames) == 4
    assert frames[0].shape == (64, 80, 3)
    save_gif(tmp_path / "film.gif", frames, fps=env.metadata["render_fps"])
    with Image.open(tmp_path / "film.gif") as film:
        assert (film.n_frames, film.size) == (4, (80, 64))
    assert parallel_env(num_agents=2).render() is None
    with pytest.raises(ConfigError, match="render_mode='human' must be 'rgb_array' or None"):
        parallel_env(render_mode="human")


def test_without_pettingzoo_one_sentence():
    code = "import sys; sys.modules['pettingzoo'] = None; import steppe.envs.pathfinding.parallel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (
        "MissingExtra: Pathfinding for PettingZoo needs an optional dependency: pip install 'steppe[multiagent]'"
        in done.stderr
    )
