"""Shared memory between real processes: kill -9 of a writer, rooms of the living and the dead, bells and words."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from steppe.core.contracts.errors import UsageError
from steppe.core.system import shared_dir
from steppe.core.system.shared_dir import Wakeup, make_shared_dir, remove_abandoned_dirs, remove_shared_dir
from steppe.testing.channel import SPEC, fill, header, require_equal, send
from steppe.testing.weights import some_weights
from steppe.transport import shm
from steppe.transport.shm import ShmChannel, ShmControl, ShmWeights

pytestmark = pytest.mark.integration

RUN = "shm-test"
WRITER = """
import sys
from pathlib import Path
from steppe.testing.channel import SPEC, send
from steppe.core.system.shared_dir import Wakeup
from steppe.transport.shm import ShmChannel
room, actor, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:])
channel, bell = ShmChannel(room, SPEC, "shm-test", 2, 2), Wakeup(room / f"bell-actor-{actor}")
for sequence in range(first, last):
    while channel.blank(actor) is None:
        bell.wait(60.0)
    send(channel, "shm-test", actor, sequence)
"""
HALF_A_SEGMENT = """
import sys
from pathlib import Path
from steppe.testing.channel import SPEC
from steppe.transport.shm import ShmChannel
channel = ShmChannel(Path(sys.argv[1]), SPEC, "shm-test", 2, 2)
segment = channel.blank(0)
segment["obs"][:2] = 1e9
segment["reward"][:2] = 1e9
print("filling", flush=True)
sys.stdin.read()
"""
HALF_A_PUBLICATION = """
import sys
from pathlib import Path
import numpy as np
from steppe.testing.weights import some_weights
from steppe.transport.shm import ShmWeights
def copy_half(target, source):
    target[: len(target) // 2] = source[: len(target) // 2]
    print("copying", flush=True)
    sys.stdin.read()
np.copyto = copy_half
ShmWeights(Path(sys.argv[1])).publish("policy", some_weights(int(sys.argv[2])))
"""
ROOM_KEEPER = """
import sys
from steppe.core.system.shared_dir import make_shared_dir
print(make_shared_dir("keeper", 1), flush=True)
sys.stdin.read()
"""
ROOM_MAKER = """
from steppe.core.system.shared_dir import make_shared_dir, remove_shared_dir
for _ in range(150):
    room = make_shared_dir("maker", 1)
    assert (room / "owner").exists(), "a living room was swept"
    (room / "weights").write_bytes(b"x")
    remove_shared_dir(room)
    assert not room.exists()
"""


@contextmanager
def running(script: str, *words: object):
    """A Python process with its first line of output read, killed at the end whatever happened."""
    command = [sys.executable, "-c", script, *map(str, words)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finished(script: str, *words: object) -> None:
    subprocess.run([sys.executable, "-c", script, *map(str, words)], check=True, timeout=120)


@pytest.fixture
def room():
    path = make_shared_dir(RUN, 1)
    yield path
    remove_shared_dir(path)


@pytest.fixture
def channel(room):
    made = ShmChannel(room, SPEC, RUN, 2, 2, create=True)
    yield made
    made.close()


def receive(channel, bell):
    while (segment := channel.poll()) is None:
        bell.wait(60.0)
    return segment


class TestChannel:
    def test_two_writing_processes(self, room, channel):
        bell, count = Wakeup(room / "bell-learner"), 200
        with running(WRITER, room, 0, 0, count), running(WRITER, room, 1, 0, count):
            expected = [0, 0]
            while min(expected) < count:
                segment = receive(channel, bell)
                actor = segment.header.actor
                contents = fill(type(segment).blank(SPEC), actor, expected[actor])
                require_equal(segment, contents, header(RUN, actor, expected[actor]))
                expected[actor] += 1
                channel.release(segment)
        assert channel.poll() is None
        bell.close()

    def test_a_writer_killed_in_mid_segment_leaves_the_channel_usable(self, room, channel):
        bell = Wakeup(room / "bell-learner")
        finished(WRITER, room, 0, 0, 1)
        with running(HALF_A_SEGMENT, room) as victim:
            assert victim.stdout.readline() == "filling\n"
            victim.kill()
            assert victim.wait() == -9
        finished(WRITER, room, 1, 0, 1)
        finished(WRITER, room, 0, 1, 2)  # its successor fills the same slot again
        seen = []
        for _ in range(3):
            segment = receive(channel, bell)
            seen.append((segment.header.actor, segment.header.sequence))
            require_equal(segment, fill(type(segment).blank(SPEC), *seen[-1]), header(RUN, *seen[-1]))
            channel.release(segment)
        assert seen == [(0, 0), (1, 0), (0, 1)]
        assert channel.poll() is None
        bell.close()

    def test_a_segment_seen_late_is_not_overtaken(self, room, channel, monkeypatch):
        """The reader's first look passes slot 0 just before it is filled, and sees slot 1, which was filled after it."""
        first = send(channel, RUN, 0, 0)
        second = send(channel, RUN, 0, 1)
        real, looks = np.flatnonzero, []

        def late(states):
            looks.append(states)
            return np.array([1]) if len(looks) == 1 else real(states)

        monkeypatch.setattr(shm.np, "flatnonzero", late)
        require_equal(channel.poll(), first, header(RUN, 0, 0))
        monkeypatch.undo()
        require_equal(channel.poll(), second, header(RUN, 0, 1))

    def test_it_holds_no_memory_that_nobody_wrote_to(self, room):
        """final_obs of large images costs nothing until an episode ends."""
        channel = ShmChannel(room, SPEC, RUN, 2, 50, create=True)
        used = os.stat(room / "channel").st_blocks * 512
        assert used < 10 * os.stat(room / "channel").st_blksize
        channel.close()

    def test_closing_gives_every_handle_back(self, room):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            made = ShmChannel(room, SPEC, RUN, 2, 2, create=not (room / "channel").exists())
            made.close()
        del made
        assert len(os.listdir("/proc/self/fd")) == before


class TestWeights:
    def test_a_writer_killed_in_mid_publication_harms_nobody(self, room):
        ShmWeights(room).publish("policy", some_weights(0))
        reader = ShmWeights(room)
        for version in (1, 5, 9):  # each time the next of the three buffers is left half written
            with running(HALF_A_PUBLICATION, room, version) as victim:
                assert victim.stdout.readline() == "copying\n"
                victim.kill()
                victim.wait()
            assert reader.newer_than("policy", version - 1) is None
            assert reader.newer_than("policy", -1).sha256() == some_weights(max(0, version - 2)).sha256()
            successor = ShmWeights(room)
            for following in range(version, version + 3):
                successor.publish("policy", some_weights(following))
                assert reader.newer_than("policy", following - 1).sha256() == some_weights(following).sha256()

    def test_full_memory_is_one_sentence(self, room, monkeypatch):
        def full(handle, start, size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UsageError, match="No space left on device"):
            ShmWeights(room).publish("policy", some_weights(0))
        assert [path.name for path in room.iterdir()] == ["owner"]
        assert ShmWeights(room).newer_than("policy", -1) is None


class TestRooms:
    def test_a_living_room_is_left_alone_and_a_dead_one_is_swept(self):
        with running(ROOM_KEEPER) as keeper:
            kept = Path(keeper.stdout.readline().strip())
            (kept / "channel").write_bytes(b"x")
            remove_abandoned_dirs(kept.parent)
            assert (kept / "channel").exists()
            keeper.kill()
            keeper.wait()
            assert kept.exists()
            remove_abandoned_dirs(kept.parent)
            assert not kept.exists()

    def test_the_next_room_sweeps_the_last(self):
        with running(ROOM_KEEPER) as keeper:
            left = Path(keeper.stdout.readline().strip())
            keeper.kill()
            keeper.wait()
        own = make_shared_dir(RUN, 1)
        assert not left.exists()
        remove_abandoned_dirs(own.parent)
        assert own.exists(), "a process swept a room of its own"
        remove_shared_dir(own)

    @pytest.mark.regression
    def test_makers_and_sweepers_at_the_same_time(self):
        """Every new room sweeps; none may take another's between its making and its lock."""
        makers = [subprocess.Popen([sys.executable, "-c", ROOM_MAKER], stderr=subprocess.PIPE) for _ in range(3)]
        for maker in makers:
            _, errors = maker.communicate(timeout=120)
            assert maker.returncode == 0, errors.decode()

    def test_without_place_in_shared_memory_it_is_elsewhere(self, monkeypatch, tmp_path):
        monkeypatch.setattr(shared_dir.tempfile, "gettempdir", lambda: str(tmp_path))
        free = {Path("/dev/shm"): 10, tmp_path: 1000}
        monkeypatch.setattr(shutil, "disk_usage", lambda base: SimpleNamespace(free=free[Path(base)]))
        room = make_shared_dir(RUN, 100)
        assert room.parent == tmp_path
        assert (room.stat().st_mode & 0o777) == 0o700
        remove_shared_dir(room)
        with pytest.raises(UsageError, match="shared memory are needed"):
            make_shared_dir(RUN, 2000)

    def test_mappings_outlive_their_room(self):
        room = make_shared_dir(RUN, 1)
        channel = ShmChannel(room, SPEC, RUN, 1, 1, create=True)
        remove_shared_dir(room)
        sent = send(channel, RUN, 0, 0)
        require_equal(channel.poll(), sent, header(RUN, 0, 0))
        channel.close()


class TestBellsAndWords:
    def test_a_ring_before_the_wait_is_not_missed(self, room):
        bell = Wakeup(room / "bell-x")
        Wakeup(room / "bell-x").ring()
        bell.wait(3600.0)
        bell.close()

    def test_one_wait_answers_all_rings(self, room):
        owner, visitor = Wakeup(room / "bell-x"), Wakeup(room / "bell-x")
        for _ in range(100_000):  # more than the pipe holds
            visitor.ring()
        assert owner.wait(3600.0)
        while owner.wait(0.0):  # a pipe may hold more than one read takes
            pass
        owner.close()
        visitor.close()

    def test_words_cross_processes(self, room):
        control = ShmControl(room / "control", create=True)
        assert control.get("manager") == 0
        finished(
            "import sys; from pathlib import Path; from steppe.transport.shm import ShmControl\n"
            "ShmControl(Path(sys.argv[1])).set('manager', 2)",
            room / "control",
        )
        assert [control.get(kind) for kind in ShmControl.KINDS] == [0, 0, 2, 0, 0]
