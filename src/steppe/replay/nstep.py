"""Convert segments to n-step transitions: (obs, action, …), the discounted sum of up to n rewards, and the bootstrap.

A window opens at every valid step and closes
  - after n steps:              next_obs = the observation then, discount = gamma ** n;
  - at the end of the episode:  next_obs = final_obs, discount = gamma ** k for its k steps, `terminated` if it did;
  - where the trajectory is interrupted (a segment is missing, or the actor restarted): as if truncated there.
A window that is still open at the end of a segment continues in the actor's next segment, so segment boundaries do not
affect the transitions. For this the last n - 1 rows of each actor are kept (see Tail).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.replay.kernels.copy import compiled

SCALARS = ("reward", "terminated", "truncated", "valid")


def transition_fields(spec: SegmentSpec) -> tuple[FieldSpec, ...]:
    """Return the columns of a transition; the agent's extra columns keep their values at the window's first step."""
    return (
        spec.obs,
        spec.action,
        FieldSpec("reward", (), "float32"),
        replace(spec.obs, name="next_obs"),
        FieldSpec("terminated", (), "bool"),
        FieldSpec("discount", (), "float32"),
        *spec.extras,
    )


class Tail:
    """The last n - 1 rows of one actor (`valid` is False for missing ones), and the observation after them."""

    def __init__(self, spec: SegmentSpec, rows: int) -> None:
        kept = [field for field in spec.fields if field.name != "final_obs"]
        self.columns = {field.name: np.zeros((rows, spec.num_envs, *field.shape), field.dtype) for field in kept}
        self.last_obs = np.zeros((spec.num_envs, *spec.obs.shape), spec.obs.dtype)
        self.sequence = -1

    def continues(self, segment: Segment) -> bool:
        """Return whether a segment directly follows these rows: the next sequence number and the same observation.

        The observation distinguishes an actor that was restarted with its environments restored from one that reset
        them.
        """
        assert segment.header is not None
        return segment.header.sequence == self.sequence + 1 and np.array_equal(segment["obs"][0], self.last_obs)

    def advance(self, segment: Segment) -> None:
        """Replace the kept rows by the newest ones, including those of `segment`."""
        assert segment.header is not None
        num_steps = segment.spec.num_steps
        for name, kept in self.columns.items():
            old = max(0, len(kept) - num_steps)
            kept[:old] = kept[len(kept) - old :].copy()
            kept[old:] = segment[name][num_steps - (len(kept) - old) : num_steps]
        self.last_obs[...] = segment["obs"][num_steps]
        self.sequence = segment.header.sequence


class NStepAccumulator:
    """Convert the segments of any number of actors to transitions, each exactly once."""

    def __init__(self, spec: SegmentSpec, n_step: int, gamma: float) -> None:
        self.spec, self.n_step, self.gamma = spec, n_step, gamma
        self.tails: dict[int, Tail] = {}

    def transitions(self, segment: Segment) -> list[dict[str, np.ndarray]]:
        """Return non-empty blocks of the transitions that this segment completes, by first step, then environment."""
        if segment.header is None:
            raise UsageError("a segment without a header cannot be remembered: who collected it is unknown")
        if self.n_step == 1:
            return self._complete_transitions(Tail(self.spec, 0), segment)
        actor, blocks = segment.header.actor, []
        tail = self.tails.get(actor)
        if tail is not None and not tail.continues(segment):
            blocks += self._complete_transitions(tail, None)
            tail = None
        tail = self.tails[actor] = tail or Tail(self.spec, self.n_step - 1)
        blocks += self._complete_transitions(tail, segment)
        tail.advance(segment)
        return blocks

    def state(self) -> Tree:
        """Return the open windows of every actor."""
        return {
            str(actor): {
                "columns": {name: rows.copy() for name, rows in tail.columns.items()},
                "last_obs": tail.last_obs.copy(),
                "sequence": tail.sequence,
            }
            for actor, tail in self.tails.items()
        }

    def restore(self, state: Tree) -> None:
        """Restore what `state` returned."""
        self.tails = {}
        for actor, saved in state.items():
            tail = self.tails[int(actor)] = Tail(self.spec, self.n_step - 1)
            for name, rows in tail.columns.items():
                rows[...] = saved["columns"][name]
            tail.last_obs[...] = saved["last_obs"]
            tail.sequence = saved["sequence"]

    def _complete_transitions(self, tail: Tail, segment: Segment | None) -> list[dict[str, np.ndarray]]:
        """Return the transitions that `segment` completes, or without one all open windows, as 0 or 1 blocks."""
        reward, terminated, truncated, valid = (_concatenate(tail, segment, name) for name in SCALARS)
        kept = len(tail.columns["valid"])
        first, after, cut, total, ended, discount = _close_windows(
            reward, terminated, truncated, valid, kept, self.n_step, self.gamma, segment is None
        )
        if not len(first):
            return []
        obs_after = tail.last_obs if segment is None else _flat(segment["obs"])
        block = {"reward": total, "terminated": ended, "discount": discount, "next_obs": obs_after[after]}
        if segment is not None and cut.any():
            block["next_obs"][cut] = _flat(segment["final_obs"])[after[cut] - self.spec.num_envs]
        split = int(np.searchsorted(first, kept * self.spec.num_envs))
        for field in (self.spec.obs, self.spec.action, *self.spec.extras):
            values = np.empty((len(first), *field.shape), field.dtype)
            values[:split] = _flat(tail.columns[field.name])[first[:split]]
            if segment is not None:
                values[split:] = _flat(segment[field.name])[first[split:] - kept * self.spec.num_envs]
            block[field.name] = values
        return [block]


def _concatenate(tail: Tail, segment: Segment | None, name: str) -> np.ndarray:
    kept = tail.columns[name]
    return kept if segment is None else np.concatenate([kept, segment[name]])


def _flat(column: np.ndarray) -> np.ndarray:
    """Reshape [T, B, …] to [T · B, …]."""
    return column.reshape(-1, *column.shape[2:])


@compiled
def _close_windows(
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    valid: np.ndarray,
    kept: int,
    n_step: int,
    gamma: float,
    give_up: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the windows that close at row `kept` or later, by first step, then by environment.

    Earlier windows were returned before. With `give_up`, windows that are still open at the end are closed too. Per
    window: its first row · B + b; the row it bootstraps from, counted from `kept`, · B + b; whether it bootstraps from
    final_obs; the sum of rewards; terminated; discount.
    """
    num_rows, num_envs = reward.shape
    size = num_rows * num_envs
    first, after = np.empty(size, np.int64), np.empty(size, np.int64)
    cut, ended = np.empty(size, np.bool_), np.empty(size, np.bool_)
    total, discount = np.empty(size, np.float32), np.empty(size, np.float32)
    count = 0
    for start in range(num_rows):
        for b in range(num_envs):
            if not valid[start, b]:
                continue
            row, summed, factor, is_cut = start, 0.0, 1.0, False
            while row < num_rows and row < start + n_step and valid[row, b] and not is_cut:
                summed += factor * reward[row, b]
                factor *= gamma
                is_cut = terminated[row, b] or truncated[row, b]
                row += 1
            # `row` is now one past the window, which closed at its last row or at an invalid row, or is still open.
            by_itself = is_cut or row == start + n_step
            if by_itself:
                closed_now = row > kept
            elif row < num_rows:
                closed_now = row >= kept
            else:
                closed_now = give_up
            if not closed_now:
                continue
            first[count] = start * num_envs + b
            after[count] = (row - kept) * num_envs + b
            cut[count] = is_cut
            ended[count] = is_cut and terminated[row - 1, b]
            total[count] = summed
            discount[count] = factor
            count += 1
    return first[:count], after[:count], cut[:count], total[:count], ended[:count], discount[:count]
