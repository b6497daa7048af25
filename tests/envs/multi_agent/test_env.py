"""Worlds of several agents beyond their suite: limits, scaling, masks, faults, what is refused, and where one goes on."""

import sys

import numpy as np
import pytest
from gymnasium import spaces

from steppe.core.config.references import make_reference
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.env import get_comm_mask, num_rows
from steppe.core.contracts.errors import CannotResume, ConfigError, EnvironmentFault, MissingExtra, WorldError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.io import codec
from steppe.envs import make_segment_env, probe
from steppe.envs.pathfinding.worlds import PathfindingWorlds
from steppe.testing.env import collect
from tests.support import team_envs

pytestmark = pytest.mark.unit

MAZE = "steppe/Pathfinding-v0"


def world_of(env, num_envs=2, seed=0, **config):
    text = env if isinstance(env, str) else make_reference(env)
    return make_segment_env(text, EnvConfig(**config), num_envs, np.random.SeedSequence(seed))


def segment_for(world, num_steps):
    spec = world.spec
    made = SegmentSpec(num_steps, num_rows(world), spec.obs, spec.action.field, num_agents=spec.num_agents)
    return Segment.blank(made)


def test_the_spec_names_agents_and_what_each_has():
    spec = probe("tests.support.team_envs:Visitors", EnvConfig())
    assert (spec.num_agents, spec.agents, spec.members) == (3, ("zero", "one", "two"), ())
    assert (spec.obs.shape, spec.action.sizes) == ((3,), (4,))
    unlike = probe("tests.support.team_envs:Unlike", EnvConfig())
    assert (unlike.obs.shape, unlike.action.sizes) == ((5,), (4,))
    assert [(member.obs.shape, member.action.sizes) for member in unlike.members] == [((3,), (2,)), ((5,), (4,))]
    maze = probe(MAZE, EnvConfig(kwargs={"num_agents": 5, "size": 8}))
    assert (maze.num_agents, maze.obs.shape, maze.obs.dtype, maze.obs.most) == (5, (6, 9, 9), "uint8", 1)
    assert maze.native_vector
    looped = probe(MAZE, EnvConfig(kwargs={"num_agents": 5, "size": 8}, vector="loop"))
    assert (looped.obs, looped.action, looped.agents) == (maze.obs, maze.action, maze.agents)


def test_a_time_limit_truncates_everyone_and_begins_anew():
    world = world_of("tests.support.team_envs:Visitors", time_limit=4)
    journal = collect(world, 12, 5)
    assert {length for _, length in journal.finished} == {4}
    ends = journal.ended.nonzero()[0]
    np.testing.assert_array_equal(ends, [3, 3, 7, 7, 11, 11])
    assert journal["truncated"][3].any()
    assert not (journal["terminated"] & journal["truncated"]).any()


def test_rewards_are_scaled_and_clipped_for_agents_but_not_in_returns():
    plain = collect(world_of("tests.support.team_envs:Visitors"), 40, 7)
    scaled = collect(world_of("tests.support.team_envs:Visitors", reward_scale=0.5, reward_clip=1.0), 40, 7)
    np.testing.assert_array_equal(scaled["reward"], np.clip(plain["reward"] * 0.5, -1, 1))
    assert scaled.finished == plain.finished


def test_frames_of_each_agent_are_joined():
    plain, stacked = (
        collect(world_of("tests.support.team_envs:Visitors"), 40, 7),
        collect(world_of("tests.support.team_envs:Visitors", frame_stack=2), 40, 7),
    )
    for t in range(1, 40):
        for row in range(6):
            if plain["valid"][t, row]:
                before = plain["obs"][t if plain.starts[t, row] else t - 1, row]
                np.testing.assert_array_equal(stacked["obs"][t, row], [*before, *plain["obs"][t, row]])


class Talkers(team_envs.Visitors):
    """Everyone hears itself and the agent before it."""

    def step(self, actions):
        *rest, infos = super().step(actions)
        return *rest, {agent: {"comm_mask": self._heard(agent)} for agent in infos}

    def reset(self, seed=None, options=None):
        seen, infos = super().reset(seed)
        return seen, {agent: {"comm_mask": self._heard(agent)} for agent in infos}

    def _heard(self, agent):
        place = self.possible_agents.index(agent)
        return [other in (place, place - 1) for other in range(3)]


@pytest.mark.parametrize("env", [team_envs.Visitors, Talkers])
def test_who_hears_whom_is_what_infos_say_among_those_who_are_there(env):
    world = world_of(env, 3)
    segment = segment_for(world, 1)
    world.reset(segment["obs"][0])
    rule = np.ones((3, 3), bool) if env is team_envs.Visitors else np.eye(3, dtype=bool) | np.eye(3, k=-1, dtype=bool)
    absent = 0
    for _ in range(30):
        there = world.present.reshape(3, 3).copy()
        expected = rule & there[:, None, :] & there[:, :, None]
        np.testing.assert_array_equal(get_comm_mask(world).reshape(3, 3, 3), expected)
        world.step(np.zeros(9, np.int64), segment, 0)
        np.testing.assert_array_equal(segment["valid"][0].reshape(3, 3), there)
        absent += np.count_nonzero(~there)
    assert absent


