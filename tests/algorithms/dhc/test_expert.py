"""Which moves an observation advises, on small pictures."""

import numpy as np
import pytest

from steppe.algorithms.dhc.expert import expert_action_mask
from steppe.envs.pathfinding.expert import greedy_walk

pytestmark = pytest.mark.unit
STAY, UP, DOWN, LEFT, RIGHT = range(5)
CELLS = {UP: (3, 4), DOWN: (5, 4), LEFT: (4, 3), RIGHT: (4, 5)}


def seen(nearer=(), others=(), walls=()):
    """What an agent sees that stands in the middle: which moves lead nearer, and who and what is beside it."""
    obs = np.zeros((6, 9, 9), np.uint8)
    for move in nearer:
        obs[1 + move, 4, 4] = 1
    for plane, moves in enumerate((others, walls)):
        for move in moves:
            obs[plane][CELLS[move]] = 1
    return obs


@pytest.mark.parametrize(
    ("obs", "wanted"),
    [
        (seen(nearer=[UP, LEFT]), {UP, LEFT}),
        (seen(nearer=[RIGHT], walls=[UP]), {RIGHT}),
        (seen(), {STAY}),
        (seen(walls=[UP, DOWN, LEFT, RIGHT]), {STAY}),
        (seen(nearer=[RIGHT], others=[RIGHT], walls=[UP]), {RIGHT, DOWN, LEFT}),
        (seen(nearer=[RIGHT], others=[LEFT]), {RIGHT, UP, DOWN}),
        (seen(others=[UP]), {DOWN, LEFT, RIGHT}),
        (seen(others=[UP], walls=[DOWN, LEFT, RIGHT]), {STAY}),
        (seen(nearer=[UP], others=[UP], walls=[DOWN, LEFT, RIGHT]), {UP}),
    ],
    ids=[
        "nearer",
        "one way",
        "at the goal",
        "walled in",
        "blocked",
        "followed",
        "in the way",
        "stuck",
        "blocked in a lane",
    ],
)
def test_moves_that_are_advised(obs, wanted):
    assert set(np.flatnonzero(expert_action_mask(obs)).tolist()) == wanted
    many = np.broadcast_to(obs, (2, 3, 6, 9, 9))
    np.testing.assert_array_equal(expert_action_mask(many), np.broadcast_to(expert_action_mask(obs), (2, 3, 5)))


def test_somebody_further_away_is_not_beside():
    obs = seen(nearer=[UP])
    obs[0, 2, 4] = obs[0, 3, 3] = 1
    assert np.flatnonzero(expert_action_mask(obs)).tolist() == [UP]


def test_the_walker_takes_moves_that_lead_nearer_whoever_is_there():
    stream = np.random.default_rng(0)
    obs = np.broadcast_to(seen(nearer=[UP, LEFT], others=[UP]), (1, 4_000, 6, 9, 9))
    counts = np.bincount(greedy_walk(obs, stream)[0], minlength=5) / 4_000
    assert counts == pytest.approx([0.02, 0.47, 0.02, 0.47, 0.02], abs=0.03)
