"""The SQLite store with several processes and threads, forks, dead owners and damaged files."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from steppe.core.contracts.errors import DamagedFile, RunNotFound
from steppe.records import store as module
from steppe.records.store import HEARTBEAT_S, LOST, STATES, RunStore, process_start

pytestmark = pytest.mark.integration

POSTER = """
import sys
from pathlib import Path
from steppe.records.store import RunStore
store = RunStore(Path(sys.argv[1]))
for k in range(int(sys.argv[3])):
    store.post("t", {"who": sys.argv[2], "k": k})
"""
OWNER = """
import sys, time
from pathlib import Path
from steppe.records.store import RunStore
store = RunStore(Path(sys.argv[1]))
store.set_status(sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path):
    store = RunStore(tmp_path / "run.sqlite")
    yield store
    store.close()


def owner_of(store, state="RUNNING"):
    command = [sys.executable, "-c", OWNER, str(store.path), state]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_concurrent_writers_lose_nothing(tmp_path):
    path = tmp_path / "run.sqlite"  # it does not exist yet: they also race to create it
    command = [sys.executable, "-c", POSTER, str(path)]
    writers = [subprocess.Popen([*command, str(who), "300"]) for who in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    store = RunStore(path)
    records = store.read("t", limit=10_000)
    numbers = [number for number, _ in records]
    assert numbers == sorted(set(numbers))
    for who in range(4):
        assert [record["k"] for _, record in records if record["who"] == str(who)] == list(range(300))
    store.close()


def test_a_reader_misses_no_record_written_while_it_reads(store):
    writers = [subprocess.Popen([sys.executable, "-c", POSTER, str(store.path), str(who), "200"]) for who in range(2)]
    seen, after = [], 0
    while len(seen) < 400:
        page = store.read("t", after, limit=7)
        seen += [(record["who"], record["k"]) for _, record in page]
        after = page[-1][0] if page else after
    assert [writer.wait() for writer in writers] == [0, 0]
    assert sorted(seen) == sorted((who, k) for who in "01" for k in range(200))


def test_every_thread_has_its_own_connection(store):
    def post(who):
        for k in range(50):
            store.post("t", {"who": who, "k": k})
        store.close()

    threads = [threading.Thread(target=post, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = [record for _, record in store.read("t")]
    for who in range(4):
        assert [record["k"] for record in records if record["who"] == who] == list(range(50))


@pytest.fixture
def connections(monkeypatch):
    """Collect every connection that is opened from now on."""
    made, connect = [], sqlite3.connect

    def counted(*words, **options):
        made.append(connect(*words, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", counted)
    return made


def sound(path):
    database = sqlite3.connect(path)
    with contextlib.closing(database):
        return database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_fork_does_not_share_its_parents_connection(store, connections):
    store.post("t", {"who": "parent", "k": 0})
    assert connections == [], "the parent has one already"

    def child():
        for k in range(100):
            store.post("t", {"who": "child", "k": k})
        assert len(connections) == 1
        store.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    for k in range(1, 100):
        store.post("t", {"who": "parent", "k": k})
    process.join()
    assert process.exitcode == 0
    records = [record for _, record in store.read("t")]
    for who in ("parent", "child"):
        assert [record["k"] for record in records if record["who"] == who] == list(range(100))
    assert sound(store.path)


def test_records_survive_a_kill(tmp_path):
    path = tmp_path / "run.sqlite"
    script = POSTER + "print('posted', flush=True)\nsys.stdin.read()\n"
    command = [sys.executable, "-c", script, str(path), "x", "25"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"posted\n"
    end(process)
    store = RunStore(path)
    assert [record["k"] for _, record in store.read("t")] == list(range(25))
    store.close()


def test_the_state_is_pending_until_it_is_set(store):
    assert store.status().state == "PENDING"
    assert not store.status().live


@pytest.mark.parametrize("state", [state for state in STATES if state != LOST])
def test_every_state_is_read_as_it_was_set(store, state):
    before = time.time()
    store.set_status(state, "because", "a message")
    status = store.status()
    assert (status.state, status.reason, status.message, status.pid) == (state, "because", "a message", os.getpid())
    assert before <= status.started_s <= status.changed_s <= time.time()
    assert status.live == (state in ("STARTING", "RUNNING", "PAUSED", "STOPPING"))


def test_an_unknown_state_is_refused(store):
    with pytest.raises(ValueError, match="BUSY"):
        store.set_status("BUSY")


def test_start_time_is_constant_and_change_time_is_updated(store):
    store.set_status("STARTING")
    first = store.status()
    store.set_status("RUNNING")
    second = store.status()
    assert second.started_s == first.started_s
    assert second.changed_s > first.changed_s


@pytest.mark.parametrize("state", ["PENDING", "STARTING", "RUNNING", "PAUSED", "STOPPING"])
def test_a_run_whose_owner_was_killed_is_lost_at_once(store, state):
    owner = owner_of(store, state)
    assert store.status().state == state
    assert store.status().pid == owner.pid
    end(owner)
    status = store.status()
    assert (status.state, status.reason) == (LOST, "process_dead")
    assert str(owner.pid) in status.message


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "STOPPED"])
def test_an_ended_run_keeps_its_state(store, state):
    end(owner_of(store, state))
    assert store.status().state == state


def test_an_unreaped_owner_counts_as_dead(store):
    owner = owner_of(store)
    os.kill(owner.pid, signal.SIGKILL)
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the process table
    assert os.path.exists(f"/proc/{owner.pid}")
    assert store.status().state == LOST
    end(owner)


def test_another_process_with_the_same_pid_is_not_the_owner(store, monkeypatch):
    store.set_status("RUNNING")
    assert store.status().state == "RUNNING"
    mine = process_start(os.getpid())
    monkeypatch.setattr(module, "process_start", lambda pid: mine + 1)
    assert store.status().reason == "process_dead"


def test_a_run_is_lost_after_three_missed_heartbeats(store, monkeypatch):
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now)
    store.set_status("RUNNING")
    now += 3 * HEARTBEAT_S - 0.1
    assert store.status().state == "RUNNING"
    now += 0.2
    assert (store.status().state, store.status().reason) == (LOST, "heartbeat_expired")
    store.heartbeat()
    assert store.status().state == "RUNNING"


def test_only_heartbeats_of_the_owner_count(store):
    owner = owner_of(store)
    before = store.status().heartbeat_s
    store.heartbeat()
    assert store.status().heartbeat_s == before
    end(owner)


def test_a_file_that_is_no_store_is_damage(tmp_path):
    (tmp_path / "run.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(DamagedFile, match=r"run\.sqlite"):
        RunStore(tmp_path / "run.sqlite")


def test_a_reader_does_not_create_a_missing_store(tmp_path):
    with pytest.raises(RunNotFound):
        RunStore(tmp_path / "run.sqlite", create=False)
    assert not list(tmp_path.iterdir())


def test_the_journal_is_write_ahead_and_the_file_intact(tmp_path, connections):
    store = RunStore(tmp_path / "run.sqlite")
    store.post("t", {})
    [database] = connections
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert database.execute("PRAGMA synchronous").fetchone() == (1,)
    assert sound(store.path)
    store.close()


def test_start_time_is_known_for_existing_processes_only():
    assert process_start(os.getpid()) == process_start(os.getpid())
    assert process_start(1) is not None
    assert process_start(2**22 + 1) is None
