"""`steppe.classic`: its names, what importing it costs, and the snippets that promised it."""

# ruff: noqa: PT009 (the printed test uses unittest)

import inspect
import subprocess
import sys
import unittest

import numpy as np
import pytest

from steppe import classic
from steppe.classic import (
    BaseAlgorithm,
    ExperienceBuffer,
    ListQLearning,
    MemoryOptimizedQLearning,
    NumpyQLearning,
    OptimalQLearning,
)
from steppe.testing import MockEnvironment

pytestmark = pytest.mark.unit


def test_every_name_resolves_and_is_described():
    assert set(classic._HOMES) == set(classic.__all__)
    assert len(set(classic.__all__)) == len(classic.__all__)
    for name in classic.__all__:
        assert inspect.getdoc(getattr(classic, name)), name
    assert set(classic.__all__) <= set(dir(classic))
    with pytest.raises(AttributeError, match="no attribute 'QLearning'"):
        classic.QLearning  # noqa: B018


def test_importing_costs_nothing_and_using_it_needs_no_torch():
    code = """
import sys
import steppe.classic as classic
assert not {"torch", "numba", "numpy", "gymnasium"} & set(sys.modules), "importing is not free"
for name in classic.__all__:
    getattr(classic, name)
env = classic.TicTacToeEnv(opponent="random")
agent = classic.OptimalQLearning(env.observation_space_size, env.action_space_size)
agent.train_episode(env)
classic.GameTrainer(agent, classic.tictactoe()).run(2048)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("kind", [BaseAlgorithm, OptimalQLearning, ListQLearning, NumpyQLearning])
def test_the_documented_signature(kind):
    parameters = list(inspect.signature(kind).parameters.values())
    assert [(p.name, p.default) for p in parameters[:7]] == [
        ("state_size", inspect.Parameter.empty), ("action_size", inspect.Parameter.empty), ("learning_rate", 0.1),
        ("discount_factor", 0.99), ("epsilon", 0.1), ("epsilon_decay", 0.995), ("epsilon_min", 0.01),
    ]  # fmt: skip


class TestOptimalQLearning(unittest.TestCase):
    """The test that the description of the library prints, as it stands."""

    def setUp(self):
        """Set up test fixtures."""
        self.agent = OptimalQLearning(state_size=10, action_size=4)
        self.env = MockEnvironment()

    def test_initialization(self):
        """Test proper initialization."""
        self.assertEqual(self.agent.q_table.shape, (10, 4))
        self.assertTrue(np.all(self.agent.q_table == 0))

    def test_action_selection(self):
        """Test action selection logic."""
        # Test random action during exploration
        self.agent.epsilon = 1.0
        action = self.agent.select_action(0)
        self.assertIn(action, range(4))

        # Test greedy action during exploitation
        self.agent.epsilon = 0.0
        self.agent.q_table[0] = [1, 2, 3, 0]
        action = self.agent.select_action(0)
        self.assertEqual(action, 2)  # Should select action with highest Q-value

    def test_q_learning_update(self):
        """Test Q-learning update rule."""
        initial_q = self.agent.q_table[0, 1]
        self.agent.update(state=0, action=1, reward=1, next_state=1, done=False)
        updated_q = self.agent.q_table[0, 1]

        # Q-value should have increased
        self.assertGreater(updated_q, initial_q)


def test_the_mock_pays_for_the_right_answer():
    env = MockEnvironment(num_states=3, num_actions=2, length=4)
    env.reset()
    assert [env.step(action)[:4] for action in (0, 0, 0, 1)] == [
        (1, 1.0, False, False), (2, 0.0, False, False), (0, 1.0, False, False), (1, 0.0, False, True),
    ]  # fmt: skip
    assert env.calls == [0, 0, 0, 1]


def test_batches_through_the_documented_buffer():
    buffer = ExperienceBuffer(capacity=100)
    for i in range(60):
        buffer.push(i % 10, i % 4, 1.0, (i + 1) % 10, i % 7 == 0)
    assert len(buffer) == 60
    for kind in (NumpyQLearning, MemoryOptimizedQLearning, ListQLearning):
        agent = kind(state_size=10, action_size=4)
        agent.batch_update(buffer.sample(32))
        assert (np.asarray(agent.q_table) > 0).any()
    assert len(buffer.sample(100)) == 60