def test_pathfinding_says_who_hears_whom_as_the_machine_itself_does():
    world = world_of(MAZE, 4, kwargs={"num_agents": 6, "size": 12})
    machine = PathfindingWorlds(4, 6, size=12)
    segment = segment_for(world, 1)
    world.reset(segment["obs"][0])
    seen = machine.reset(world.seeds[0])
    stream = np.random.default_rng(0)
    for _ in range(50):
        np.testing.assert_array_equal(get_comm_mask(world).reshape(4, 6, 6), seen.comm_mask)
        actions = stream.integers(0, 5, 24)
        world.step(actions, segment, 0)
        seen = machine.step(actions.reshape(4, 6))
        np.testing.assert_array_equal(segment["obs"][1].reshape(seen.obs.shape), seen.obs)


def test_pathfinding_with_fewer_agents_leaves_rows_empty():
    world = world_of(MAZE, 2, kwargs={"num_agents": 4, "size": 6, "density": 0.0, "max_steps": 5})
    segment = segment_for(world, 12)
    world.worlds.assign(num_agents=2, worlds=0)
    world.reset(segment["obs"][0])
    for t in range(12):
        world.step(np.zeros(8, np.int64), segment, t)
    there = np.array([True, True, False, False, True, True, True, True])
    np.testing.assert_array_equal(segment["valid"], np.tile(there, (12, 1)))
    assert not segment["obs"][:, ~there].any()
    assert segment["obs"][:, there].any(axis=(0, 2, 3, 4)).all()
    assert segment.env_steps == 24
    assert segment.num_valid == 12 * 6
    np.testing.assert_array_equal(segment.ended.nonzero()[0], [4, 4, 9, 9])
    shares = world.agent_returns()
    np.testing.assert_array_equal(np.isnan(shares), [[False, False, True, True], [False] * 4] * 2)


def test_a_snapshot_taken_with_fewer_agents_goes_on():
    config = {"kwargs": {"num_agents": 3, "size": 6, "max_steps": 7}}
    one, other = world_of(MAZE, 2, 1, **config), world_of(MAZE, 2, 2, **config)
    first, second = segment_for(one, 20), segment_for(other, 20)
    one.worlds.assign(num_agents=2)
    one.reset(first["obs"][0])
    one.step(np.ones(6, np.int64), first, 0)
    other.restore(codec.unpack(codec.pack(one.snapshot())))
    for t in range(1, 20):
        for world, segment in ((one, first), (other, second)):
            world.step(np.full(6, t % 5), segment, t)
    for name in ("reward", "valid", "terminated", "truncated"):
        np.testing.assert_array_equal(first[name][1:], second[name][1:])
    np.testing.assert_array_equal(first["obs"][2:], second["obs"][2:])
    assert one.take_finished() == other.take_finished()


def test_a_snapshot_with_other_agents_is_refused():
    one = world_of(MAZE, 2, kwargs={"num_agents": 3, "size": 6})
    one.reset(segment_for(one, 1)["obs"][0])
    other = world_of(MAZE, 2, kwargs={"num_agents": 4, "size": 6})
    with pytest.raises(CannotResume):
        other.restore(one.snapshot())


class Opaque(team_envs.Visitors):
    """Holds something that cannot be read."""

    def __init__(self):
        super().__init__()
        self.file = sys.stdout.buffer


def test_an_unreadable_environment_only_resumes_with_new_episodes():
    world = world_of(Opaque)
    assert world.snapshot() is None
    world.reset(segment_for(world, 1)["obs"][0])
    assert world.resume_kind == "episode-boundary"
    assert world.snapshot() is None


def _broken(change):
    class Broken(team_envs.Visitors):
        def step(self, actions):
            result = super().step(actions)
            if self.t == 3:
                change(self, result)
            return result

    return Broken


def _forget_observation(env, result):
    del result[0]["zero"]


def _forget_reward(env, result):
    del result[1]["zero"]


def _stranger(env, result):
    env.agents = [*env.agents, "four"]


def _raise(env, result):
    raise IndexError("off the map")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_forget_observation, "it gave no observation for 'zero', which was among its agents"),
        (_forget_reward, "it gave no reward for 'zero'"),
        (_stranger, "'four' is among `agents` and not among `possible_agents`"),
        (_raise, "IndexError: off the map"),
    ],
)
def test_a_fault_names_agent_step_episode_and_seed(change, words):
    world = world_of(_broken(change))
    segment = segment_for(world, 1)
    world.reset(segment["obs"][0])
    for _ in range(2):
        world.step(np.ones(6, np.int64), segment, 0)
    with pytest.raises(EnvironmentFault) as caught:
        world.step(np.ones(6, np.int64), segment, 0)
    assert words in str(caught.value)
    details = caught.value.details
    assert (details["step"], details["episode"], details["env_index"]) == (3, 1, 0)
    assert details["last_action"] == {"zero": 1, "one": 1, "two": 1}
    env = team_envs.Visitors()
    assert "zero" in env.reset(seed=details["seed"])[0]  # the seed is one that a bare environment takes
    assert str(details["seed"]) in str(caught.value)


