"""Run by test_killed_saves.py: kills its own children with -9 in the middle of saves, at one system call after another.

Prints how many kills there were, after checking that each left a save that loads: the one before, or the new one complete.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from steppe.core.io import row_chunks
from steppe.replay import ReplayBufferPool

CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "link", "unlink", "rmdir")


def block(numbers: range) -> dict[str, np.ndarray]:
    return {"obs": np.repeat(np.array(numbers, np.float32)[:, None], 3, 1), "action": np.array(numbers, np.int64)}


def make() -> ReplayBufferPool:
    return ReplayBufferPool(2, 64, use_prioritized=True, seed=1)


def save_and_die(pool: ReplayBufferPool, directory: Path, after: int) -> None:
    """In a child: save, and be killed at the `after`-th call of the system; ends well when there are not so many."""
    left = after

    def deadly(name: str):
        real = getattr(os, name)

        def call(*words, **options):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*words, **options)

        return call

    for name in CALLS:
        setattr(os, name, deadly(name))
    pool.save_buffers(directory)
    os._exit(0)


def main(directory: Path) -> int:
    row_chunks.CHUNK_BYTES = 8 * 20
    pool = make()
    pool.add_experiences(block(range(50)), buffer_id=0)
    pool.add_experiences(block(range(100, 140)), buffer_id=1)
    pool.save_buffers(directory)
    kills = new = 0
    while True:
        before = pool.store.state()
        pool.add_experiences(block(range(1000 * (kills + 1), 1000 * (kills + 1) + 9)), buffer_id=kills % 2)
        after = pool.store.state()
        child = os.fork()
        if child == 0:
            save_and_die(pool, directory, kills + 1)
        _, status = os.waitpid(child, 0)
        loaded = make()
        loaded.load_buffers(directory)
        found = loaded.store.state()
        is_new = found["added"].tolist() == after["added"].tolist()
        np.testing.assert_equal(found, after if is_new else before)
        pool = loaded
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the child failed"
            assert is_new
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills, new = kills + 1, new + is_new
    left = [path.name for path in directory.iterdir()]
    assert len(left) == 1, left  # what the killed ones left aside was swept
    print(kills, new)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
