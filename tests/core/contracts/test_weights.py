"""Weights: one flat buffer, its layout, and a hash that does not depend on where entries lie."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.weights import Weights, WeightsEntry, WeightsLayout

pytestmark = pytest.mark.unit


@st.composite
def named_arrays(draw):
    count = draw(st.integers(0, 6))
    arrays = {}
    for index in range(count):
        dtype = draw(st.sampled_from(["float32", "float64", "int64", "uint8", "bool", "int16"]))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        stream = np.random.default_rng(draw(st.integers(0, 99)))
        arrays[f"entry {index}"] = (100 * stream.normal(size=shape)).astype(dtype)
    return arrays


@given(named_arrays())
@settings(max_examples=80, deadline=None)
def test_arrays_come_back(arrays):
    weights = Weights.from_arrays(arrays)
    found = weights.arrays()
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert array.size == 0 or np.shares_memory(found[name], weights.buffer)


@given(named_arrays())
@settings(max_examples=60, deadline=None)
def test_the_hash_is_over_the_raw_bytes_in_order(arrays):
    raw = b"".join(array.tobytes() for array in arrays.values())
    assert Weights.from_arrays(arrays).sha256() == hashlib.sha256(raw).hexdigest()


def test_entries_are_aligned_and_float32_leaves_no_gap():
    layout = WeightsLayout.of(
        [("a", (3,), "uint8"), ("b", (2,), "float32"), ("c", (5,), "float32"), ("d", (), "float64")]
    )
    assert [(entry.name, entry.offset) for entry in layout.entries] == [("a", 0), ("b", 4), ("c", 12), ("d", 32)]
    assert layout.nbytes == 40
    assert WeightsLayout.of([]).nbytes == 0


def test_padding_does_not_enter_the_hash():
    arrays = {"a": np.ones(3, np.uint8), "b": np.ones(2, np.float32)}
    weights = Weights.from_arrays(arrays)
    before = weights.sha256()
    weights.buffer[3] = 77  # between the two
    assert weights.sha256() == before
    weights.buffer[4] ^= 1
    assert weights.sha256() != before


def test_other_places_same_hash():
    arrays = {"a": np.arange(3, dtype=np.float32), "b": np.arange(2, dtype=np.float32)}
    spread = WeightsLayout((WeightsEntry("a", (3,), "float32", 8), WeightsEntry("b", (2,), "float32", 64)))
    buffer = np.zeros(100, np.uint8)
    for name, view in spread.views(buffer).items():
        view[...] = arrays[name]
    assert Weights(spread, buffer).sha256() == Weights.from_arrays(arrays).sha256()


def test_stamping_shares_and_copying_does_not():
    weights = Weights.from_arrays({"a": np.zeros(3, np.float32)})
    stamped = weights.stamped(version=3, updates=4, env_steps=5, episodes=6, train_s=7.5)
    assert (stamped.version, stamped.updates, stamped.env_steps, stamped.episodes, stamped.train_s) == (3, 4, 5, 6, 7.5)
    assert stamped.buffer is weights.buffer
    copy = stamped.copy()
    assert copy.version == 3
    weights.arrays()["a"][:] = 1.0
    assert copy.arrays()["a"].sum() == 0.0


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([("a", (2,), "float32")], "b: .* absent there"),
        ([("a", (2,), "float32"), ("b", (3,), "float32"), ("c", (1,), "float32")], "c: absent here"),
        ([("a", (2,), "float32"), ("b", (4,), "float32")], r"b: \(\(3,\), 'float32'\) here, \(\(4,\), 'float32'\) there"),
        ([("a", (2,), "float64"), ("b", (3,), "float32")], "a: .*'float32'.* here, .*'float64'.* there"),
        ([("b", (3,), "float32"), ("a", (2,), "float32")], "another order"),
    ],
)  # fmt: skip
def test_invalid_input_is_named(other, words):
    own = WeightsLayout.of([("a", (2,), "float32"), ("b", (3,), "float32")])
    weights = Weights(WeightsLayout.of(other), np.zeros(64, np.uint8))
    with pytest.raises(ConfigError, match=f"do not fit this agent: .*{words}"):
        weights.require(own, "this agent")
    weights.require(weights.layout, "itself")
