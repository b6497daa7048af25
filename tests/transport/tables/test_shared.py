"""Tables that workers share: steps given out, sums, and what a killed worker leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.transport import TableDelta
from steppe.core.system.shared_dir import make_shared_dir, remove_shared_dir
from steppe.transport.tables import shared as tables
from steppe.transport.tables.shared import LocalTable, ShmTable

pytestmark = pytest.mark.integration


def change(steps, episodes):
    """What was added to any row, as a sum."""
    return TableDelta(np.empty(0, np.int64), np.ones((200, 2), np.float32), steps, episodes)


@pytest.fixture
def shared_dir():
    shared_dir = make_shared_dir("tables", 1 << 20)
    yield shared_dir
    remove_shared_dir(shared_dir)


@pytest.fixture(params=["local", "shm"])
def pair(request, shared_dir):
    """A table as its keeper has it, and a function that opens it for another worker."""
    if request.param == "local":
        table = LocalTable()
        return table, lambda: table
    return ShmTable(shared_dir), lambda: ShmTable(shared_dir)


def test_a_worker_waits_for_the_table(pair):
    owner, opened = pair
    local = np.zeros((4, 2), np.float32)
    assert opened().begin(0, local) is None
    assert opened().totals().steps == 0
    owner.create(np.full((4, 2), 0.5, np.float32), 1, 100, steps=7, episodes=2)
    assert opened().begin(0, local) == 0
    assert (local == 0.5).all()
    assert opened().totals()[:2] == (7, 2)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_steps_given_out_are_those_asked_for(num_workers, pair):
    owner, opened = pair
    owner.create(np.zeros((3, 2), np.float32), num_workers, 1_000)
    workers = [opened() for _ in range(num_workers)]
    locals_ = [np.zeros((3, 2), np.float32) for _ in workers]
    for number, (worker, local) in enumerate(zip(workers, locals_, strict=True)):
        assert worker.begin(number, local) == 0
    given, turns = 0, 0
    while any(grants := [worker.claim(number, 64, 1.0) for number, worker in enumerate(workers)]):
        for number, (worker, steps) in enumerate(zip(workers, grants, strict=True)):
            assert 0 <= steps <= 64
            if steps:
                locals_[number][1, 0] += steps
                worker.merge(number, change(steps, 1), 2.0)
        given, turns = given + sum(grants), turns + 1
    values = np.zeros((3, 2), np.float32)
    totals = owner.read(values)
    assert given == totals.steps == 1_000
    assert (totals.started_s, totals.merged_s) == (1.0, 2.0)
    assert values.tolist() == [[0, 0], [1_000, 0], [0, 0]]


def test_more_than_was_given_counts(pair):
    """Whole episodes end when they end: the rest is given out less for it."""
    owner, opened = pair
    owner.create(np.zeros((3, 2), np.float32), 1, 100)
    worker = opened()
    worker.begin(0, np.zeros((3, 2), np.float32))
    assert worker.claim(0, 60, 0.0) == 60
    worker.merge(0, change(75, 3), 0.0)
    assert worker.claim(0, 60, 0.0) == 25
    worker.merge(0, change(30, 1), 0.0)
    assert worker.claim(0, 60, 0.0) == 0
    assert owner.totals()[:2] == (105, 4)


def test_steps_of_a_killed_worker_are_given_out_again(pair):
    owner, opened = pair
    owner.create(np.zeros((3, 2), np.float32), 1, 100)
    local = np.zeros((3, 2), np.float32)
    worker = opened()
    worker.begin(0, local)
    assert worker.claim(0, 40, 0.0) == 40
    again = opened()
    assert again.begin(0, local) == 40
    assert again.claim(0, 1_000, 0.0) == 100
    assert owner.totals().lost_steps == 40


def test_a_run_without_a_number_of_steps_gives_out_any(pair):
    owner, opened = pair
    owner.create(np.zeros((3, 2), np.float32), 4, None)
    worker = opened()
    worker.begin(2, np.zeros((3, 2), np.float32))
    assert worker.claim(2, 1 << 40, 0.0) == 1 << 40


def test_a_log_that_ran_over_loses_nothing(monkeypatch, pair):
    monkeypatch.setattr(tables, "LOG_ROWS", 16)
    owner, opened = pair
    owner.create(np.zeros((200, 1), np.float32), 2, None)
    one, other = opened(), opened()
    mine, theirs = np.zeros((200, 1), np.float32), np.zeros((200, 1), np.float32)
    one.begin(0, mine)
    other.begin(1, theirs)
    for row in range(200):
        mine[row] += row
        one.merge(0, change(1, 0), 0.0)
    other.merge(1, change(1, 0), 0.0)
    assert theirs.ravel().tolist() == list(range(200))


ADDING = """
import sys, numpy as np
from pathlib import Path
from steppe.core.contracts.transport import TableDelta
from steppe.transport.tables.shared import ShmTable
table, local = ShmTable(Path(sys.argv[1])), np.zeros((64, 3), np.float32)
number, rounds = int(sys.argv[2]), int(sys.argv[3])
assert table.begin(number, local) == 0
stream = np.random.default_rng(number)
for _ in range(rounds):
    rows = stream.integers(0, 64, 5)
    np.add.at(local, (rows, number), 1.0)
    table.merge(number, TableDelta(np.empty(0, np.int64), np.ones((64, 3), np.float32), 5, 1), 0.0)
