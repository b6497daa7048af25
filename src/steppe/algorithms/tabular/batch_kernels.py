"""Compiled action selection and one-step updates on a table `q[state, action]`.

A batch gives the same result as its rows one by one, in order; a single step with the selection of the next action is
in step_kernels.py.

All kernels compute in float64 between reading a float32 entry and rounding the result into it, so that the same rows
give the same bits in any grouping; no fastmath. `masks` [B, A] says which actions the state allows, and has no rows if
all are allowed. A negative discount means a turn-based game: the opponent moves in the next state (negamax). Rows are
checked before the first one is learned, and a kernel returns the index of the first invalid row, or −1. Values that
cannot be negative are cast to uint64 before they are used as an index: numba then omits the code for negative indices,
which saves a quarter of the time.
"""

from __future__ import annotations

from typing import Any

import numba
import numba.extending
import numpy as np

from steppe.core.array_checks import as_column
from steppe.core.contracts.errors import ConfigError
from steppe.core.system.random_words import NumbaInt, random_below

VALID, LENGTHS_DIFFER = -1, -2  # no invalid row; columns of different lengths
NO_MASKS = np.empty((0, 0), np.bool_)  # the masks of states that allow all actions
_UNIT = 2.0**-32
_LOWER = np.uint64(0xFFFFFFFF)


@numba.njit(cache=True, nogil=True, inline="always")
def should_explore(word: NumbaInt, epsilon: float) -> Any:
    """Whether the lower half of a word falls below `epsilon`; the upper half is left for the choice of the action."""
    return np.int64(np.uint64(word) & _LOWER) * _UNIT < epsilon


@numba.njit(cache=True, nogil=True, inline="always")
def best_action(q: np.ndarray, state: NumbaInt, masks: np.ndarray, row: NumbaInt) -> NumbaInt:
    """Return the first of the best allowed actions; −1 if none is allowed."""
    state = np.uint64(state)
    best, action = q[state, 0], 0
    if len(masks) == 0:
        for candidate in range(1, q.shape[1]):
            value = q[state, candidate]
            better = value > best
            best = value if better else best
            action = candidate if better else action
        return action
    action = -1
    for candidate in range(q.shape[1]):
        value = q[state, candidate]
        better = masks[row, candidate] & ((action < 0) | (value > best))
        best = value if better else best
        action = candidate if better else action
    return action


@numba.njit(cache=True, nogil=True, inline="always")
def best_value(q: np.ndarray, state: NumbaInt, masks: np.ndarray, row: NumbaInt) -> float:
    """Return the largest allowed value; at least one action must be allowed."""
    if len(masks) > 0:
        return np.float64(q[np.uint64(state), best_action(q, state, masks, row)])
    state = np.uint64(state)
    best = q[state, 0]
    for action in range(np.uint64(1), np.uint64(q.shape[1])):
        value = q[state, action]
        best = value if value > best else best
    return np.float64(best)


@numba.njit(cache=True, nogil=True, inline="always")
def mean_value(q: np.ndarray, state: NumbaInt, masks: np.ndarray, row: NumbaInt) -> float:
    """Return the mean of the allowed values."""
    state, total, count = np.uint64(state), 0.0, 0
    for action in range(q.shape[1]):
        if len(masks) == 0 or masks[row, action]:
            total += np.float64(q[state, action])
            count += 1
    return total / count


@numba.njit(cache=True, nogil=True, inline="always")
def random_action(num_actions: NumbaInt, masks: np.ndarray, row: NumbaInt, word: NumbaInt) -> NumbaInt:
    """Return a uniformly random allowed action; −1 if none is allowed."""
    if len(masks) == 0:
        return random_below(word, num_actions)
    count = np.int64(0)
    for action in range(num_actions):
        count += np.int64(masks[row, action])
    left = random_below(word, count)
    for action in range(num_actions):
        if masks[row, action]:
            if left == 0:
                return action
            left -= 1
    return -1


@numba.njit(cache=True, nogil=True, inline="always")
def epsilon_greedy_action(
    q: np.ndarray, state: NumbaInt, masks: np.ndarray, row: NumbaInt, epsilon: float, word: NumbaInt
) -> NumbaInt:
    """Return an ε-greedy action; −1 if none is allowed."""
    if should_explore(word, epsilon):
        return random_action(q.shape[1], masks, row, word)
    return best_action(q, state, masks, row)


