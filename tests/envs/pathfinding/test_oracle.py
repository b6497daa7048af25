"""The compiled worlds against the slow one, step by step; STEPPE_PATHFINDING_STEPS makes the walk longer."""

import os
from collections import Counter

import numpy as np
import pytest

from steppe.envs.pathfinding.worlds import PathfindingWorlds, greedy_walk
from tests.support.pathfinding_oracle import SlowWorld, distances

pytestmark = pytest.mark.unit
STEPS = int(os.environ.get("STEPPE_PATHFINDING_STEPS", "4000"))
CASES = [  # worlds, agents, size, density, share of all steps
    (3, 1, 10, None, 0.1),
    (4, 4, 10, 0.3, 0.2),
    (3, 16, 10, None, 0.2),
    (2, 16, (5, 9), 0.1, 0.2),
    (2, 30, (40, 11), 0.3, 0.1),
    (2, 64, 10, 0.2, 0.15),
    (2, 64, 40, 0.3, 0.05),
]


def slow_copy(worlds, b):
    """The slow world of what has just begun, which is checked to be a fair beginning."""
    slow = SlowWorld(worlds.obstacles(b), worlds.positions(b), worlds.goals(b), worlds.view // 2)
    assert len(set(slow.at)) == len(set(slow.goals)) == len(slow.at)
    assert all(start != goal for start, goal in zip(slow.at, slow.goals, strict=True))
    assert all(start in known for start, known in zip(slow.at, slow.distances, strict=True))
    return slow


def assert_same(obs, mask, slow):
    n = len(slow.at)
    np.testing.assert_array_equal(obs[:n], slow.observe())
    np.testing.assert_array_equal(mask[:n, :n], slow.hears())
    assert not obs[n:].any()
    assert not mask[n:].any()
    assert not mask[:, n:].any()


def walk(worlds, steps, stream, counts):
    """Follow every world with a slow one, by actions between wild and greedy; how many world steps were compared."""
    output = worlds.reset(int(stream.integers(2**31)))
    slow = [slow_copy(worlds, b) for b in range(worlds.num_worlds)]
    taken = 0
    while taken < steps:
        wildness = (0.1, 0.5, 1.0)[int(stream.integers(3))]
        actions = greedy_walk(output.obs, stream, wildness)
        output = worlds.step(actions)
        for b, world in enumerate(slow):
            n = len(world.at)
            rewards, arrived = world.step(actions[b, :n].tolist())
            assert output.rewards[b, :n].tolist() == np.array(rewards, np.float32).tolist()
            assert not output.rewards[b, n:].any()
            assert bool(output.terminated[b]) == arrived
            assert bool(output.truncated[b]) == (not arrived and world.steps >= worlds.max_steps)
            if output.terminated[b] or output.truncated[b]:
                assert_same(output.final_obs[b], output.final_mask[b], world)
                counts.update(world.met, arrived=int(arrived), truncated=int(not arrived))
                slow[b] = world = slow_copy(worlds, b)
            assert worlds.positions(b).tolist() == [list(cell) for cell in world.at]
            assert_same(output.obs[b], output.comm_mask[b], world)
            taken += 1
    for world in slow:
        counts.update(world.met)
    return taken


@pytest.mark.slow
def test_worlds_equal_the_slow_reference():
    counts, taken = Counter(), 0
    for index, (num_worlds, num_agents, size, density, share) in enumerate(CASES):
        worlds = PathfindingWorlds(num_worlds, num_agents, size=size, density=density, max_steps=60)
        taken += walk(worlds, STEPS * share, np.random.default_rng(index), counts)
    assert taken >= STEPS
    for kind in ("blocked", "swap", "stood on", "crowd", "chain", "followed", "arrived", "truncated"):
        assert counts[kind] > STEPS / 1000, (kind, counts)


@pytest.mark.parametrize("view", [3, 5, 11])
def test_other_views(view):
    worlds = PathfindingWorlds(2, 12, size=14, density=0.25, view=view, max_steps=30)
    assert worlds.output.obs.shape == (2, 12, 6, view, view)
    walk(worlds, 200, np.random.default_rng(view), Counter())


def test_fewer_agents_and_smaller_maps_from_the_next_episode_on():
    worlds = PathfindingWorlds(3, 10, size=12, density=0.2, max_steps=20)
    stream = np.random.default_rng(0)
    walk(worlds, 30, stream, Counter())
    assert worlds.agents.tolist() == [10, 10, 10]
    worlds.assign(4, (6, 9), worlds=1)
    assert worlds.agents.tolist() == [10, 10, 10]
    walk(worlds, 200, stream, Counter())
    assert worlds.agents.tolist() == [10, 4, 10]
    assert [worlds.obstacles(b).shape for b in range(3)] == [(12, 12), (6, 9), (12, 12)]


def test_every_free_cell_may_have_an_agent():
    """As many agents as cells: a permutation, in which nobody's goal is its start."""
    worlds = PathfindingWorlds(20, 12, size=(3, 4), density=0.0)
    worlds.reset(1)
    for b in range(20):
        slow = slow_copy(worlds, b)
        assert len(slow.free) == 12
        assert distances(slow.free, slow.at[0])[slow.goals[0]] > 0


def test_progress_is_the_ground_gained():
    worlds = PathfindingWorlds(3, 12, size=10, density=0.2, max_steps=40, progress=0.25)
    stream, gained = np.random.default_rng(3), Counter()
    output = worlds.reset(3)
    slow = [slow_copy(worlds, b) for b in range(3)]
    for _ in range(300):
        actions = greedy_walk(output.obs, stream, 0.4)
        output = worlds.step(actions)
        for b, world in enumerate(slow):
            before = [known[at] for known, at in zip(world.distances, world.at, strict=True)]
            rewards, _ = world.step(actions[b].tolist())
            nearer = [was - known[at] for was, known, at in zip(before, world.distances, world.at, strict=True)]
            expected = np.array(rewards, np.float32) + np.float32(0.25) * np.array(nearer, np.float32)
            np.testing.assert_array_equal(output.rewards[b], expected)
            gained.update(nearer)
            if output.terminated[b] or output.truncated[b]:
                slow[b] = slow_copy(worlds, b)
    assert min(gained[-1], gained[0], gained[1]) > 100
