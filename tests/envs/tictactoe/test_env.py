"""TicTacToe enumerated completely against rules written anew, played by the seed's own listing, and its opponents."""

from functools import cache

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import ConfigError
from steppe.envs import make_segment_env
from steppe.envs.tictactoe.env import TicTacToeEnv, tictactoe
from steppe.envs.tictactoe.rules import exact_return, greedy_moves, moves_to_mask, player_moves, worst_return
from steppe.testing.env import WorldConformance

pytestmark = pytest.mark.unit

# The rules once more, on strings: X begins, three in a row, column or diagonal win.


def winner(board):
    for i, j, k in ("012", "345", "678", "036", "147", "258", "048", "246"):
        if board[int(i)] != "." and board[int(i)] == board[int(j)] == board[int(k)]:
            return board[int(i)]
    return None


def player(board):
    return "X" if board.count("X") == board.count("O") else "O"


def moves(board):
    return [] if winner(board) else [i for i, cell in enumerate(board) if cell == "."]


def after(board, move):
    return board[:move] + player(board) + board[move + 1 :]


def number(board):
    return sum(".XO".index(cell) * 3**i for i, cell in enumerate(board))


@cache
def reachable():
    """Every board that can come up, by walking all games."""
    found, waiting = set(), ["." * 9]
    while waiting:
        board = waiting.pop()
        if board not in found:
            found.add(board)
            waiting += [after(board, move) for move in moves(board)]
    return sorted(found)


@cache
def minimax(board):
    """The result for who is to move if both play perfectly."""
    if winner(board):
        return -1
    return max((-minimax(after(board, move)) for move in moves(board)), default=0)


def value(me, mine, theirs):
    """What X (or O) gets on average if both choose among their moves with equal chance."""

    @cache
    def worth(board):
        if winner(board) or not moves(board):
            return {None: 0.0, me: 1.0}.get(winner(board), -1.0)
        choices = mine(board) if player(board) == me else theirs(board)
        return sum(worth(after(board, move)) for move in choices) / len(choices)

    return worth("." * 9)


def bits(choices):
    return sum(1 << move for move in choices)


def test_the_tables_are_the_rules_on_all_5478_boards():
    game, boards = tictactoe(), reachable()
    assert len(boards) == 5478
    assert (game.num_states, game.num_actions) == (19_683, 9)
    for board in boards:
        state = number(board)
        assert game.legal[state] == bits(moves(board))
        assert game.outcome[state] == {"X": 1, "O": 2}.get(winner(board), 0 if moves(board) else 3)
        for move in moves(board):
            assert game.mover[state] == "XO".index(player(board))
            assert game.following[state, move] == number(after(board, move))
            assert game.reward[state, move] == (winner(after(board, move)) is not None)


def test_the_environment_is_the_rules_on_all_5478_boards():
    env = TicTacToeEnv()
    for board in reachable():
        for move in range(9) if moves(board) else []:
            env.reset()
            env.board[:] = [".XO".index(cell) for cell in board]
            env.current_player = 1 + "XO".index(player(board))
            seen, reward, terminated, truncated, info = env.step(move)
            assert type(seen) is int
            assert not truncated
            if board[move] != ".":
                assert (seen, reward, terminated, info) == (number(board), -1, True, {"invalid_move": True})
                continue
            following = after(board, move)
            assert seen == number(following)
            assert reward == (winner(following) is not None)
            assert terminated == (not moves(following))
            assert info["current_player"] == 3 - (1 + "XO".index(player(board)))
            assert np.flatnonzero(info["action_mask"]).tolist() == moves(following)


def test_perfect_moves_are_minimax_on_all_boards():
    game = tictactoe()
    for board in reachable():
        best = [move for move in moves(board) if -minimax(after(board, move)) == minimax(board)]
        assert game.perfect[number(board)] == bits(best)


def test_exact_returns_are_those_of_a_walk_over_the_tree():
    game, q = tictactoe(), np.random.default_rng(0).normal(size=(19_683, 9))

    class Player:
        q_table = q

    def greedy(board):
        return [max(moves(board), key=lambda move: q[number(board), move])]

    for theirs, opponent in ((moves, "random"), (greedy, Player)):
        for mine, me in ((moves, "random"), (greedy, Player)):
            expected = [value(seat, mine, theirs) for seat in "XO"]
            assert exact_return(game, me, opponent) == pytest.approx(expected, abs=1e-12)


def test_returns_that_are_known():
    game = tictactoe()
    assert exact_return(game, "perfect", "perfect") == (0.0, 0.0)
    assert worst_return(game, "perfect") == (0.0, 0.0)
    assert worst_return(game, "random") == (-1.0, -1.0)
    first, second = exact_return(game, "random", "random")
    assert first == -second == pytest.approx(0.584920634920635 - 0.288095238095238)  # known shares of random games


def test_players_that_do_not_fit_are_refused():
    game = tictactoe()
    with pytest.raises(ConfigError, match=r"needs a table of 19683 × 9, not \(3, 2\)"):
        greedy_moves(game, np.zeros((3, 2)))
    with pytest.raises(ConfigError, match=r"no opponent 'prefect'.*Did you mean 'perfect'"):
        player_moves(game, "prefect")
    with pytest.raises(ConfigError, match="a int cannot play TicTacToe here"):
        player_moves(game, 3)
    assert moves_to_mask(game.legal[:1], 9).all()


# The environment


@pytest.mark.parametrize("opponent", ["self", "random", "perfect"])
def test_gymnasium_finds_nothing_wrong(opponent):
    check_env(TicTacToeEnv(opponent=opponent), skip_render_check=True)
    with gym.make("steppe/TicTacToe-v0", opponent=opponent) as env:
        assert env.unwrapped.opponent == opponent


