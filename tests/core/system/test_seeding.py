"""One seed, many independent streams."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from steppe.core.system import seeding

pytestmark = pytest.mark.unit


def test_names_are_all_that_matters():
    one, two = (seeding.generator(7, "actor", 2, "env").random(8) for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_every_difference_in_the_name_gives_another_stream():
    names = [
        (),
        ("a",),
        ("b",),
        ("a", 0),
        ("a", 1),
        (0, "a"),
        (0,),
        (1,),
        ("a", "b"),
        ("b", "a"),
        ("a", 0, "b"),
        ("ab",),
    ]
    streams = [(seed, *name) for seed in (0, 1, 2**62) for name in names]
    numbers = {tuple(seeding.generator(*stream).integers(2**62, size=4)) for stream in streams}
    assert len(numbers) == len(streams)


def test_a_number_never_collides_with_a_name():
    """Names are hashed beyond 32 bits, where no index of an actor lies."""
    word = "actor"
    assert not np.array_equal(
        seeding.generator(0, word).random(4), seeding.generator(0, zlib.crc32(word.encode())).random(4)
    )


def test_streams_look_independent():
    """The correlation of neighbours' streams is what chance gives: below 4.5 standard errors for each of 190 pairs."""
    draws = np.array([seeding.generator(3, "actor", index, "policy").normal(size=4000) for index in range(20)])
    correlations = np.corrcoef(draws)[np.triu_indices(20, 1)]
    assert np.abs(correlations).max() < 4.5 / 4000**0.5


def test_integers_fit_in_31_bits():
    numbers = [seeding.integer_seed(5, "env", index) for index in range(200)]
    assert all(0 <= number < 2**31 for number in numbers)
    assert len(set(numbers)) == 200
    assert max(numbers) > 2**30


def test_copies_are_seeded_apart_and_the_sequence_is_left_alone():
    sequence = seeding.seed_sequence(1, "judge")
    first = seeding.env_seeds(sequence, 5)
    assert seeding.env_seeds(sequence, 3) == first[:3]
    assert len(set(first)) == 5
    expected = [int(child.generate_state(1, np.uint32)[0]) // 2 for child in seeding.seed_sequence(1, "judge").spawn(5)]
    assert first == expected


def test_the_numbers_never_change():
    """A run from last year must come out the same: these were computed once from NumPy's documented algorithm."""
    sequence = np.random.SeedSequence(7, spawn_key=(zlib.crc32(b"actor") + 2**32, 2, zlib.crc32(b"env") + 2**32))
    np.testing.assert_array_equal(
        seeding.generator(7, "actor", 2, "env").integers(2**32, size=5),
        np.random.Generator(np.random.PCG64(sequence)).integers(2**32, size=5),
    )
