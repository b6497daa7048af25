"""Sequence replay over remote shards: each shard fills the windows of its own rows, the learner joins them."""

from __future__ import annotations

import numpy as np

from steppe.core.contracts.segment import Batch
from steppe.replay.remote.client import RemoteReplayStore
from steppe.replay.sequence_windows import SequenceBatchBuffer, SequenceReplay


class RemoteSequenceReplay(SequenceReplay):
    """SequenceReplay over a RemoteReplayPool."""

    def draw(self, stream: np.random.Generator, into: SequenceBatchBuffer, beta: float) -> Batch:
        store = self.store
        assert isinstance(store, RemoteReplayStore)
        leaves, indices = np.empty(into.count, np.float32), np.empty(into.count, np.int64)
        states = {
            f.name: np.empty((into.count, *f.shape), f.dtype) for f in store.fields if f.name in self.windowing.states
        }
        for positions, reply in store.draw(stream, into.count, leaves, indices):
            for name, rows in reply["columns"].items():
                into.columns[name][:, positions] = rows
            for name, rows in reply["states"].items():
                states[name][positions] = rows
        return Batch({**into.columns, **states}, weights=store.weights(leaves, beta), indices=indices)
