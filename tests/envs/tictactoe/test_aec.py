"""TicTacToe for PettingZoo: its own test of the interface, and the rewards of both sides."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its test module imports its own games in the old way
    from pettingzoo.test import api_test, seed_test

from steppe.core.contracts.errors import ConfigError
from steppe.envs.tictactoe.aec import TicTacToeAEC, env

pytestmark = pytest.mark.unit


# It advises everybody but its own games against observations with a mask, and against plain numbers, which tables take.
@pytest.mark.filterwarnings("ignore:Observation is not a NumPy array", "ignore:Observation space for each agent prob")
def test_pettingzoos_tests_pass(capsys):
    api_test(env(), num_cycles=300, verbose_progress=False)
    api_test(TicTacToeAEC(), num_cycles=300, verbose_progress=False)
    seed_test(env, num_cycles=50)
    assert "Passed" in capsys.readouterr().out


def play(moves):
    world = env()
    world.reset(seed=0)
    gained = {"player_1": 0.0, "player_2": 0.0}
    for move in moves:
        agent = world.agent_selection
        world.step(move)
        for name, reward in world.unwrapped.rewards.items():
            gained[name] += reward
    for agent in world.agent_iter():
        _, total, terminated, _, _ = world.last()
        assert terminated
        assert total == gained[agent]
        world.step(None)
    return gained


def test_rewards_are_zero_sum():
    assert play([0, 3, 1, 4, 2]) == {"player_1": 1.0, "player_2": -1.0}
    assert play([8, 0, 3, 1, 4, 2]) == {"player_1": -1.0, "player_2": 1.0}
    assert play([0, 1, 2, 4, 3, 5, 7, 6, 8]) == {"player_1": 0.0, "player_2": 0.0}
    assert play([0, 0]) == {"player_1": 1.0, "player_2": -1.0}


def test_each_sees_the_board_and_only_the_mover_may_move():
    world = TicTacToeAEC("ansi")
    world.reset()
    world.step(4)
    assert world.agent_selection == "player_2"
    observation = world.observe("player_2")
    assert observation["observation"] == 3**4
    assert observation["action_mask"].tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 1]
    assert not world.observe("player_1")["action_mask"].any()
    assert world.observation_space("player_1").contains(world.observe("player_1"))
    assert world.render() == ". . .\n. X .\n. . ."
    with pytest.raises(ConfigError, match="player_2 is to move"):
        world.step(None)
    assert np.asarray(list(world.rewards.values())).sum() == 0


def test_without_pettingzoo_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['pettingzoo'] = None\n"
        "from steppe.core.contracts.errors import MissingExtra\n"
        "try:\n    import steppe.envs.tictactoe.aec\n"
        "except MissingExtra as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("pip install 'steppe[multiagent]'")
