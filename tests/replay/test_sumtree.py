"""The sum tree against NumPy, exact probabilities and a plain rebuild."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from steppe.replay.kernels.pow import power
from steppe.replay.kernels.sumtree import BLOCK, FANOUT, SumTree

pytestmark = pytest.mark.unit

SIZES = [1, 2, 15, 16, 17, 63, 64, 65, 257, 1000, 4097]


def filled(leaves, num_parts=1):
    """A tree over `leaves`, written in pieces of uneven length."""
    capacity = len(leaves) // num_parts
    tree = SumTree(capacity, num_parts)
    for part in range(num_parts):
        own = np.asarray(leaves[part * capacity : (part + 1) * capacity], np.float32)
        start = 0
        while start < capacity:
            length = min(capacity - start, 7 + start % 40)
            tree.fill(part, start, own[start : start + length])
            start += length
    return tree


def frequencies(tree, count, size, seed, first=0, last=None):
    slots, drawn = tree.descend(np.random.default_rng(seed).random(count), first, last or len(tree.leaves))
    np.testing.assert_array_equal(drawn, tree.leaves[slots // tree.capacity, slots % tree.capacity])
    return np.bincount(slots, minlength=size)


def chi_square_p(observed, probabilities):
    """Bins that expect fewer than ten draws are joined."""
    expected = probabilities * observed.sum()
    assert not observed[probabilities == 0].any()
    small = expected < 10
    seen = np.append(observed[~small], observed[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    keep = wanted > 0
    return stats.chisquare(seen[keep], wanted[keep] * seen[keep].sum() / wanted[keep].sum()).pvalue


@pytest.mark.parametrize("size", SIZES)
def test_total_is_the_sum_of_the_leaves(size):
    stream = np.random.default_rng(size)
    leaves = stream.random(size).astype(np.float32)
    tree = filled(leaves)
    assert tree.totals[0] == pytest.approx(math.fsum(leaves.tolist()), rel=1e-14)
    slots = stream.integers(0, size, 50)
    values = stream.random(50).astype(np.float32)
    tree.assign(slots, values)
    for slot, value in zip(slots, values, strict=True):  # of duplicates the last one counts
        leaves[slot] = value
    np.testing.assert_array_equal(tree.leaves[0, :size], leaves)
    assert tree.totals[0] == pytest.approx(math.fsum(leaves.tolist()), rel=1e-14)


@pytest.mark.parametrize("size", SIZES)
def test_every_node_is_the_sum_of_what_lies_below(size):
    tree = filled(np.random.default_rng(size).random(size))
    blocks = tree.leaves[0].astype(np.float64).reshape(-1, BLOCK)
    level = blocks.sum(axis=1)
    for offset in tree.levels:
        np.testing.assert_allclose(tree.nodes[0, offset : offset + len(level)], level, rtol=1e-14)
        level = np.pad(level, (0, -len(level) % FANOUT)).reshape(-1, FANOUT).sum(axis=1)
    assert len(level) == 1


@pytest.mark.parametrize("size", SIZES)
def test_a_node_starts_where_those_before_it_in_its_group_end(size):
    leaves = np.random.default_rng(size).random(size)
    leaves[size // 2 :] = 0  # whole groups, and the end of one, are empty
    tree = filled(leaves)
    for group in range(0, int(tree.levels[-1]), FANOUT):
        sums = tree.nodes[0, group : group + FANOUT]
        for place, start in enumerate(tree.starts[0, group : group + FANOUT]):
            if sums[place:].any():
                assert start == pytest.approx(math.fsum(sums[:place]), rel=1e-14)
            else:
                assert start == math.inf


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 3), st.lists(st.integers(0, 2**31), min_size=1, max_size=12))
def test_history_leaves_no_trace(size, num_parts, seeds):
    """After any updates the tree equals, bit for bit, one built from its leaves at once."""
    tree = SumTree(size, num_parts)
    for seed in seeds:
        stream = np.random.default_rng(seed)
        values = (10.0 ** stream.uniform(-30, 30, size)).astype(np.float32)
        if seed % 2:
            tree.assign(stream.integers(0, size * num_parts, size), values)
        else:
            start = int(stream.integers(0, size))
            tree.fill(int(stream.integers(0, num_parts)), start, values[: size - start])
    nodes, starts = tree.nodes.copy(), tree.starts.copy()
    tree.rebuild()
    assert tree.nodes.tobytes() == nodes.tobytes()
    assert tree.starts.tobytes() == starts.tobytes()
    fresh = SumTree(size, num_parts)
    for part in range(num_parts):
        fresh.fill(part, 0, tree.leaves[part, :size].copy())
    assert fresh.nodes.tobytes() == nodes.tobytes()
    assert fresh.starts.tobytes() == starts.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=30))
def test_leaves_that_wait_are_there_when_the_tree_is_looked_at(additions):
    """Rings are extended by runs of one value or of several; a plain list of leaves is kept beside them."""
    values = {value: np.array([value], np.float32) for value in (1, 2)}
    tree, plain, cursors = SumTree(150, 2), np.zeros((2, 150), np.float32), [0, 0]
    for part, count, value in additions:
        start = cursors[part] if cursors[part] + count <= 150 else 0
        cursors[part] = end = start + count
        entering = values[value] if value in values else np.arange(1, count + 1, dtype=np.float32)
        tree.extend(part, start, end, entering)
        plain[part, start:end] = entering
        if count % 7 == 0:
            tree.assign(np.array([part * 150 + start]), np.array([9], np.float32))
            plain[part, start] = 9
    slots, drawn = tree.descend(np.linspace(0, 1, 500, endpoint=False), 0, 2)
    np.testing.assert_array_equal(drawn, plain.reshape(-1)[slots])
    np.testing.assert_array_equal(tree.leaves[:, :150], plain)
    np.testing.assert_array_equal(tree.totals, plain.sum(axis=1))


@pytest.mark.parametrize("size", [5, 16, 100, 1000])
def test_draws_follow_the_leaves(size):
    leaves = np.random.default_rng(size).exponential(size=size).astype(np.float32)
    observed = frequencies(filled(leaves), 200_000, size, seed=1)
    assert chi_square_p(observed, leaves.astype(np.float64) / leaves.astype(np.float64).sum()) > 1e-3


def test_draws_over_several_parts_follow_the_leaves():
    leaves = np.random.default_rng(3).exponential(size=3 * 70).astype(np.float32)
    leaves[70:140] *= 0.01
    tree = filled(leaves, num_parts=3)
    probabilities = leaves.astype(np.float64)
    assert chi_square_p(frequencies(tree, 200_000, 210, seed=2), probabilities / probabilities.sum()) > 1e-3
    only = np.where(np.arange(210) // 70 == 1, probabilities, 0)
    observed = frequencies(tree, 100_000, 210, seed=3, first=1, last=2)
    assert chi_square_p(observed, only / only.sum()) > 1e-3


def test_small_leaves_beside_large_ones():
    """4,096 leaves of 1 beside one of 3e7: a float32 sum would lose most of them (adding 1 to 3e7 changes nothing)."""
    leaves = np.ones(4097, np.float32)
    leaves[0] = 3e7
    tree = filled(leaves)
    assert tree.totals[0] == 3e7 + 4096
    draws = np.linspace(3e7 / (3e7 + 4096), 1, 200_000, endpoint=False)  # only where the small ones lie
    slots, _ = tree.descend(draws, 0, 1)
    counts = np.bincount(slots, minlength=4097)[1:]
    assert counts.sum() >= 199_999
    assert counts.min() >= 47
    assert counts.max() <= 50


def test_leaves_of_zero_are_never_drawn():
    stream = np.random.default_rng(0)
    for size in (3, 16, 200, 2000):
        leaves = stream.random(size).astype(np.float32) * (stream.random(size) < 0.1)
        leaves[size // 2] = 0.5
        tree = filled(leaves)
        leaves[-1] = 0
        tree.assign(np.array([size - 1]), leaves[-1:])
        bounds = np.cumsum(leaves, dtype=np.float64) / tree.totals  # 1 and beyond: where rounding may lead
        slots, _ = tree.descend(np.concatenate([stream.random(20_000), bounds, [0.0, 1.0, 1.0 + 1e-12]]), 0, 1)
        assert (leaves[slots] > 0).all()


def test_draws_are_in_the_order_of_the_leaves():
    """The inverse of the cumulative sum, as NumPy computes it."""
    leaves = np.random.default_rng(8).integers(0, 5, 500).astype(np.float32)  # small integers: all sums are exact
    draws = np.random.default_rng(9).random(5000)
    slots, _ = filled(leaves).descend(draws, 0, 1)
    bounds = np.cumsum(leaves, dtype=np.float64)
    np.testing.assert_array_equal(slots, np.searchsorted(bounds, draws * bounds[-1], side="right"))


def test_powers_are_those_of_the_standard_library():
    stream = np.random.default_rng(0)
    for exponent in (0.0, 1e-3, 0.4, 0.6, 1.0):
        base = 10.0 ** stream.uniform(-290, 290, 4000)
        base[:9] = [1.0, 2.0, 0.5, 1e-300, 1e300, math.sqrt(2), math.sqrt(0.5), np.nextafter(1, 0), np.nextafter(1, 2)]
        found = base.copy()
        power(found, exponent)
        np.testing.assert_allclose(found, [math.pow(x, exponent) for x in base], rtol=1e-12)
    ones = np.ones(7)
    power(ones, 0.37)
    np.testing.assert_array_equal(ones, 1.0)


def test_rounding_never_leads_to_an_empty_leaf():
    """Draws at and next to every boundary, in a tree where most leaves are 0 and the rest differ by 20 orders."""
    stream = np.random.default_rng(3)
    leaves = np.where(stream.random(700) < 0.1, 10.0 ** stream.uniform(-12, 8, 700), 0).astype(np.float32)
    tree = filled(leaves)
    ends = np.cumsum(leaves, dtype=np.float64) / np.sum(leaves, dtype=np.float64)
    draws = np.concatenate([ends, np.nextafter(ends, 0), np.nextafter(ends, 2), [0.0, 1 - 2**-53]])
    slots, drawn = tree.descend(draws[draws < 1], 0, 1)
    assert (leaves[slots] > 0).all()
    assert (drawn > 0).all()
    assert SumTree(50).descend(draws[draws < 1], 0, 1) is None


def test_what_lies_at_or_beyond_the_sum_of_a_part_is_its_last_leaf_that_is_not_empty():
    """Rounding may lead there. The leaves of 16 in a row, those next to each other in memory, and the parts are all different."""
    leaves = np.arange(1, 3 * 80 + 1, dtype=np.float32).reshape(3, 80)
    leaves[:, 70:] = 0.0
    leaves[1, 45:] = 0.0
    leaves[2, 16:] = 0.0
    tree = filled(leaves.reshape(-1), num_parts=3)
    for part, last in enumerate((69, 44, 15)):
        total = float(leaves[part].sum())
        slots, drawn = tree.find(part, np.array([0.0, total - 0.5, total, total * 2]))
        assert slots.tolist() == [part * 80, *[part * 80 + last] * 3]
        assert drawn.tolist() == [leaves[part, 0], *[leaves[part, last]] * 3]
        own = leaves[part, : last + 1]
        slots, _ = tree.find(part, np.cumsum(own, dtype=np.float64) - own / 2)
        assert slots.tolist() == list(range(part * 80, part * 80 + last + 1)), "the middle of a leaf is that leaf's"


def test_a_draw_at_the_sum_of_all_parts_is_in_the_last_part_that_is_not_empty():
    leaves = np.zeros((4, 20), np.float32)
    leaves[0, :3], leaves[1, :5] = 1.0, 2.0
    tree = filled(leaves.reshape(-1), num_parts=4)
    for last in (3, 4):  # one empty part behind it, and two
        slots, _ = tree.descend(np.array([0.0, 1.0 - 1e-9, 1.0, 1.0 + 1e-12, 1.5]), 0, last)
        assert slots.tolist() == [0, 24, 24, 24, 24]
    slots, _ = tree.descend(np.array([0.0, 1.0, 1.5]), 0, 1)
    assert slots.tolist() == [0, 2, 2]


def test_what_lies_beyond_a_full_part_is_not_in_the_next_one():
    size = BLOCK * FANOUT
    tree = filled(np.ones(2 * size), num_parts=2)
    for part in range(2):
        slots, drawn = tree.find(part, np.array([size - 0.5, size, size + 1.0]))
        assert slots.tolist() == [(part + 1) * size - 1] * 3
        assert drawn.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("capacity", "levels"),
    [(1, [0, 8]), (128, [0, 8]), (129, [0, 16, 24]), (4097, [0, 264, 304, 312])],
)
def test_the_tree_takes_no_more_memory_than_its_levels(capacity, levels):
    """Levels of 16 leaves, then 8 nodes each, padded to whole groups of 8; the root has a group of its own."""
    tree = SumTree(capacity, 3)
    assert tree.levels.tolist() == levels
    assert tree.leaves.shape == (3, levels[1] * 16)
    assert tree.nodes.shape == tree.starts.shape == (3, levels[-1] + 8)


@pytest.mark.parametrize("count", [1, 6, 14, 20, 40, 150])
def test_few_and_many_assignments_update_every_level(count):
    """Few slots recompute their own path, many the whole level: in 3 parts of 4,097 slots the levels have 33, 5 and 1."""
    stream = np.random.default_rng(count)
    leaves = stream.integers(1, 9, (3, 4097)).astype(np.float32)
    tree = filled(leaves.reshape(-1), num_parts=3)
    slots = stream.choice(3 * 4097, count, replace=False)
    values = stream.integers(10, 90, count).astype(np.float32)
    tree.assign(slots, values)
    leaves.reshape(-1)[slots] = values
    np.testing.assert_array_equal(tree.leaves[:, :4097], leaves)
    level = np.pad(leaves.astype(np.float64), ((0, 0), (0, 127))).reshape(3, 264, 16).sum(axis=2)
    for offset, width in zip(tree.levels, (264, 40, 8, 1), strict=True):
        found = tree.nodes[:, offset : offset + width]
        level = np.pad(level, ((0, 0), (0, width - level.shape[1])))
        np.testing.assert_array_equal(found, level)
        level = np.pad(level, ((0, 0), (0, -width % 8))).reshape(3, -1, 8).sum(axis=2)


def test_a_range_of_another_part_is_not_joined_to_the_pending_one():
    """Part, start and end may be the same number."""
    value = np.ones(1, np.float32)
    tree = SumTree(10, 3)
    tree.extend(0, 0, 1, value)
    tree.extend(1, 1, 3, value)
    tree.extend(2, 3, 4, value)
    tree.extend(2, 4, 6, value)
    assert tree.totals.tolist() == [1.0, 2.0, 3.0]
    assert np.argwhere(tree.leaves[:, :10]).tolist() == [[0, 0], [1, 1], [1, 2], [2, 3], [2, 4], [2, 5]]
    tree.extend(0, 6, 7, value)
    assert tree.totals.tolist() == [2.0, 2.0, 3.0]


def test_draws_over_some_parts_are_in_the_order_of_their_leaves():
    """Parts 1 to 3 of five, each with one leaf of its own sum."""
    leaves = np.zeros((5, 4))
    leaves[np.arange(5), [0, 1, 2, 3, 0]] = [7, 1, 2, 1, 7]
    slots, drawn = filled(leaves.reshape(-1), num_parts=5).descend(np.array([0.1, 0.3, 0.7, 0.8, 0.9]), 1, 4)
    assert slots.tolist() == [5, 10, 10, 15, 15]
    assert drawn.tolist() == [1.0, 2.0, 2.0, 1.0, 1.0]
