"""Columns on disk: arrays over unnamed temporary files, which disappear with their process, however it ends.

The page cache keeps frequently used rows in memory; otherwise the disk limits the speed. Saves work as for columns in
memory.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.errors import ConfigError, DiskFull
from steppe.core.io.atomic_files import is_disk_full

# Bytes of a cache line. Columns are aligned to it, so that a row of at most this size need not span two lines.
CACHE_LINE = 64


def zeros(shape: tuple[int, ...], dtype: str | np.dtype[Any], directory: Path | None) -> np.ndarray:
    """Return zeros in memory, or in a file in `directory`.

    The file's space is reserved, so that a full disk cannot kill the process later.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if directory is None:
        buffer = np.zeros(size + CACHE_LINE, np.uint8)
        return np.ndarray(shape, dtype, buffer, -buffer.ctypes.data % CACHE_LINE)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
            mapped = mmap.mmap(file.fileno(), max(1, size))
    except OSError as error:
        if is_disk_full(error):
            raise DiskFull(
                f"there is no disk space for {size:,} bytes of experience at {directory}: lower the size, or choose another disk"
            ) from None
        raise ConfigError(f"experience cannot be kept at {directory}: {error.strerror}") from None
    return np.frombuffer(mapped, dtype, math.prod(shape)).reshape(shape)
