"""Columns that lie on disk: arrays over files without a name, which are gone when their process is, however it ends.

The system keeps in memory what is used; how fast rows come is then up to the disk. Saves are made as of any other column.
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

# Bytes that come from memory at once: a row no longer than that never needs two of them for want of alignment.
CACHE_LINE = 64


def zeros(shape: tuple[int, ...], dtype: str | np.dtype[Any], directory: Path | None) -> np.ndarray:
    """Zeros in memory, or in a file of `directory` with its room reserved: a disk full later cannot end the process."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if directory is None:
        room = np.zeros(size + CACHE_LINE, np.uint8)
        return np.ndarray(shape, dtype, room, -room.ctypes.data % CACHE_LINE)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
            file_room = mmap.mmap(file.fileno(), max(1, size))
    except OSError as error:
        if is_disk_full(error):
            raise DiskFull(
                f"there is no room for {size:,} bytes of experience at {directory}: lower the size, or choose another disk"
            ) from None
        raise ConfigError(f"experience cannot be kept at {directory}: {error.strerror}") from None
    return np.frombuffer(file_room, dtype, math.prod(shape)).reshape(shape)
