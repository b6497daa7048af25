"""Named, independent random streams from one seed: adding a role never shifts another role's random numbers."""

from __future__ import annotations

import zlib

import numpy as np

StreamName = str | int


def _key(name: StreamName) -> int:
    return name if isinstance(name, int) else zlib.crc32(name.encode()) | 1 << 32


def seed_sequence(seed: int, *names: StreamName) -> np.random.SeedSequence:
    """Return the seed sequence of one named stream, for example `seed_sequence(7, "actor", 2, "env")`."""
    return np.random.SeedSequence(entropy=seed, spawn_key=tuple(_key(name) for name in names))


def generator(seed: int, *names: StreamName) -> np.random.Generator:
    """Return a NumPy generator for one named stream."""
    return np.random.Generator(np.random.PCG64(seed_sequence(seed, *names)))


def integer_seed(seed: int, *names: StreamName) -> int:
    """Return a 31-bit seed from one named stream, for libraries that take a single number."""
    return int(seed_sequence(seed, *names).generate_state(1, np.uint32)[0] >> 1)


def env_seeds(seeds: np.random.SeedSequence, num_envs: int) -> list[int]:
    """Return the 31-bit seed of each of `num_envs` copies; does not change `seeds`."""
    keys = [(*seeds.spawn_key, index) for index in range(num_envs)]
    children = [np.random.SeedSequence(seeds.entropy, spawn_key=key, pool_size=seeds.pool_size) for key in keys]
    return [int(child.generate_state(1, np.uint32)[0] >> 1) for child in children]
