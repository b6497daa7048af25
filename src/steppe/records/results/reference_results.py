"""Reference results: what an experiment reached, seed by seed, and the band in which a repetition is expected.

`benchmarks/references/NAME.json` holds one `Reference`. Every finished seed is written as a `SeedResult` of its own first, so
that a long measurement can be interrupted and continued.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from steppe.core.contracts.errors import ConfigError, DamagedFile
from steppe.core.io.atomic_files import write_atomic

FORMAT = 1
CONFIDENCE = 0.99
MIN_RELATIVE_SPREAD = 0.005  # of the mean: the least standard deviation that is assumed between seeds
SCORES = ("final", "best", "exact")
Curve = list[tuple[int, float]]


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of somebody else for the same task."""

    value: float
    about: str
    source: str


class ReferenceExperiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to measure: an environment, an algorithm, its settings, and how the result is scored."""

    name: str
    env: str
    algo: str
    steps: int
    seeds: list[int]
    settings: dict[str, Any] = {}
    score: str = "final"  # returns of the final weights, of the best checkpoint, or an exact evaluation's
    episodes: int = 100  # of the evaluations after training
    verify_seeds: int = 1  # how many of the seeds a verification repeats
    targets: dict[str, float] = {}  # median, worst: at least; relative_gap, absolute_gap: to the optimum, at most
    asked: str = ""
    published: list[Published] = []
    short: bool = False  # takes seconds: CI repeats it

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score {self.score!r} is none of {', '.join(SCORES)}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError("seeds must be at least one, each once")
        if unknown := self.targets.keys() - {"median", "worst", "relative_gap", "absolute_gap"}:
            raise ValueError(f"unknown targets: {', '.join(sorted(unknown))}")


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Returns of episodes after training, with one set of weights."""

    env_steps: int
    episodes: int
    mean: float
    std: float


class SeedResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one seed. Times are of training, with its evaluations."""

    seed: int
    env_steps: int
    final: Score
    best: Score | None
    exact: dict[str, float]  # return, optimum; empty if the environment has no exact model
    evaluations: Curve
    training: Curve
    wall_s: float
    train_s: float
    cpu_s: float
    weights_sha256: str
    commit: str | None
    config: dict[str, Any]
    format: int = FORMAT


class Band(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Interval that holds the mean score of `seeds` repeated runs with probability `confidence`."""

    low: float
    high: float
    seeds: int
    confidence: float = CONFIDENCE


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured experiment."""

    experiment: ReferenceExperiment
    results: list[SeedResult]
    band: Band
    machine: dict[str, Any]
    versions: dict[str, str | None]
    format: int = FORMAT

    @property
    def scores(self) -> list[float]:
        """The score of each seed, in the order of the seeds."""
        return [score_of(self.experiment, result) for result in self.results]


Record = TypeVar("Record", Reference, SeedResult)


def score_of(experiment: ReferenceExperiment, result: SeedResult) -> float:
    """Return the number that a seed is judged by."""
    if experiment.score == "exact":
        if "return" not in result.exact:
            raise ConfigError(f"{experiment.env} has no exact model: score it by its final or best evaluation")
        return result.exact["return"]
    if experiment.score == "best" and result.best is not None:
        return result.best.mean
    return result.final.mean


def make_reference(
    experiment: ReferenceExperiment, results: list[SeedResult], machine: dict[str, Any], versions: dict[str, str | None]
) -> Reference:
    """Combine the results of all seeds. ConfigError if they were not measured with one configuration."""
    results = sorted(results, key=lambda result: result.seed)
    first = results[0]
    for other in results[1:]:
        apart = sorted(key for key in first.config | other.config if first.config.get(key) != other.config.get(key))
        if apart:
            raise ConfigError(
                f"seeds {first.seed} and {other.seed} of {experiment.name} have different settings ({', '.join(apart)}): "
                "measure both again with the same version"
            )
    return Reference(experiment, results, prediction_band(experiment, results), machine, versions)


def prediction_band(
    experiment: ReferenceExperiment,
    results: list[SeedResult],
    *,
    seeds: int | None = None,
    confidence: float = CONFIDENCE,
) -> Band:
    """Return the prediction interval for the mean score of `seeds` further runs (Student's t).

    The spread between seeds is taken as at least what the evaluations' own standard error explains, and at least half a
    percent of the mean, so that seeds that agree by chance give no empty band. A single result is treated as two that
    differ by its least spread.
    """
    from scipy import stats

    seeds = experiment.verify_seeds if seeds is None else seeds
    scores = np.array([score_of(experiment, result) for result in results])
    count = len(scores)
    mean = float(scores.mean())
    spread = max(
        float(scores.std(ddof=1)) if count > 1 else 0.0,
        _evaluation_error(experiment, results),
        MIN_RELATIVE_SPREAD * abs(mean),
    )
    quantile = float(stats.t.ppf(0.5 + confidence / 2, max(1, count - 1)))
    half = quantile * spread * float(np.sqrt(1 / count + 1 / seeds))
    return Band(mean - half, mean + half, seeds, confidence)


def _evaluation_error(experiment: ReferenceExperiment, results: list[SeedResult]) -> float:
    """Return the standard error of one seed's score that its finite number of episodes explains."""
    if experiment.score == "exact":
        return 0.0
    scores = [(result.best or result.final) if experiment.score == "best" else result.final for result in results]
    return float(np.sqrt(np.mean([score.std**2 / score.episodes for score in scores])))


def write_record(path: Path, record: Reference | SeedResult) -> None:
    """Write a record as JSON, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_reference(path: Path) -> Reference:
    """Read a reference result; DamagedFile says what is wrong."""
    return _read(path, Reference)


def read_seed_result(path: Path) -> SeedResult:
    """Read the result of one seed; DamagedFile says what is wrong."""
    return _read(path, SeedResult)


def _read(path: Path, kind: type[Record]) -> Record:
    try:
        record = msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, OSError) as error:
        raise DamagedFile(f"{path} is no {kind.__name__} that this version of Steppe reads: {error}") from None
    if record.format > FORMAT:
        raise DamagedFile(f"{path} has format {record.format}; this version of Steppe reads {FORMAT}")
    return record


def read_experiments(path: Path) -> dict[str, ReferenceExperiment]:
    """Read the table of experiments: name → experiment."""
    import tomllib

    try:
        table = msgspec.convert(tomllib.loads(path.read_text()), dict[str, list[ReferenceExperiment]])
    except (msgspec.ValidationError, tomllib.TOMLDecodeError, OSError) as error:
        raise DamagedFile(f"{path} is no table of experiments: {error}") from None
    experiments = {experiment.name: experiment for experiment in table.get("experiment", [])}
    if len(experiments) != len(table.get("experiment", [])):
        raise DamagedFile(f"{path} names an experiment twice")
    return experiments
