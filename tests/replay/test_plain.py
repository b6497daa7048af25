"""Instructions of compiled kernels and their twins in plain Python give the same bits."""

import numba
import numpy as np
import pytest

from steppe.replay.kernels import copy as kernels
from steppe.replay.kernels import plain

pytestmark = pytest.mark.unit


def aligned(count, dtype, values=0):
    """An array that begins at a multiple of 64, as the trees' do."""
    room = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -room.ctypes.data % 64
    numbers = room[start : start + count * np.dtype(dtype).itemsize].view(dtype)
    numbers[:] = values
    return numbers


@numba.njit
def compiled_sums(leaves, nodes, starts, rest):
    at = np.int64(leaves.ctypes.data)
    return (
        kernels.block_sum(at),
        kernels.group_sum(np.int64(nodes.ctypes.data), np.int64(starts.ctypes.data)),
        kernels.count_not_above(np.int64(starts.ctypes.data), rest),
        kernels.load_float32(at + 12),
        kernels.load_float64(np.int64(nodes.ctypes.data) + 8),
    )


@numba.njit
def compiled_copy(target, source, count):
    kernels.prefetch(np.int64(source.ctypes.data))
    kernels.copy_bytes(np.int64(target.ctypes.data), np.int64(source.ctypes.data), count)


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="compilation is off")
@pytest.mark.parametrize("seed", range(20))
def test_the_same_bits(seed):
    stream = np.random.default_rng(seed)
    leaves = aligned(16, np.float32, 10.0 ** stream.uniform(-20, 20, 16) * (stream.random(16) < 0.7))
    nodes = aligned(8, np.float64, 10.0 ** stream.uniform(-9, 9, 8) * (stream.random(8) < 0.7))
    starts, same = aligned(8, np.float64), aligned(8, np.float64)
    rest = float(stream.random() * nodes.sum())
    at, other = leaves.ctypes.data, nodes.ctypes.data
    found = compiled_sums(leaves, nodes, starts, rest)
    assert plain.block_sum(at) == found[0]
    assert plain.group_sum(other, same.ctypes.data) == found[1]
    assert plain.count_not_above(same.ctypes.data, rest) == found[2]
    assert plain.load_float32(at + 12) == found[3] == leaves[3]
    assert plain.load_float64(other + 8) == found[4] == nodes[1]
    np.testing.assert_array_equal(same, starts)
    one, two = np.zeros(16, np.float32), np.zeros(16, np.float32)
    compiled_copy(one, leaves, 40)
    plain.prefetch(at)
    plain.copy_bytes(two.ctypes.data, at, 40)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one[:10], leaves[:10])
    assert not one[10:].any()
