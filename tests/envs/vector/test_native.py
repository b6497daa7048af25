"""The native world's faults and refusals; its rows are held to the conformance suite."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode

from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import EnvironmentFault, WorldError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.envs import make_segment_env, probe
from steppe.testing.env import collect

pytestmark = pytest.mark.unit


class SameStep(CartPoleVectorEnv):
    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012


class Grid(CartPoleVectorEnv):
    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.single_observation_space = gym.spaces.Discrete(4)


class Falling(CartPoleVectorEnv):
    def step(self, action):
        if self.steps[0] == 3:
            raise RuntimeError("fell over")
        return super().step(action)


@pytest.fixture
def registered(request):
    gym.register(
        "Odd/Pole-v0",
        "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        vector_entry_point=request.param,
        max_episode_steps=9,
    )
    yield "Odd/Pole-v0"
    gym.registry.pop("Odd/Pole-v0")


@pytest.mark.parametrize(
    ("registered", "words"), [(SameStep, "not on the next step"), (Grid, "not a plain vector")], indirect=["registered"]
)
def test_an_unexpected_vector_version_is_refused_and_auto_takes_the_loop(registered, words):
    with pytest.raises(WorldError, match=words):
        probe(registered, EnvConfig(vector="native"))
    assert not probe(registered, EnvConfig()).native_vector


@pytest.mark.parametrize("registered", [Falling], indirect=True)
def test_an_error_is_a_fault_with_the_one_seed(registered):
    world = make_segment_env(registered, EnvConfig(), 2, np.random.SeedSequence(4))
    assert world.spec.native_vector
    with pytest.raises(
        EnvironmentFault, match="vector version of Odd/Pole-v0 raised RuntimeError: fell over"
    ) as caught:
        collect(world, 9, 9)
    details = caught.value.details
    assert details["step"] == 4
    assert details["seed"] == int(np.random.SeedSequence(4).spawn(1)[0].generate_state(1)[0]) // 2
    assert len(details["last_action"]) == 2
    assert "fell over" in details["traceback"]


def test_a_step_that_ends_and_the_reset_row_after_it():
    world = make_segment_env("CartPole-v1", EnvConfig(vector="native", time_limit=3), 1, np.random.SeedSequence(0))
    journal = collect(world, 9, 2)
    np.testing.assert_array_equal(journal["valid"][:, 0], [1, 1, 1, 0, 1, 1, 1, 0, 1])
    np.testing.assert_array_equal(journal["truncated"][:, 0], [0, 0, 1, 0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(journal["reward"][:, 0], [1, 1, 1, 0, 1, 1, 1, 0, 1])
    np.testing.assert_array_equal(journal.starts[:, 0], [1, 0, 0, 0, 1, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(journal["final_obs"][2, 0], journal["obs"][3, 0])
    assert (np.abs(journal["obs"][[0, 4, 8], 0]) <= 0.05).all()  # where CartPole begins
    assert journal.finished == [(3.0, 3), (3.0, 3)]
    assert journal.unfinished == [(1.0, 1)]


def test_reset_forgets_that_an_episode_had_just_ended():
    world = make_segment_env("CartPole-v1", EnvConfig(vector="native", time_limit=3), 1, np.random.SeedSequence(0))
    segment = Segment.blank(SegmentSpec(3, 1, world.spec.obs, world.spec.action.field))
    world.reset(segment["obs"][0])
    for t in range(3):
        world.step(np.zeros(1, np.int64), segment, t)
    assert segment["truncated"][2, 0]
    world.reset(segment["obs"][0])
    world.step(np.zeros(1, np.int64), segment, 0)
    assert segment["valid"][0, 0]
    assert segment["reward"][0, 0] == 1.0
    world.close()
