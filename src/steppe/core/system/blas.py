"""The threads of the BLAS under NumPy and the compiled kernels. Counts are process-wide and change results bitwise."""

from __future__ import annotations

import functools
from typing import Any


def get_threads() -> list[int]:
    """How many threads each library may use."""
    return [library.get_num_threads() for library in _libraries()]


def set_threads(*counts: int) -> None:
    """One count for all libraries, or one for each as `get_threads` gave them."""
    libraries = _libraries()
    for library, count in zip(libraries, counts if len(counts) > 1 else counts * len(libraries), strict=True):
        library.set_num_threads(count)


@functools.cache
def _libraries() -> list[Any]:
    """Looked for once, which takes milliseconds, after the one that compiled kernels use is there."""
    import scipy.linalg.cython_blas  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return list(ThreadpoolController().select(user_api="blas").lib_controllers)
