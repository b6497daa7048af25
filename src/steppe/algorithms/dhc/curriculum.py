"""Curriculum over the number of agents and the map size, easier stages first.

Stages form a grid. Passing a stage opens its two neighbours: more agents, and larger maps. The status of the stages is
published with the weights, so any actor can sample stages; only the learner counts outcomes, from the segments that it
receives, whichever actors they come from.
"""

from __future__ import annotations

import numpy as np

from steppe.core.contracts.algorithm import Tree

LOCKED, OPEN, PASSED = 0, 1, 2


class Curriculum:
    """Passes a stage when at least the fraction `passing` of its last `episodes` episodes succeeded."""

    def __init__(self, agents: tuple[int, ...], sizes: tuple[int, ...], episodes: int, passing: float) -> None:
        self.agents, self.sizes = np.array(agents, np.int64), np.array(sizes, np.int64)
        self.episodes, self.passing = episodes, passing
        shape = len(agents), len(sizes)
        self.standing = np.full(shape, LOCKED, np.uint8)
        self.standing[0, 0] = OPEN
        self._outcomes = np.zeros((*shape, episodes), np.bool_)  # a ring buffer per stage
        self._counts = np.zeros(shape, np.int64)

    def record(self, agents: int, size: int, *, success: bool) -> bool:
        """Count an episode; return True if it passed its stage. Episodes outside the grid are not counted."""
        row, column = np.flatnonzero(self.agents == agents), np.flatnonzero(self.sizes == size)
        if not len(row) or not len(column):
            return False
        stage = int(row[0]), int(column[0])
        self._outcomes[stage][self._counts[stage] % self.episodes] = success
        self._counts[stage] += 1
        if self.standing[stage] != OPEN or self._counts[stage] < self.episodes:
            return False
        if self._outcomes[stage].sum() < self.passing * self.episodes:
            return False
        self._pass(*stage)
        return True

    def _pass(self, row: int, column: int) -> None:
        self.standing[row, column] = PASSED
        for following in ((row + 1, column), (row, column + 1)):
            if following[0] < len(self.agents) and following[1] < len(self.sizes):
                self.standing[following] = max(self.standing[following], OPEN)

    def rate(self, row: int, column: int) -> float:
        """Return the success rate over the counted episodes of a stage; NaN if there are none."""
        known = min(int(self._counts[row, column]), self.episodes)
        return float(self._outcomes[row, column, :known].mean()) if known else float("nan")

    def stats(self) -> dict[str, float]:
        """Return the number of passed stages, and the furthest unlocked stage with its success rate."""
        row, column = np.argwhere(self.standing != LOCKED)[-1].tolist()
        furthest = {"lesson_agents": float(self.agents[row]), "lesson_size": float(self.sizes[column])}
        rate = self.rate(row, column)
        known = {} if np.isnan(rate) else {"lesson_success": rate}
        return {"lessons_passed": float((self.standing == PASSED).sum()), **furthest, **known}

    def state(self) -> Tree:
        """Return everything that a resumed run needs to continue counting."""
        return {"standing": self.standing.copy(), "outcomes": self._outcomes.copy(), "counts": self._counts.copy()}

    def restore(self, state: Tree) -> None:
        """Restore what `state` returned."""
        for name, array in (("standing", self.standing), ("outcomes", self._outcomes), ("counts", self._counts)):
            array[...] = state[name]


def sample_stages(
    stage_status: np.ndarray, agents: np.ndarray, sizes: np.ndarray, count: int, stream: np.random.Generator
) -> np.ndarray:
    """Sample stages [count, 2] of (agents, size), each with probability 1/2 from the open ones that are not passed.

    The rest come from all unlocked stages, open or passed. The number of random draws does not depend on the status.
    """
    known, new = np.argwhere(stage_status != LOCKED), np.argwhere(stage_status == OPEN)
    renewing = stream.random(count) < 0.5
    draws = stream.random(count)
    chosen = known[(draws * len(known)).astype(np.int64)]
    if len(new):
        chosen = np.where(renewing[:, None], new[(draws * len(new)).astype(np.int64)], chosen)
    return np.stack([agents[chosen[:, 0]], sizes[chosen[:, 1]]], axis=1)
