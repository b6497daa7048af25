"""The loop's faults and its account of episodes; what it writes is held to the conformance suite."""

import json

import gymnasium as gym
import numpy as np
import pytest

from steppe.core.config import references
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import EnvironmentFault
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.envs import make_segment_env
from steppe.envs.factory import env_seeds
from steppe.envs.toy.builtin import CountingEnv, IdentityEnv
from steppe.testing.env import collect

pytestmark = pytest.mark.unit


def _world(env, num_envs=3, seed=0, **options):
    return make_segment_env(env, EnvConfig(**options), num_envs, np.random.SeedSequence(seed))


def _fault(world, rows=60):
    with pytest.raises(EnvironmentFault) as caught:
        collect(world, rows, 7)
    return caught.value


def _counted_episode(seed, steps):
    """Episode (from 1) and step within it of the given step of a CountingEnv's life."""
    env = CountingEnv()
    env.reset(seed=seed)
    episode = 1
    while steps > (length := CountingEnv.length_of(env.identity, episode - 1)):
        episode, steps = episode + 1, steps - length
    return episode, steps


def test_an_error_in_step_names_its_position():
    fault = _fault(_world("steppe/Failing-v0", kwargs={"at_step": 13}))
    seed = env_seeds(np.random.SeedSequence(0), 3)[0]
    episode, step = _counted_episode(seed, 13)
    details = fault.details
    assert details["env_id"] == "steppe/Failing-v0"
    assert details["env_index"] == 0
    assert details["seed"] == seed
    assert (details["episode"], details["step"]) == (episode, step)
    assert details["last_action"] in (0, 1)
    assert "RuntimeError: this environment was made to fail" in details["traceback"]
    assert "envs/toy/builtin.py" in details["traceback"]
    for part in (
        "steppe/Failing-v0",
        "RuntimeError",
        f"step {step} of episode {episode}",
        "environment 0 of 3",
        str(seed),
    ):
        assert part in str(fault)
    assert "\n" not in str(fault)
    json.dumps(details)


def test_the_environment_that_failed_is_the_one_named():
    made = []

    class Third(CountingEnv):
        def __init__(self):
            super().__init__()
            made.append(self)

        def step(self, action):
            if self is made[2] and self.elapsed == 1:
                raise KeyError("wall")
            return super().step(action)

    fault = _fault(_world(references.make_reference(Third)))
    assert fault.details["env_index"] == 2
    assert fault.details["seed"] == env_seeds(np.random.SeedSequence(0), 3)[2]
    assert (fault.details["episode"], fault.details["step"]) == (1, 2)
    assert isinstance(fault.__cause__, KeyError)


def test_the_fault_can_be_reproduced_from_its_details():
    class Moody(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(1, np.float32), {}

        def step(self, action):
            if self.np_random.random() < 0.05:
                raise RuntimeError("mood")
            return np.zeros(1, np.float32), 0.0, False, False, {}

    fault = _fault(_world(references.make_reference(Moody)), rows=500)
    again = Moody()
    again.reset(seed=fault.details["seed"])
    for _ in range(fault.details["step"] - 1):
        again.step(0)
    with pytest.raises(RuntimeError, match="mood"):
        again.step(fault.details["last_action"])


def test_an_error_in_reset_is_a_fault_too():
    fault = _fault(_world("steppe/Failing-v0", num_envs=1, kwargs={"at_step": 2, "where": "reset"}))
    assert fault.details["step"] == 0
    assert fault.details["episode"] == 2
    assert fault.details["last_action"] is None
    assert "at the reset before episode 2" in str(fault)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ((np.zeros(3, np.float32), 0.0, False, {}), "not enough values"),
        ((np.zeros(2, np.float32), 0.0, False, False, {}), "shape"),
        ((np.zeros(3, np.float32), "much", False, False, {}), "could not convert"),
        (None, "cannot unpack"),
    ],
)
def test_a_result_of_the_wrong_form_is_a_fault(result, words):
    class Odd(CountingEnv):
        def step(self, action):
            return result

    assert words in str(_fault(_world(references.make_reference(Odd))))


