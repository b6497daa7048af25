"""Every update rule against slow Python written from its definition, bit for bit, in batches and one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.classic import (
    SARSA,
    DoubleQLearning,
    ExpectedSARSA,
    ListQLearning,
    MemoryOptimizedQLearning,
    NStepQLearning,
    NumpyQLearning,
    OptimalQLearning,
    QLambda,
    vectorized_q_update,
)
from tests.support.tabular_oracles import SlowTable, pick, spread_word, words_of

pytestmark = pytest.mark.unit

STATES, ACTIONS, RATE, GAMMA, EPSILON = 4, 3, 0.3, 0.9, 0.4
OPTIONS = {"learning_rate": RATE, "discount_factor": GAMMA, "epsilon": EPSILON, "epsilon_decay": 1.0}
COMPILED = [OptimalQLearning, NumpyQLearning, MemoryOptimizedQLearning]
ALL = [*COMPILED, SARSA, ExpectedSARSA, DoubleQLearning, NStepQLearning, QLambda]


@st.composite
def rows(draw, *, most=24):
    """A batch with many pairs twice or more, ends, cuts, masks that always allow something, and next actions."""
    seed, count = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, most))
    stream = np.random.default_rng(seed)
    masks = stream.random((count, ACTIONS)) < 0.6
    masks[np.arange(count), stream.integers(0, ACTIONS, count)] = True
    return {
        "states": stream.integers(0, STATES, count),
        "actions": stream.integers(0, ACTIONS, count),
        "rewards": stream.normal(size=count),
        "next_states": stream.integers(0, STATES, count),
        "dones": stream.random(count) < 0.2,
        "masks": masks if draw(st.booleans()) else None,
        "truncated": stream.random(count) < 0.2,
        "next_actions": stream.integers(0, ACTIONS, count),
        "streams": stream.integers(0, 3, count),
        "turns": draw(st.booleans()),
    }


def columns(batch):
    return [batch[name] for name in ("states", "actions", "rewards", "next_states", "dones")]


def each(batch):
    """(state, action, reward, next_state, done, mask) of each row, as plain Python."""
    masks = [None] * len(batch["states"]) if batch["masks"] is None else batch["masks"].tolist()
    return list(zip(*(column.tolist() for column in columns(batch)), masks, strict=True))


def discount(batch):
    return -GAMMA if batch["turns"] else GAMMA


def slow_q(batch):
    table = SlowTable(STATES, ACTIONS)
    for state, action, reward, following, done, mask in each(batch):
        table.move(state, action, reward + (0.0 if done else discount(batch) * max(table.row(following, mask))), RATE)
    return table.array()


def one_by_one(agent, batch, **columns_besides):
    update = agent.update_turn if batch["turns"] else agent.update
    for i, row in enumerate(each(batch)):
        update(*row, **{name: column[i] for name, column in columns_besides.items()})


@settings(max_examples=60, deadline=None)
@given(rows())
def test_q_learning_is_its_rule_however_it_is_called(batch):
    expected = slow_q(batch)
    for kind in COMPILED:
        together, apart = kind(STATES, ACTIONS, **OPTIONS), kind(STATES, ACTIONS, **OPTIONS)
        together.learn(*columns(batch), next_masks=batch["masks"], turn_based=batch["turns"])
        one_by_one(apart, batch)
        np.testing.assert_array_equal(together.q_table, expected)
        np.testing.assert_array_equal(apart.q_table, expected)


@settings(max_examples=40, deadline=None)
@given(rows())
def test_tuples_columns_and_the_bare_kernel_are_the_same_batch(batch):
    batch = {**batch, "masks": None, "turns": False}
    expected, table = slow_q(batch), np.zeros((STATES, ACTIONS), np.float32)
    vectorized_q_update(table, *columns(batch), RATE, GAMMA)
    np.testing.assert_array_equal(table, expected)
    names = ("state", "action", "reward", "next_state", "done")
    for kind in COMPILED:
        of_tuples, of_columns = kind(STATES, ACTIONS, **OPTIONS), kind(STATES, ACTIONS, **OPTIONS)
        of_tuples.batch_update([row[:5] for row in each(batch)])
        of_columns.batch_update(dict(zip(names, columns(batch), strict=True)))
        np.testing.assert_array_equal(of_tuples.q_table, expected)
        np.testing.assert_array_equal(of_columns.q_table, expected)


@settings(max_examples=40, deadline=None)
@given(rows())
def test_lists_learn_in_double_precision(batch):
    values = [[0.0] * ACTIONS for _ in range(STATES)]
    for state, action, reward, following, done, mask in each(batch):
        allowed = [v for a, v in enumerate(values[following]) if mask is None or mask[a]]
        target = reward + (0.0 if done else discount(batch) * max(allowed))
        values[state][action] += RATE * (target - values[state][action])
    agent = ListQLearning(STATES, ACTIONS, **OPTIONS)
    one_by_one(agent, batch)
    assert agent.q_table == values


@settings(max_examples=60, deadline=None)
@given(rows())
def test_expected_sarsa_is_its_rule(batch):
    table = SlowTable(STATES, ACTIONS)
    for state, action, reward, following, done, mask in each(batch):
        row = table.row(following, mask)
        worth = (1.0 - EPSILON) * max(row) + EPSILON * (sum(row) / len(row))
        table.move(state, action, reward + (0.0 if done else discount(batch) * worth), RATE)
    together, apart = (ExpectedSARSA(STATES, ACTIONS, **OPTIONS) for _ in range(2))
    together.learn(*columns(batch), next_masks=batch["masks"], turn_based=batch["turns"])
    one_by_one(apart, batch)
    np.testing.assert_allclose(together.q_table, table.array(), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(together.q_table, apart.q_table)


@settings(max_examples=60, deadline=None)
@given(rows())
def test_sarsa_is_its_rule(batch):
    table = SlowTable(STATES, ACTIONS)
    for (state, action, reward, following, done, _), after in zip(each(batch), batch["next_actions"], strict=True):
        worth = 0.0 if done else discount(batch) * table.values[following, int(after)]
        table.move(state, action, reward + worth, RATE)
    together, apart = (SARSA(STATES, ACTIONS, **OPTIONS) for _ in range(2))
    together.learn(*columns(batch), next_actions=batch["next_actions"], turn_based=batch["turns"])
    one_by_one(apart, batch, next_action=batch["next_actions"])
    np.testing.assert_array_equal(together.q_table, table.array())
    np.testing.assert_array_equal(apart.q_table, table.array())


@settings(max_examples=60, deadline=None)
@given(rows(), st.integers(0, 1000))
def test_double_q_is_its_rule(batch, seed):
    pair = [SlowTable(STATES, ACTIONS), SlowTable(STATES, ACTIONS)]
    coins = words_of(seed, len(batch["states"]))
    for (state, action, reward, following, done, mask), coin in zip(each(batch), coins, strict=True):
        updated, other = pair[coin & 1], pair[1 - (coin & 1)]
        target = reward
        if not done:
            allowed = [a for a in range(ACTIONS) if mask is None or mask[a]]
            best = max(allowed, key=lambda a: updated.values[following, a])
            target += discount(batch) * other.values[following, best]
        updated.move(state, action, target, RATE)
    expected = np.stack([table.array() for table in pair])
    together, apart = (DoubleQLearning(STATES, ACTIONS, **OPTIONS, seed=seed) for _ in range(2))
    together.learn(*columns(batch), next_masks=batch["masks"], turn_based=batch["turns"])
    one_by_one(apart, batch)
    np.testing.assert_array_equal(together.storage, expected)
    np.testing.assert_array_equal(apart.storage, expected)
    np.testing.assert_allclose(together.q_table, expected.mean(axis=0), rtol=1e-6)


@settings(max_examples=80, deadline=None)
@given(rows(), st.integers(1, 6))
def test_n_step_returns_are_their_definition(batch, n):
    table, waiting = SlowTable(STATES, ACTIONS), {0: [], 1: [], 2: []}

    def settle(steps, tail):
        (state, action, _), rewards = steps[0], [reward for _, _, reward in steps]
        total = sum(discount(batch) ** k * reward for k, reward in enumerate(rewards))
        table.move(state, action, total + discount(batch) ** len(rewards) * tail, RATE)
        steps.pop(0)

    for i, (state, action, reward, following, done, mask) in enumerate(each(batch)):
        steps = waiting[int(batch["streams"][i])]
        steps.append((state, action, reward))
        ended = done or batch["truncated"][i]
        while steps and (ended or len(steps) == n):
            settle(steps, 0.0 if done else max(table.row(following, mask)))
    agent = NStepQLearning(STATES, ACTIONS, n_step=n, **OPTIONS)
    more = {"truncated": batch["truncated"], "streams": batch["streams"]}
    agent.learn(*columns(batch), next_masks=batch["masks"], turn_based=batch["turns"], **more)
    np.testing.assert_allclose(agent.q_table, table.array(), rtol=1e-5, atol=1e-6)


@settings(max_examples=80, deadline=None)
@given(rows(), st.sampled_from([0.0, 0.5, 1.0]))
def test_watkins_q_lambda_is_its_definition(batch, decay):
    """With accumulating traces kept for every pair, as the textbook has them."""
    table = SlowTable(STATES, ACTIONS)
    traces, masks_before = {stream: {} for stream in range(3)}, dict.fromkeys(range(3))
    for i, (state, action, reward, following, done, mask) in enumerate(each(batch)):
        stream = int(batch["streams"][i])
        trace, value = traces[stream], table.values[state, action]
        if trace and value < max(table.row(state, masks_before[stream])):
            trace.clear()
        trace[state, action] = trace.get((state, action), 0.0) + 1.0
        error = reward + (0.0 if done else discount(batch) * max(table.row(following, mask))) - value
        for key, weight in trace.items():
            table.values[key] += RATE * weight * error
            trace[key] = weight * discount(batch) * decay
        masks_before[stream] = mask
        if done or batch["truncated"][i]:
            trace.clear()
    agent = QLambda(STATES, ACTIONS, trace_decay=decay, **OPTIONS)
    more = {"truncated": batch["truncated"], "streams": batch["streams"]}
    agent.learn(*columns(batch), next_masks=batch["masks"], turn_based=batch["turns"], **more)
    np.testing.assert_allclose(agent.q_table, table.array(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [NStepQLearning, QLambda])
@settings(max_examples=30, deadline=None)
@given(batch=rows(), cut=st.integers(0, 24))
def test_trajectories_may_be_given_in_any_pieces(kind, batch, cut):
    whole, pieces, apart = (kind(STATES, ACTIONS, **OPTIONS) for _ in range(3))
    masks, streams = batch["masks"], batch["streams"]
    options = {"turn_based": batch["turns"]}
    whole.learn(*columns(batch), next_masks=masks, truncated=batch["truncated"], streams=streams, **options)
    for part in (slice(0, cut), slice(cut, None)):
        pieces.learn(
            *(column[part] for column in columns(batch)), next_masks=None if masks is None else masks[part],
            truncated=batch["truncated"][part], streams=streams[part], **options,
        )  # fmt: skip
    for i in range(len(streams)):
        apart.learn(
            *(column[i : i + 1] for column in columns(batch)), next_masks=None if masks is None else masks[i : i + 1],
            truncated=batch["truncated"][i : i + 1], streams=streams[i : i + 1], **options,
        )  # fmt: skip
    np.testing.assert_array_equal(whole.q_table, pieces.q_table)
    np.testing.assert_array_equal(whole.q_table, apart.q_table)


def test_an_episode_that_is_cut_still_settles_its_last_steps():
    """Two steps wait for a third when the environment truncates: both bootstrap from the state they led to."""
    agent = NStepQLearning(3, 1, n_step=3, learning_rate=1.0, discount_factor=0.5)
    agent.q_table[2, 0] = 8.0
    agent.update(0, 0, 1.0, 1, False)
    agent.update(1, 0, 2.0, 2, False)
    assert agent.q_table[0, 0] == agent.q_table[1, 0] == 0.0
    agent.end_episode()
    assert agent.q_table[1, 0] == 2.0 + 0.5 * 8.0
    assert agent.q_table[0, 0] == 1.0 + 0.5 * 2.0 + 0.25 * 8.0


def test_batched_action_selection_equals_single_selection():
    masks = np.random.default_rng(1).random((3000, ACTIONS)) < 0.5
    masks[:, 1] = True
    states = np.random.default_rng(2).integers(0, STATES, 3000)
    table = np.random.default_rng(3).normal(size=(STATES, ACTIONS)).astype(np.float32)
    for kind in (OptimalQLearning, DoubleQLearning):
        together, apart = (kind(STATES, ACTIONS, **OPTIONS, seed=5) for _ in range(2))
        together.q_table, apart.q_table = table.copy(), table.copy()
        chosen = np.concatenate(
            [together.select_actions(states[i : i + 700], masks[i : i + 700]) for i in range(0, 3000, 700)]
        )
        assert chosen.tolist() == [apart.select_action(s, m) for s, m in zip(states, masks, strict=True)]
        for word, state, mask, action in zip(words_of(5, 3000), states, masks, chosen, strict=True):
            choices = np.flatnonzero(mask)
            explores = spread_word(word)[0] < EPSILON
            assert action == (pick(choices, word) if explores else choices[table[state, choices].argmax()])


def test_lists_choose_like_tables():
    agents = [kind(STATES, ACTIONS, **OPTIONS, seed=5) for kind in (ListQLearning, OptimalQLearning)]
    chosen = [[agent.select_action(i % STATES, [1, i % 2, 1]) for i in range(500)] for agent in agents]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("kind", ALL)
def test_exploration_is_as_frequent_as_epsilon_and_fair(kind):
    agent = kind(1, 4, epsilon=0.4, seed=0)
    agent.storage[...] = np.float32([0, 0, 9, 0])
    counts = np.bincount(agent.select_actions(np.zeros(40_000, np.int64)), minlength=4) / 40_000
    np.testing.assert_allclose(counts, [0.1, 0.1, 0.7, 0.1], atol=0.01)
