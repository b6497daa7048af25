"""Running normalization of observations and rewards.

The statistics are float64 buffers and therefore part of the weights: every process that loads the weights (actor,
evaluator, export) normalizes as the learner did. Only the learner updates them.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import nn

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.segment import Segment

_OBS_CLIP = 10.0
_EPSILON = 1e-8


class RunningMeanStd(nn.Module):
    """Count, mean and variance of all rows seen so far; mean 0 and variance 1 before that."""

    count: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def update_from_rows(self, rows: np.ndarray) -> None:
        """Add rows `[N, …]`."""
        if len(rows):
            self._update_from_moments(
                len(rows), rows.mean(axis=0, dtype=np.float64), rows.var(axis=0, dtype=np.float64)
            )

    def take(self, other: RunningMeanStd) -> None:
        """Add everything that another instance has seen, and reset that one."""
        if float(other.count):
            self._update_from_moments(float(other.count), other.mean.cpu().numpy(), other.var.cpu().numpy())
            other.count.zero_()
            other.mean.zero_()
            other.var.fill_(1.0)

    @torch.no_grad()
    def _update_from_moments(self, count: float, mean: np.ndarray, var: np.ndarray) -> None:
        """Chan, Golub and LeVeque's pairwise update, in place."""
        share = count / (float(self.count) + count)
        delta = torch.as_tensor(mean, device=self.mean.device) - self.mean
        self.mean.add_(delta * share)
        self.var.mul_(1.0 - share).add_(torch.as_tensor(var, device=self.var.device) * share)
        self.var.add_(delta.square() * (share * (1.0 - share)))
        self.count.add_(count)

    def statistics(self) -> Tree:
        return {name: buffer.cpu().numpy().copy() for name, buffer in self.named_buffers()}

    def restore_statistics(self, state: Tree) -> None:
        for name, buffer in self.named_buffers():
            buffer.copy_(torch.as_tensor(np.array(state[name])))


class ObsNormalizer(RunningMeanStd):
    """Normalizes observations to about zero mean and unit variance, clipped to ± 10."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        scale = (self.var + _EPSILON).rsqrt().to(torch.float32)
        return ((obs - self.mean.to(torch.float32)) * scale).clamp_(-_OBS_CLIP, _OBS_CLIP)

    def normalize(self, rows: np.ndarray) -> np.ndarray:
        """Do the same for an array `[N, …]` on the CPU, compiled; return a new array."""
        scaled = np.empty(rows.shape, np.float32)
        _scale(rows.reshape(len(rows), -1), self.mean.numpy().ravel(), self.var.numpy().ravel(), scaled)
        return scaled


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _scale(rows: np.ndarray, mean: np.ndarray, var: np.ndarray, out: np.ndarray) -> None:
    scale = (1.0 / np.sqrt(var + _EPSILON)).astype(np.float32)
    middle = mean.astype(np.float32)
    limit = np.float32(_OBS_CLIP)
    flat = out.reshape(len(rows), len(mean))
    for i in range(len(rows)):
        for j in range(len(mean)):
            flat[i, j] = min(max((rows[i, j] - middle[j]) * scale[j], -limit), limit)


class RewardNormalizer(RunningMeanStd):
    """Divides rewards by the standard deviation of the running discounted return, kept per (actor, environment)."""

    def __init__(self, gamma: float) -> None:
        super().__init__(())
        self.gamma = gamma
        self.running: dict[int, np.ndarray] = {}

    def observe(self, segment: Segment) -> None:
        """Continue each environment's discounted return through a segment, and add every value to the statistics."""
        actor = segment.header.actor if segment.header else 0
        reward, valid, cut = segment["reward"], segment["valid"], segment.cut
        running = self.running.get(actor)
        if running is None or running.shape != reward.shape[1:]:
            running = np.zeros(reward.shape[1:])
        returns = np.empty(reward.shape)
        for t in range(len(reward)):
            running = np.where(valid[t], running * self.gamma + reward[t], running)
            returns[t] = running
            running = np.where(valid[t] & cut[t], 0.0, running)
        self.running[actor] = running
        self.update_from_rows(returns[valid])

    def normalize(self, reward: np.ndarray) -> np.ndarray:
        """Normalize rewards, or discounted sums of them; return float32."""
        scaled: np.ndarray = reward / np.sqrt(float(self.var) + _EPSILON)
        return scaled.astype(np.float32)

    def running_state(self) -> Tree:
        return {str(actor): running.copy() for actor, running in self.running.items()}

    def restore_running(self, state: Tree) -> None:
        self.running = {int(actor): np.array(running) for actor, running in state.items()}
