"""One seed becomes named, independent streams: adding a role never shifts another role's numbers."""

from __future__ import annotations

import zlib

import numpy as np

Name = str | int


def _key(name: Name) -> int:
    return name if isinstance(name, int) else zlib.crc32(name.encode()) | 1 << 32


def sequence(seed: int, *names: Name) -> np.random.SeedSequence:
    """The seed sequence of one named stream, for example `sequence(7, "actor", 2, "env")`."""
    return np.random.SeedSequence(entropy=seed, spawn_key=tuple(_key(name) for name in names))


def generator(seed: int, *names: Name) -> np.random.Generator:
    """A NumPy generator for one named stream."""
    return np.random.Generator(np.random.PCG64(sequence(seed, *names)))


def integer(seed: int, *names: Name) -> int:
    """A 31-bit seed for libraries that take a single number, from one named stream."""
    return int(sequence(seed, *names).generate_state(1, np.uint32)[0] >> 1)
