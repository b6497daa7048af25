"""The conformance suite of worlds with several agents: real PettingZoo environments beside bare ones, and the house's own."""

from typing import ClassVar

import gymnasium as gym
import numpy as np
import pettingzoo
import pytest
from pettingzoo.utils import conversions

from steppe.core.config.run import EnvConfig
from steppe.envs import make_segment_env
from steppe.envs.pathfinding.parallel import PathfindingParallel
from steppe.envs.toy.teamwork import TeamworkEnv
from steppe.testing.env import collect
from steppe.testing.team import TeamConformance
from tests.support import team_envs

pytestmark = pytest.mark.integration


def number(*keys):
    """The 31-bit number at the end of a path of spawned seed sequences, as NumPy documents them."""
    entropy, *path = keys
    return int(np.random.SeedSequence(entropy, spawn_key=tuple(path)).generate_state(1, np.uint32)[0] >> 1)


def seed_of(seed, index):
    """What the world seeds episode k of its environment `index` with."""
    return lambda episode: number(number(seed, index), episode)


class _Loop(TeamConformance):
    env = ""
    kwargs: ClassVar = {}

    def make_world(self, num_envs, seed):
        return make_segment_env(
            self.env, EnvConfig(vector="loop", kwargs=self.kwargs), num_envs, np.random.SeedSequence(seed)
        )

    def make_plain(self):
        return pettingzoo.make("parallel", self.env.removeprefix("pettingzoo.").replace(".", "/"), **self.kwargs)

    def team_references(self, num_envs, seed):
        return [(self.make_plain(), seed_of(seed, index)) for index in range(num_envs)]


class TestRockPaperScissors(_Loop):
    env = "pettingzoo.classic.rps_v2"
    seed_matters = False

    def team_row(self, agent, raw):
        return np.eye(4)[int(raw)]


class TestPursuit(_Loop):
    env = "pettingzoo.sisl.pursuit_v5"
    kwargs: ClassVar = {"max_cycles": 12, "x_size": 8, "y_size": 8, "n_pursuers": 3, "n_evaders": 2}


class TestKnightsAndArchers(_Loop):
    """Knights and archers fall one by one."""

    env = "pettingzoo.butterfly.knights_archers_zombies_v11"
    kwargs: ClassVar = {"max_cycles": 150, "spawn_delay": 3, "max_zombies": 20, "line_death": True}
    num_envs, num_rows = 2, 320

    def test_some_fall_before_the_others(self):
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 40)
        assert not journal["valid"].all()


class TestById(TestRockPaperScissors):
    env = "classic/rps_v2"

    def make_plain(self):
        return pettingzoo.make("parallel", "classic/rps_v2")


class TestParallelizedAEC(TestRockPaperScissors):
    """The same game from its AEC side, which says that it can be played all at once."""

    env = "pettingzoo.classic.rps.rps:env"

    def make_plain(self):
        return pettingzoo.make("parallel", "classic/rps_v2")


class TestVisitors(_Loop):
    env = "tests.support.team_envs:Visitors"
    make_plain = team_envs.Visitors

    def test_agents_may_appear_late_and_leave_early(self):
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        starts, begins = journal.starts[:-1], journal.starts.reshape(-1, 3, 3)[:-1]
        assert (starts & journal["valid"]).sum() == starts.sum()
        assert (begins.any(axis=2) & ~begins[:, :, 0]).any(), "nobody came while another was there"
        cut = (journal["terminated"] | journal["truncated"]).reshape(-1, 3, 3)
        assert (cut.any(axis=2) & ~journal.ended).any(), "nobody left while another stayed"


class TestTeamwork(_Loop):
    env = "steppe/Teamwork-v0"
    kwargs: ClassVar = {"num_agents": 3, "length": 7}

    def make_plain(self):
        return TeamworkEnv(**self.kwargs)

    def team_row(self, agent, raw):
        return np.eye(3)[raw]


class TestUnlikeAgents(_Loop):
    env = "tests.support.team_envs:Unlike"
    make_plain = team_envs.Unlike

    def make_world(self, num_envs, seed):
        return _Folded(super().make_world(num_envs, seed))

    def team_action(self, agent, action):
        return int(action) % team_envs.Unlike.sizes[agent][1]


class TestUnlikeBoxes(_Loop):
    env = "tests.support.team_envs:Reaches"
    make_plain = team_envs.Reaches
    seed_matters = False

    def team_action(self, agent, action):
        low, shape = (-1, (1,)) if agent == "short" else (-2, (2, 2))
        return np.clip(action[: np.prod(shape)].reshape(shape), low, -low)


class TestPathfindingLoop(_Loop):
    env = "steppe/Pathfinding-v0"
    kwargs: ClassVar = {"num_agents": 3, "size": 5, "density": 0.1, "max_steps": 20}
    num_rows = 90

    def make_plain(self):
        return PathfindingParallel(**self.kwargs)


