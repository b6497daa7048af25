"""Compiled single steps: one call learns from a step and selects the next action, for loops over a plain environment.

The rules are those of the batches (batch_kernels.py, trace_kernels.py). Row 0 of `masks` says which actions the next
state allows. A call returns the next action, 0 if the episode has ended, or a negative reason why nothing was done. All
checks come before any learning, so after OUT_OF_WORDS the same call can be repeated. `epsilon` is the exploration rate
of this step, `next_epsilon` that of the next.
"""

from __future__ import annotations

import numba
import numpy as np

from steppe.algorithms.tabular.batch_kernels import (
    best_action,
    best_value,
    epsilon_greedy_action,
    expected_value,
    is_invalid_row,
    move_towards,
)
from steppe.algorithms.tabular.trace_kernels import push_lambda, push_n_step, ring_views
from steppe.core.system.random_words import NumbaInt

NONE_ALLOWED, INVALID_STEP, OUT_OF_WORDS = -1, -2, -3  # reasons for no action: mask, invalid number, no words left


@numba.njit(cache=True, nogil=True, inline="always")
def next_word(block: np.ndarray, cursor: np.ndarray) -> NumbaInt:
    """Take the next random word."""
    word = block[cursor[0]]
    cursor[0] += 1
    return word


@numba.njit(cache=True, nogil=True, inline="always")
def epsilon_greedy_next(
    q: np.ndarray, state: NumbaInt, masks: np.ndarray, epsilon: float, block: np.ndarray, cursor: np.ndarray
) -> NumbaInt:
    """Return an ε-greedy action; a random word is taken only if epsilon is above 0."""
    word = next_word(block, cursor) if epsilon > 0.0 else np.uint64(0)
    return epsilon_greedy_action(q, state, masks, 0, epsilon, word)


@numba.njit(cache=True, nogil=True, inline="always")
def check_step(
    q: np.ndarray,
    state: NumbaInt,
    action: NumbaInt,
    reward: float,
    next_state: NumbaInt,
    done: bool,
    masks: np.ndarray,
    missing: NumbaInt,
) -> NumbaInt:
    """Return why a step cannot be learned from, or 0; `missing` is the number of words that are lacking."""
    if is_invalid_row(q, state, action, reward, next_state) != 0:
        return INVALID_STEP
    if len(masks) > 0:
        if masks.shape[1] != q.shape[1]:
            return INVALID_STEP
        if not done and not masks[0].any():
            return NONE_ALLOWED
    return OUT_OF_WORDS if missing > 0 else 0


@numba.njit(cache=True, nogil=True)
def select_action(
    q: np.ndarray, state: int, masks: np.ndarray, epsilon: float, block: np.ndarray, cursor: np.ndarray
) -> NumbaInt:
    """Return an ε-greedy action."""
    if not 0 <= state < q.shape[0]:
        return INVALID_STEP
    if epsilon > 0.0 and cursor[0] >= len(block):
        return OUT_OF_WORDS
    return epsilon_greedy_next(q, state, masks, epsilon, block, cursor)


@numba.njit(cache=True, nogil=True)
def select_action_double(
    pair: np.ndarray, state: int, masks: np.ndarray, epsilon: float, block: np.ndarray, cursor: np.ndarray
) -> NumbaInt:
    """Return an ε-greedy action by the sum of two tables."""
    if not 0 <= state < pair.shape[1]:
        return INVALID_STEP
    if epsilon > 0.0 and cursor[0] >= len(block):
        return OUT_OF_WORDS
    both = pair[0, state : state + 1] + pair[1, state : state + 1]
    return epsilon_greedy_next(both, 0, masks, epsilon, block, cursor)


