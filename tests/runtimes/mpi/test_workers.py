"""Workers on the ranks of real MPI worlds: sums, unequal work, a killed rank, and the user's training call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtimes.mpi.test_runtime import (
    PATIENCE_S,
    STEPPE,
    files_of,
    parents,
    ranks_of,
    status,
    trained,
    under_way,
    wait_until,
    world,
)

pytestmark = pytest.mark.integration

SUITE = Path(__file__).with_name("tables_suite.py")


def told(ranks, *words):
    done = world(ranks, sys.executable, SUITE, *map(str, words))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_messages_add_up_in_any_order_of_ending():
    found = told(3, "table", 40)
    assert found["sums"] == [7 * 40 * (rank + 1) for rank in range(3)]
    assert found["steps"] == sum(found["sums"])


def test_ranks_learn_the_values_of_value_iteration():
    """40,000 random steps in total, learning rate falling to 0 (seed 4): every value within 0.3. Sums of three are
    exact, as above.
    """
    found = told(2, "train", "maze", 40_000, 32, 20)
    assert found["state"] == "SUCCEEDED"
    assert found["size"] == 2
    assert 40_000 <= found["steps"] < 40_000 + 20 * 2
    assert found["error"] < 0.3
    assert found["validated"] >= 1
    assert 100 <= found["again"] < 100 + 20 * 2
    assert "the other ranks have only the environment of the first train call" in found["another"]
    assert not found["torch"]


@pytest.mark.slow
def test_a_slow_rank_does_not_block_the_others():
    found = told(3, "train", "uneven", 3_000, 4, 2)
    shares = [found["shares"][str(rank)] for rank in range(3)]
    assert found["state"] == "SUCCEEDED"
    assert found["steps"] >= 3_000
    assert shares[0] > shares[2] > 0, shares


@pytest.mark.slow
def test_steppe_train_with_ranks():
    words = ["train", "steppe/TicTacToe-v0", "--algo", "q-learning", "--mode", "workers", "--runtime", "mpi", "--json"]
    more = ["--envs", "64", "-s", "evaluation.episodes=5"]
    done = subprocess.run(
        [STEPPE, *words, *more, "--actors", "2", "--steps", "10000", "--name", "run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["state"], found["mode"], found["actors"]) == ("SUCCEEDED", "workers", 2)
    assert 10_000 <= found["env_steps"] < 10_000 + 2 * 64
    wrong = world(2, STEPPE, *words, "--actors", "3")
    assert wrong.returncode == 2
    assert (
        "mpiexec started 2 ranks, but this run takes 3, one for each worker: use mpiexec -n 3, or --actors 2"
        in wrong.stderr
    )
    done = world(2, STEPPE, *words, *more, "--actors", "2", "--steps", "10000")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["env_steps"] >= 10_000


@pytest.mark.slow
def test_a_killed_rank_fails_the_run_and_leaves_nothing():
    words = ["--actors", "3", "--steps", "1000000000", "-s", "checkpoint.every_s=0.2", "--envs", "8", "--name", "run"]
    command = [STEPPE, "train", "Taxi-v4", "--algo", "q-learning", "--mode", "workers", "--runtime", "mpi", *words]
    with under_way(command) as process:
        wait_until(trained, process)
        places = ranks_of(process)
        assert sorted(places.values()) == ["learner", "worker-1", "worker-2"]
        files = files_of(places)
        os.kill(next(pid for pid, place in places.items() if place == "worker-2"), signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "the process of worker-2 was killed or crashed" in errors
        wait_until(lambda: not set(places) & set(parents()))
    assert not [file for file in files if file.exists()]
    assert (status().state, status().reason) == ("FAILED", "role_died")
