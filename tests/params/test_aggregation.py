"""Every aggregation against NumPy in float64, and what must hold for any updates: order, bounds, breakdown point."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.params.aggregation import METHODS, Aggregation, _merge_exchange, krum_order, sorting_network
from steppe.params.kernels import SORT_TILE, SUM_TILE, all_finite, squared_distances, squared_norm

pytestmark = pytest.mark.unit

SIZES = (1, 3, SORT_TILE, SORT_TILE + 1, SUM_TILE + 7)
numbers = st.floats(-1e6, 1e6, width=32)
some_updates = st.tuples(st.integers(1, 12), st.integers(1, 9)).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=numbers)
)


def updates_of(count: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)


def plain_krum(updates: np.ndarray, faults: int) -> list[int]:
    """Scores by the definition, one distance at a time."""
    exact = updates.astype(np.float64)
    scores = []
    for i in range(len(exact)):
        others = sorted(float(((exact[i] - exact[j]) ** 2).sum()) for j in range(len(exact)) if j != i)
        scores.append(sum(others[: len(exact) - faults - 2]))
    return sorted(range(len(scores)), key=lambda i: scores[i])


def oracle(method: str, updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    exact = updates.astype(np.float64)
    count = len(exact)
    if method in ("weighted", "federated"):
        return np.average(exact, axis=0, weights=weights)
    if method in ("krum", "multi_krum"):
        faults = (count - 3) // 2
        best = plain_krum(updates, faults)
        return exact[best[0]] if method == "krum" else exact[best[: count - faults - 2]].mean(axis=0)
    if method == "trimmed_mean":
        cut = int(0.1 * count)
        return np.sort(exact, axis=0)[cut : count - cut].mean(axis=0)
    return {"average": exact.mean(axis=0), "sum": exact.sum(axis=0), "median": np.median(exact, axis=0)}[method]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [3, 8, 13, 64])
@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_numpy(method: str, count: int, size: int) -> None:
    updates = updates_of(count, size, seed=count + size)
    weights = np.random.default_rng(1).uniform(0.5, 9.0, count) if Aggregation(method).uses_weights else np.ones(count)
    found = Aggregation(method).combine(updates, weights)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, oracle(method, updates, weights), rtol=2e-6, atol=1e-6)


def test_linear_methods_are_sums_of_what_is_pushed() -> None:
    assert {name for name in METHODS if Aggregation(name).linear} == {"average", "sum", "weighted"}


@settings(max_examples=60, deadline=None)
@given(some_updates, st.randoms(use_true_random=False), st.sampled_from(["average", "sum", "median", "trimmed_mean"]))
def test_order_does_not_matter(updates: np.ndarray, chance, method: str) -> None:
    order = list(range(len(updates)))
    chance.shuffle(order)
    one, other = Aggregation(method).combine(updates), Aggregation(method).combine(updates[order])
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["krum", "multi_krum"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(4, 12))  # of three, the two nearest have the same score
def test_order_does_not_matter_to_krum(method: str, seed: int, count: int) -> None:
    stream = np.random.default_rng(seed)
    updates = stream.normal(size=(count, 5)).astype(np.float32)
    one = Aggregation(method).combine(updates)
    other = Aggregation(method).combine(updates[stream.permutation(count)])
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(some_updates, st.sampled_from(["average", "weighted", "median", "trimmed_mean"]))
def test_lies_between_the_smallest_and_the_largest(updates: np.ndarray, method: str) -> None:
    found = Aggregation(method).combine(updates)
    assert (found >= updates.min(axis=0)).all()
    assert (found <= updates.max(axis=0)).all()


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (7,), elements=numbers), st.integers(3, 9))
def test_equal_updates_are_returned_unchanged(update: np.ndarray, count: int) -> None:
    same = np.tile(update, (count, 1))
    for method in METHODS:
        if method != "sum":
            np.testing.assert_allclose(Aggregation(method).combine(same), update, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.sampled_from([1e3, 1e9, 1e30]))
def test_a_minority_cannot_move_the_robust_ones(faults: int, seed: int, lie: float) -> None:
    """With f Byzantine updates among 2f + 3 the result stays with the honest ones; the average does not."""
    stream = np.random.default_rng(seed)
    honest = stream.normal(size=(faults + 3, 6)).astype(np.float32)
    lies = (lie * stream.choice([-1.0, 1.0], size=(faults, 6))).astype(np.float32)
    updates = np.concatenate([lies, honest])[stream.permutation(2 * faults + 3)]
    low, high = honest.min(axis=0), honest.max(axis=0)
    for method in ("median", "trimmed_mean", "krum", "multi_krum"):
        given = None if method == "median" else faults
        found = Aggregation(method, byzantine=given).combine(updates)
        assert (found >= low).all(), method
        assert (found <= high).all(), method
    if faults % 2:  # an odd number of equal lies cannot cancel
        assert np.abs(Aggregation("average").combine(updates)).max() > np.abs(honest).max()


def test_a_majority_breaks_the_median() -> None:
    updates = np.array([[0.0], [0.0], [9e9], [9e9], [9e9]], np.float32)
    assert Aggregation("median").combine(updates)[0] == np.float32(9e9)


def test_krum_needs_two_f_plus_three() -> None:
    with pytest.raises(UsageError, match="at least 7 updates, there are 6"):
        Aggregation("krum", byzantine=2).combine(updates_of(6, 4))
    with pytest.raises(UsageError, match="at least 3"):
        Aggregation("multi_krum").combine(updates_of(2, 4))
    assert Aggregation("krum", byzantine=2).combine(updates_of(7, 4)).shape == (4,)


def test_krum_orders_by_score_with_distances_from_differences() -> None:
    updates = updates_of(9, 3000) * 1e-3 + np.float32(1000.0)  # a product of matrices would lose all digits here
    exact = updates.astype(np.float64)
    expected = ((exact[:, None] - exact[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(squared_distances(updates), expected, rtol=1e-9)
    assert krum_order(updates, 3).tolist() == plain_krum(updates, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [(0, 0), (4, SUM_TILE + 6)])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_is_refused(method: str, index: tuple[int, int], bad: float) -> None:
    updates = updates_of(5, SUM_TILE + 7)
    updates[index] = bad
    with pytest.raises(UsageError, match="NaN or infinity"):
        Aggregation(method).combine(updates)


def test_a_sum_too_large_for_float32_is_refused_and_its_average_is_not() -> None:
    updates = np.full((3, 2), 3e38, np.float32)
    with pytest.raises(UsageError, match="too large"):
        Aggregation("sum").combine(updates)
    assert Aggregation("average").combine(updates)[0] == np.float32(3e38)


@pytest.mark.parametrize("weights", [[1, -1, 1], [0, 0, 0], [1, np.nan, 1], [1, 2]])
def test_wrong_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="weights"):
        Aggregation("weighted").combine(updates_of(3, 2), np.array(weights))


def test_weights_are_never_ignored() -> None:
    with pytest.raises(UsageError, match="counts every update alike"):
        Aggregation("median").combine(updates_of(3, 2), np.array([1.0, 2.0, 1.0]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "averge"}, "Did you mean 'average'"),
        ({"method": "average", "byzantine": 1}, "only for krum"),
        ({"method": "krum", "byzantine": -1}, "at least 0"),
        ({"method": "trimmed_mean", "trim": 0.5}, "trim"),
    ],
)
def test_wrong_settings_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Aggregation(**settings)


@pytest.mark.parametrize("count", range(1, 11))
def test_the_network_sorts_every_sequence_of_zeros_and_ones(count: int) -> None:
    """By the 0-1 principle it then sorts everything; a pruned one still puts the ranks it was made for in place."""
    for first, last in [(0, count), ((count - 1) // 2, count // 2 + 1)]:
        pairs = sorting_network(count, first, last)
        for bits in itertools.product((0, 1), repeat=count):
            values = list(bits)
            for low, high in pairs:
                values[low], values[high] = sorted((values[low], values[high]))
            assert values[first:last] == sorted(bits)[first:last]
    assert len(sorting_network(count, 0, count)) == len(_merge_exchange(count))


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_finite_and_norm(values: np.ndarray) -> None:
    assert all_finite(values) == bool(np.isfinite(values).all())
    if np.isfinite(values).all():
        np.testing.assert_allclose(squared_norm(values), float((values.astype(np.float64) ** 2).sum()), rtol=1e-12)


def test_how_many_updates_each_method_needs():
    for method in METHODS:
        assert Aggregation(method).at_least == (3 if "krum" in method else 1), method
    for count in (1, 2, 3):
        assert Aggregation("trimmed_mean", byzantine=count).at_least == 2 * count + 1
        assert Aggregation("multi_krum", byzantine=count).at_least == 2 * count + 3


@pytest.mark.parametrize(
    "updates", [np.zeros((2, 2, 2), np.float32), np.zeros((2, 2), np.int64), np.zeros((0, 2), np.float32)]
)
def test_only_rows_of_float32_are_aggregated(updates):
    with pytest.raises(UsageError, match=r"float32 \[workers, parameters\]"):
        Aggregation("average").combine(updates)


def test_settings_stay_as_they_were_checked():
    with pytest.raises(AttributeError):
        Aggregation("average").trim = 0.7
