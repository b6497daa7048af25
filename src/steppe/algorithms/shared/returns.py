"""Targets from rewards, as compiled kernels over `[T, B]`: generalized advantages and n-step returns.

All follow three rules: the target of a terminated step is its reward alone; a truncated step bootstraps from the value
of its final observation; an invalid (autoreset) row is skipped and gets 0.

Sums are float64 (numba promotes an int literal with a float32 anyway), results float32; no fastmath, so that the hashes
of weights stay the same.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def gae(
    reward: np.ndarray,
    value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    valid: np.ndarray,
    final_value: np.ndarray,
    last_value: np.ndarray,
    gamma: float,
    lam: float,
) -> np.ndarray:
    """Advantages A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} − V_t (Schulman et al. 2016, eq. 16).

    `final_value` [T, B] is read only where truncated; `last_value` [B] is the value of the observation after the last row.
    """
    num_steps, num_envs = reward.shape
    advantage = np.zeros((num_steps, num_envs), np.float32)
    next_value = last_value.astype(np.float64)
    chain = np.zeros(num_envs, np.float64)
    for t in range(num_steps - 1, -1, -1):
        for b in range(num_envs):
            if not valid[t, b]:
                continue
            if terminated[t, b]:
                following, carried = 0.0, 0.0
            elif truncated[t, b]:
                following, carried = np.float64(final_value[t, b]), 0.0
            else:
                following, carried = next_value[b], chain[b]
            here = np.float64(value[t, b])
            chain[b] = np.float64(reward[t, b]) + gamma * following - here + gamma * lam * carried
            next_value[b] = here
            advantage[t, b] = chain[b]
    return advantage


@numba.njit(cache=True, nogil=True)
def n_step_returns(
    reward: np.ndarray,
    value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    valid: np.ndarray,
    final_value: np.ndarray,
    last_value: np.ndarray,
    gamma: float,
    n: int,
) -> np.ndarray:
    """G_t = r_t + … + γ^{n−1} r_{t+n−1} + γ^n V_{t+n}; shorter where the episode or the rows end first."""
    num_steps, num_envs = reward.shape
    returns = np.zeros((num_steps, num_envs), np.float32)
    for b in range(num_envs):
        for start in range(num_steps):
            if not valid[start, b]:
                continue
            total, discount, taken = 0.0, 1.0, 0
            tail = float(last_value[b])
            for t in range(start, num_steps):
                if not valid[t, b]:
                    continue
                if taken == n:
                    tail = float(value[t, b])
                    break
                total += discount * np.float64(reward[t, b])
                discount *= gamma
                taken += 1
                if terminated[t, b]:
                    tail = 0.0
                    break
                if truncated[t, b]:
                    tail = float(final_value[t, b])
                    break
            returns[start, b] = total + discount * tail
    return returns
