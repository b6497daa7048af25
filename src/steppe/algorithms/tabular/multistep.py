"""Multi-step algorithms: n-step Q-learning and Watkins's Q(λ)."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import numpy as np

from steppe.algorithms.tabular import batch_kernels, io, step_kernels, trace_kernels
from steppe.algorithms.tabular.base import as_bools
from steppe.algorithms.tabular.schedules import require_rate
from steppe.algorithms.tabular.table import TableAlgorithm, TransitionColumns, as_int64
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import ConfigError, DamagedFile

MAX_TRACE_STEPS = 1_000
MIN_TRACE_WEIGHT = 1e-4
MAX_STREAMS = 1 << 20


class MultiStepAlgorithm(TableAlgorithm):
    """Base of both: pending steps are kept in ring buffers, one for each trajectory that is followed at the same time.

    Rows of a batch are successive steps of one trajectory, unless `streams` gives the trajectory that each row
    continues (for B parallel environments, `np.arange(B)` at every step).
    """

    ring_steps: int

    def __init__(self, state_size: int, action_size: int, ring_steps: int, **options: Any) -> None:
        super().__init__(state_size, action_size, **options)
        self.ring_steps = ring_steps
        self._open(1)

    def _open(self, num_streams: int) -> None:
        size = self.ring_steps
        numbers, reals = np.zeros(num_streams * (2 * size + 3), np.int64), np.zeros(num_streams * (size + 1))
        masks = np.ones((num_streams, self.action_size), np.bool_)
        self._rings: trace_kernels.TrajectoryRings = trace_kernels.carve(numbers, reals, masks, size)
        self._ring_memory = (numbers, reals, masks, size)

    def learn(
        self,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_states: np.ndarray,
        dones: np.ndarray,
        *,
        next_masks: np.ndarray | None = None,
        turn_based: bool = False,
        truncated: np.ndarray | None = None,
        streams: np.ndarray | None = None,
    ) -> None:
        """Learn from arrays (see TableAlgorithm.learn); `truncated` marks where a trajectory was cut short."""
        columns = self._columns(states, actions, rewards, next_states, dones)
        count = len(columns[0])
        cuts = np.zeros(count, np.bool_) if truncated is None else as_bools(truncated, "truncated")
        stream_indices = np.zeros(count, np.int64) if streams is None else as_int64(streams, "streams")
        if cuts.shape != (count,) or stream_indices.shape != (count,):
            raise ConfigError(
                f"{count} rows need as many of truncated and streams, not {cuts.shape} and {stream_indices.shape}"
            )
        self._follow(stream_indices)
        masks = self._next_masks(next_masks, count)
        wrong = self._learn_streams(columns, cuts, stream_indices, masks, self._discount(turn_based=turn_based))
        if wrong != batch_kernels.VALID:
            raise self._invalid_row_error(columns, masks, wrong)

    def end_episode(self) -> None:
        """Count the end of an episode; end trajectory 0 here if it was truncated without notice."""
        self._truncate_trajectory()
        super().end_episode()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the table and the pending steps."""
        return {**super().arrays(), **{f"ring_{name}": array for name, array in self._rings._asdict().items()}}

    def _take(self, saved: io.SavedLearner) -> None:
        rings = saved.arrays.get("ring_counts")
        if rings is not None and rings.ndim == 1 and 0 < len(rings) != len(self._rings.counts):
            self._open(len(rings))
        io.require_fit(saved, self.arrays())
        self._require_sound(saved)
        super()._take(saved)

    def _require_sound(self, saved: io.SavedLearner) -> None:
        """Raise DamagedFile for rings whose numbers are not valid indices for compiled code."""
        size = self.ring_steps
        below = {"heads": size, "counts": size + 1, "states": self.state_size, "actions": self.action_size}
        for name, most in {**below, "ahead": self.state_size}.items():
            numbers = saved.arrays[f"ring_{name}"]
            if numbers.size and not 0 <= numbers.min() <= numbers.max() < most:
                raise DamagedFile(f"{saved.path} is damaged: ring_{name} has numbers that are not from 0 to {most - 1}")

    @abstractmethod
    def _learn_streams(
        self, columns: TransitionColumns, cuts: np.ndarray, streams: np.ndarray, masks: np.ndarray, discount: float
    ) -> int:
        """Learn from columns; return the first invalid row, or another result of `first_invalid_row`."""

    @abstractmethod
    def _truncate_trajectory(self) -> None:
        """End trajectory 0 as truncated."""

    def _follow(self, streams: np.ndarray) -> None:
        """Make sure that there is a ring for each of these trajectories."""
        if not len(streams):
            return
        if streams.min() < 0:
            raise ConfigError(f"trajectories are numbered from 0, not {streams.min()}")
        have, want = len(self._rings.counts), int(streams.max()) + 1
        if want > have:
            if want > MAX_STREAMS:
                raise ConfigError(
                    f"streams has the number {want - 1}, but trajectories are numbered up to {MAX_STREAMS - 1}"
                )
            old = self._rings
            self._open(want)
            for before, now in zip(old, self._rings, strict=True):
                now[:have] = before


