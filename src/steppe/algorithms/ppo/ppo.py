"""Proximal policy optimization (Schulman et al. 2017) on rollouts with axes [T, B, …].

The loss is a compiled kernel that gives d(loss)/d(outputs) in closed form; the network backpropagates it row by row or,
if it is recurrent, through whole sequences (algorithms/nn/forward_backward.py).
"""

from __future__ import annotations

import math

import numba
import numpy as np

from steppe.algorithms.nn.forward_backward import RolloutTargets
from steppe.algorithms.ppo.config import PPOConfig
from steppe.algorithms.shared.on_policy import OnPolicyAgent
from steppe.core.contracts.algorithm import Learned, Tree
from steppe.core.contracts.errors import NotFinite
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import EnvSpec
from steppe.core.system import seeding

_STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


class PPO(OnPolicyAgent):
    """Clipped policy gradient with generalized advantages, for discrete, multi-discrete and box actions."""

    config: PPOConfig

    def __init__(self, config: PPOConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        config.require(spec, "ppo")
        super().__init__(config.resolve_defaults(spec, 1, None)[0], spec, seed, device)
        self._rollouts = 0

    def learn(self, batch: Batch) -> Learned:
        """Take all epochs over one rollout."""
        rollout = self._prepare(batch)
        stream = seeding.generator(self.seed, "shuffle", self._rollouts)  # its only state is the counter
        self._rollouts += 1
        totals, norms, updates = np.zeros(len(_STATS)), 0.0, 0
        for _ in range(self.config.epochs or 1):
            before, done = totals[3], updates
            for rows in self._pass.minibatches(rollout, self.config.minibatch_size or len(rollout.rows), stream):
                totals += self._backward(rollout, rows)
                norms += self.optimizer.step(self.learning_rate, self.updates, len(rows))
                self.updates += 1
                updates += 1
            if self.config.target_kl is not None and totals[3] - before > self.config.target_kl * (updates - done):
                break
        self._apply_obs_statistics()
        if not updates:
            return Learned(0)
        stats = dict(zip(_STATS, (totals / updates).tolist(), strict=True))
        stats["explained_variance"] = rollout.explained_variance
        return Learned(updates, stats | {"grad_norm": norms / updates, "learning_rate": self.learning_rate})

    def gradients(self, batch: Batch) -> np.ndarray:
        """Return the unclipped gradient of the loss on the whole rollout as one minibatch."""
        rollout = self._prepare(batch)
        self._backward(rollout, rollout.rows)
        gradient: np.ndarray = self.flat.gradient.cpu().numpy().copy()
        return gradient

    def state(self) -> Tree:
        return super().state() | {"rollouts": self._rollouts}

    def restore(self, state: Tree) -> None:
        super().restore(state)
        self._rollouts = int(state["rollouts"])

    def _backward(self, rollout: RolloutTargets, rows: np.ndarray) -> np.ndarray:
        """Fill the flat gradient from one minibatch; return its statistics in the order of _STATS."""
        config = self.config
        outputs, value = self._pass.trace(rollout, rows)
        action = rollout.action.take(rows, axis=0)
        logp, entropy, inner = self.choices.evaluate(outputs, action)
        scale = self._scale(rollout.advantage, rows)
        d_logp, d_value, stats = _clipped_loss(
            rows, logp, value, rollout.logp, rollout.advantage, rollout.returns, config.clip, config.value_coef, *scale
        )
        stats[2] = entropy.sum() / len(rows)
        for name, number in zip(_STATS[:3], stats[:3].tolist(), strict=True):
            if not math.isfinite(number):
                raise NotFinite(
                    f"{name} is {number} at update {self.updates}: lower learning_rate or check the rewards"
                )
        d_entropy, d_beyond = -config.entropy_coef / len(rows), (config.bounds_coef or 0.0) / len(rows)
        d_outputs = self.choices.backward(inner, action, d_logp, d_entropy, d_beyond)
        self.flat.gradient.zero_()
        self._pass.backward(d_outputs, d_value)
        return stats

    def _scale(self, advantage: np.ndarray, rows: np.ndarray) -> tuple[bool, float, float]:
        """Return (scaled, mean, scale) for `_clipped_loss`: whether it uses the minibatch's own mean and deviation.

        If not, it subtracts `mean` and multiplies by `scale`. Learners that train together share the mean and deviation
        of all their minibatches.
        """
        if self.joint_sum is None or not self.config.normalize_advantage:
            return self.config.normalize_advantage, 0.0, 1.0
        mine = advantage[rows].astype(np.float64)
        count, total, squares = self.joint_sum(np.array([len(mine), mine.sum(), mine @ mine])).tolist()
        mean = total / count
        deviation = math.sqrt(max(0.0, squares / count - mean * mean))
        return (False, mean, 1.0 / (deviation + 1e-8)) if count > 1 else (False, 0.0, 1.0)


@numba.njit(cache=True, nogil=True)
def _clipped_loss(
    rows: np.ndarray,
    logp: np.ndarray,
    value: np.ndarray,
    old_logp: np.ndarray,
    advantage: np.ndarray,
    returns: np.ndarray,
    clip: float,
    value_coef: float,
    scaled: bool,
    mean: float,
    scale: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return d(loss)/d(logp), d(loss)/d(value), statistics of −min(r A, clip(r) A) + value_coef (V − R)² (eq. 7, 9).

    `logp` and `value` are the minibatch's, the other columns the rollout's. An advantage counts as (A − mean) · scale,
    by the minibatch's own mean and deviation if `scaled`.
    """
    count = len(rows)
    if scaled and count > 1:  # normalizing a single row would make it 0
        square = 0.0
        for i in range(count):
            mean += advantage[rows[i]] / count
        for i in range(count):
            square += (advantage[rows[i]] - mean) ** 2 / count
        scale = 1.0 / (math.sqrt(square) + 1e-8)
    d_logp = np.zeros(count, np.float64)
    d_value = np.empty(count, np.float32)
    stats = np.zeros(5, np.float64)
    for i in range(count):
        row = rows[i]
        gain = (advantage[row] - mean) * scale
        log_ratio = logp[i] - old_logp[row]
        ratio = math.exp(log_ratio)
        clipped = min(max(ratio, 1.0 - clip), 1.0 + clip)
        if ratio * gain <= clipped * gain:
            d_logp[i] = -ratio * gain / count
        error = np.float64(value[i]) - np.float64(returns[row])
        d_value[i] = 2.0 * value_coef * error / count
        stats[0] -= min(ratio * gain, clipped * gain) / count
        stats[1] += error * error / count
        stats[3] += (ratio - 1.0 - log_ratio) / count
        stats[4] += (1.0 if ratio != clipped else 0.0) / count
    return d_logp, d_value, stats