def test_what_the_seed_promises():
    env = TicTacToeEnv(render_mode=None)
    assert (env.num_agents, env.observation_space_size, env.action_space_size) == (2, 19_683, 9)
    assert env.reset(seed=1)[0] == 0
    for move, expected in ((0, 1), (8, 1 + 2 * 3**8), (1, 1 + 2 * 3**8 + 3), (7, 1 + 2 * 3**8 + 3 + 2 * 3**7)):
        seen, reward, terminated, _, info = env.step(move)
        assert (seen, reward, terminated) == (expected, 0, False)
    assert info["current_player"] == 1
    assert env.step(2)[1:3] == (1, True)  # X has the first row; int8 arithmetic would have overflowed at 3^8
    assert env.step(3) == (expected + 9, 0, True, False, {})


@pytest.mark.parametrize("move", [4, -1, 9])
def test_an_illegal_move_loses_at_once(move):
    env = TicTacToeEnv()
    env.reset()
    env.step(4)
    seen, reward, terminated, truncated, info = env.step(move)
    assert (reward, terminated, truncated, info) == (-1, True, False, {"invalid_move": True})
    assert env.step(0) == (seen, 0, True, False, {})


def games(env, count, stream):
    """The observations of games at random."""
    played = []
    for _ in range(count):
        seen, info = env.reset()
        game, ended = [seen], False
        while not ended:
            seen, reward, ended, _, info = env.step(int(stream.choice(np.flatnonzero(info["action_mask"]))))
            game.append(seen)
        played.append((*game, reward))
    return played


@pytest.mark.parametrize("opponent", ["random", "perfect"])
def test_no_two_evaluations_are_the_same_and_a_seed_repeats_them(opponent):
    env = TicTacToeEnv(opponent=opponent)
    env.reset(seed=7)
    first = games(env, 30, np.random.default_rng(0))
    second = games(env, 30, np.random.default_rng(0))
    assert first != second
    env.reset(seed=7)
    assert games(env, 30, np.random.default_rng(0)) == first


@pytest.mark.parametrize("opponent", ["random", "perfect"])
def test_an_opponent_plays_as_it_is_said_to(opponent):
    """Mean results over 4,000 games lie within four standard errors of the exact ones, for each seat."""
    for starts in (True, False):
        env = TicTacToeEnv(opponent=opponent, agent_starts=starts)
        env.reset(seed=3)
        results = [game[-1] for game in games(env, 4000, np.random.default_rng(1))]
        exact = exact_return(tictactoe(), "random", opponent)[0 if starts else 1]
        assert abs(np.mean(results) - exact) < 4 * np.std(results) / 4000**0.5 + 1e-9


def test_seats_are_drawn_for_each_game():
    env = TicTacToeEnv(opponent="random")
    env.reset(seed=0)
    firsts = [env.reset()[0] == 0 for _ in range(400)]
    assert 150 < sum(firsts) < 250


def test_openings_are_random_moves():
    for opponent in ("random", "self"):
        env = TicTacToeEnv(opponent=opponent, opening_moves=4)
        env.reset(seed=0)
        stones = [int((env.reset()[0] // 3 ** np.arange(9) % 3 > 0).sum()) for _ in range(600)]
        assert set(stones) == set(range(5 + (opponent == "random")))
        assert not env.game_over


class First:
    """Takes the first free cell; says so if it is asked without a mask."""

    def __init__(self):
        self.asked = []

    def select_action(self, state):
        self.asked.append(state)
        return next(i for i in range(9) if state // 3**i % 3 == 0)


class Blind:
    def select_action(self, state):
        return 0


def test_an_agent_may_be_the_opponent():
    opponent = First()
    env = TicTacToeEnv(opponent=opponent, agent_starts=True)
    env.reset(seed=0)
    assert env.step(4)[0] == 3**4 + 2
    assert opponent.asked == [3**4]
    env = TicTacToeEnv(opponent=Blind(), agent_starts=True)
    env.reset(seed=0)
    env.step(4)
    _, reward, terminated, _, _ = env.step(5)
    assert (reward, terminated) == (1, True)  # its illegal move is our win


def test_a_table_may_be_the_opponent():
    class Table:
        q_table = np.tile(np.arange(9.0), (19_683, 1))

    env = TicTacToeEnv(opponent=Table(), agent_starts=False)
    assert env.reset(seed=0)[0] == 3**8
    assert env.step(0)[0] == 3**8 + 2 + 3**7


def test_the_board_is_drawn(capsys):
    env = TicTacToeEnv("ansi")
    env.reset()
    env.step(0)
    env.step(4)
    assert env.render() == "X . .\n. O .\n. . ."
    human = TicTacToeEnv("human")
    human.reset()
    human.step(8)
    assert capsys.readouterr().out.endswith(". . .\n. . .\n. . X\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opponent": "prefect"}, "Did you mean 'perfect'"),
        ({"opponent": 3}, "it has no q_table"),
        ({"render_mode": "rgb"}, "render_mode='rgb'"),
        ({"opening_moves": 9}, "opening_moves=9"),
        ({"agent_starts": True}, "leave it out"),
    ],
)
def test_bad_arguments_are_one_sentence(options, words):
    with pytest.raises(ConfigError, match=words):
        TicTacToeEnv(**options)


@pytest.mark.parametrize("opponent", ["random", "perfect"])
class TestAsAWorld(WorldConformance):
    """Snapshots included: a resumed run goes on in the same games."""

    @pytest.fixture(autouse=True)
    def _against(self, opponent):
        self.opponent = opponent

    def make_world(self, num_envs, seed):
        config = EnvConfig(kwargs={"opponent": self.opponent})
        return make_segment_env("steppe/TicTacToe-v0", config, num_envs, np.random.SeedSequence(seed))
