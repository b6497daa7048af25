"""Repeat a reference experiment and compare its result with the recorded band."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from steppe.core.contracts.errors import UsageError
from steppe.records.results.reference_results import (
    Band,
    Reference,
    SeedResult,
    prediction_band,
    read_reference,
    score_of,
)
from steppe.training.reference_experiments.measurement import Say, measure


@dataclass(frozen=True)
class Verification:
    """The result of a repeated experiment."""

    name: str
    seeds: list[int]
    scores: list[float]
    band: Band
    same_weights: list[int]  # seeds that ended with the recorded weights, bit for bit
    changed_settings: dict[str, tuple[object, object]]  # recorded and present value

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def inside(self) -> bool:
        """Whether the mean score lies in the band."""
        return self.band.low <= self.score <= self.band.high


def find_references(directory: Path, algo: str | None = None, env: str | None = None) -> list[Reference]:
    """Return the recorded references of a directory, those of one algorithm and environment only if they are given."""
    found = [read_reference(path) for path in sorted(directory.glob("*.json"))]
    chosen = [
        reference
        for reference in found
        if algo in (None, reference.experiment.algo, reference.experiment.name)
        and env in (None, reference.experiment.env)
    ]
    if chosen:
        return chosen
    asked = " ".join(word for word in (algo, env) if word is not None)
    known = ", ".join(reference.experiment.name for reference in found) or "none"
    raise UsageError(f"there is no reference result for {asked or 'any experiment'}; recorded are: {known}")


def verify(
    reference: Reference, *, seeds: Sequence[int] | None = None, jobs: int = 1, say: Say = print
) -> Verification:
    """Repeat an experiment with some of its seeds (default: the first `verify_seeds`) and the present defaults."""
    experiment = reference.experiment
    chosen = list(seeds) if seeds is not None else experiment.seeds[: experiment.verify_seeds]
    with tempfile.TemporaryDirectory(prefix="steppe-verify-") as work:
        results = measure(experiment, seeds=chosen, work=Path(work), jobs=jobs, say=say)
    return compare(reference, results)


def compare(reference: Reference, results: Sequence[SeedResult]) -> Verification:
    """Compare results of the same experiment with a reference."""
    band = reference.band
    if len(results) != band.seeds:
        band = prediction_band(reference.experiment, reference.results, seeds=len(results), confidence=band.confidence)
    recorded = {result.seed: result for result in reference.results}
    before, now = reference.results[0].config, results[0].config
    return Verification(
        reference.experiment.name,
        [result.seed for result in results],
        [score_of(reference.experiment, result) for result in results],
        band,
        [
            one.seed
            for one in results
            if one.seed in recorded and recorded[one.seed].weights_sha256 == one.weights_sha256
        ],
        {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)},
    )


def choose_by_commit(references: Iterable[Reference], commit: str, number: int = 2) -> list[Reference]:
    """Return `number` short references, chosen by a commit's hash: over many commits each gets its turn."""
    short = sorted((one for one in references if one.experiment.short), key=lambda one: one.experiment.name)
    start = int(commit[:12], 16) % max(1, len(short))
    return [short[(start + index) % len(short)] for index in range(min(number, len(short)))]


def to_builtins(verification: Verification) -> dict[str, object]:
    """Return a verification as plain values."""
    plain: dict[str, object] = msgspec.to_builtins(verification)
    return plain | {"score": verification.score, "inside": verification.inside}
