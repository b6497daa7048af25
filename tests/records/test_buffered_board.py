"""Records that wait for room: a board whose disk is full for as long as the test says, and a real full disk."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress

import pytest

from steppe.core.contracts.errors import DiskFull
from steppe.core.contracts.transport import ACTORS, EVENTS, TRAINING
from steppe.records.buffered_board import BufferedBoard
from steppe.records.store import RunStore
from steppe.transport.local import LocalBoard

pytestmark = pytest.mark.integration


class Full(LocalBoard):
    """A board with room for `room` more records."""

    room = 0

    def post(self, topic, record):
        if self.room <= 0:
            raise DiskFull("full")
        self.room -= 1
        return super().post(topic, record)


def test_with_room_it_is_the_board():
    board = LocalBoard()
    backlog = BufferedBoard(board)
    assert [backlog.post(TRAINING, {"k": k}) for k in range(3)] == [1, 2, 3]
    assert backlog.read(TRAINING, 1) == board.read(TRAINING, 1) == [(2, {"k": 1}), (3, {"k": 2})]


def test_what_waits_goes_out_in_order_before_the_next_record():
    board = Full()
    backlog = BufferedBoard(board)
    assert [backlog.post(TRAINING, {"k": k}) for k in range(3)] == [0, 0, 0]
    assert (len(backlog), board.read(TRAINING)) == (3, [])
    board.room = 2
    assert backlog.post(TRAINING, {"k": 3}) == 0  # there was room for two of the four
    assert [record["k"] for _, record in board.read(TRAINING)] == [0, 1]
    board.room = 10
    assert backlog.post(ACTORS, {"k": 4}) == 1
    assert [record["k"] for _, record in board.read(TRAINING)] == [0, 1, 2, 3]
    assert [record["k"] for _, record in board.read(ACTORS)] == [4]
    assert len(backlog) == 0


def test_without_another_record_flush_is_enough():
    board = Full()
    backlog = BufferedBoard(board)
    backlog.post(TRAINING, {"k": 0})
    board.room = 1
    assert backlog.flush() == 1
    assert backlog.flush() == 0


def test_what_is_given_up_is_counted_and_told():
    board = Full()
    backlog = BufferedBoard(board, limit=4)
    for k in range(10):
        backlog.post(TRAINING, {"run": "r", "k": k})
    assert (len(backlog), backlog.num_dropped) == (4, 6)
    board.room = 100
    backlog.flush()
    assert [record["k"] for _, record in board.read(TRAINING)] == [6, 7, 8, 9]
    ((_, event),) = board.read(EVENTS)
    assert (event["kind"], event["run"], event["details"]["given_up"]) == ("warning", "r", 6)
    assert backlog.num_dropped == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_the_store_on_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], check=True)
    try:
        store = RunStore(disk / "run.sqlite")
        store.set_status("RUNNING")
        with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(4096))
        posted = 0
        with suppress(DiskFull):
            while posted < 10_000:
                posted = store.post("t", {"k": posted, "fill": "x" * 500})
        with pytest.raises(DiskFull, match=r"no disk space to write .*run\.sqlite"):
            store.post("t", {"k": posted, "fill": "x" * 5000})
        before = os.stat(store.path).st_mtime_ns
        store.heartbeat()  # does not raise
        assert os.stat(store.path).st_mtime_ns > before
        assert [record["k"] for _, record in store.read("t")] == list(range(posted))
        assert store.status().state == "RUNNING"
        (disk / "filler").unlink()
        store.post("t", {"k": posted})
        assert [record["k"] for _, record in store.read("t")] == list(range(posted + 1))
        store.close()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_heart_that_the_disk_cannot_take_still_beats(tmp_path, monkeypatch):
    """Readers go by the file's time then."""
    store, other = RunStore(tmp_path / "run.sqlite"), RunStore(tmp_path / "run.sqlite")
    store.set_status("RUNNING")
    later = time.time() + 60.0
    monkeypatch.setattr(time, "time", lambda: later)
    assert other.status().reason == "heartbeat_expired"
    os.utime(store.path, (later - 1.0, later - 1.0))
    assert other.status().state == "RUNNING"
    store.close()
    other.close()
