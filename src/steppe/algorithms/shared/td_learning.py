"""Parts shared by agents that learn action values from sequences: exploration, recurrent state, and the TD loss.

Axes are [T, N, …]. Batches come from replay/sequence_windows.py: a step's target is its n-step sum plus the bootstrap
value of row `following`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np

from steppe.core.contracts.errors import NotFinite
from steppe.core.contracts.segment import Batch
from steppe.core.value_rescaling import inverse_rescale_value, rescale_value

_rescale_value = numba.njit(cache=True, nogil=True)(rescale_value)
_inverse_rescale_value = numba.njit(cache=True, nogil=True)(inverse_rescale_value)


def apex_epsilons(base: float, power: float, num_envs: int, actor: int, num_actors: int) -> np.ndarray:
    """Return the epsilons [num_envs] of one actor; over all actors they range from base down to base ** (1 + power).

    Neighbouring epsilons are in different actors, so each actor covers the whole range (Horgan et al. 2018).
    """
    index = np.arange(num_envs) * num_actors + actor
    shares: np.ndarray = base ** (1.0 + power * index / max(1, num_envs * num_actors - 1))
    return shares


def epsilon_greedy(
    action: np.ndarray, num_actions: int, epsilon: float | np.ndarray, stream: np.random.Generator
) -> np.ndarray:
    """Replace each action by a random one with probability epsilon; the same number of random draws either way."""
    explores = stream.random(action.shape) < epsilon
    chosen: np.ndarray = np.where(explores, stream.integers(num_actions, size=action.shape), action)
    return chosen


class RecurrentState:
    """Hidden state of a recurrent policy in each environment, float32 [B, *shape]; 0 when an episode starts."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.state = np.zeros((0, *shape), np.float32)

    def begin(self, num_envs: int) -> None:
        """Reset to zeros for `num_envs` environments."""
        self.state = np.zeros((num_envs, *self.shape), np.float32)

    def reset_where(self, starts: np.ndarray) -> np.ndarray:
        """Return the state before a step, zeroed where an episode starts; all zeros if the batch width changed."""
        if len(starts) != len(self.state):
            self.begin(len(starts))
        elif starts.any():
            self.state[starts] = 0.0
        return self.state

    def keep(self, state: np.ndarray) -> None:
        """Store the state after a step. It must be a new array: the previous one may still be read."""
        self.state = state


def first_learned_step(learn: np.ndarray) -> np.ndarray:
    """Return bool [T, N], True at the first learned row of each sequence: gradients stop there."""
    first = np.zeros_like(learn)
    first[learn.argmax(axis=0), np.arange(learn.shape[1])] = True
    return first


@dataclass(frozen=True)
class TDLoss:
    """A loss, its gradient by the action values [T, N, A], and |TD errors| [T, N], 0 in rows not learned from.

    `core.priorities.sequence_priority` turns the errors into priorities.
    """

    loss: float
    mean_value: float
    mean_error: float
    gradient: np.ndarray
    errors: np.ndarray

    def require_finite(self, update: int) -> None:
        """Raise NotFinite, naming the update, unless the loss is finite."""
        if not math.isfinite(self.loss):
            raise NotFinite(f"loss is {self.loss} at update {update}: lower learning_rate or check the rewards")


def td_loss(
    values: np.ndarray, target_values: np.ndarray, batch: Batch, *, double: bool, value_rescaling: bool
) -> TDLoss:
    """Compute the mean weighted Huber loss (threshold 1) of Q(s, a) − [Σ γᵏ r + γⁿ Q'(sₙ, a')] over the learned rows.

    `values` are the online network's, `target_values` the target network's, both [T, N, A]; with `double`, a' is the
    online network's choice. With several agents, N may be sequences × agents if every column and the weights are.
    """
    found = _huber_loss(
        values,
        values if double else target_values,
        target_values,
        batch["action"],
        batch["reward"],
        batch["discount"],
        batch["terminated"],
        batch["following"],
        batch["learn"],
        np.ones(values.shape[1], np.float32) if batch.weights is None else batch.weights,
        value_rescaling,
    )
    return TDLoss(*found)


@numba.njit(cache=True, nogil=True)
def _huber_loss(
    values: np.ndarray,
    selection_values: np.ndarray,
    target_values: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    discount: np.ndarray,
    terminated: np.ndarray,
    following: np.ndarray,
    learn: np.ndarray,
    weights: np.ndarray,
    value_rescaling: bool,
) -> tuple[float, float, float, np.ndarray, np.ndarray]:
    num_rows, count, num_actions = values.shape
    gradient = np.zeros((num_rows, count, num_actions), np.float32)
    errors = np.zeros((num_rows, count), np.float32)
    loss, mean_value, mean_error = 0.0, 0.0, 0.0
    share = 1.0 / max(1.0, float(np.count_nonzero(learn)))
    for t in range(num_rows):
        for i in range(count):
            if not learn[t, i]:
                continue
            target = np.float64(reward[t, i])
            if not terminated[t, i]:
                then = following[t, i]
                best = 0
                for j in range(1, num_actions):
                    if selection_values[then, i, j] > selection_values[then, i, best]:
                        best = j
                ahead = np.float64(target_values[then, i, best])
                target += np.float64(discount[t, i]) * (_inverse_rescale_value(ahead) if value_rescaling else ahead)
            if value_rescaling:
                target = _rescale_value(target)
            value = np.float64(values[t, i, action[t, i]])
            error = value - target
            size = abs(error)
            weight = np.float64(weights[i]) * share
            loss += weight * (0.5 * error * error if size <= 1.0 else size - 0.5)
            gradient[t, i, action[t, i]] = weight * min(max(error, -1.0), 1.0)
            errors[t, i] = size
            mean_value += value * share
            mean_error += size * share
    return loss, mean_value, mean_error, gradient, errors


def large_margin_loss(
    values: np.ndarray, expert_mask: np.ndarray, learn: np.ndarray, margin: float
) -> tuple[float, np.ndarray]:
    """Return the large margin loss of Hester et al. (2018), for any number of expert actions, and its gradient.

    The loss is how far the best expert action lags behind the other actions plus `margin`, averaged over the learned
    rows that have an expert action. The gradient is with respect to the values [T, N, A].
    """
    counted = learn & expert_mask.any(axis=2)
    rivals = values + np.float32(margin) * ~expert_mask
    best = np.where(expert_mask, values, np.float32(-np.inf)).argmax(axis=2)[..., None]
    rival = rivals.argmax(axis=2)[..., None]
    lag = (np.take_along_axis(rivals, rival, 2) - np.take_along_axis(values, best, 2))[..., 0]
    share = 1.0 / max(1, int(np.count_nonzero(counted)))
    gradient, weight = np.zeros_like(values), (counted * np.float32(share))[..., None]
    np.put_along_axis(gradient, rival, weight, 2)
    np.put_along_axis(gradient, best, np.take_along_axis(gradient, best, 2) - weight, 2)
    return float(lag[counted].sum() * share), gradient