@numba.njit(cache=True, nogil=True, inline="always")
def move_towards(q: np.ndarray, state: NumbaInt, action: NumbaInt, target: float, rate: float) -> None:
    """Move an entry towards a target by the learning rate."""
    state, action = np.uint64(state), np.uint64(action)
    value = np.float64(q[state, action])
    q[state, action] = value + rate * (target - value)


@numba.njit(cache=True, nogil=True, inline="always")
def expected_value(q: np.ndarray, state: NumbaInt, masks: np.ndarray, row: NumbaInt, epsilon: float) -> float:
    """Return the expected value of an ε-greedy action."""
    return (1.0 - epsilon) * best_value(q, state, masks, row) + epsilon * mean_value(q, state, masks, row)


@numba.njit(cache=True, nogil=True)
def select_actions(
    q: np.ndarray, states: np.ndarray, masks: np.ndarray, epsilon: float, words: np.ndarray, actions: np.ndarray
) -> int:
    """Write an ε-greedy action for each state; return the first row with a bad state or no allowed action, or −1."""
    for i in range(len(states)):
        if not 0 <= states[i] < q.shape[0]:
            return i
        word = words[i] if epsilon > 0.0 else np.uint64(0)
        actions[i] = epsilon_greedy_action(q, states[i], masks, i, epsilon, word)
        if actions[i] < 0:
            return i
    return -1


@numba.njit(cache=True, nogil=True, inline="always")
def is_invalid_row(
    q: np.ndarray, state: NumbaInt, action: NumbaInt, reward: NumbaInt, next_state: NumbaInt
) -> NumbaInt:
    """Return 1 for an index outside the table or a non-finite reward, else 0; no branches, so rows run in parallel."""
    num_states, num_actions = np.uint64(q.shape[0]), np.uint64(q.shape[1])
    outside = np.int64(np.uint64(state) >= num_states) | np.int64(np.uint64(next_state) >= num_states)
    return outside | np.int64(np.uint64(action) >= num_actions) | np.int64(reward - reward != 0.0)


@numba.njit(cache=True, nogil=True)
def first_invalid_row(
    q: np.ndarray,
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    next_states: np.ndarray,
    dones: np.ndarray,
    masks: np.ndarray,
) -> int:
    """Return the first invalid row, −1 if there is none, or LENGTHS_DIFFER if columns differ in length."""
    count, bad = len(states), np.int64(0)
    if not len(actions) == len(rewards) == len(next_states) == len(dones) == count:
        return LENGTHS_DIFFER
    for i in range(count):
        bad |= is_invalid_row(q, states[i], actions[i], rewards[i], next_states[i])
    for i in range(len(masks)):
        bad |= np.int64(not dones[i] and not masks[i].any())
    if bad == 0:
        return -1
    for i in range(len(states)):
        if is_invalid_row(q, states[i], actions[i], rewards[i], next_states[i]):
            return i
        if len(masks) > 0 and not dones[i] and not masks[i].any():
            return i
    return -1


@numba.njit(cache=True, nogil=True)
def learn_q(
    q: np.ndarray,
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    next_states: np.ndarray,
    dones: np.ndarray,
    masks: np.ndarray,
    rate: float,
    discount: float,
) -> int:
    """Q-learning: towards r + γ max Q(s′, ·) (Watkins 1989)."""
    wrong = first_invalid_row(q, states, actions, rewards, next_states, dones, masks)
    if wrong != VALID:
        return wrong
    for i in range(len(states)):
        target = np.float64(rewards[i])
        if not dones[i]:
            target += discount * best_value(q, next_states[i], masks, i)
        move_towards(q, states[i], actions[i], target, rate)
    return -1


@numba.njit(cache=True, nogil=True)
def learn_expected(
    q: np.ndarray,
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    next_states: np.ndarray,
    dones: np.ndarray,
    masks: np.ndarray,
    rate: float,
    discount: float,
    epsilon: float,
) -> int:
    """Expected SARSA: towards r + γ E Q(s′, ·) under the ε-greedy policy (van Seijen et al. 2009)."""
    wrong = first_invalid_row(q, states, actions, rewards, next_states, dones, masks)
    if wrong != VALID:
        return wrong
    for i in range(len(states)):
        target = np.float64(rewards[i])
        if not dones[i]:
            target += discount * expected_value(q, next_states[i], masks, i, epsilon)
        move_towards(q, states[i], actions[i], target, rate)
    return -1


