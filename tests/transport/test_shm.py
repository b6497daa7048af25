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
from steppe.core.system import shared_dir as shared_dir_module
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
shared_dir, actor, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:])
channel, wakeup = ShmChannel(shared_dir, SPEC, "shm-test", 2, 2), Wakeup(shared_dir / f"wakeup-actor-{actor}")
for sequence in range(first, last):
    while channel.blank(actor) is None:
        wakeup.wait(60.0)
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
SHARED_DIR_HOLDER = """
import sys
from steppe.core.system.shared_dir import make_shared_dir
print(make_shared_dir("holder", 1), flush=True)
sys.stdin.read()
"""
SHARED_DIR_MAKER = """
from steppe.core.system.shared_dir import make_shared_dir, remove_shared_dir
for _ in range(150):
    shared_dir = make_shared_dir("maker", 1)
    assert (shared_dir / "owner").exists(), "the directory of a live process was removed"
    (shared_dir / "weights").write_bytes(b"x")
    remove_shared_dir(shared_dir)
    assert not shared_dir.exists()
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
def shared_dir():
    path = make_shared_dir(RUN, 1)
    yield path
    remove_shared_dir(path)


@pytest.fixture
def channel(shared_dir):
    made = ShmChannel(shared_dir, SPEC, RUN, 2, 2, create=True)
    yield made
    made.close()


def receive(channel, wakeup):
    while (segment := channel.poll()) is None:
        wakeup.wait(60.0)
    return segment


class TestChannel:
    def test_two_writing_processes(self, shared_dir, channel):
        wakeup, count = Wakeup(shared_dir / "wakeup-learner"), 200
        with running(WRITER, shared_dir, 0, 0, count), running(WRITER, shared_dir, 1, 0, count):
            expected = [0, 0]
            while min(expected) < count:
                segment = receive(channel, wakeup)
                actor = segment.header.actor
                contents = fill(type(segment).blank(SPEC), actor, expected[actor])
                require_equal(segment, contents, header(RUN, actor, expected[actor]))
                expected[actor] += 1
                channel.release(segment)
        assert channel.poll() is None
        wakeup.close()

    def test_a_writer_killed_in_mid_segment_leaves_the_channel_usable(self, shared_dir, channel):
        wakeup = Wakeup(shared_dir / "wakeup-learner")
        finished(WRITER, shared_dir, 0, 0, 1)
        with running(HALF_A_SEGMENT, shared_dir) as victim:
            assert victim.stdout.readline() == "filling\n"
            victim.kill()
            assert victim.wait() == -9
        finished(WRITER, shared_dir, 1, 0, 1)
        finished(WRITER, shared_dir, 0, 1, 2)  # its successor fills the same slot again
        seen = []
        for _ in range(3):
            segment = receive(channel, wakeup)
            seen.append((segment.header.actor, segment.header.sequence))
            require_equal(segment, fill(type(segment).blank(SPEC), *seen[-1]), header(RUN, *seen[-1]))
            channel.release(segment)
        assert seen == [(0, 0), (1, 0), (0, 1)]
        assert channel.poll() is None
        wakeup.close()

    def test_a_segment_seen_late_is_not_overtaken(self, shared_dir, channel, monkeypatch):
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

    def test_it_holds_no_memory_that_nobody_wrote_to(self, shared_dir):
        """final_obs of large images costs nothing until an episode ends."""
        channel = ShmChannel(shared_dir, SPEC, RUN, 2, 50, create=True)
        used = os.stat(shared_dir / "channel").st_blocks * 512
        assert used < 10 * os.stat(shared_dir / "channel").st_blksize
        channel.close()

    def test_closing_gives_every_handle_back(self, shared_dir):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            made = ShmChannel(shared_dir, SPEC, RUN, 2, 2, create=not (shared_dir / "channel").exists())
            made.close()
        del made
        assert len(os.listdir("/proc/self/fd")) == before


class TestWeights:
    def test_a_writer_killed_in_mid_publication_harms_nobody(self, shared_dir):
        ShmWeights(shared_dir).publish("policy", some_weights(0))
        reader = ShmWeights(shared_dir)
        for version in (1, 5, 9):  # each time the next of the three buffers is left half written
            with running(HALF_A_PUBLICATION, shared_dir, version) as victim:
                assert victim.stdout.readline() == "copying\n"
                victim.kill()
                victim.wait()
            assert reader.newer_than("policy", version - 1) is None
            assert reader.newer_than("policy", -1).sha256() == some_weights(max(0, version - 2)).sha256()
            successor = ShmWeights(shared_dir)
            for following in range(version, version + 3):
                successor.publish("policy", some_weights(following))
                assert reader.newer_than("policy", following - 1).sha256() == some_weights(following).sha256()

    def test_full_memory_is_one_sentence(self, shared_dir, monkeypatch):
        def full(handle, start, size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UsageError, match="No space left on device"):
            ShmWeights(shared_dir).publish("policy", some_weights(0))
        assert [path.name for path in shared_dir.iterdir()] == ["owner"]
        assert ShmWeights(shared_dir).newer_than("policy", -1) is None


class TestSharedDirs:
    def test_only_directories_of_dead_processes_are_removed(self):
        with running(SHARED_DIR_HOLDER) as holder:
            kept = Path(holder.stdout.readline().strip())
            (kept / "channel").write_bytes(b"x")
            remove_abandoned_dirs(kept.parent)
            assert (kept / "channel").exists()
            holder.kill()
            holder.wait()
            assert kept.exists()
            remove_abandoned_dirs(kept.parent)
            assert not kept.exists()

    def test_a_new_directory_removes_abandoned_ones(self):
        with running(SHARED_DIR_HOLDER) as holder:
            left = Path(holder.stdout.readline().strip())
            holder.kill()
            holder.wait()
        own = make_shared_dir(RUN, 1)
        assert not left.exists()
        remove_abandoned_dirs(own.parent)
        assert own.exists(), "a process removed its own directory"
        remove_shared_dir(own)

    @pytest.mark.regression
    def test_makers_and_sweepers_at_the_same_time(self):
        """Every new room sweeps; none may take another's between its making and its lock."""
        makers = [subprocess.Popen([sys.executable, "-c", SHARED_DIR_MAKER], stderr=subprocess.PIPE) for _ in range(3)]
        for maker in makers:
            _, errors = maker.communicate(timeout=120)
            assert maker.returncode == 0, errors.decode()

    def test_without_place_in_shared_memory_it_is_elsewhere(self, monkeypatch, tmp_path):
        monkeypatch.setattr(shared_dir_module.tempfile, "gettempdir", lambda: str(tmp_path))
        free = {Path("/dev/shm"): 10, tmp_path: 1000}
        monkeypatch.setattr(shutil, "disk_usage", lambda base: SimpleNamespace(free=free[Path(base)]))
        shared_dir = make_shared_dir(RUN, 100)
        assert shared_dir.parent == tmp_path
        assert (shared_dir.stat().st_mode & 0o777) == 0o700
        remove_shared_dir(shared_dir)
        with pytest.raises(UsageError, match="shared memory are needed"):
            make_shared_dir(RUN, 2000)

    def test_mappings_outlive_their_directory(self):
        shared_dir = make_shared_dir(RUN, 1)
        channel = ShmChannel(shared_dir, SPEC, RUN, 1, 1, create=True)
        remove_shared_dir(shared_dir)
        sent = send(channel, RUN, 0, 0)
        require_equal(channel.poll(), sent, header(RUN, 0, 0))
        channel.close()


class TestWakeupsAndControl:
    def test_a_ring_before_the_wait_is_not_missed(self, shared_dir):
        wakeup = Wakeup(shared_dir / "wakeup-x")
        Wakeup(shared_dir / "wakeup-x").ring()
        wakeup.wait(3600.0)
        wakeup.close()

    def test_one_wait_answers_all_rings(self, shared_dir):
        owner, visitor = Wakeup(shared_dir / "wakeup-x"), Wakeup(shared_dir / "wakeup-x")
        for _ in range(100_000):  # more than the pipe holds
            visitor.ring()
        assert owner.wait(3600.0)
        while owner.wait(0.0):  # a pipe may hold more than one read takes
            pass
        owner.close()
        visitor.close()

    def test_commands_are_visible_in_other_processes(self, shared_dir):
        control = ShmControl(shared_dir / "control", create=True)
        assert control.get("manager") == 0
        finished(
            "import sys; from pathlib import Path; from steppe.transport.shm import ShmControl\n"
            "ShmControl(Path(sys.argv[1])).set('manager', 2)",
            shared_dir / "control",
        )
        assert [control.get(kind) for kind in ShmControl.KINDS] == [0, 0, 2, 0, 0]
