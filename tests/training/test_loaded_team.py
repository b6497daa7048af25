"""A loaded policy for several agents acts as it did in the run's evaluation."""

import numpy as np
import pettingzoo
import pytest

import steppe
from steppe.core.contracts.errors import UsageError
from steppe.envs.toy.teamwork import TeamworkEnv

pytestmark = pytest.mark.integration

SMALL = {"runtime": "inline", "hidden": (16,), "steps": 3_000, "evaluation.every_steps": 10**9}


def test_a_loaded_team_plays_as_in_the_evaluation_of_its_run():
    result = steppe.train(
        "steppe/Teamwork-v0", seed=0, policies="own", target_return=31, **SMALL | {"steps": 30_000, "evaluation.every_steps": 2_000},
        **{"environment.kwargs": {"task": "divide"}, "learning_rate": 3e-3},
    )  # fmt: skip
    team = steppe.load(result.path)
    env, total = TeamworkEnv(task="divide"), 0.0
    seen, _ = env.reset(seed=3)
    while env.agents:
        actions = team.act(seen)
        assert list(actions) == ["agent_0", "agent_1"]
        seen, rewards, *_ = env.step(actions)
        total += sum(rewards.values())
    assert total == pytest.approx(32.0)
    assert result.eval_return_mean == pytest.approx(32.0)
    alone = team.act({"agent_1": 0})
    assert list(alone) == ["agent_1"], "agents may be missing"
    with pytest.raises(UsageError, match="'nobody' is none of the agents"):
        team.act({"nobody": 0})


def test_a_loaded_team_takes_the_observation_of_the_agent_to_move():
    result = steppe.train("pettingzoo.classic.tictactoe_v3", **SMALL | {"steps": 500})
    team, env = steppe.load(result.path), pettingzoo.make("aec", "classic/tictactoe_v3")
    env.reset(seed=0)
    turns = 0
    for agent in env.agent_iter():
        raw, _, terminated, truncated, _ = env.last()
        env.step(None if terminated or truncated else team.act({agent: raw})[agent])
        turns += 1
    assert turns >= 3


def test_sampled_actions_depend_on_the_seed():
    result = steppe.train("pettingzoo.classic.rps_v2", **SMALL | {"steps": 500})
    seen = {"player_0": 0, "player_1": 3}
    plays = [
        [team.act(seen, explore=True) for _ in range(20)]
        for team in (steppe.load(result.path, seed=s) for s in (1, 1, 2))
    ]
    assert plays[0] == plays[1]
    assert plays[0] != plays[2]
    assert all(np.issubdtype(type(action), np.integer) for play in plays[0] for action in play.values())