@numba.njit(cache=True, nogil=True)
def step_q(
    q: np.ndarray,
    state: int,
    action: int,
    reward: float,
    next_state: int,
    done: bool,
    ended: bool,
    masks: np.ndarray,
    rate: float,
    discount: float,
    epsilon: float,
    next_epsilon: float,
    block: np.ndarray,
    cursor: np.ndarray,
) -> NumbaInt:
    """Q-learning."""
    missing = cursor[0] + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = check_step(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    target = reward if done else reward + discount * best_value(q, next_state, masks, 0)
    move_towards(q, state, action, target, rate)
    return 0 if ended else epsilon_greedy_next(q, next_state, masks, next_epsilon, block, cursor)


@numba.njit(cache=True, nogil=True)
def step_expected(
    q: np.ndarray,
    state: int,
    action: int,
    reward: float,
    next_state: int,
    done: bool,
    ended: bool,
    masks: np.ndarray,
    rate: float,
    discount: float,
    epsilon: float,
    next_epsilon: float,
    block: np.ndarray,
    cursor: np.ndarray,
) -> NumbaInt:
    """Expected SARSA."""
    missing = cursor[0] + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = check_step(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    target = reward if done else reward + discount * expected_value(q, next_state, masks, 0, epsilon)
    move_towards(q, state, action, target, rate)
    return 0 if ended else epsilon_greedy_next(q, next_state, masks, next_epsilon, block, cursor)


@numba.njit(cache=True, nogil=True)
def step_sarsa(
    q: np.ndarray,
    state: int,
    action: int,
    reward: float,
    next_state: int,
    done: bool,
    ended: bool,
    masks: np.ndarray,
    rate: float,
    discount: float,
    epsilon: float,
    next_epsilon: float,
    block: np.ndarray,
    cursor: np.ndarray,
) -> NumbaInt:
    """SARSA: the next action is selected first, with this step's epsilon, and also if the episode was truncated."""
    missing = cursor[0] + np.int64(not done and epsilon > 0.0) - len(block)
    reason = check_step(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    following, target = np.int64(0), reward
    if not done:
        following = np.int64(epsilon_greedy_next(q, next_state, masks, epsilon, block, cursor))
        target += discount * np.float64(q[np.uint64(next_state), np.uint64(following)])
    move_towards(q, state, action, target, rate)
    return following


@numba.njit(cache=True, nogil=True)
def step_double(
    pair: np.ndarray,
    state: int,
    action: int,
    reward: float,
    next_state: int,
    done: bool,
    ended: bool,
    masks: np.ndarray,
    rate: float,
    discount: float,
    epsilon: float,
    next_epsilon: float,
    block: np.ndarray,
    cursor: np.ndarray,
) -> NumbaInt:
    """Double Q-learning: one word selects the table that learns, another one the action by both tables."""
    missing = cursor[0] + 1 + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = check_step(pair[0], state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    side = np.int64(next_word(block, cursor) & np.uint64(1))
    q, other, target = pair[side], pair[1 - side], reward
    if not done:
        target += discount * np.float64(other[next_state, best_action(q, next_state, masks, 0)])
    move_towards(q, state, action, target, rate)
    if ended:
        return 0
    both = pair[0, next_state : next_state + 1] + pair[1, next_state : next_state + 1]
    return epsilon_greedy_next(both, 0, masks, next_epsilon, block, cursor)


@numba.njit(cache=True, nogil=True)
def step_n_step(
    q: np.ndarray,
    numbers: np.ndarray,
    reals: np.ndarray,
    ring_masks: np.ndarray,
    size: int,
    state: int,
    action: int,
    reward: float,
    next_state: int,
    done: bool,
    ended: bool,
    masks: np.ndarray,
    rate: float,
    discount: float,
    epsilon: float,
    next_epsilon: float,
    block: np.ndarray,
    cursor: np.ndarray,
) -> NumbaInt:
    """n-step Q-learning of trajectory 0; `flush_truncated` ends it if the episode is truncated."""
    missing = cursor[0] + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = check_step(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    rings = ring_views(numbers, reals, ring_masks, size)
    push_n_step(q, rings, 0, state, action, reward, next_state, done, False, masks, 0, rate, discount)
    return 0 if ended else epsilon_greedy_next(q, next_state, masks, next_epsilon, block, cursor)


@numba.njit(cache=True, nogil=True)
def step_lambda(
    q: np.ndarray,
    numbers: np.ndarray,
    reals: np.ndarray,
    ring_masks: np.ndarray,
    size: int,
    decay: float,
    state: int,
    action: int,
    reward: float,
    next_state: int,
    done: bool,
    ended: bool,
    masks: np.ndarray,
    rate: float,
    discount: float,
    epsilon: float,
    next_epsilon: float,
    block: np.ndarray,
    cursor: np.ndarray,
) -> NumbaInt:
    """Watkins's Q(λ) of trajectory 0."""
    missing = cursor[0] + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = check_step(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    rings = ring_views(numbers, reals, ring_masks, size)
    push_lambda(q, rings, 0, state, action, reward, next_state, done, False, masks, 0, rate, discount, decay)
    return 0 if ended else epsilon_greedy_next(q, next_state, masks, next_epsilon, block, cursor)
