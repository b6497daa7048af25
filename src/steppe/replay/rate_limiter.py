"""Limit sampling: after `learning_starts` insertions, each further one allows `samples_per_insert` samples.

The number of updates therefore depends only on the data that was inserted, not on the speed of actors and learner.
"""

from __future__ import annotations

from dataclasses import dataclass

from steppe.core.contracts.algorithm import Tree


@dataclass
class RateLimiter:
    """Count insertions and samples in one unit: transitions, or steps of sequences."""

    learning_starts: int
    samples_per_insert: float
    inserted: int = 0
    sampled: int = 0

    def allows(self, ahead: int = 0) -> bool:
        """Return whether one more sample is allowed, given that `ahead` samples are already in flight."""
        return self.sampled + ahead < (self.inserted - self.learning_starts) * self.samples_per_insert

    def stats(self) -> dict[str, float]:
        """Return the counts of insertions and samples; samples_per_insert counts from learning_starts on."""
        allowed_inserts = self.inserted - self.learning_starts
        return {
            "inserted": float(self.inserted),
            "sampled": float(self.sampled),
            "samples_per_insert": self.sampled / allowed_inserts if allowed_inserts > 0 else 0.0,
        }

    def state(self) -> Tree:
        return {"inserted": self.inserted, "sampled": self.sampled}

    def restore(self, state: Tree) -> None:
        """Restore the counts that `state` returned."""
        self.inserted, self.sampled = int(state["inserted"]), int(state["sampled"])
