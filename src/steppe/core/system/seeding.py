"""One seed becomes named, independent streams: adding a role never shifts another role's numbers."""

from __future__ import annotations

import zlib

import numpy as np

StreamName = str | int


def _key(name: StreamName) -> int:
    return name if isinstance(name, int) else zlib.crc32(name.encode()) | 1 << 32


def seed_sequence(seed: int, *names: StreamName) -> np.random.SeedSequence:
    """The seed sequence of one named stream, for example `sequence(7, "actor", 2, "env")`."""
    return np.random.SeedSequence(entropy=seed, spawn_key=tuple(_key(name) for name in names))


def generator(seed: int, *names: StreamName) -> np.random.Generator:
    """A NumPy generator for one named stream."""
    return np.random.Generator(np.random.PCG64(seed_sequence(seed, *names)))


def integer_seed(seed: int, *names: StreamName) -> int:
    """A 31-bit seed for libraries that take a single number, from one named stream."""
    return int(seed_sequence(seed, *names).generate_state(1, np.uint32)[0] >> 1)


def env_seeds(seeds: np.random.SeedSequence, num_envs: int) -> list[int]:
    """The 31-bit number that each of `num_envs` copies is seeded with; `seeds` itself is left as it was."""
    keys = [(*seeds.spawn_key, index) for index in range(num_envs)]
    children = [np.random.SeedSequence(seeds.entropy, spawn_key=key, pool_size=seeds.pool_size) for key in keys]
    return [int(child.generate_state(1, np.uint32)[0] >> 1) for child in children]
