"""Tabular Q-learning as bare compiled loops, each for one task and with nothing around it: the limit for tables.py."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def learn(q, states, actions, rewards, next_states, dones, rate, gamma):
    """A batch, row by row."""
    for i in range(len(states)):
        target = rewards[i]
        if not dones[i]:
            best = q[next_states[i], 0]
            for a in range(1, q.shape[1]):
                best = max(best, q[next_states[i], a])
            target += gamma * best
        q[states[i], actions[i]] += rate * (target - q[states[i], actions[i]])


@numba.njit(cache=True, nogil=True)
def play(q, placed, legal, mover, outcome, states, steps, rate, epsilon, gamma, seed):
    """TicTacToe against a random opponent, game after game in turn, chance by xorshift64."""
    for _ in range(steps):
        for b in range(len(states)):
            seed ^= seed << np.uint64(13)
            seed ^= seed >> np.uint64(7)
            seed ^= seed << np.uint64(17)
            state = states[b]
            seat = mover[state]
            if (seed & np.uint64(0xFFFF)) / 65536.0 < epsilon:
                action = any_of(legal[state], seed >> np.uint64(16))
            else:
                action, best = -1, 0.0
                for a in range(9):
                    if legal[state] >> a & 1 and (action < 0 or q[state, a] > best):
                        action, best = a, q[state, a]
            after = state + placed[seat, action]
            if legal[after]:
                after += placed[1 - seat, any_of(legal[after], seed >> np.uint64(32))]
            if legal[after]:
                best = -np.inf
                for a in range(9):
                    if legal[after] >> a & 1:
                        best = max(best, q[after, a])
                target = gamma * best
                states[b] = after
            else:
                target = 0.0 if outcome[after] == 3 else (1.0 if outcome[after] == seat + 1 else -1.0)
                second = seed >> np.uint64(63)
                states[b] = placed[0, any_of(511, seed >> np.uint64(40))] if second else 0
            q[state, action] += rate * (target - q[state, action])


@numba.njit(cache=True, nogil=True)
def any_of(moves, word):
    """One of the set bits by 16 bits of chance."""
    count = 0
    for a in range(9):
        count += moves >> a & 1
    left = np.int64((word & np.uint64(0xFFFF)) * np.uint64(count) >> np.uint64(16))
    for a in range(9):
        if moves >> a & 1:
            if left == 0:
                return a
            left -= 1
    return -1
