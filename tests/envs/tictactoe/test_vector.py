"""The compiled games against single environments and against chance as it should be."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from steppe.core.contracts.errors import ConfigError
from steppe.core.system.random_words import popcount, random_below, splitmix64
from steppe.envs.registry import register_builtins
from steppe.envs.tictactoe.env import TicTacToeEnv, tictactoe
from steppe.envs.tictactoe.kernels import random_move
from steppe.envs.tictactoe.rules import exact_return
from steppe.envs.tictactoe.vector import TicTacToeVectorEnv

pytestmark = pytest.mark.unit
NEXT, SAME = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP


def choose(masks, stream):
    """A legal move for each game; anything where there is none."""
    draws = stream.random(masks.shape) * masks
    return draws.argmax(axis=1)


@pytest.mark.parametrize("mode", [NEXT, SAME])
@pytest.mark.parametrize("illegal", [0.0, 0.1])
def test_both_seats_are_stepped_like_single_environments(mode, illegal):
    """Without an opponent nothing is left to chance: twelve single environments follow every step."""
    many = TicTacToeVectorEnv(12, opponent="self", autoreset_mode=mode)
    singles = [TicTacToeEnv() for _ in range(12)]
    stream, ended = np.random.default_rng(0), np.zeros(12, bool)
    seen, info = many.reset(seed=0)
    assert seen.tolist() == [env.reset()[0] for env in singles]
    for _ in range(120):
        actions = np.where(
            stream.random(12) < illegal, stream.integers(-1, 11, 12), choose(info["action_mask"], stream)
        )
        seen, rewards, terminated, truncated, info = many.step(actions)
        assert not truncated.any()
        for b, env in enumerate(singles):
            if mode == NEXT and ended[b]:
                assert (seen[b], rewards[b], terminated[b]) == (env.reset()[0], 0.0, False)
                continue
            board, reward, over, _, told = env.step(actions[b])
            assert (rewards[b], terminated[b]) == (reward, over)
            assert bool(info.get("invalid_move", np.zeros(12))[b]) == bool(told.get("invalid_move"))
            if mode == SAME and over:
                assert info["final_obs"][b] == board
                assert info["_final_obs"][b]
                board = env.reset()[0]
            assert seen[b] == board
            if not (over and mode == NEXT):
                assert info["action_mask"][b].tolist() == (env.board == 0).tolist()
                assert info["current_player"][b] == env.current_player
        ended = terminated


@pytest.mark.parametrize("opponent", ["random", "perfect"])
@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_games_end_as_they_should_on_average(opponent, mode):
    """Random moves in 30,000 games: within four standard errors of the exact mean over both seats."""
    env = TicTacToeVectorEnv(500, opponent=opponent, autoreset_mode=mode)
    stream, results = np.random.default_rng(1), []
    _, info = env.reset(seed=2)
    while len(results) < 30_000:
        _, rewards, terminated, _, info = env.step(choose(info["action_mask"], stream))
        results += rewards[terminated].tolist()
    exact = np.mean(exact_return(tictactoe(), "random", opponent))
    # Short games end first: the few that are still under way make hardly a difference in 60 games each.
    assert abs(np.mean(results) - exact) < 4 * np.std(results) / 30_000**0.5 + 0.005


def test_replies_and_openings_are_fair():
    env = TicTacToeVectorEnv(90_000, opponent="random", opening_moves=1)
    boards, _ = env.reset(seed=0)
    stones = (boards[:, None] // 3 ** np.arange(9) % 3 > 0).sum(axis=1)
    # Seat first or second × an opening of 0 or 1 moves: 0, 1, 1 and 2 stones are seen with equal chance.
    np.testing.assert_allclose(np.bincount(stones) / 90_000, [0.25, 0.5, 0.25], atol=0.01)
    firsts = boards[stones == 1]
    np.testing.assert_allclose(np.unique(firsts, return_counts=True)[1] / len(firsts), 1 / 9, atol=0.01)


def test_a_reset_without_a_seed_goes_on_and_with_one_repeats():
    env = TicTacToeVectorEnv(50, opponent="random")
    first = env.reset(seed=5)[0].tolist()
    assert env.reset()[0].tolist() != first
    assert env.reset(seed=5)[0].tolist() == first


def test_gymnasium_makes_it_by_name():
    register_builtins()
    env = gym.make_vec("steppe/TicTacToe-v0", 3, "vector_entry_point", opponent="perfect")
    assert isinstance(env, TicTacToeVectorEnv)
    assert env.observation_space.shape == env.action_space.shape == (3,)
    assert env.metadata["autoreset_mode"] == NEXT
    assert TicTacToeVectorEnv.metadata["autoreset_mode"] == NEXT
    assert env.game is tictactoe()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_envs": 0}, "num_envs=0"),
        ({"opponent": "nobody"}, "there is no opponent 'nobody'"),
        ({"opening_moves": -1}, "opening_moves=-1"),
        ({"autoreset_mode": AutoresetMode.DISABLED}, "autoreset_mode"),
    ],
)
def test_bad_arguments_are_one_sentence(options, words):
    with pytest.raises(ConfigError, match=words):
        TicTacToeVectorEnv(**options)


def test_wrong_calls_are_one_sentence():
    env = TicTacToeVectorEnv(2)
    env.reset()
    with pytest.raises(ConfigError, match=r"2 games need as many actions, not \(3,\)"):
        env.step(np.zeros(3, int))
    with pytest.raises(ConfigError, match="seed it with one number"):
        env.reset(seed=[1, 2])


# What play.py is made of


def test_words_are_those_of_splitmix64():
    """The first outputs for seed 1234567, as its authors' C code prints them."""
    state, found = np.uint64(1234567), []
    for _ in range(5):
        found.append(int(splitmix64(state)))
        state = np.uint64((int(state) + 0x9E3779B97F4A7C15) % 2**64)
    assert found == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def test_bits_are_counted_and_picked_by_rank():
    rules = tictactoe().rules
    for moves in range(1, 512):
        places = [i for i in range(9) if moves >> i & 1]
        assert popcount(moves) == len(places)
        for k in range(len(places)):
            word = np.uint64(-(-(k << 32) // len(places)) << 32)  # the least whose upper half has the share k
            assert random_below(word, len(places)) == k
            assert random_move(rules, moves, word) == places[k]
