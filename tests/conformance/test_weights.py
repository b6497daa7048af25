"""The conformance suite of weight stores over local and shared memory, the latter between real processes."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from steppe.core.system.shared_dir import make_shared_dir, remove_shared_dir
from steppe.testing.weights import WeightStoreConformance
from steppe.transport.local import LocalWeights
from steppe.transport.shm import ShmWeights

pytestmark = pytest.mark.integration


class TestLocalWeights(WeightStoreConformance):
    race_versions = 300

    @contextmanager
    def make(self):
        yield LocalWeights()


class TestShmWeights(WeightStoreConformance):
    @contextmanager
    def make(self):
        self.room = make_shared_dir("conformance", 1)
        store = ShmWeights(self.room, readers=("actor-0", "actor-1"))
        try:
            yield store
        finally:
            store.close()
            remove_shared_dir(self.room)

    def beside(self, store):
        return ShmWeights(self.room)

    def reopen(self, store):
        return "tests.conformance.test_weights:open_shm", [str(self.room)]


def open_shm(room):
    return ShmWeights(Path(room))
