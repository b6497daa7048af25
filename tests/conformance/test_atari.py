"""The conformance suite of worlds over Atari games, with short episodes: cut by frames, by steps, and by lost lives."""

import numpy as np
import pytest

from steppe.core.config.run import EnvConfig
from steppe.envs import make_segment_env
from steppe.testing.env import WorldConformance

pytestmark = pytest.mark.integration


class _Atari(WorldConformance):
    env = ""
    config = EnvConfig()

    def make_world(self, num_envs, seed):
        return make_segment_env(self.env, self.config, num_envs, np.random.SeedSequence(seed))

    def test_it_resumes_exactly(self):
        world = self.make_world(1, 0)
        world.reset(np.zeros((1, *world.spec.obs.shape), np.uint8))
        assert world.resume_kind == "exact"
        world.close()


class TestPong(_Atari):
    env = "ALE/Pong-v5"
    config = EnvConfig(kwargs={"max_num_frames_per_episode": 70})


@pytest.mark.slow
class TestColouredSpaceInvaders(_Atari):
    env = "ALE/SpaceInvaders-v5"
    config = EnvConfig(grayscale=False, resize=30, frame_stack=2, reward_clip=0, time_limit=17)


@pytest.mark.slow
class TestLivesOfBreakout(_Atari):
    """A ball is lost every 30 steps or so."""

    env = "ALE/Breakout-v5"
    config = EnvConfig(kwargs={"episodic_life": True, "frameskip": 8}, reward_clip=0, resize=24)
    num_rows = 150
