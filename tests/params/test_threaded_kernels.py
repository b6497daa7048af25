"""Long rows in several threads: the same numbers as in one, and NaN is found wherever it is."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.params import kernels
from steppe.params.kernels import MIN_PARALLEL_SIZE, run_threaded

pytestmark = pytest.mark.unit

SIZE = MIN_PARALLEL_SIZE + 4099


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_cores", lambda: 3)


def test_the_numbers_are_those_of_one_pass() -> None:
    stream = np.random.default_rng(0)
    values, gradient = stream.standard_normal((2, SIZE)).astype(np.float32)
    out = np.empty_like(values)
    assert run_threaded(kernels.sgd_step, values, gradient, 0.125, out)
    np.testing.assert_array_equal(out, values - np.float32(0.125) * gradient)


@pytest.mark.parametrize("index", [0, SIZE // 3, SIZE // 2, 2 * SIZE // 3, SIZE - 1])
def test_a_bad_number_is_found_in_every_slice(index: int) -> None:
    row, into = np.ones(SIZE, np.float32), np.empty(SIZE, np.float32)
    row[index] = np.nan
    assert not run_threaded(kernels.copy_finite, row, into)
    np.testing.assert_array_equal(into, row)
