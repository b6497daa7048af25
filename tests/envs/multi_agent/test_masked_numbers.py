"""PettingZoo's Dicts of observation and action mask as numbered states: tictactoe_v3 with a table."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

import steppe
from steppe.envs.multi_agent.masked_numbers import MaskedStateIndexer

DICT = spaces.Dict({"observation": spaces.Box(0, 2, (2, 2), np.int8), "action_mask": spaces.Box(0, 1, (3,), np.int8)})


def test_every_observation_has_a_number_of_its_own() -> None:
    numbers = MaskedStateIndexer.of(DICT)
    assert numbers is not None
    assert numbers.space.n == 81
    found = {numbers.number({"observation": np.array(np.unravel_index(k, (3, 3, 3, 3)))}) for k in range(81)}
    assert found == set(range(81))
    with pytest.raises(ValueError, match="not within its space's bounds"):
        numbers.number({"observation": np.full((2, 2), 3)})
    assert numbers.mask({"action_mask": [0, 1, 0]}).tolist() == [False, True, False]
    assert numbers.mask({"action_mask": [0, 0, 0]}).tolist() == [True, True, True]


def test_other_spaces_have_none() -> None:
    wide = spaces.Dict({"observation": spaces.Box(0, 255, (9,), np.uint8), "action_mask": spaces.MultiBinary(3)})
    real = spaces.Dict({"observation": spaces.Box(0, 1, (2,)), "action_mask": spaces.MultiBinary(3)})
    assert [MaskedStateIndexer.of(space) for space in (wide, real, spaces.Discrete(3))] == [None, None, None]


@pytest.mark.integration
def test_tictactoe_of_pettingzoo_is_learned_in_a_table() -> None:
    tictactoe_v3 = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    result = steppe.train(
        tictactoe_v3.env, algo="q-learning", steps=2_000, runtime="inline", **{"evaluation.episodes": 4}
    )
    assert result.state == "SUCCEEDED"
    steps = steppe.DistributedEnvironment(tictactoe_v3.env, 1, runtime="inline")
    agent = steppe.DistributedAgent("q-learning", seed=0).bind(steps)
    assert steps.spec.num_states == 2**18
    played = steps.generate_experiences(agent, 20)
    lengths = {step["episode"]: 0 for step in played}
    for step in played:
        lengths[step["episode"]] += 1
    assert min(lengths.values()) >= 5, "an illegal move would have ended a game before the fifth turn"
    steps.shutdown()
