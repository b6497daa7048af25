"""Compiled games: step by step against slow Python with the same chance, and what comes of training, exactly.

Learning tests state seed, steps and threshold; the optimum against a random opponent is .95983 over both seats.
"""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from steppe.classic import (
    SARSA,
    ConstantSchedule,
    ExponentialSchedule,
    GameTrainer,
    LinearSchedule,
    NumpyQLearning,
    OptimalQLearning,
    exact_return,
    tictactoe,
    worst_return,
)
from steppe.core.contracts.errors import ConfigError
from steppe.envs.tictactoe.rules import player_moves
from tests.support.tabular_oracles import pick, splitmix, spread_word, words_of

pytestmark = pytest.mark.unit
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def cells(state):
    return [state // 3**i % 3 for i in range(9)]


def winner(board):
    return next((board[i] for i, j, k in LINES if board[i] and board[i] == board[j] == board[k]), 0)


def free(board):
    return [] if winner(board) else [i for i in range(9) if board[i] == 0]


def turn(board):
    return 1 + sum(cell > 0 for cell in board) % 2


def number(board):
    return sum(cell * 3**i for i, cell in enumerate(board))


class SlowGames:
    """The same training in plain Python: lists for boards, a dictionary for the table."""

    def __init__(self, replies, starts, seed, num_games):
        self.replies, self.starts, self.table = replies, [column.tolist() for column in starts], {}
        self.words = iter(words_of(seed, 100_000))
        self.boards = [self.begin(next(self.words)) for _ in range(num_games)]
        self.tally = [0, 0, 0]

    def place(self, board, move):
        board[move] = turn(board)

    def begin(self, word):
        own, other, shares = pick(list(zip(*self.starts, strict=True)), word)
        return cells(own if word % 2**32 < shares else other)

    def value(self, board, move):
        return self.table.get((number(board), move), 0.0)

    def step(self, b, rate, epsilon, gamma):
        board, word = self.boards[b], next(self.words)
        explores = spread_word(word)[0] < epsilon
        action = pick(free(board), word) if explores else max(free(board), key=lambda move: self.value(board, move))
        following, me = board.copy(), turn(board)
        self.place(following, action)
        if self.replies:
            word = splitmix(word)
            if free(following):
                self.place(following, pick(self.replies(following), word))
        if free(following):
            best = max(self.value(following, move) for move in free(following))
            target = gamma * best if self.replies else -gamma * best
            self.boards[b] = following
        else:
            target = 0.0 if not winner(following) else (1.0 if winner(following) == me else -1.0)
            won_first = target if self.replies or me == 1 else -target
            self.tally[1 - int(won_first)] += 1
            self.boards[b] = self.begin(splitmix(word))
        old = self.value(board, action)
        self.table[number(board), action] = float(np.float32(old + rate * (target - old)))

    def array(self):
        table = np.zeros((19_683, 9), np.float32)
        for key, value in self.table.items():
            table[key] = value
        return table


def highest(board):
    """A player that always takes the last free cell."""
    return [free(board)[-1]]


class Highest:
    q_table = np.tile(np.arange(9.0), (19_683, 1))


@pytest.mark.parametrize("opening", [0, 3])
@pytest.mark.parametrize(("opponent", "replies"), [("random", free), (Highest, highest), ("self", None)])
def test_a_block_of_games_is_what_single_steps_make_of_it(opponent, replies, opening):
    rate, epsilon = LinearSchedule(0.5, 0.1, 2000), LinearSchedule(0.9, 0.1, 2000)
    agent = OptimalQLearning(19_683, 9, learning_rate=rate, discount_factor=0.9, epsilon=epsilon)
    trainer = GameTrainer(agent, tictactoe(), opponent, num_games=5, opening_moves=opening, block_steps=7, seed=3)
    moves = tictactoe().legal[:0] if opponent == "self" else player_moves(tictactoe(), opponent)
    slow = SlowGames(replies, tictactoe().starts(moves, opening), 3, 5)
    tally = trainer.run(2000)
    for step in range(400):
        for b in range(5):
            slow.step(b, rate(step * 5), epsilon(step * 5), 0.9)
    np.testing.assert_array_equal(agent.q_table, slow.array())
    assert [cells(state) for state in trainer.states] == slow.boards
    assert [tally.won, tally.drawn, tally.lost] == slow.tally
    assert (tally.num_steps, tally.num_games) == (2000, sum(slow.tally)) == (agent.step_count, agent.episode_count)


def beginnings(replies, opening):
    """Where a player meets a new game, with exact chances: every way to play the opening, in either seat."""
    found, waiting = Counter(), [([0] * 9, count, Fraction(1, opening + 1)) for count in range(opening + 1)]
    while waiting:
        board, left, chance = waiting.pop()
        if left and free(board):
            part = chance / len(free(board))
            waiting += [(with_move(board, move), left - 1, part) for move in free(board)]
            continue
        choices = replies(board) if replies and free(board) else []
        met = [(board, chance / 2), *((with_move(board, move), chance / 2 / len(choices)) for move in choices)]
        for after, part in met:
            if free(after):
                found[number(after)] += part
    return {state: chance / found.total() for state, chance in found.items()}


def with_move(board, move):
    after = board.copy()
    after[move] = turn(board)
    return after


@pytest.mark.slow
@pytest.mark.parametrize("opening", [0, 1, 4])
@pytest.mark.parametrize(("opponent", "replies"), [("random", free), (Highest, highest), ("self", None)])
def test_games_begin_where_they_should_as_often_as_they_should(opponent, replies, opening):
    moves = tictactoe().legal[:0] if opponent == "self" else player_moves(tictactoe(), opponent)
    starts = tictactoe().starts(moves, opening)
    drawn = Counter()
    for own, other, share in zip(*(column.tolist() for column in starts), strict=True):
        assert 0 <= share <= 2**32
        drawn[own] += Fraction(share, 2**32 * len(starts.states))
        drawn[other] += Fraction(2**32 - share, 2**32 * len(starts.states))
    expected = beginnings(replies, opening)
    assert drawn.keys() == expected.keys()
    assert max(abs(drawn[state] - expected[state]) for state in expected) < 2**-32


@pytest.mark.parametrize("steps", [1, 64, 1000])
def test_blocks_of_any_length_train_alike(steps):
    def trained(block):
        agent = OptimalQLearning(19_683, 9, epsilon=ConstantSchedule(0.3))
        GameTrainer(agent, tictactoe(), num_games=16, block_steps=block, seed=1).run(steps * 16)
        return agent.q_table

    np.testing.assert_array_equal(trained(1), trained(48))


def test_a_plain_epsilon_falls_with_the_games_that_end():
    agent = OptimalQLearning(19_683, 9, epsilon=1.0, epsilon_decay=0.99, epsilon_min=0.2)
    trainer = GameTrainer(agent, tictactoe(), num_games=2, block_steps=1, seed=0)
    tally = trainer.run(60)
    assert agent.epsilon == pytest.approx(0.99**tally.num_games)
    trainer.run(20_000)
    assert agent.epsilon == 0.2


def test_a_trainer_goes_on_where_another_was():
    def make(seed):
        agent = NumpyQLearning(19_683, 9, epsilon=ConstantSchedule(0.3))
        return GameTrainer(agent, tictactoe(), num_games=16, seed=seed)

    one, other = make(1), make(2)
    one.run(5000)
    other.agent.q_table[...] = one.agent.q_table
    other.restore(one.state())
    assert one.run(5000) == other.run(5000)
    np.testing.assert_array_equal(one.agent.q_table, other.agent.q_table)
    with pytest.raises(ConfigError, match="not the states of 3 games"):
        GameTrainer(one.agent, tictactoe(), num_games=3).restore(one.state())
    with pytest.raises(ConfigError, match="not the states of 16 games"):
        make(1).restore({**one.state(), "states": np.full(16, 19_682)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GameTrainer(SARSA(19_683, 9), tictactoe()), "step a SARSA in the vector environment"),
        (lambda: GameTrainer(OptimalQLearning(10, 9), tictactoe()), "needs state_size=19683, action_size=9, not 10"),
        (lambda: GameTrainer(OptimalQLearning(19_683, 9), tictactoe(), "nobody"), "there is no opponent 'nobody'"),
        (lambda: GameTrainer(OptimalQLearning(19_683, 9), tictactoe(), num_games=0), "num_games=0"),
        (lambda: GameTrainer(OptimalQLearning(19_683, 9), tictactoe(), opening_moves=9), "opening_moves=9"),
    ],
)
def test_mistakes_are_one_sentence(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def learned(opponent, steps, rate, epsilon):
    agent = OptimalQLearning(19_683, 9, learning_rate=rate, discount_factor=1.0, epsilon=ConstantSchedule(epsilon))
    GameTrainer(agent, tictactoe(), opponent, seed=0).run(steps)
    return agent


def test_against_a_random_opponent_it_finds_the_best_play():
    """20 M steps, about 2 s; at least .955 exactly evaluated, and never more than the optimum."""
    agent = learned("random", 20_000_000, ExponentialSchedule.over(0.5, 0.005, 20_000_000), 0.5)
    score = np.mean(exact_return(tictactoe(), agent, "random"))
    assert 0.955 <= score < 0.95984


@pytest.mark.slow
@pytest.mark.parametrize(("opponent", "steps"), [("self", 10_000_000), ("perfect", 20_000_000)])
def test_by_self_play_or_against_the_perfect_player_it_never_loses(opponent, steps):
    """Whatever anybody plays, over the whole tree."""
    agent = learned(opponent, steps, ConstantSchedule(0.5), 1.0)
    assert worst_return(tictactoe(), agent) == (0.0, 0.0)


def test_games_without_openings_do_not_teach_what_follows_a_mistake_of_a_perfect_player():
    """Why openings are the default against it."""
    agent = OptimalQLearning(19_683, 9, learning_rate=0.5, discount_factor=1.0, epsilon=ConstantSchedule(1.0))
    GameTrainer(agent, tictactoe(), "perfect", opening_moves=0, seed=0).run(4_000_000)
    assert min(worst_return(tictactoe(), agent)) == -1.0