if number == 2:
    table._lock.__enter__()
    print("holding", flush=True)
    sys.stdin.read()
"""


def adding(shared_dir, number, rounds):
    command = [sys.executable, "-c", ADDING, str(shared_dir), str(number), str(rounds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_add_up_and_one_that_is_killed_holds_nobody_up(shared_dir):
    owner = ShmTable(shared_dir)
    owner.create(np.zeros((64, 3), np.float32), 3, None)
    holder = adding(shared_dir, 2, 10)
    assert holder.stdout.readline() == "holding\n"
    workers = [adding(shared_dir, number, 400) for number in (0, 1)]
    os.kill(holder.pid, signal.SIGKILL)
    for process in (holder, *workers):
        process.communicate()
    assert [process.returncode for process in workers] == [0, 0]
    values = np.zeros((64, 3), np.float32)
    totals = owner.read(values)
    assert values.sum(axis=0).tolist() == [2_000, 2_000, 50]
    assert totals.steps == 4_050


def test_shared_memory_that_is_too_small_is_said(shared_dir, monkeypatch):
    def full(path, size=None, **options):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables, "map_file", full)
    with pytest.raises(UsageError, match="1526 MiB of shared memory for the table: No space left"):
        ShmTable(shared_dir).create(np.broadcast_to(np.float32(0), (10**8, 4)), 1, None)
    assert not list(shared_dir.glob("table*"))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_episodes_given_out_are_those_asked_for(num_workers, pair):
    """A worker plays fewer than it was given at a time, and one is killed: what it had not brought is given out again."""
    owner, opened = pair
    owner.create(np.zeros((3, 2), np.float32), num_workers, None, episodes=10, episode_limit=70)
    workers = [opened() for _ in range(num_workers)]
    left = [0] * num_workers
    for number, worker in enumerate(workers):
        worker.begin(number, np.zeros((3, 2), np.float32))
    for turn in range(200):
        for number, worker in enumerate(workers):
            left[number] += worker.claim_episodes(number, 8)
            played = min(left[number], 3)
            worker.merge(number, change(5, played), 0.0)
            left[number] -= played
        if turn == 2:
            assert left[0] > 0
            left[0] = 0
            workers[0] = opened()
            workers[0].begin(0, np.zeros((3, 2), np.float32))
    assert left == [0] * num_workers
    assert owner.totals().episodes == 70
