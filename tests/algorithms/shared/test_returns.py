"""Advantages and n-step returns against slow Python written from the definitions, one trajectory at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.algorithms.shared.returns import gae, n_step_returns

pytestmark = pytest.mark.unit


def invented(seed, num_steps, num_envs, *, cuts=0.3, resets_take_a_step=True):
    """Random rows; what no rule may read is NaN."""
    stream = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
    terminated, truncated, valid = np.zeros(shape, bool), np.zeros(shape, bool), np.ones(shape, bool)
    resetting = stream.random(num_envs) < 0.3 if resets_take_a_step else np.zeros(num_envs, bool)
    for t in range(num_steps):
        valid[t] = ~resetting
        cut = (stream.random(num_envs) < cuts) & valid[t]
        kind = stream.integers(0, 3, num_envs)  # both at once happens too
        terminated[t], truncated[t] = cut & (kind != 1), cut & (kind != 0)
        resetting = cut if resets_take_a_step else resetting
    reward = np.where(valid, stream.normal(size=shape), np.nan).astype(np.float32)
    value = np.where(valid, stream.normal(size=shape), np.nan).astype(np.float32)
    final_value = np.where(truncated & ~terminated, stream.normal(size=shape), np.nan).astype(np.float32)
    last_value = stream.normal(size=num_envs).astype(np.float32)
    return reward, value, terminated, truncated, valid, final_value, last_value


def trajectories(rows, env):
    """Each as [(t, reward, value), …] and the value that follows its last step."""
    reward, value, terminated, truncated, valid, final_value, last_value = rows
    steps = []
    for t in range(len(reward)):
        if not valid[t, env]:
            continue
        steps.append((t, float(reward[t, env]), float(value[t, env])))
        if terminated[t, env]:
            yield steps, 0.0
            steps = []
        elif truncated[t, env]:
            yield steps, float(final_value[t, env])
            steps = []
    if steps:
        yield steps, float(last_value[env])


def slow_gae(rows, gamma, lam):
    """A_t = Σ_k (γλ)^k δ_{t+k}, summed out."""
    expected = np.zeros(rows[0].shape)
    for env in range(rows[0].shape[1]):
        for steps, after in trajectories(rows, env):
            values = [value for _, _, value in steps] + [after]
            delta = [reward + gamma * values[i + 1] - values[i] for i, (_, reward, _) in enumerate(steps)]
            for i, (t, _, _) in enumerate(steps):
                expected[t, env] = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(steps)))
    return expected


def slow_n_step(rows, gamma, n):
    expected = np.zeros(rows[0].shape)
    for env in range(rows[0].shape[1]):
        for steps, after in trajectories(rows, env):
            for i, (t, _, _) in enumerate(steps):
                end = min(i + n, len(steps))
                tail = steps[end][2] if end < len(steps) else after
                rewards = [reward for _, reward, _ in steps[i:end]]
                expected[t, env] = sum(gamma**k * r for k, r in enumerate(rewards)) + gamma ** len(rewards) * tail
    return expected


# Hundredths: where a role has set flush-to-zero in this process, hypothesis refuses to draw floats.
fractions = st.integers(0, 100).map(lambda hundredths: hundredths / 100)
sizes = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 24), st.integers(1, 5), st.booleans())


@settings(max_examples=80, deadline=None)
@given(sizes, fractions, fractions)
def test_gae_is_its_definition(size, gamma, lam):
    seed, num_steps, num_envs, takes = size
    rows = invented(seed, num_steps, num_envs, resets_take_a_step=takes)
    np.testing.assert_allclose(gae(*rows, gamma, lam), slow_gae(rows, gamma, lam), rtol=1e-5, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(sizes, fractions, st.integers(1, 30))
def test_n_step_returns_are_their_definition(size, gamma, n):
    seed, num_steps, num_envs, takes = size
    rows = invented(seed, num_steps, num_envs, resets_take_a_step=takes)
    np.testing.assert_allclose(n_step_returns(*rows, gamma, n), slow_n_step(rows, gamma, n), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(sizes, fractions)
def test_with_lambda_one_it_is_the_discounted_return_minus_the_value(size, gamma):
    seed, num_steps, num_envs, takes = size
    rows = invented(seed, num_steps, num_envs, resets_take_a_step=takes)
    expected = np.zeros(rows[0].shape)
    for env in range(num_envs):
        for steps, following in trajectories(rows, env):
            total = following
            for t, reward, value in reversed(steps):
                total = reward + gamma * total
                expected[t, env] = total - value
    np.testing.assert_allclose(gae(*rows, gamma, 1.0), expected, rtol=1e-5, atol=1e-5)


def test_by_hand():
    """γ = .5, λ = .5; rewards 1, values 2, next value 4: δ = 1 + 2 − 2 = 1 at the end, 1 + 1 − 2 = 0 before it."""
    ones = np.ones((2, 1), np.float32)
    none = np.zeros((2, 1), bool)
    rows = (ones, 2 * ones, none, none, ~none, ones * np.nan, np.array([4.0], np.float32))
    np.testing.assert_array_equal(gae(*rows, 0.5, 0.5), [[0.25], [1.0]])
    np.testing.assert_array_equal(n_step_returns(*rows, 0.5, 1), [[2.0], [3.0]])
    np.testing.assert_array_equal(n_step_returns(*rows, 0.5, 5), [[2.5], [3.0]])


def test_a_truncated_step_bootstraps_and_a_terminated_one_does_not():
    one = np.ones((1, 1), np.float32)
    no, yes = np.zeros((1, 1), bool), np.ones((1, 1), bool)
    last = np.array([100.0], np.float32)
    assert gae(one, 0 * one, no, yes, yes, 8 * one, last, 0.5, 0.9)[0, 0] == 5.0
    assert gae(one, 0 * one, yes, no, yes, 8 * one, last, 0.5, 0.9)[0, 0] == 1.0
    assert gae(one, 0 * one, yes, yes, yes, 8 * one, last, 0.5, 0.9)[0, 0] == 1.0


def test_no_state_or_gradient_crosses_a_reset_row():
    rows = invented(3, 12, 3)
    advantage = gae(*rows, 0.9, 0.9)
    valid = rows[4]
    assert not valid.all()
    assert (advantage[~valid] == 0).all()
    assert np.isfinite(advantage).all()


def test_n_step_returns_step_over_a_reset_row_that_no_end_precedes():
    """The row between belongs to nobody: rewards 1 and 1, then the value after the rows, 4, discounted twice."""
    reward = np.array([[1.0], [np.nan], [1.0]], np.float32)
    none, valid = np.zeros((3, 1), bool), np.array([[True], [False], [True]])
    rows = (reward, reward, none, none, valid, reward * np.nan, np.array([4.0], np.float32))
    np.testing.assert_array_equal(n_step_returns(*rows, 0.5, 9), [[2.5], [0.0], [3.0]])
