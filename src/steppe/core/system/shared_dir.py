"""Shared directories: private directories of mapped files and wakeups, shared by the processes of one machine.

Plain files (in /dev/shm where it exists) are used instead of `multiprocessing.shared_memory`, which unlinks a segment
when any process that attached to it exits. The process that makes a directory removes it. The memory layout of each
file is drawn in the module that uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from steppe.core.contracts.errors import UsageError

_fence_lock = threading.Lock()
owned_dirs: dict[Path, int] = {}  # directories that this process made, with the descriptor that holds the lock


def memory_fence() -> None:
    """Order earlier writes before later ones, for readers on other cores (a lock's atomics are full barriers)."""
    with _fence_lock:
        pass


def make_shared_dir(run: str, nbytes: int, *, base: Path | None = None) -> Path:
    """Make a private directory where `nbytes` are free, under `base`, or in shared memory if that is large enough.

    The process holds a lock on it until it removes it or exits, by which `remove_abandoned_dirs` recognizes abandoned
    directories. A write past the end of a full filesystem would be a bus error, hence the check beforehand.
    """
    choice = (Path("/dev/shm"), Path(tempfile.gettempdir())) if base is None else (base,)
    bases = [path for path in choice if path.is_dir()]
    for path in bases:
        remove_abandoned_dirs(path)
    large = [path for path in bases if shutil.disk_usage(path).free > nbytes]
    if not large:
        raise UsageError(
            f"{nbytes >> 20} MiB of shared memory are needed: free some, or use fewer actors, envs or steps"
        )
    while True:
        shared_dir = Path(tempfile.mkdtemp(prefix=f"steppe-{run[:40]}-", dir=large[0]))
        if (owner := _lock_new_dir(shared_dir)) is not None:
            owned_dirs[shared_dir] = owner
            return shared_dir


def _lock_new_dir(directory: Path) -> int | None:
    """Lock a new directory; None if another process removed it as abandoned before it was locked."""
    try:
        owner = os.open(directory / "owner", os.O_CREAT | os.O_RDWR, 0o600)
    except FileNotFoundError:
        return None
    fcntl.flock(owner, fcntl.LOCK_EX)
    if (directory / "owner").exists():
        return owner
    os.close(owner)
    return None


def remove_shared_dir(directory: Path) -> None:
    """Remove a shared directory with all its files; open mappings stay usable."""
    shutil.rmtree(directory, ignore_errors=True)
    if directory in owned_dirs:
        os.close(owned_dirs.pop(directory))


def remove_abandoned_dirs(base: Path) -> None:
    """Remove the shared directories of processes that died without removing them."""
    for path in base.glob("steppe-*/owner"):
        if path.parent in owned_dirs:
            continue
        with contextlib.suppress(OSError), path.open() as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_shared_dir(path.parent)


def map_file(path: Path, size: int | None = None, *, reserve: bool = False) -> mmap.mmap:
    """Map a file, creating it with `size` zero bytes when a size is given.

    Pages cost nothing until touched, unless `reserve`: then a full filesystem is an OSError here and not a bus error
    later, and the first touch is no slower.
    """
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if size is not None else 0)
    handle = os.open(path, flags, 0o600)
    try:
        if size is not None:
            os.ftruncate(handle, size)
            if reserve:
                os.posix_fallocate(handle, 0, size)
        present = mmap.MAP_POPULATE if reserve and sys.platform == "linux" else 0
        return mmap.mmap(handle, os.fstat(handle).st_size, mmap.MAP_SHARED | present)
    finally:
        os.close(handle)


class Wakeup:
    """Wakes one role: any process calls `ring`, the owner calls `wait`. A wakeup before the wait is not missed."""

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        self._handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._handle, select.POLLIN)

    def ring(self, word: bytes = b"!") -> None:
        with contextlib.suppress(BlockingIOError):  # the FIFO is full: the role will wake anyway
            os.write(self._handle, word)

    def wait(self, timeout_s: float) -> bytes:
        """Block until a `ring` since the last wait, or for `timeout_s`; return the bytes of all rings."""
        return os.read(self._handle, 65536) if self._poll.poll(timeout_s * 1000) else b""

    def close(self) -> None:
        os.close(self._handle)