@numba.njit(cache=True, nogil=True)
def learn_sarsa(
    q: np.ndarray,
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    next_states: np.ndarray,
    dones: np.ndarray,
    next_actions: np.ndarray,
    rate: float,
    discount: float,
) -> int:
    """SARSA: towards r + γ Q(s′, a′) for the action that was taken next (Rummery and Niranjan 1994)."""
    for i in range(len(states)):
        if not dones[i] and not 0 <= next_actions[i] < q.shape[1]:
            return i
    wrong = first_invalid_row(q, states, actions, rewards, next_states, dones, np.empty((0, 0), np.bool_))
    if wrong != VALID:
        return wrong
    for i in range(len(states)):
        target = np.float64(rewards[i])
        if not dones[i]:
            target += discount * np.float64(q[next_states[i], next_actions[i]])
        move_towards(q, states[i], actions[i], target, rate)
    return -1


@numba.njit(cache=True, nogil=True)
def learn_double(
    pair: np.ndarray,
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    next_states: np.ndarray,
    dones: np.ndarray,
    masks: np.ndarray,
    rate: float,
    discount: float,
    words: np.ndarray,
) -> int:
    """Double Q-learning over two tables `pair` [2, S, A] (van Hasselt 2010).

    A random bit selects the table that learns; that table chooses the next action, and the other one evaluates it.
    """
    wrong = first_invalid_row(pair[0], states, actions, rewards, next_states, dones, masks)
    if wrong != VALID:
        return wrong
    for i in range(len(states)):
        side = np.int64(words[i] & np.uint64(1))
        q, other = pair[side], pair[1 - side]
        target = np.float64(rewards[i])
        if not dones[i]:
            target += discount * np.float64(other[next_states[i], best_action(q, next_states[i], masks, i)])
        move_towards(q, states[i], actions[i], target, rate)
    return -1


def vectorized_q_update(
    q_table: np.ndarray,
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    next_states: np.ndarray,
    dones: np.ndarray,
    learning_rate: float,
    discount_factor: float,
) -> None:
    """Update a Q-table in place by Q-learning over a batch, row by row; users' compiled code may call it too."""
    floats = isinstance(q_table, np.ndarray) and q_table.dtype in (np.float32, np.float64)
    if not floats or q_table.ndim != 2 or not q_table.flags.behaved:
        raise ConfigError("q_table must be an array [states, actions] of float32 or float64 that can be written to")
    columns = (
        as_column(states, "states", np.int64),
        as_column(actions, "actions", np.int64),
        as_column(rewards, "rewards", np.float64),
        as_column(next_states, "next_states", np.int64),
        as_column(dones, "dones", np.bool_),
    )
    if any(column.ndim != 1 for column in columns):
        raise ConfigError(f"the columns of a batch have one axis, not {[column.ndim for column in columns]}")
    _update_batch(q_table, *columns, float(learning_rate), float(discount_factor))


@numba.njit(cache=True, nogil=True)
def _update_batch(
    q_table: np.ndarray,
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    next_states: np.ndarray,
    dones: np.ndarray,
    learning_rate: float,
    discount_factor: float,
) -> None:
    none = np.empty((0, 0), np.bool_)
    if learn_q(q_table, states, actions, rewards, next_states, dones, none, learning_rate, discount_factor) != VALID:
        raise ConfigError(
            "a state or action is outside the table, a reward is not finite, or the columns differ in length; nothing was learned"
        )


@numba.extending.overload(vectorized_q_update)
def _overload_q_update(
    q_table: Any,
    states: Any,
    actions: Any,
    rewards: Any,
    next_states: Any,
    dones: Any,
    learning_rate: Any,
    discount_factor: Any,
) -> Any:
    """Overload for compiled callers: numba knows the types, so only values are left to check."""
    for name, column in (("states", states), ("actions", actions), ("next_states", next_states)):
        if not isinstance(getattr(column, "dtype", None), numba.types.Integer):
            raise numba.TypingError(f"{name} must be an array of whole numbers")

    def update(
        q_table: Any,
        states: Any,
        actions: Any,
        rewards: Any,
        next_states: Any,
        dones: Any,
        learning_rate: Any,
        discount_factor: Any,
    ) -> Any:
        _update_batch(q_table, states, actions, rewards, next_states, dones, learning_rate, discount_factor)

    return update
