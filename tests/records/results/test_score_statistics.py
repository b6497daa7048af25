"""Statistics of few runs against scipy's own, and against values computed by hand."""

import numpy as np
import pytest
from scipy import stats

from steppe.records.results.score_statistics import (
    curve_at,
    estimate,
    interquartile_mean,
    mean,
    median,
    normalize,
    performance_profile,
    probability_of_improvement,
    sample_efficiency,
    steps_to_reach,
)

pytestmark = pytest.mark.unit


def runs(seed, *sizes):
    generator = np.random.default_rng(seed)
    return [generator.normal(index, 1 + index, size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize("size", range(1, 12))
def test_the_interquartile_mean_is_scipys_trimmed_mean(size):
    values = runs(size, size)[0]
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25))


def test_the_interquartile_mean_by_hand():
    """Of 8 values the 2 lowest and the 2 highest are cut: one outlier changes nothing."""
    assert interquartile_mean(np.array([1, 2, 3, 4, 5, 6, 7, 1000.0])) == 4.5


def test_intervals_of_one_environment_agree_with_scipys_bootstrap():
    [values] = runs(0, 20)
    for statistic, tolerance in ((mean, 0.05), (median, 0.12), (interquartile_mean, 0.06)):
        found = estimate([values], statistic)
        scipys = stats.bootstrap(
            (values,), statistic, method="percentile", n_resamples=20_000, rng=1
        ).confidence_interval
        assert (found.low, found.high) == pytest.approx(scipys, abs=tolerance)
        assert found.value == pytest.approx(float(statistic(values)))


def test_runs_are_drawn_within_their_environment():
    """Without spread within environments there is no uncertainty, however different the environments are."""
    found = estimate([np.full(5, 1.0), np.full(5, 9.0)], mean)
    assert (found.low, found.value, found.high) == (5.0, 5.0, 5.0)


def test_stratified_intervals_agree_with_the_normal_approximation():
    """The mean of two environments of 40 runs: standard error √(s₁²/40 + s₂²/40) / 2."""
    strata = runs(3, 40, 40)
    error = np.sqrt(sum(stratum.var() / 40 for stratum in strata)) / 2
    found = estimate(strata, mean)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.08)


def test_the_same_scores_give_the_same_interval():
    strata = runs(4, 5, 5)
    assert estimate(strata, median) == estimate([stratum.copy() for stratum in strata], median)


def test_the_probability_of_improvement_is_the_mann_whitney_statistic():
    one, other = runs(5, 7, 9)
    statistic = stats.mannwhitneyu(one, other).statistic
    assert probability_of_improvement([one], [other]).value == pytest.approx(statistic / (7 * 9))


def test_the_probability_of_improvement_by_hand():
    """Pairs (2, 1), (2, 2), (3, 1), (3, 2): a tie counts half; the second environment is lost."""
    first = probability_of_improvement([np.array([2.0, 3.0])], [np.array([1.0, 2.0])])
    assert first.value == pytest.approx(3.5 / 4)
    both = probability_of_improvement([np.array([2.0, 3.0]), np.zeros(3)], [np.array([1.0, 2.0]), np.ones(2)])
    assert both.value == pytest.approx(3.5 / 8)
    assert both.low <= both.value <= both.high


def test_the_performance_profile_by_hand():
    """Above 1: 2 of 4 runs and 2 of 2 runs, of two environments: (1/2 + 1) / 2."""
    scores = [np.array([0.0, 1.0, 2.0, 3.0]), np.array([2.0, 4.0])]
    values, low, high = performance_profile(scores, np.array([-1.0, 1.0, 2.5, 5.0]))
    assert values.tolist() == [1.0, 0.75, (1 / 4 + 1 / 2) / 2, 0.0]
    assert (low <= values).all()
    assert (values <= high).all()


def test_curves_hold_their_newest_value():
    curve = [(100, 1.0), (200, 3.0)]
    assert curve_at(curve, [50, 100, 150, 500]).tolist()[1:] == [1.0, 1.0, 3.0]
    assert np.isnan(curve_at(curve, [50])[0])
    assert (steps_to_reach(curve, 2.0), steps_to_reach(curve, 4.0)) == (200, None)


def test_sample_efficiency_is_the_interquartile_mean_over_runs_at_each_step():
    curves = [[[(100, float(run)), (200, 10.0 * run)] for run in range(4)]]
    at = sample_efficiency(curves, [50, 100, 200])
    assert np.isnan(at[0].value)
    assert [one.value for one in at[1:]] == [1.5, 15.0]


def test_normalized_scores():
    assert normalize(np.array([-200.0, 0.0, 200.0]), -200, 200).tolist() == [0.0, 0.5, 1.0]
