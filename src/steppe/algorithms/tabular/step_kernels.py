"""Learning from one step and choosing the next action in one compiled call: all that a loop over a plain environment needs.

The rules are those of the batches (batch_kernels.py, trace_kernels.py), row 0 of `masks` is what the next state allows, and a call
returns the next action, 0 where the episode has ended, or why nothing was done. Whatever may be wrong is seen before
anything is learned, so after NO_WORDS the same call can be made again. `epsilon` is the rate of exploration of this step,
`next_epsilon` of the next.
"""

from __future__ import annotations

import numba
import numpy as np

from steppe.algorithms.tabular.batch_kernels import (
    best_action,
    best_value,
    chosen,
    expected_value,
    towards,
    unlearnable,
)
from steppe.algorithms.tabular.trace_kernels import carved, follow_lambda, follow_n_step
from steppe.core.play import Whole

NONE_ALLOWED, WRONG, NO_WORDS = -1, -2, -3  # no action, because: the mask, a bad number, no chance left


@numba.njit(cache=True, nogil=True, inline="always")
def next_word(block: np.ndarray, cursor: np.ndarray) -> Whole:
    """Take a word of chance."""
    word = block[cursor[0]]
    cursor[0] += 1
    return word


@numba.njit(cache=True, nogil=True, inline="always")
def chosen_next(
    q: np.ndarray, state: Whole, masks: np.ndarray, epsilon: float, block: np.ndarray, cursor: np.ndarray
) -> Whole:
    """An ε-greedy action with the next word, which is only taken where chance has a say."""
    word = next_word(block, cursor) if epsilon > 0.0 else np.uint64(0)
    return chosen(q, state, masks, 0, epsilon, word)


@numba.njit(cache=True, nogil=True, inline="always")
def refused(
    q: np.ndarray,
    state: Whole,
    action: Whole,
    reward: float,
    next_state: Whole,
    done: bool,
    masks: np.ndarray,
    missing: Whole,
) -> Whole:
    """Why a step cannot be learned from, or 0; `missing` is how many words there are too few."""
    if unlearnable(q, state, action, reward, next_state) != 0:
        return WRONG
    if len(masks) > 0:
        if masks.shape[1] != q.shape[1]:
            return WRONG
        if not done and not masks[0].any():
            return NONE_ALLOWED
    return NO_WORDS if missing > 0 else 0


@numba.njit(cache=True, nogil=True)
def choose_one(
    q: np.ndarray, state: int, masks: np.ndarray, epsilon: float, block: np.ndarray, cursor: np.ndarray
) -> Whole:
    """An ε-greedy action."""
    if not 0 <= state < q.shape[0]:
        return WRONG
    if epsilon > 0.0 and cursor[0] >= len(block):
        return NO_WORDS
    return chosen_next(q, state, masks, epsilon, block, cursor)


@numba.njit(cache=True, nogil=True)
def choose_double(
    pair: np.ndarray, state: int, masks: np.ndarray, epsilon: float, block: np.ndarray, cursor: np.ndarray
) -> Whole:
    """An ε-greedy action by the sum of two tables."""
    if not 0 <= state < pair.shape[1]:
        return WRONG
    if epsilon > 0.0 and cursor[0] >= len(block):
        return NO_WORDS
    both = pair[0, state : state + 1] + pair[1, state : state + 1]
    return chosen_next(both, 0, masks, epsilon, block, cursor)


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
) -> Whole:
    """Q-learning."""
    missing = cursor[0] + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = refused(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    target = reward if done else reward + discount * best_value(q, next_state, masks, 0)
    towards(q, state, action, target, rate)
    return 0 if ended else chosen_next(q, next_state, masks, next_epsilon, block, cursor)


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
) -> Whole:
    """Expected SARSA."""
    missing = cursor[0] + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = refused(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    target = reward if done else reward + discount * expected_value(q, next_state, masks, 0, epsilon)
    towards(q, state, action, target, rate)
    return 0 if ended else chosen_next(q, next_state, masks, next_epsilon, block, cursor)


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
) -> Whole:
    """SARSA: the next action is chosen first, at the rate of this step, and also where an episode was cut."""
    missing = cursor[0] + np.int64(not done and epsilon > 0.0) - len(block)
    reason = refused(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    following, target = np.int64(0), reward
    if not done:
        following = np.int64(chosen_next(q, next_state, masks, epsilon, block, cursor))
        target += discount * np.float64(q[np.uint64(next_state), np.uint64(following)])
    towards(q, state, action, target, rate)
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
) -> Whole:
    """Double Q-learning: a word for the coin, and one for the choice by both tables."""
    missing = cursor[0] + 1 + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = refused(pair[0], state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    side = np.int64(next_word(block, cursor) & np.uint64(1))
    q, other, target = pair[side], pair[1 - side], reward
    if not done:
        target += discount * np.float64(other[next_state, best_action(q, next_state, masks, 0)])
    towards(q, state, action, target, rate)
    if ended:
        return 0
    both = pair[0, next_state : next_state + 1] + pair[1, next_state : next_state + 1]
    return chosen_next(both, 0, masks, next_epsilon, block, cursor)


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
) -> Whole:
    """n-step Q-learning of trajectory 0, whose end is left to `cut`."""
    missing = cursor[0] + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = refused(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    rings = carved(numbers, reals, ring_masks, size)
    follow_n_step(q, rings, 0, state, action, reward, next_state, done, False, masks, 0, rate, discount)
    return 0 if ended else chosen_next(q, next_state, masks, next_epsilon, block, cursor)


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
) -> Whole:
    """Watkins's Q(λ) of trajectory 0."""
    missing = cursor[0] + np.int64(not ended and next_epsilon > 0.0) - len(block)
    reason = refused(q, state, action, reward, next_state, done, masks, missing)
    if reason != 0:
        return reason
    rings = carved(numbers, reals, ring_masks, size)
    follow_lambda(q, rings, 0, state, action, reward, next_state, done, False, masks, 0, rate, discount, decay)
    return 0 if ended else chosen_next(q, next_state, masks, next_epsilon, block, cursor)
