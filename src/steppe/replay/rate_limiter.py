"""How much may be drawn: after `learning_starts` insertions, each further one pays for `samples_per_insert` draws.

So the updates that follow an intake are a function of what was taken in, whoever is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from steppe.core.contracts.algorithm import Tree


@dataclass
class RateLimiter:
    """Counts in one unit, transitions or steps of sequences, on both sides."""

    learning_starts: int
    samples_per_insert: float
    inserted: int = 0
    sampled: int = 0

    def allows(self, ahead: int = 0) -> bool:
        """Whether one more draw is paid for, when `ahead` are already on their way."""
        return self.sampled + ahead < (self.inserted - self.learning_starts) * self.samples_per_insert

    def stats(self) -> dict[str, float]:
        """What was inserted and sampled so far; samples_per_insert counts from learning_starts on."""
        paid = self.inserted - self.learning_starts
        return {
            "inserted": float(self.inserted),
            "sampled": float(self.sampled),
            "samples_per_insert": self.sampled / paid if paid > 0 else 0.0,
        }

    def state(self) -> Tree:
        return {"inserted": self.inserted, "sampled": self.sampled}

    def restore(self, state: Tree) -> None:
        """Take over the counts that `state` returned."""
        self.inserted, self.sampled = int(state["inserted"]), int(state["sampled"])
