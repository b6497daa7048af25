"""Rings and priorities in small, against plain Python: indices and back, importance weights, whole draws and updates."""

import math

import numpy as np
import pytest

from steppe.replay.kernels import ring_index
from steppe.replay.kernels.priority_draw import sample_by_priority, update_leaves
from steppe.replay.kernels.sumtree import NO_PREFETCH, SumTree

pytestmark = pytest.mark.unit

CAPACITY, SHIFT = 5, 2


def rings_of(*written):
    """Rings of CAPACITY rows after so many rows each: size, cursor, added, lap."""
    rows = [(min(n, CAPACITY), n % CAPACITY, n, n // CAPACITY) for n in written]
    return np.array(rows, np.int64).T.copy()


def index_of(number, part):
    """The index of the row that was written as `number` of a part."""
    return (number << SHIFT) + part


def present(*written):
    """{index: slot} of all rows that are still there."""
    return {
        index_of(number, part): part * CAPACITY + number % CAPACITY
        for part, n in enumerate(written)
        for number in range(max(0, n - CAPACITY), n)
    }


WRITTEN = [(3,), (5,), (7,), (13,), (3, 5, 13), (10, 4, 6), (1, 0, 7)]


@pytest.mark.parametrize("written", WRITTEN)
def test_rows_have_indices_that_lead_back_to_them(written):
    rings, rows = rings_of(*written), present(*written)
    slots = np.array(list(rows.values()), np.int64)
    indices, weights = np.empty(len(slots), np.int64), np.empty(len(slots), np.float32)
    leaves = np.linspace(0.5, 2.0, len(slots)).astype(np.float32)
    ring_index.compute_indices_and_weights(rings, CAPACITY, SHIFT, 0.4, slots, leaves, indices, weights)
    assert indices.tolist() == list(rows)
    np.testing.assert_allclose(weights, [(0.5 / leaf) ** 0.4 for leaf in leaves.tolist()], rtol=1e-6)
    found, values = np.full(len(slots), -7), np.empty(len(slots), np.float32)
    priorities = np.linspace(0.0, 3.0, len(slots))
    result = ring_index.resolve_priority_update(rings, CAPACITY, SHIFT, 0.6, indices, priorities, found, values)
    assert result == (-1, priorities.max(), 0)
    assert found.tolist() == slots.tolist()
    np.testing.assert_allclose(values, priorities**0.6, rtol=1e-6)


@pytest.mark.parametrize("written", WRITTEN)
def test_overwritten_and_unknown_rows_are_distinguished(written):
    rings, rows = rings_of(*written), present(*written)
    gone = [index_of(number, part) for part, n in enumerate(written) for number in range(max(0, n - CAPACITY))]
    never = [index_of(n + more, part) for part, n in enumerate(written) for more in (0, 1, CAPACITY)]
    never += [-1, -(1 << SHIFT)] + [index_of(0, part) for part in range(len(written), 1 << SHIFT)]
    slots, values = np.full(len(gone), -7), np.empty(len(gone), np.float32)
    result = ring_index.resolve_priority_update(
        rings, CAPACITY, SHIFT, 0.6, np.array(gone, np.int64), np.ones(len(gone)), slots, values
    )
    assert result == (-1, 1.0 if gone else 0.0, len(gone))
    assert slots.tolist() == [-1] * len(gone)
    known = next(iter(rows))
    for index in never:
        slots, values = np.empty(3, np.int64), np.empty(3, np.float32)
        indices = np.array([known, index, known], np.int64)
        assert ring_index.resolve_priority_update(rings, CAPACITY, SHIFT, 0.6, indices, np.ones(3), slots, values) == (
            1,
            1.0,
            0,
        ), index


def test_priorities_after_an_unknown_index_are_validated():
    slots, values = np.empty(3, np.int64), np.empty(3, np.float32)
    indices = np.array([index_of(6, 0), -1, index_of(1, 0)])
    assert ring_index.resolve_priority_update(
        rings_of(7), CAPACITY, SHIFT, 0.6, indices, np.ones(3), slots, values
    ) == (1, 1.0, 1)
    assert slots[[0, 2]].tolist() == [1, -1]


def test_priorities_become_leaves_that_can_be_drawn():
    tiny, huge = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    priorities = np.array([0.0, 1e-320, 1e-200, 1.0, 2.0, 1e200])
    indices, slots = np.zeros(6, np.int64), np.empty(6, np.int64)
    leaves = np.empty(6, np.float32)
    result = ring_index.resolve_priority_update(rings_of(1), CAPACITY, SHIFT, 1.0, indices, priorities, slots, leaves)
    assert result == (-1, 1e200, 0)
    np.testing.assert_allclose(leaves.astype(np.float64), [0.0, tiny, tiny, 1.0, 2.0, huge], rtol=1e-6)
    ring_index.resolve_priority_update(rings_of(1), CAPACITY, SHIFT, 0.0, indices, priorities, slots, leaves)
    assert leaves.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0], "uniform, but for those that are never drawn"
    ring_index.resolve_priority_update(rings_of(1), CAPACITY, SHIFT, 0.1, indices, priorities, slots, leaves)
    np.testing.assert_allclose(leaves[1:3], [1e-30, 1e-20], rtol=1e-5)  # nothing counts less than 1e-300


@pytest.mark.parametrize("bad", [-1.0, -1e-9, math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_priority_that_is_none_is_noticed(bad, place):
    priorities, slots, leaves = np.ones(3), np.empty(3, np.int64), np.full(3, 7.0, np.float32)
    priorities[place] = bad
    result = ring_index.resolve_priority_update(
        rings_of(2), CAPACITY, SHIFT, 0.6, np.array([0, 0, 99 << SHIFT]), priorities, slots, leaves
    )
    assert result == (2, -1.0, 0)
    assert leaves.tolist() == [7.0] * 3


def test_no_rows_have_no_weights():
    ring_index.compute_importance_weights(np.empty(0, np.float32), 0.5, np.empty(0, np.float32))


def test_uniform_draws_spread_over_all_rows():
    rings = rings_of(3, 0, 7, 1)
    for first, last, expected in (
        (0, 4, [0, 1, 2, 10, 11, 12, 13, 14, 15]),
        (1, 3, [10, 11, 12, 13, 14]),
        (3, 4, [15]),
    ):
        draws = (np.arange(len(expected)) + 0.5) / len(expected)
        slots = np.empty(len(draws), np.int64)
        ring_index.sample_uniform(rings, CAPACITY, first, last, draws, NO_PREFETCH, slots)
        assert slots.tolist() == expected
        ring_index.sample_uniform(rings, CAPACITY, first, last, draws - 0.49 / len(draws), np.array([[64, 8]]), slots)
        assert slots.tolist() == expected, "a hint for the cache changes nothing"


class Store:
    """Two rings with one column of bytes beside a tree: what `take` and `revise` work on."""

    def __init__(self):
        self.rings = rings_of(7, 4)
        self.column = np.arange(20, dtype=np.uint8).reshape(10, 2)
        self.plan = np.array([[self.column.ctypes.data, 2, 2, 0]], np.int64)
        self.tree = SumTree(CAPACITY, 2)

    def take(self, draws, parts=(0, 2), beta=0.5):
        count = len(draws)
        block, slots = np.zeros((count, 2), np.uint8), np.empty(count, np.int64)
        indices, weights = np.empty(count, np.int64), np.empty(count, np.float32)
        done = sample_by_priority(
            *self.tree.unsettled, self.rings, SHIFT, parts, np.array(draws), beta, NO_PREFETCH, self.plan,
            block.reshape(-1), slots, indices, weights,
        )  # fmt: skip
        return done, block, slots, indices, weights

    def revise(self, indices, priorities, alpha=0.5):
        return update_leaves(
            *self.tree.unsettled, self.rings, SHIFT, alpha, np.array(indices, np.int64), np.array(priorities)
        )


def test_a_batch_is_drawn_described_and_copied():
    store = Store()
    assert store.take([0.5])[0] is False, "there is nothing to draw"
    leaf = np.array([4.0], np.float32)
    store.tree.extend(0, 0, 2, leaf)  # waits until somebody looks
    store.tree.extend(1, 3, 4, np.array([1.0], np.float32))
    done, block, slots, indices, weights = store.take([0.0, 0.4, 0.5, 0.95])
    assert done
    assert slots.tolist() == [0, 0, 1, 8]
    assert block.tolist() == store.column[slots].tolist()
    assert indices.tolist() == [index_of(5, 0), index_of(5, 0), index_of(6, 0), index_of(3, 1)]
    np.testing.assert_allclose(weights, [0.5, 0.5, 0.5, 1.0], rtol=1e-6)
    assert store.take([0.1, 0.9], parts=(1, 2))[2].tolist() == [8, 8]
    assert store.take([0.1, 0.9], parts=(0, 1))[2].tolist() == [0, 1]
    store.tree.assign(np.array([8]), np.zeros(1, np.float32))
    assert store.take([0.1], parts=(1, 2))[0] is False


def test_new_priorities_are_set_unless_one_is_wrong():
    store = Store()
    store.tree.extend(0, 0, CAPACITY, np.array([1.0], np.float32))  # waits
    indices = [index_of(5, 0), index_of(2, 0), index_of(1, 0), index_of(3, 1)]
    assert store.revise(indices, [4.0, 9.0, 16.0, 25.0]) == (-1, 25.0, 1)
    expected = [2.0, 1.0, 3.0, 1.0, 1.0], [0.0, 0.0, 0.0, 5.0, 0.0]
    np.testing.assert_allclose(store.tree.leaves[:, :CAPACITY], expected, rtol=1e-6)
    np.testing.assert_allclose(store.tree.totals, [8.0, 5.0], rtol=1e-6)
    before = store.tree.leaves.copy()
    assert store.revise([index_of(5, 0), index_of(7, 0)], [1.0, 1.0]) == (1, 1.0, 0)
    assert store.revise([index_of(7, 0), index_of(5, 0)], [1.0, 1.0]) == (0, 1.0, 0)
    assert store.revise([index_of(5, 0), index_of(6, 0)], [1.0, -1.0]) == (-1, -1.0, 0)
    np.testing.assert_array_equal(store.tree.leaves, before)
    assert store.revise([index_of(5, 0)], [0.0]) == (-1, 0.0, 0), "0 is a priority"
    assert store.tree.leaves[0, 0] == 0.0
