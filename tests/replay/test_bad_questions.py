"""Questions to a replay role that name rows it does not have are answered with an error."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.core.io import codec
from steppe.replay.pool import ReplayBufferPool
from steppe.replay.remote.server import ReplayShard

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("at", [[10**12], [-1], [3], [0.5], [[0]], [np.nan]])
def test_rows_that_are_not_there_cannot_be_drawn(at: list) -> None:
    pool = ReplayBufferPool(1, 8, ("reward",))
    pool.add_experiences({"reward": np.ones(3)})
    shard = ReplayShard(pool, None)
    told = codec.unpack(shard.handle(codec.pack({"do": "draw", "at": np.array(at)}, sealed=False)), sealed=False)
    assert told["error"] in ("UsageError", "NotFinite"), told
    good = codec.unpack(shard.handle(codec.pack({"do": "draw", "at": np.array([2])}, sealed=False)), sealed=False)
    assert good["columns"]["reward"].tolist() == [1.0]
