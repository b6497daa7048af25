"""A table that is shared by calls: sums, whoever ends first; workers in place of others; keepers that go. Calls come in threads
of a pool here, as they do in Ray's; a real cluster is in tests/runtimes/ray/world_suite.py."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from steppe.core.contracts.transport import TableDelta
from steppe.transport.ray.tables import RayTable

pytestmark = pytest.mark.unit

WORKERS, STATES, PATIENCE_S = 4, 32, 180.0
NOTHING = np.empty(0, np.int64)


class Calls:
    """A keeper that is called, and its bell."""

    def __init__(self) -> None:
        self.wakes = 0  # messages that came, while no answer of its own does
        self.owner = RayTable(self._wake, owns_table=True)
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(2 * WORKERS)

    def _wake(self) -> None:
        with self.lock:
            self.wakes += 1

    def worker(self) -> RayTable:
        table = RayTable(lambda: None, owns_table=False)
        table.call = lambda *message: SimpleNamespace(future=lambda: self.pool.submit(self.owner.request, *message))
        return table

    def make(self) -> None:
        self.owner.create(np.zeros((STATES, WORKERS), np.float32), WORKERS, None)


@pytest.fixture
def calls():
    made = Calls()
    yield made
    made.owner.close()
    made.pool.shutdown()


def until(found, *links: RayTable):
    """What `found` gives once it gives something, while these links go on."""
    ended = threading.Event()
    timer = threading.Timer(PATIENCE_S, ended.set)
    timer.start()
    try:
        while (answer := found()) is None or answer is False:
            assert not ended.is_set(), "nothing came"
            for link in links:
                link.progress()
        return answer
    finally:
        timer.cancel()


def change(steps: int, episodes: int = 1) -> TableDelta:
    return TableDelta(NOTHING, np.ones((STATES, WORKERS), np.float32), steps, episodes)


def work(table: RayTable, worker: int, rounds: int) -> None:
    local, stream = np.zeros((STATES, WORKERS), np.float32), np.random.default_rng(worker)
    assert until(lambda: table.begin(worker, local), table) == 0
    for number in range(rounds):
        np.add.at(local, (stream.integers(0, STATES, 7), worker), 1.0)
        table.merge(worker, change(7), 0.0)
        if number % 5 == worker:
            assert until(lambda: table.claim(worker, 10, 0.0), table) == 10
        table.progress()
    until(lambda: table.settled, table)


@pytest.mark.slow
def test_messages_add_up_whoever_ends_first(calls):
    workers = [
        threading.Thread(target=work, args=(calls.worker(), index, 20 * (index + 1))) for index in range(WORKERS)
    ]
    for worker in workers:
        worker.start()  # before there is a table: they wait for it
    until(lambda: calls.wakes == WORKERS)
    calls.make()
    wanted = sum(7 * 20 * (index + 1) for index in range(WORKERS))
    until(lambda: calls.owner.totals().steps == wanted, calls.owner)
    until(lambda: not any(worker.is_alive() for worker in workers), calls.owner)
    values = np.zeros((STATES, WORKERS), np.float32)
    assert calls.owner.read(values).episodes == 20 * 10
    assert values.sum(axis=0).tolist() == [7 * 20 * (index + 1) for index in range(WORKERS)]


def test_one_in_place_of_another_gets_the_whole_table_and_hears_what_was_lost(calls):
    calls.make()
    first, other, local = calls.worker(), calls.worker(), np.zeros((STATES, WORKERS), np.float32)
    assert until(lambda: first.begin(1, local), first, calls.owner) == 0
    assert until(lambda: first.claim(1, 30, 0.0), first, calls.owner) == 30
    local[3, 1] = 5.0
    first.merge(1, change(10), 0.0)
    until(lambda: first.settled, first, calls.owner)
    again = np.zeros((STATES, WORKERS), np.float32)
    assert until(lambda: other.begin(1, again), other, calls.owner) == 20, "given out, and never merged"
    assert again[3, 1] == 5.0
    assert calls.owner.totals().steps == 10


def test_one_that_asks_in_place_of_another_before_there_is_a_table(calls):
    first, other = calls.worker(), calls.worker()
    local, again = (np.zeros((STATES, WORKERS), np.float32) for _ in range(2))
    assert first.begin(2, local) is None
    until(lambda: calls.wakes == 1)
    calls.owner.progress()
    assert other.begin(2, again) is None
    until(lambda: calls.wakes == 2)
    calls.owner.progress()
    calls.make()
    assert until(lambda: other.begin(2, again), other, calls.owner) == 0
    assert first.begin(2, local) is None, "it was dismissed"


def test_closing_the_owner_unblocks_all_workers(calls):
    calls.make()
    table = calls.worker()
    table.begin(0, np.zeros((STATES, WORKERS), np.float32))
    until(lambda: calls.wakes == 1)
    calls.owner.close()
    until(lambda: table.settled, table)
    assert len(calls.owner.request(0, 0, np.zeros(64, np.uint8))) == 0


def test_an_error_of_the_owner_is_raised_at_the_worker():
    table, failed = RayTable(lambda: None, owns_table=False), Future()
    failed.set_exception(ArithmeticError("this table has an edge"))
    table.call = lambda *_: SimpleNamespace(future=lambda: failed)
    table.begin(0, np.zeros((STATES, WORKERS), np.float32))
    with pytest.raises(ArithmeticError, match="edge"):
        table.progress()
