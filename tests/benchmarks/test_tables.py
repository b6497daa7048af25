"""The tabular workloads: both sides of a comparison do the same work, and every task prints what classic.py reads."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from suite.ours import WORKLOADS

from steppe.classic import OptimalQLearning, exact_return, tictactoe

sys.path.append(str(WORKLOADS))

import bare
import tables

pytestmark = pytest.mark.integration


def test_the_minimal_batch_learner_equals_steppes():
    rows, shape = tables.random_rows("taxi", 1024)
    table, agent = np.zeros(shape, np.float32), OptimalQLearning(*shape, learning_rate=0.1, discount_factor=0.99)
    for _ in range(20):
        bare.learn(table, *rows, 0.1, 0.99)
        agent.learn(*rows)
    assert table.max() > 0.5
    np.testing.assert_allclose(table, agent.q_table, rtol=1e-5)  # it rounds at other points


def test_the_minimal_game_learner_learns_to_play():
    """3 M steps at ε = .3: it beats a random opponent more often than random play (0 on average)."""
    game = tictactoe()
    table, states = np.zeros((19_683, 9), np.float32), np.zeros(64, np.int64)
    tables_of = (game.placed, game.legal.astype(np.int64), game.mover, game.outcome.astype(np.int64))
    bare.play(table, *tables_of, states, 3_000_000 // 64, 0.1, 0.3, 1.0, np.uint64(1))
    assert (game.legal[states] > 0).all()

    class Player:
        q_table = table

    assert np.mean(exact_return(game, Player, "random")) > 0.9


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        ("batches --steps 4096", {"value", "seconds", "settings"}),
        ("bare-batches --steps 4096 --size taxi", {"value", "seconds", "settings"}),
        ("games --steps 4096 --opponent perfect --games 64", {"value", "seconds", "settings"}),
        ("bare-games --steps 4096 --games 64", {"value", "seconds", "settings"}),
        ("quality --steps 4096 --opponent self", {"value", "worst", "train_s", "settings"}),
        ("overhead --steps 1000 --algorithm QLambda", {"value", "own_us", "whole_us", "settings"}),
        ("first", {"value", "torch", "settings"}),
    ],
)
def test_every_task_prints_its_figures(words, figures, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tables.py", *words.split()])
    tables.main()
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == figures
    assert found["value"] is not None