class TestPathfindingCompiled(TeamConformance):
    num_rows = 90

    def make_world(self, num_envs, seed):
        config = EnvConfig(vector="native", kwargs={"num_agents": 3, "size": 5, "density": 0.1, "max_steps": 20})
        return make_segment_env("steppe/Pathfinding-v0", config, num_envs, np.random.SeedSequence(seed))

    def test_rows_are_what_gymnasiums_vector_gives(self):
        """Also whom each agent hears, which the actor writes beside them."""
        journal = collect(self.make_world(4, 2), self.num_rows, 7)
        vector = gym.make_vec("steppe/Pathfinding-v0", 4, num_agents=3, size=5, density=0.1, max_episode_steps=20)
        observations, info = vector.reset(seed=number(2, 0))
        ended = 0
        for t in range(self.num_rows):
            np.testing.assert_array_equal(journal["obs"][t], observations.reshape(12, *observations.shape[2:]))
            observations, rewards, terminated, truncated, info = vector.step(journal["action"][t].reshape(4, 3))
            np.testing.assert_array_equal(journal["reward"][t], rewards.ravel())
            np.testing.assert_array_equal(journal["terminated"][t], np.repeat(terminated, 3))
            np.testing.assert_array_equal(journal["truncated"][t], np.repeat(truncated, 3))
            for world in np.flatnonzero(terminated | truncated):
                last = journal["final_obs"][t].reshape(4, 3, *observations.shape[2:])[world]
                np.testing.assert_array_equal(last, info["final_obs"][world])
                ended += 1
        assert ended > 8
        assert journal["valid"].all()


class _Turns(TeamConformance):
    """AEC environments against a loop over `agent_iter` and `last`, which never asks for rewards of others' turns."""

    env = ""
    num_envs, num_rows = 2, 60
    seed_matters = True

    def make_world(self, num_envs, seed):
        return make_segment_env(self.env, EnvConfig(), num_envs, np.random.SeedSequence(seed))

    def make_plain(self):
        raise NotImplementedError

    def flat(self, raw):
        return np.asarray(raw, np.float32).ravel()

    def test_turns_are_what_agent_iter_gives(self):
        journal = collect(self.make_world(self.num_envs, 9), self.num_rows, 7)
        for index in range(self.num_envs):
            env, t, episode = self.make_plain(), 0, 0
            while t < self.num_rows:
                env.reset(seed=seed_of(9, index)(episode))
                t, episode = self._play(env, journal, index, t), episode + 1
            assert episode > 1

    def _play(self, env, journal, index, t):
        rows = {agent: index * journal.num_agents + a for a, agent in enumerate(env.possible_agents)}
        paid = dict.fromkeys(rows, 0.0)  # by the rows, since an agent's own last turn
        for agent in env.agent_iter():
            raw, reward, terminated, truncated, _ = env.last()
            if t >= self.num_rows:
                return t
            if terminated or truncated:
                row = rows[agent]
                end = t - 1 - np.argmax((journal["terminated"] | journal["truncated"])[:t, row][::-1])
                assert journal["terminated"][end, row] == terminated
                assert journal["truncated"][end, row] == truncated
                assert paid[agent] == pytest.approx(reward)
                env.step(None)
                continue
            np.testing.assert_array_equal(journal["obs"][t, rows[agent]], [*self.flat(raw), 1.0])
            assert paid[agent] == pytest.approx(reward)
            for other in env.agents:
                if other != agent and journal["valid"][t, rows[other]]:
                    np.testing.assert_array_equal(journal["obs"][t, rows[other]], [*self.flat(env.observe(other)), 0.0])
            paid[agent] = 0.0
            env.step(int(journal["action"][t, rows[agent]]))
            for other, row in rows.items():
                paid[other] += float(journal["reward"][t, row])
            t += 1
        return t


class TestTicTacToe(_Turns):
    env = "pettingzoo.classic.tictactoe_v3"
    seed_matters = False

    def make_plain(self):
        return pettingzoo.make("aec", "classic/tictactoe_v3")

    def flat(self, raw):
        return np.concatenate([raw["action_mask"], raw["observation"].ravel()])


class TestCountdown(_Turns):
    env = "tests.support.team_envs:Countdown"
    make_plain = team_envs.Countdown


class TestPettingZoosOwnConversion(TestVisitors):
    """What went to AEC and back is stepped as it was."""

    env = "tests.envs.multi_agent.test_conformance:_there_and_back"


def _there_and_back():
    return conversions.parallel_to_aec(team_envs.Visitors())


class _Folded:
    """A world that is told actions beyond an agent's own choices, folded back into them: random actions are as wide as the
    widest agent's."""

    def __init__(self, world):
        self._world = world

    def step(self, actions, segment, t):
        counts = np.tile([count for _, count in team_envs.Unlike.sizes.values()], self._world.num_envs)
        self._world.step(actions % counts, segment, t)

    def __getattr__(self, name):
        return getattr(self._world, name)