def test_an_observation_of_the_wrong_shape_at_reset_is_a_fault():
    class Odd(CountingEnv):
        def reset(self, *, seed=None, options=None):
            return np.float32(3), {}

    assert "has shape (), its space has (3,)" in str(_fault(_world(references.make_reference(Odd))))


def test_box_actions_in_a_fault_are_plain_numbers():
    class Odd(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (1,))
        action_space = gym.spaces.Box(-1, 1, (2,))

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            raise ValueError(f"cannot do {action}")

    last = _fault(_world(references.make_reference(Odd))).details["last_action"]
    assert isinstance(last, list)
    assert all(-1 <= number <= 1 for number in last)
    json.dumps(last)


def test_stopping_is_not_a_fault():
    class Stopped(CountingEnv):
        def step(self, action):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(_world(references.make_reference(Stopped)), 5, 5)


def test_each_copy_is_seeded_once():
    calls = []

    class Watched(IdentityEnv):
        def reset(self, *, seed=None, options=None):
            calls.append(seed)
            return super().reset(seed=seed)

    world = _world(references.make_reference(Watched), num_envs=2, kwargs={"length": 4})
    segment = Segment.blank(SegmentSpec(9, 2, world.spec.obs, world.spec.action.field))
    world.reset(segment["obs"][0])
    for t in range(9):
        world.step(np.zeros(2, np.int64), segment, t)
    world.reset(segment["obs"][0])
    assert calls == [*env_seeds(np.random.SeedSequence(0), 2), None, None, None, None, None, None]


def test_trajectories_of_copies_are_never_mixed():
    journal = collect(_world("steppe/Counting-v0", num_envs=5), 80, 9)
    for index in range(5):
        identity, episode, step = journal["obs"][0, index]
        for t in range(80):
            step += 1
            last = step == CountingEnv.length_of(int(identity), int(episode))
            after = journal["final_obs" if last else "obs"][t if last else t + 1, index]
            np.testing.assert_array_equal(after, [identity, episode, step])
            assert journal["reward"][t, index] == step
            assert journal["terminated"][t, index] == (last and episode % 2 == 0)
            assert journal["truncated"][t, index] == (last and episode % 2 == 1)
            if last:
                episode, step = episode + 1, 0
                np.testing.assert_array_equal(journal["obs"][t + 1, index], [identity, episode, 0])


def test_termination_and_truncation_in_one_step_are_both_kept():
    class Both(CountingEnv):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, True, True, {}

    journal = collect(_world(references.make_reference(Both)), 4, 4)
    assert journal["terminated"].all()
    assert journal["truncated"].all()
    assert journal.finished == [(1.0, 1)] * 12


def test_reset_drops_running_episodes_but_not_finished_ones():
    world = _world("steppe/Identity-v0", num_envs=1, kwargs={"length": 3})
    segment = Segment.blank(SegmentSpec(5, 1, world.spec.obs, world.spec.action.field))
    world.reset(segment["obs"][0])
    for t in range(5):
        world.step(np.zeros(1, np.int64), segment, t)
    world.reset(segment["obs"][0])
    assert [length for _, length in world.take_finished()] == [3]
    assert world.take_finished() == []
    for t in range(3):
        world.step(np.zeros(1, np.int64), segment, t)
    assert [length for _, length in world.take_finished()] == [3]


def test_every_environment_is_closed_even_if_one_cannot():
    closed = []

    class Stubborn(IdentityEnv):
        def close(self):
            closed.append(self)
            if len(closed) == 2:
                raise OSError("busy")

    world = _world(references.make_reference(Stubborn))
    with pytest.raises(OSError, match="busy"):
        world.close()
    assert len(closed) == 3


def test_no_checks_of_gymnasium_remain_on_the_hot_path(monkeypatch):
    stepped = set()

    def watched(kind):
        step = kind.step

        def noted(wrapper, action):
            stepped.add(type(wrapper).__name__)
            return step(wrapper, action)

        return noted

    kinds = [kind for kind in vars(gym.wrappers).values() if isinstance(kind, type) and "step" in vars(kind)]
    for kind in (gym.Wrapper, *kinds):
        monkeypatch.setattr(kind, "step", watched(kind))
    world = _world("CartPole-v1", vector="loop")
    collect(world, 2, 7)
    assert stepped == {"TimeLimit"}
