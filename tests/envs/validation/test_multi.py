"""`check` finds each mistake that authors of environments with several agents make, and nothing in sound ones."""

import numpy as np
import pytest
from gymnasium import spaces

from steppe.core.contracts.errors import WorldError
from steppe.envs import check_env, require_valid_env
from tests.support import team_envs

pytestmark = pytest.mark.unit


def _stepping(change, after=2):
    """Visitors whose steps are changed in one place from a certain step on."""

    class Changed(team_envs.Visitors):
        def step(self, actions):
            result = super().step({agent: actions[agent] for agent in self.agents})
            if self.t >= after:
                change(self, result)
            return result

    Changed.__qualname__ = change.__name__
    return Changed


def obs_missing(env, result):
    result[0].pop("zero", None)


def reward_missing(env, result):
    result[1].pop("zero", None)


def end_missing(env, result):
    result[2].pop("zero", None)


def obs_of_a_stranger(env, result):
    result[0]["nobody"] = np.zeros(3, np.float32)


def stranger_in_agents(env, result):
    env.agents = [*env.agents, "nobody"]


def twice_in_agents(env, result):
    env.agents = [*env.agents, *env.agents[:1]]


def agents_a_tuple(env, result):
    env.agents = tuple(env.agents)


def agents_not_updated(env, result):
    result[2]["zero"] = True
    env.agents = list(dict.fromkeys(["zero", *env.agents]))


def left_without_an_end(env, result):
    env.agents = [agent for agent in env.agents if agent != "zero"]
    result[2]["zero"] = result[3]["zero"] = False


def wrong_dtype(env, result):
    result[0]["zero"] = np.zeros(3, np.float64)


def wrong_shape(env, result):
    result[0]["zero"] = np.zeros(2, np.float32)


def not_a_number(env, result):
    result[1]["zero"] = "much"


def not_finite(env, result):
    result[1]["zero"] = float("nan")


def not_a_bool(env, result):
    result[3]["zero"] = 0


def info_none(env, result):
    result[4]["zero"] = None


def mask_too_short(env, result):
    result[4]["zero"] = {"comm_mask": [True, False]}


class OneSpaceForAll(team_envs.Visitors):
    """Spaces as Gymnasium has them."""

    def __init__(self):
        super().__init__()
        self.observation_space = self._box


class SpaceUnknown(team_envs.Visitors):
    def action_space(self, agent):
        return {"zero": self._choice}[agent]


class SpaceIsNone(team_envs.Visitors):
    def observation_space(self, agent):
        return None


class SpaceAnew(team_envs.Visitors):
    def action_space(self, agent):
        self._count = getattr(self, "_count", 2) + 1
        return spaces.Discrete(self._count)


class SpaceWithoutRule(team_envs.Visitors):
    def observation_space(self, agent):
        return spaces.Text(3)


class NobodyAtReset(team_envs.Visitors):
    def reset(self, seed=None, options=None):
        result = super().reset(seed)
        self.agents = []
        return result


class OldReset(team_envs.Visitors):
    def reset(self, seed=None, options=None):
        return super().reset(seed)[0]


class NoSeed(team_envs.Visitors):
    def reset(self):
        return super().reset()


class ResetMissing(team_envs.Visitors):
    def reset(self, seed=None, options=None):
        observations, infos = super().reset(seed)
        del observations["zero"]
        return observations, infos


class OldStep(team_envs.Visitors):
    def step(self, actions):
        obs, rewards, terminated, _, infos = super().step(actions)
        return obs, rewards, terminated, infos


class Unseeded(team_envs.Visitors):
    def reset(self, seed=None, options=None):
        return super().reset(int(np.random.default_rng().integers(2**31)))


class Reviving(team_envs.Visitors):
    """The second visitor comes back after its end."""

    def reset(self, seed=None, options=None):
        result = super().reset(seed)
        self.visits[1], self.gone = [0, 3], False
        if "one" not in self.agents:
            self.agents.append("one")
            result[0].update(self._see(["one"]))
        return result

    def due(self, t):
        due = super().due(t)
        return [*due, "one"] if t >= 5 and "one" not in due else due


@pytest.mark.parametrize(
    "env",
    [
        team_envs.Visitors,
        team_envs.Unlike,
        team_envs.Reaches,
        team_envs.Countdown,
        "steppe/Teamwork-v0",
        "steppe/Pathfinding-v0",
        "pettingzoo.classic.rps_v2",
        "pettingzoo.classic.tictactoe_v3",
        "sisl/pursuit-v5",
    ],
)
def test_sound_environments_pass(env):
    assert check_env(env, steps=60) == []
    require_valid_env(env, steps=20)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (_stepping(obs_missing), "the observations have nothing for 'zero', which was in `agents`"),
        (_stepping(reward_missing), "the rewards have nothing for 'zero', which was in `agents`"),
        (_stepping(end_missing), "the terminations have nothing for 'zero', which was in `agents`"),
        (
            _stepping(obs_of_a_stranger),
            "the observations have something for 'nobody', which is not in `possible_agents`",
        ),
        (_stepping(stranger_in_agents), "'nobody' is in `agents` but not in `possible_agents`"),
        (_stepping(twice_in_agents), "`agents` contains an agent twice"),
        (_stepping(agents_a_tuple), "`agents` must be a list, not ("),
        (_stepping(agents_not_updated), "'zero' is still in `agents` after its episode ended"),
        (_stepping(left_without_an_end), "'zero' left `agents` without having been terminated or truncated"),
        (_stepping(wrong_dtype), "the observation of 'zero' from step() is outside its space"),
        (_stepping(wrong_dtype), "its dtype is float64, not float32"),
        (_stepping(wrong_shape), "its shape is (2,), not (3,)"),
        (_stepping(not_a_number), "the reward of 'zero' must be a number, not 'much'"),
        (_stepping(not_finite), "the reward of 'zero' is nan"),
        (_stepping(not_a_bool), "truncations['zero'] as a bool, not 0"),
        (_stepping(info_none), "a dict as the info of 'zero', not None"),
        (_stepping(mask_too_short), "the comm_mask of 'zero' has shape (2,), not (3,)"),
        (OneSpaceForAll, "observation_space must be a function of the agent, as in observation_space('zero')"),
        (SpaceUnknown, "action_space('one') raised KeyError: 'one'"),
        (SpaceIsNone, "observation_space('zero') must be a gymnasium space, not None"),
        (SpaceAnew, "action_space('zero') is another space at every call"),
        (SpaceWithoutRule, "a Text space"),
        (NobodyAtReset, "`agents` is empty after reset()"),
        (OldReset, "reset() must return (observations, infos), two dicts by agent"),
        (NoSeed, "reset() takes no seed"),
        (ResetMissing, "the observations of reset() have nothing for 'zero'"),
        (OldStep, "step() must return observations, rewards, terminations, truncations, infos"),
        (Unseeded, "two copies with the same seed (0) and the same actions differ"),
        (Reviving, "'one' is again in `agents` after its episode ended"),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_each_mistake_gets_its_sentence(env, words):
    found = check_env(env)
    assert any(words in sentence for sentence in found), found
    with pytest.raises(WorldError) as caught:
        require_valid_env(env)
    assert words in str(caught.value)