class NStepQLearning(MultiStepAlgorithm):
    """Learns towards the sum of `n_step` rewards and the best value after them.

    The rewards in between come from the exploring policy, without off-policy correction: with n > 1 let `epsilon` fall
    towards 0.
    """

    _learn_and_choose = staticmethod(step_kernels.step_n_step)

    def __init__(self, state_size: int, action_size: int, *, n_step: int = 3, **options: Any) -> None:
        if isinstance(n_step, bool) or not isinstance(n_step, int) or n_step < 1:
            raise ConfigError(f"n_step={n_step!r} must be a whole number of at least 1")
        self.n_step = n_step
        super().__init__(state_size, action_size, n_step, **options)

    def settings(self) -> Tree:
        """Return the constructor arguments."""
        return {**super().settings(), "n_step": self.n_step}

    def _learn_streams(
        self, columns: TransitionColumns, cuts: np.ndarray, streams: np.ndarray, masks: np.ndarray, discount: float
    ) -> int:
        rates = self.learning_rate, discount
        return int(trace_kernels.learn_n_step(self.storage, *columns, cuts, streams, masks, self._rings, *rates))

    def _memory(self) -> tuple[Any, ...]:
        return (self.storage, *self._ring_memory)

    def _truncate_trajectory(self) -> None:
        trace_kernels.flush_truncated(self.storage, self._rings, 0, self.learning_rate)


class QLambda(MultiStepAlgorithm):
    """Watkins's Q(λ): each TD error also updates the steps that led to it, weighted by γλ for each step back.

    A trace ends at an exploring action, after 1,000 steps, or when its weight is below 1e-4.
    """

    _learn_and_choose = staticmethod(step_kernels.step_lambda)

    def __init__(self, state_size: int, action_size: int, *, trace_decay: float = 0.9, **options: Any) -> None:
        self.trace_decay = require_rate(trace_decay, "trace_decay")
        discount = require_rate(options.get("discount_factor", 0.99), "discount_factor")
        super().__init__(state_size, action_size, _trace_steps(discount * self.trace_decay), **options)

    def settings(self) -> Tree:
        """Return the constructor arguments."""
        return {**super().settings(), "trace_decay": self.trace_decay}

    def _learn_streams(
        self, columns: TransitionColumns, cuts: np.ndarray, streams: np.ndarray, masks: np.ndarray, discount: float
    ) -> int:
        rates = self.learning_rate, discount, self.trace_decay
        return int(trace_kernels.learn_lambda(self.storage, *columns, cuts, streams, masks, self._rings, *rates))

    def _memory(self) -> tuple[Any, ...]:
        return (self.storage, *self._ring_memory, self.trace_decay)

    def _truncate_trajectory(self) -> None:
        self._rings.counts[0] = 0


def _trace_steps(factor: float) -> int:
    if factor >= 1.0:
        return MAX_TRACE_STEPS
    return (
        1 if factor <= 0.0 else min(MAX_TRACE_STEPS, max(1, math.ceil(math.log(MIN_TRACE_WEIGHT) / math.log(factor))))
    )
