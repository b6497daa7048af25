"""Thread counts of the BLAS under NumPy and the compiled kernels. They are process-wide and change results bitwise."""

from __future__ import annotations

import functools
from typing import Any


def get_threads() -> list[int]:
    """Return the maximum number of threads of each library."""
    return [library.get_num_threads() for library in _libraries()]


def set_threads(*counts: int) -> None:
    """Set one count for all libraries, or one for each as `get_threads` returned them."""
    libraries = _libraries()
    for library, count in zip(libraries, counts if len(counts) > 1 else counts * len(libraries), strict=True):
        library.set_num_threads(count)


@functools.cache
def _libraries() -> list[Any]:
    """Find the BLAS libraries, once because it takes milliseconds, after loading the one that compiled kernels use."""
    import scipy.linalg.cython_blas  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return list(ThreadpoolController().select(user_api="blas").lib_controllers)
