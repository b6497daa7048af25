"""Conformance suite for WeightStore, to inherit, with a race between one writer and several readers.

class TestMine(WeightStoreConformance):
    @contextmanager
    def make(self): yield MyStore(...)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from steppe.core.config import references
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.transport import WeightStore
from steppe.core.contracts.weights import Weights

POLICY = "policy"
RACE_BYTES = 1 << 20  # large enough for the writer to reuse a buffer while a reader copies it
RACE_S = 60.0
_RUN = "import json, sys; from steppe.testing import weights; weights.{}(*json.loads(sys.argv[1]))"


class WeightStoreConformance:
    """Inherit and implement `make`; for a store across processes also `beside` and `reopen`."""

    race_versions = 1500

    def make(self) -> AbstractContextManager[WeightStore]:
        """Return a new, empty store, as opened by the writer."""
        raise NotImplementedError

    def beside(self, store: WeightStore) -> WeightStore:
        """Return the same store as opened by a reader."""
        return store

    def reopen(self, store: WeightStore) -> tuple[str, list[Any]] | None:
        """Return `module:function` and plain arguments that open the store in another process; None if impossible."""
        return None

    def test_nothing_before_the_first_publication(self) -> None:
        with self.make() as store:
            assert self.beside(store).newer_than(POLICY, -1) is None

    def test_a_reader_that_came_first_sees_the_first_publication(self) -> None:
        with self.make() as store:
            reader = self.beside(store)
            assert reader.newer_than(POLICY, -1) is None
            store.publish(POLICY, some_weights(0))
            require_equal(reader.newer_than(POLICY, -1), some_weights(0))

    def test_weights_arrive_as_they_were(self) -> None:
        with self.make() as store:
            reader = self.beside(store)
            given = some_weights(3).stamped(version=3, updates=2**40, env_steps=2**41, episodes=2**42, train_s=1 / 3)
            store.publish(POLICY, given)
            require_equal(reader.newer_than(POLICY, 2), given)

    def test_the_newest_wins(self) -> None:
        with self.make() as store:
            reader = self.beside(store)
            for version in range(8):
                store.publish(POLICY, some_weights(version))
            require_equal(reader.newer_than(POLICY, 2), some_weights(7))
            require_equal(self.beside(store).newer_than(POLICY, -1), some_weights(7))

    def test_only_newer_ones_are_given(self) -> None:
        with self.make() as store:
            reader = self.beside(store)
            store.publish(POLICY, some_weights(4))
            assert reader.newer_than(POLICY, 4) is None
            assert reader.newer_than(POLICY, 5) is None
            require_equal(reader.newer_than(POLICY, 3), some_weights(4))

    def test_versions_must_grow(self) -> None:
        with self.make() as store:
            store.publish(POLICY, some_weights(4))
            for version in (4, 3):
                try:
                    store.publish(POLICY, some_weights(version))
                except ValueError:
                    continue
                raise AssertionError(f"version {version} was published after 4")
            require_equal(self.beside(store).newer_than(POLICY, -1), some_weights(4))

    def test_versions_may_leap(self) -> None:
        with self.make() as store:
            reader = self.beside(store)
            for version in (5, 6, 100):
                store.publish(POLICY, some_weights(version))
                require_equal(reader.newer_than(POLICY, version - 1), some_weights(version))

    def test_publishing_copies(self) -> None:
        with self.make() as store:
            weights = some_weights(0)
            store.publish(POLICY, weights)
            weights.buffer[:] = 0
            require_equal(self.beside(store).newer_than(POLICY, -1), some_weights(0))

    def test_the_copy_is_the_readers(self) -> None:
        with self.make() as store:
            reader = self.beside(store)
            store.publish(POLICY, some_weights(0))
            mine = reader.newer_than(POLICY, -1)
            assert mine is not None
            for version in range(1, 5):
                store.publish(POLICY, some_weights(version))
            require_equal(mine, some_weights(0))
            mine.buffer[:] = 0
            require_equal(reader.newer_than(POLICY, -1), some_weights(4))

    def test_policies_are_separate(self) -> None:
        with self.make() as store:
            reader = self.beside(store)
            store.publish("one", some_weights(7))
            assert reader.newer_than("other", -1) is None
            other = Weights.from_arrays({"table": np.arange(5, dtype=np.int64)})
            store.publish("other", other)
            require_equal(reader.newer_than("other", -1), other)
            require_equal(reader.newer_than("one", -1), some_weights(7))

    def test_another_layout_is_refused(self) -> None:
        with self.make() as store:
            store.publish(POLICY, some_weights(0))
            other = Weights.from_arrays({"torso": np.zeros((3, 5), np.float32), "count": np.zeros((), np.int64)})
            try:
                store.publish(POLICY, other.stamped(version=1, updates=0, env_steps=0))
            except ConfigError:
                require_equal(self.beside(store).newer_than(POLICY, -1), some_weights(0))
                return
            raise AssertionError("weights of another layout took the place of the first")

    def test_never_torn(self) -> None:
        """A writer publishes as fast as it can while two readers check that every copy is consistent."""
        with self.make() as store:
            opener = self.reopen(store)
            if opener is None:
                self._race_threads(store)
            else:
                _race_processes(*opener, self.race_versions)

    def _race_threads(self, store: WeightStore) -> None:
        failures: list[BaseException] = []

        def guarded(work: Any, *arguments: Any) -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - an assertion in a thread is re-raised below
                failures.append(error)

        works = [(publish_patterns, store), (watch_patterns, self.beside(store)), (watch_patterns, self.beside(store))]
        threads = [threading.Thread(target=guarded, args=(*work, self.race_versions)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(RACE_S)
        assert not any(thread.is_alive() for thread in threads), "a reader never saw the last version"
        if failures:
            raise failures[0]


def _race_processes(opener: str, arguments: list[Any], versions: int) -> None:
    order = json.dumps([opener, arguments, versions])
    words = [[sys.executable, "-c", _RUN.format(name), order] for name in ("publish_at", "watch_at", "watch_at")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen(word, stderr=subprocess.PIPE, text=True, env=environ) for word in words]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=RACE_S)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def publish_at(opener: str, arguments: list[Any], versions: int) -> None:
    """Run `publish_patterns` in its own process."""
    publish_patterns(references.resolve_reference(opener)(*arguments), versions)


def watch_at(opener: str, arguments: list[Any], versions: int) -> None:
    """Run `watch_patterns` in its own process."""
    watch_patterns(references.resolve_reference(opener)(*arguments), versions)


def publish_patterns(store: WeightStore, versions: int) -> None:
    """Publish buffers filled with a single byte value that is determined by the version."""
    weights = Weights.from_arrays({"pattern": np.zeros(RACE_BYTES, np.uint8)})
    for version in range(versions):
        weights.buffer[:] = version % 251
        store.publish(POLICY, weights.stamped(version=version, updates=3 * version, env_steps=7 * version))


def watch_patterns(store: WeightStore, versions: int) -> None:
    """Read every newer copy until the last version; raises when one is torn or versions do not increase."""
    last = -1
    while last < versions - 1:
        weights = store.newer_than(POLICY, last)
        if weights is None:
            continue
        assert weights.version > last, f"version {weights.version} came after {last}"
        last = weights.version
        assert (weights.updates, weights.env_steps) == (3 * last, 7 * last), "counters of another version"
        assert (weights.buffer == last % 251).all(), f"version {last} is torn"


def some_weights(version: int) -> Weights:
    """Return weights of several shapes and dtypes whose contents are determined by the version."""
    stream = np.random.default_rng(version)
    arrays: dict[str, np.ndarray] = {
        "torso": stream.normal(size=(3, 5)).astype(np.float32),
        "flag": stream.integers(0, 2, 3).astype(np.uint8),
        "count": np.asarray(stream.integers(2**60), np.int64),
    }
    return Weights.from_arrays(arrays).stamped(version=version, updates=10 * version, env_steps=100 * version)


def require_equal(found: Weights | None, expected: Weights) -> None:
    """Check that weights were found, with equal layout, counters and arrays."""
    assert found is not None, "no weights were found"
    assert not expected.layout.differences(found.layout)
    counters = ("version", "updates", "env_steps", "episodes", "train_s")
    assert [getattr(found, name) for name in counters] == [getattr(expected, name) for name in counters]
    for name, array in expected.arrays().items():
        np.testing.assert_array_equal(found.arrays()[name], array, err_msg=name)
