"""Merging rows of a table: sums over workers, equality for a lone one, and what others did."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.table_merge import apply_remote_rows, find_changed_rows, merge_rows

pytestmark = pytest.mark.unit

NONE = np.empty(0, np.int64)


class Copy:
    """One worker's side, as transports have it."""

    def __init__(self, shared):
        self.local, self.base, self.read_until = shared.copy(), shared.copy(), 0
        self.found, self.kept = np.empty(len(shared) + 1, np.int64), np.ones(shared.shape, np.float32)

    def merge(self, shared, log, head, candidates=NONE):
        rows = self.found[: find_changed_rows(self.local, self.base, candidates, self.found)].copy()
        self.read_until = merge_rows(shared, self.local, self.base, self.kept, rows, log, head, self.read_until)
        return self.read_until, rows


def test_changed_rows_are_found_among_all_and_among_candidates():
    base = np.zeros((6, 2), np.float32)
    local = base.copy()
    local[1, 1], local[4, 0] = 1.0, -1.0
    found = np.empty(7, np.int64)
    assert found[: find_changed_rows(local, base, NONE, found)].tolist() == [1, 4]
    assert found[: find_changed_rows(local, base, np.array([0, 4, 5]), found)].tolist() == [4]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([np.float32, np.float64]), st.sampled_from([4, 1000]))
def test_workers_merge_the_sum_of_what_they_learned(data, kind, log_rows):
    """Whole numbers, so that sums are exact in any order; a short log must do as well as a long one."""
    shared = np.zeros((8, 3), kind)
    expected = shared.astype(np.int64)
    log, head = np.zeros(log_rows, np.int64), 0
    workers = [Copy(shared) for _ in range(3)]
    moves = st.tuples(st.integers(0, 2), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), st.integers(-5, 5))))
    for who, added in data.draw(st.lists(moves, max_size=12)):
        for row, action, amount in added:
            workers[who].local[row, action] += amount
            expected[row, action] += amount
        head, _ = workers[who].merge(shared, log, head)
    for worker in workers:
        head, _ = worker.merge(shared, log, head)
        np.testing.assert_array_equal(worker.local, shared)
        np.testing.assert_array_equal(worker.base, shared)
    np.testing.assert_array_equal(shared, expected)


def test_a_lone_worker_merges_bit_for_bit():
    stream = np.random.default_rng(0)
    shared = stream.normal(size=(50, 4)).astype(np.float32)
    worker, log, head = Copy(shared), np.zeros(64, np.int64), 0
    for _ in range(5):
        worker.local[stream.integers(0, 50, 9)] = stream.normal(size=(9, 4))  # adding a difference would round
        expected = worker.local.copy()
        head, _ = worker.merge(shared, log, head)
        np.testing.assert_array_equal(shared, expected)
        np.testing.assert_array_equal(worker.local, expected)


def test_rows_that_nobody_changed_are_not_touched():
    shared = np.zeros((1000, 2), np.float32)
    one, other = Copy(shared), Copy(shared)
    log, head = np.zeros(64, np.int64), 0
    one.local[7, 1] = 3.0
    head, rows = one.merge(shared, log, head)
    assert (head, rows.tolist()) == (1, [7])
    shared[500] = 9.0  # by nobody that logged it
    head, rows = other.merge(shared, log, head)
    assert other.local[7, 1] == 3.0
    assert not other.local[500].any()


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_workers_that_converge_to_one_value_do_not_overshoot_it(num_workers):
    """n updates at rate α towards a target, by each worker at once: as if they had been made one after the other."""
    rate, updates, target = 0.3, 5, 7.0
    left = (1 - rate) ** updates
    shared = np.zeros((1, 1))
    log, head = np.zeros(64, np.int64), 0
    workers = [Copy(shared) for _ in range(num_workers)]
    for turn in range(1, 6):
        for worker in workers:
            worker.local[0, 0] = target + left * (worker.local[0, 0] - target)
            worker.kept[...] = left
        for worker in workers:
            head, _ = worker.merge(shared, log, head)
        for worker in workers:  # all look at what came of it before they go on
            head, _ = worker.merge(shared, log, head)
        assert shared[0, 0] == pytest.approx(target - target * left ** (num_workers * turn))


def test_messages_between_ranks_give_the_same_result():
    shared = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    old, learned, kept = (
        shared[[0, 2]],
        np.array([[1.0, 8.0], [2.0, 6.0]], np.float32),
        np.array([[1.0, 0.5], [0.25, 1.0]]),
    )
    shared += 10.0  # what others have learned meanwhile
    apply_remote_rows(shared, np.array([0, 2]), kept, learned - kept * old)
    assert shared.tolist() == [[11.0, 8.0 + 5.0], [13.0, 14.0], [2.0 + 2.5, 16.0]]
