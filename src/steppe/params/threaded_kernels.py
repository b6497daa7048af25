"""Split long vectors across threads: one thread cannot saturate memory bandwidth. The results are the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

MIN_PARALLEL_SIZE = 1 << 20  # numbers; for shorter vectors a thread costs more than it saves
MAX_THREADS = 4  # enough to saturate memory bandwidth


def run_threaded(kernel: Callable[..., bool], *arguments: Any) -> bool:
    """Run a compiled element-wise kernel over slices of its flat arrays; return whether every slice returned True."""
    size = next(len(given) for given in arguments if isinstance(given, np.ndarray))
    lanes = min(MAX_THREADS, _cores()) if size >= MIN_PARALLEL_SIZE else 1
    if lanes == 1:
        return bool(kernel(*arguments))
    ends = [size * lane // lanes for lane in range(lanes + 1)]
    found = [False] * lanes

    def pass_over(lane: int) -> None:
        part = slice(ends[lane], ends[lane + 1])
        found[lane] = kernel(*(given[part] if isinstance(given, np.ndarray) else given for given in arguments))

    others = [threading.Thread(target=pass_over, args=(lane,), name="params-lane") for lane in range(1, lanes)]
    for other in others:
        other.start()
    pass_over(0)
    for other in others:
        other.join()
    return all(found)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
