"""Every learner finds the exact values of small random worlds, computed by iterating the operator it is said to solve.

Each test states seeds, steps and tolerance; rewards are standard normal. A learner that bootstraps after an end, takes a
cut for an end, or learns another policy's values misses them by ten times the tolerance or more.
"""

import numpy as np
import pytest

from steppe.classic import (
    SARSA,
    DoubleQLearning,
    ExpectedSARSA,
    ExponentialSchedule,
    ListQLearning,
    MemoryOptimizedQLearning,
    NStepQLearning,
    NumpyQLearning,
    OptimalQLearning,
    QLambda,
)
from tests.support.tabular_oracles import ManyMDPs, RandomMDP

pytestmark = pytest.mark.integration
GAMMA, TOLERANCE, COPIES = 0.8, 0.08, 256
WORLDS = [(3, True), (4, False)]  # with an end, and one that only ever is cut


def fall(steps):
    return ExponentialSchedule.over(0.5, 0.0003, steps)


def error(env, agent, exact):
    known = env.known()
    return np.abs(np.asarray(agent.q_table)[known] - exact[known]).max()


@pytest.mark.parametrize(("world", "ends"), WORLDS)
@pytest.mark.parametrize("kind", [OptimalQLearning, DoubleQLearning, QLambda])
def test_off_policy_learners_find_the_best_values_from_a_random_walk(kind, world, ends):
    env, steps = RandomMDP(world, ends=ends), 1_600_000
    many, stream = ManyMDPs(env, COPIES, 1), np.random.default_rng(2)
    agent = kind(5, 3, learning_rate=fall(steps), discount_factor=GAMMA, seed=0)
    while agent.step_count < steps:
        columns, cuts = many.step(stream.integers(0, 3, COPIES))
        more = {"truncated": cuts, "streams": np.arange(COPIES)} if kind is QLambda else {}
        agent.learn(*columns, **more)
        agent.count_steps(COPIES)
    assert error(env, agent, env.exact(GAMMA, lambda q: q.max(axis=1))) < TOLERANCE


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("world", "ends"), WORLDS)
def test_n_step_learners_find_the_values_of_walking_at_random_before_acting_best(world, ends, n):
    env, steps = RandomMDP(world, ends=ends, length=400), 1_600_000  # cuts shorten returns: few of them

    def value(q):
        """n − 1 steps at random, then the best: what an uncorrected n-step target means under random behaviour."""
        worth = q.max(axis=1).copy()
        for _ in range(n - 1):
            worth[env.end if env.end >= 0 else []] = 0.0
            worth = (env.pay + GAMMA * env.chances @ worth).mean(axis=1)
        return worth

    many, stream = ManyMDPs(env, COPIES, 1), np.random.default_rng(2)
    agent = NStepQLearning(5, 3, n_step=n, learning_rate=fall(steps), discount_factor=GAMMA)
    while agent.step_count < steps:
        columns, cuts = many.step(stream.integers(0, 3, COPIES))
        agent.learn(*columns, truncated=cuts, streams=np.arange(COPIES))
        agent.count_steps(COPIES)
    exact, best = env.exact(GAMMA, value), env.exact(GAMMA, lambda q: q.max(axis=1))
    assert error(env, agent, exact) < TOLERANCE
    assert (error(env, agent, best) > 3 * TOLERANCE) == (n > 1)


@pytest.mark.parametrize("kind", [SARSA, ExpectedSARSA])
@pytest.mark.parametrize(("world", "ends"), WORLDS)
def test_on_policy_learners_find_the_values_of_their_policy(kind, world, ends):
    """With ε = .5 for ever: the best policy's values are far away."""
    env, steps, epsilon = RandomMDP(world, ends=ends), 1_600_000, 0.5
    many = ManyMDPs(env, COPIES, 1)
    agent = kind(5, 3, learning_rate=fall(steps), discount_factor=GAMMA, epsilon=epsilon, epsilon_decay=1.0, seed=0)
    actions = agent.select_actions(many.states)
    while agent.step_count < steps:
        columns, cuts = many.step(actions)
        following = agent.select_actions(columns[3])
        agent.learn(*columns, **({"next_actions": following} if kind is SARSA else {}))
        over = columns[4] | cuts
        actions = np.where(over, agent.select_actions(many.states), following)
        agent.count_steps(COPIES)
    exact = env.exact(GAMMA, lambda q: (1 - epsilon) * q.max(axis=1) + epsilon * q.mean(axis=1))
    best = env.exact(GAMMA, lambda q: q.max(axis=1))
    assert error(env, agent, exact) < TOLERANCE
    assert error(env, agent, best) > 5 * TOLERANCE


@pytest.mark.parametrize("kind", [OptimalQLearning, NumpyQLearning, MemoryOptimizedQLearning, ListQLearning])
def test_episodes_lead_to_the_best_values(kind):
    env, steps = RandomMDP(5), 60_000
    rate = ExponentialSchedule.over(0.5, 0.002, steps)
    agent = kind(5, 3, learning_rate=rate, discount_factor=GAMMA, epsilon=0.5, epsilon_decay=1.0, seed=0)
    env.reset(seed=2)
    while agent.step_count < steps:
        agent.train_episode(env)
    assert error(env, agent, env.exact(GAMMA, lambda q: q.max(axis=1))) < TOLERANCE


@pytest.mark.parametrize("kind", [NStepQLearning, QLambda])
def test_multi_step_learners_act_best_after_episodes(kind):
    env, steps = RandomMDP(5), 60_000
    agent = kind(
        5, 3, learning_rate=fall(steps), discount_factor=GAMMA,
        epsilon=ExponentialSchedule.over(1.0, 0.05, steps), seed=0,
    )  # fmt: skip
    env.reset(seed=2)
    while agent.step_count < steps:
        agent.train_episode(env)
    exact = env.exact(GAMMA, lambda q: q.max(axis=1))
    best = [int(np.argmax(exact[state])) for state in env.known()]
    assert [agent.select_action(state, deterministic=True) for state in env.known()] == best


def test_double_q_does_not_take_chance_for_value():
    """Forty arms of mean −.1 behind one door: ordinary Q-learning walks in, double Q-learning learns not to sooner."""
    stream = np.random.default_rng(0)
    single = OptimalQLearning(3, 40, learning_rate=0.1, discount_factor=1.0, seed=0)
    double = DoubleQLearning(3, 40, learning_rate=0.1, discount_factor=1.0, seed=0)
    for _ in range(300):
        arms = stream.integers(0, 40, 20)
        inside = np.ones(20, np.int64), arms, stream.normal(-0.1, 1.0, 20), np.full(20, 2), np.ones(20, bool)
        door = np.zeros(20, np.int64), np.zeros(20, np.int64), np.zeros(20), np.ones(20, np.int64), np.zeros(20, bool)
        for agent in (single, double):
            agent.learn(*inside)
            agent.learn(*door)
    assert single.q_table[0, 0] > 0.3
    assert double.q_table[0, 0] < 0.15
