"""Advantage actor-critic (Mnih et al. 2016) on rollouts with axes [T, B, …]: one policy gradient step per rollout.

`a3c` is the same agent with workers that push gradients asynchronously. The loss is a mean over rows and no row's term
depends on other rows, so the gradients of parts of a batch, weighted by their number of rows, add up to the gradient of
the whole batch.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from steppe.algorithms.a2c.config import A2CConfig
from steppe.algorithms.shared.on_policy import OnPolicyAgent
from steppe.core.contracts.algorithm import Learned
from steppe.core.contracts.errors import NotFinite
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import EnvSpec

_STATS = ("policy_loss", "value_loss", "entropy")


class A2C(OnPolicyAgent):
    """Policy gradient with generalized advantages, for discrete, multi-discrete and box actions."""

    config: A2CConfig

    def __init__(self, config: A2CConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        config.require(spec, "a2c")
        super().__init__(config.resolve_defaults(spec, 1, None)[0], spec, seed, device)

    def learn(self, batch: Batch) -> Learned:
        """Take one step with the whole rollout."""
        stats = self._backward(batch)
        if not stats:
            return Learned(0)
        rows = int(np.count_nonzero(batch["valid"]))
        norm = self.optimizer.step(self.learning_rate, self.updates, rows)
        self.updates += 1
        self._apply_obs_statistics()
        return Learned(1, stats | {"grad_norm": norm, "learning_rate": self.learning_rate})

    def gradients(self, batch: Batch) -> np.ndarray:
        """Return the unclipped gradient of the loss on the whole rollout."""
        self._backward(batch)
        gradient: np.ndarray = self.flat.gradient.cpu().numpy().copy()
        return gradient

    def _backward(self, batch: Batch) -> dict[str, float]:
        """Fill the flat gradient and return the statistics; zeros and an empty dict if no row is valid."""
        config, rollout = self.config, self._prepare(batch)
        rows = rollout.rows
        self.flat.gradient.zero_()
        if not len(rows):
            return {}
        outputs, value = self._pass.trace(rollout, rows)
        action = rollout.action.take(rows, axis=0)
        logp, entropy, inner = self.choices.evaluate(outputs, action)
        d_logp, d_value, found = _loss(rows, logp, value, rollout.advantage, rollout.returns, config.value_coef)
        found[2] = entropy.mean()
        stats = dict(zip(_STATS, found.tolist(), strict=True))
        for name, number in stats.items():
            if not math.isfinite(number):
                raise NotFinite(
                    f"{name} is {number} at update {self.updates}: lower learning_rate or check the rewards"
                )
        d_entropy, d_beyond = -config.entropy_coef / len(rows), (config.bounds_coef or 0.0) / len(rows)
        d_outputs = self.choices.backward(inner, action, d_logp, d_entropy, d_beyond)
        self._pass.backward(d_outputs, d_value)
        return stats | {"explained_variance": rollout.explained_variance}


@numba.njit(cache=True, nogil=True)
def _loss(
    rows: np.ndarray, logp: np.ndarray, value: np.ndarray, advantage: np.ndarray, returns: np.ndarray, value_coef: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return d(loss)/d(logp), d(loss)/d(value) and statistics of the mean of −A logp + value_coef (V − R)² over `rows`.

    `logp` and `value` have one entry per row of `rows`; the other columns cover the whole rollout.
    """
    count = len(rows)
    d_logp = np.empty(count, np.float64)
    d_value = np.empty(count, np.float32)
    stats = np.zeros(3, np.float64)
    for i in range(count):
        gain = np.float64(advantage[rows[i]])
        error = np.float64(value[i]) - np.float64(returns[rows[i]])
        d_logp[i] = -gain / count
        d_value[i] = 2.0 * value_coef * error / count
        stats[0] -= gain * np.float64(logp[i]) / count
        stats[1] += error * error / count
    return d_logp, d_value, stats
