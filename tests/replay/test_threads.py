"""Threads that write, draw, update, balance and clear one pool at the same time: rows stay whole, counts stay true."""

import threading
from functools import partial

import numpy as np
import pytest

from steppe.replay import ReplayBufferPool
from steppe.replay.kernels.sumtree import SumTree
from tests.support.replay_model import images

pytestmark = pytest.mark.unit

ROUNDS = 300


def together(*jobs):
    """Run jobs at once; the first exception is raised here."""
    failures, barrier = [], threading.Barrier(len(jobs))

    def guarded(job):
        try:
            barrier.wait()
            job()
        except BaseException as error:  # noqa: BLE001  # raised again below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def block(writer, first, size):
    numbers = np.arange(first, first + size) * 10 + writer
    return {"number": numbers, "wide": np.repeat(numbers[:, None], 200, 1).astype(np.float64)}


def test_rows_stay_whole():
    pool = ReplayBufferPool(3, 500, use_prioritized=True, seed=0)
    pool.add_experiences(block(9, 0, 50))

    def write(writer):
        for count in range(ROUNDS):
            pool.add_experiences(block(writer, count * 20, 20))

    def draw():
        for count in range(ROUNDS):
            batch = pool.sample_batch(40)
            np.testing.assert_array_equal(batch["wide"], np.repeat(batch["number"][:, None], 200, 1))
            pool.update_priorities(batch["indices"], 0.1 + batch["number"] % 7)
            if count % 50 == 0:
                pool.balance_buffers()

    together(lambda: write(0), lambda: write(1), draw, draw)
    stats = pool.get_buffer_stats()
    assert sum(b["added"] for b in stats["buffers"]) == 50 + 2 * 20 * ROUNDS
    assert stats["total_experiences"] == 1500
    tree = pool.store.tree
    again = SumTree(500, 3)
    again.leaves[...] = tree.leaves
    again.rebuild()
    np.testing.assert_array_equal(again.nodes, tree.nodes)


def test_the_first_experiences_may_come_from_two_threads():
    for _ in range(20):
        pool = ReplayBufferPool(2, 1000)
        together(*[partial(pool.add_experiences, block(writer, 0, 100)) for writer in range(4)])
        assert pool.get_total_experiences() == 400
        numbers = pool.store.columns["number"][
            np.concatenate([pool.store.slots_oldest_first(0), pool.store.slots_oldest_first(1)])
        ]
        assert sorted(numbers.tolist()) == sorted(n * 10 + w for n in range(100) for w in range(4))


def test_stacks_stay_whole():
    pool = ReplayBufferPool(2, 150, frame_stack=4, seed=0)

    def stacks(first):
        pairs = [images(number) for number in range(first, first + 10)]
        numbers = np.arange(first, first + 10)
        return {"obs": np.stack([a for a, _ in pairs]), "next_obs": np.stack([b for _, b in pairs]), "number": numbers}

    pool.add_experiences(stacks(0))

    def write(base):
        for count in range(60):
            pool.add_experiences(stacks(base + count * 10))

    def draw():
        for _ in range(60):
            batch = pool.sample_batch(10)
            for row, number in enumerate(batch["number"].tolist()):
                np.testing.assert_array_equal(batch["obs"][row], images(number)[0])

    together(lambda: write(0), lambda: write(7000), draw)
    assert len(pool.store.frames) == np.count_nonzero(pool.store.frames.refs)
