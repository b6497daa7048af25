"""Reference results: scores, prediction bands against a t table, and files that are refused with a sentence."""

import math

import msgspec
import pytest

from steppe.core.contracts.errors import ConfigError, DamagedFile
from steppe.records.results.reference_results import (
    ReferenceExperiment,
    Score,
    SeedResult,
    make_reference,
    prediction_band,
    read_experiments,
    read_reference,
    read_seed_result,
    score_of,
    write_record,
)

pytestmark = pytest.mark.unit
EXPERIMENT = ReferenceExperiment("cart", "CartPole-v1", "ppo", 1000, [1, 2, 3])


def result(seed, mean, *, std=0.0, best=None, exact=None, config=None):
    return SeedResult(
        seed=seed,
        env_steps=1000,
        final=Score(1000, 100, mean, std),
        best=None if best is None else Score(500, 100, best, std),
        exact=exact or {},
        evaluations=[(500, mean), (1000, mean)],
        training=[],
        wall_s=1.0,
        train_s=1.0,
        cpu_s=1.0,
        weights_sha256="0",
        commit="c",
        config=config or {"agent.gamma": 0.99},
    )


def test_a_score_is_of_the_final_weights_the_best_or_exact():
    one = result(1, 10.0, best=20.0, exact={"return": 30.0, "optimum": 31.0})
    scores = [score_of(msgspec.structs.replace(EXPERIMENT, score=name), one) for name in ("final", "best", "exact")]
    assert scores == [10.0, 20.0, 30.0]
    with pytest.raises(ConfigError, match="no exact model"):
        score_of(msgspec.structs.replace(EXPERIMENT, score="exact"), result(1, 10.0))


def test_the_band_is_students_prediction_interval():
    """Scores 90, 100, 110: mean 100, s 10; t(2 degrees, 99.5 %) = 9.92484 from a printed table."""
    scores = [result(seed, mean) for seed, mean in ((1, 90.0), (2, 100.0), (3, 110.0))]
    one = prediction_band(EXPERIMENT, scores)
    assert one.high - 100 == pytest.approx(9.92484 * 10 * math.sqrt(1 / 3 + 1), rel=1e-5)
    assert one.low + one.high == pytest.approx(200)
    assert prediction_band(EXPERIMENT, scores, seeds=3).high - 100 == pytest.approx(
        9.92484 * 10 * math.sqrt(2 / 3), rel=1e-5
    )


def test_seeds_that_agree_give_no_empty_band():
    band = prediction_band(EXPERIMENT, [result(seed, 500.0) for seed in (1, 2, 3)])
    assert band.low < 500 - 9.9 * 2.5 < 500 < band.high
    noisy = prediction_band(EXPERIMENT, [result(seed, 500.0, std=100.0) for seed in (1, 2, 3)])
    assert noisy.high - noisy.low == pytest.approx(4 * (band.high - band.low))  # 100 / √100 against .5 % of 500


def test_a_reference_is_written_and_read(tmp_path):
    reference = make_reference(EXPERIMENT, [result(2, 5.0), result(1, 4.0)], {"cpu": "c"}, {"torch": "2"})
    write_record(tmp_path / "cart.json", reference)
    assert read_reference(tmp_path / "cart.json") == reference
    assert reference.scores == [4.0, 5.0]


def test_seeds_of_different_settings_are_not_combined():
    with pytest.raises(ConfigError, match=r"seeds 1 and 2 .*agent\.gamma"):
        make_reference(EXPERIMENT, [result(1, 4.0), result(2, 5.0, config={"agent.gamma": 0.9})], {}, {})


def test_what_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "one.json"
    write_record(path, msgspec.structs.replace(result(1, 1.0), format=99))
    with pytest.raises(DamagedFile, match="format 99"):
        read_seed_result(path)
    path.write_text('{"seed": 1}')
    with pytest.raises(DamagedFile, match=r"one\.json"):
        read_seed_result(path)


def test_a_table_with_a_mistake_is_refused(tmp_path):
    path = tmp_path / "experiments.toml"
    row = '[[experiment]]\nname = "a"\nenv = "E"\nalgo = "ppo"\nsteps = 1\nseeds = [1]\n'
    path.write_text(row + row)
    with pytest.raises(DamagedFile, match="twice"):
        read_experiments(path)
    path.write_text(row + 'score = "mean"\n')
    with pytest.raises(DamagedFile, match="final, best, exact"):
        read_experiments(path)