class Forgetful(team_envs.Visitors):
    """Leaves agents in the list after their end, as many do."""

    def step(self, actions):
        listed = list(self.agents)
        self.agents = [agent for agent in listed if agent in actions]
        result = super().step(actions)
        self.agents = [*listed, *(agent for agent in self.agents if agent not in listed)]
        return result


def test_agents_left_in_the_list_after_their_end_are_taken_for_gone():
    sound, forgetful = (collect(world_of(env), 40, 7) for env in (team_envs.Visitors, Forgetful))
    for name in ("valid", "obs", "reward", "terminated", "truncated"):
        np.testing.assert_array_equal(sound[name], forgetful[name])


class Numbered(team_envs.Visitors):
    """Observations that are numbers, and a mask of what is allowed."""

    def __init__(self):
        super().__init__()
        self._number = spaces.Discrete(30)

    def observation_space(self, agent):
        return self._number

    def _see(self, agents):
        return {agent: 3 * self.t + self.possible_agents.index(agent) for agent in agents}

    def step(self, actions):
        *rest, infos = super().step(actions)
        return *rest, {agent: {"action_mask": [True, self.t % 2 == 0, True, False]} for agent in infos}


def test_numbered_states_of_several_agents_have_masks():
    world = world_of(Numbered, 1, observations="index")
    segment = segment_for(world, 9)
    world.reset(segment["obs"][0])
    assert world.spec.num_states == 30
    assert world.masks.all()
    for t in range(3):
        world.step(np.zeros(3, np.int64), segment, t)
        for row in np.flatnonzero(world.present):
            assert segment["obs"][t + 1, row] == 3 * (t + 1) + row
            np.testing.assert_array_equal(world.masks[row], [True, (t + 1) % 2 == 0, True, False])


class NoAgents(team_envs.Visitors):
    def __init__(self):
        super().__init__()
        del self.possible_agents


class Twins(team_envs.Visitors):
    def __init__(self):
        super().__init__()
        self.possible_agents = [1, "1"]


class MixedKinds(team_envs.Unlike):
    def action_space(self, agent):
        return spaces.Discrete(2) if agent == "tall" else spaces.Box(-1, 1, (2,))


class MixedImages(team_envs.Unlike):
    def observation_space(self, agent):
        return spaces.Box(0, 255, (8, 8, 3) if agent == "tall" else (9, 9, 3), np.uint8)


class NoSpace(team_envs.Unlike):
    def action_space(self, agent):
        return None


@pytest.mark.parametrize(
    ("env", "config", "words"),
    [
        (NoAgents, {}, "has no possible_agents: every agent that may ever come needs a row of its own"),
        (Twins, {}, "two agents of the same name"),
        (MixedKinds, {}, "choose in different ways (box, discrete)"),
        (MixedImages, {}, "images that differ in size"),
        (NoSpace, {}, "action_space('tall') is a NoneType, not a gymnasium space"),
        (team_envs.Unlike, {"frame_stack": 2}, "frame_stack is for agents that observe alike"),
        (team_envs.Visitors, {"observations": "index"}, "a table needs numbered states"),
        (team_envs.Visitors, {"vector": "native"}, "it comes from a function"),
        ("pettingzoo.sisl.pursuit_v3", {}, "Did you mean 'pettingzoo.sisl.pursuit_v5'?"),
        ("pettingzoo.mpe.simple_v3", {}, "MPE2"),
        ("os.path", {}, "has neither parallel_env nor env"),
        ("butterfly/no_such-v1", {}, "there is no environment 'butterfly/no_such-v1'"),
        (MAZE, {"kwargs": {"view": 4}}, "view=4 must be odd"),
        (MAZE, {"kwargs": {"sise": 4}}, "sise"),
        (MAZE, {"vector": "native", "frame_stack": 2}, "frame_stack"),
        ("steppe/Teamwork-v0", {"kwargs": {"task": "sleep"}}, "task='sleep' must be one of agree, divide"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(env, config, words):
    with pytest.raises((WorldError, ConfigError)) as caught:
        world_of(env, **config)
    assert words in str(caught.value)


def test_without_pettingzoo_its_environments_ask_for_it(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "pettingzoo" else real(name, *a))
    with pytest.raises(MissingExtra, match=r"steppe\[multiagent\]"):
        probe("pettingzoo.sisl.pursuit_v5", EnvConfig())
