"""Long rows by several threads: the numbers of one pass, and a bad one is found wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.params import kernels, threaded_kernels
from steppe.params.threaded_kernels import LONG, in_lanes

pytestmark = pytest.mark.unit

SIZE = LONG + 4099


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded_kernels, "_cores", lambda: 3)


def test_the_numbers_are_those_of_one_pass() -> None:
    stream = np.random.default_rng(0)
    values, gradient = stream.standard_normal((2, SIZE)).astype(np.float32)
    out = np.empty_like(values)
    assert in_lanes(kernels.descend, values, gradient, 0.125, out)
    np.testing.assert_array_equal(out, values - np.float32(0.125) * gradient)


@pytest.mark.parametrize("place", [0, SIZE // 3, SIZE // 2, 2 * SIZE // 3, SIZE - 1])
def test_a_bad_number_is_found_in_every_lane(place: int) -> None:
    row, into = np.ones(SIZE, np.float32), np.empty(SIZE, np.float32)
    row[place] = np.nan
    assert not in_lanes(kernels.copy_finite, row, into)
    np.testing.assert_array_equal(into, row)
