"""The thread counts of the libraries under NumPy and the compiled kernels."""

import pytest
from threadpoolctl import threadpool_info

from steppe.core.system import blas

pytestmark = pytest.mark.unit


def counts():
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


def test_every_library_is_set_and_given_back():
    before = blas.get_threads()
    assert before == counts()
    assert any("scipy" in library["filepath"] for library in threadpool_info())
    blas.set_threads(1)
    assert set(counts()) == {1}
    blas.set_threads(2)
    assert set(counts()) == {2}
    blas.set_threads(*before)
    assert counts() == before
