"""Drawing ahead: the same batches however long anything takes, nothing lost in between, nobody's arrays overwritten."""

import threading

import numpy as np
import pytest
import torch

from steppe.algorithms.nn.flat_module import as_tensor
from steppe.core.contracts.algorithm import Learned
from steppe.core.contracts.errors import UsageError
from steppe.core.io import codec
from steppe.replay import ReplayBufferPool, ReplayMemory, SamplingConfig, prefetch
from steppe.testing.memory import SPEC, MemoryConformance, ScriptedActor

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _every_batch_is_worth_a_thread(monkeypatch):
    monkeypatch.setattr(prefetch, "MIN_THREADED_BYTES", 1)


def memory_of(*, prioritized=True, num_buffers=2, capacity=60, **options):
    pool = ReplayBufferPool(num_buffers, capacity, use_prioritized=prioritized, **options)
    return ReplayMemory(SPEC, pool, SamplingConfig(8, 10, 4.0), stream=np.random.default_rng(1))


def run(memory, rounds, *, wait=lambda memory: None):
    """A learner's steps; `wait` may let the thread get as far as it can."""
    found = []
    for segments in rounds:
        memory.add(segments)
        wait(memory)
        while memory.ready():
            batch = memory.sample()
            kept = {name: column.copy() for name, column in batch.columns.items()}
            wait(memory)
            for name, column in kept.items():  # the thread draws into other arrays
                np.testing.assert_array_equal(batch[name], column)
            found.append(kept | {"weights": batch.weights, "indices": batch.indices.copy()})
            memory.update(batch, Learned(1, priorities=0.1 + np.abs(batch["reward"])))
            wait(memory)
    return found


def rounds_of(count=12):
    actors = [ScriptedActor(SPEC, actor) for actor in range(2)]
    return [[actor.segment() for actor in actors] for _ in range(count)]


def draw_first_and_update_later(memory, rounds):
    """The promise in plain words, for a memory without a thread: a batch is drawn when the one before is handed out, if it is paid for by then."""
    found, ahead = [], None
    for segments in rounds:
        memory.add(segments)
        while memory.ready():
            batch = ahead or copied(memory.sample())
            more = memory.limiter.allows(8)
            ahead = copied(memory.sample()) if more else None
            found.append(batch)
            memory.update(batch, Learned(1, priorities=0.1 + np.abs(batch["reward"])))
    return found


def copied(batch):
    columns = {name: column.copy() for name, column in batch.columns.items()}
    return type(batch)(columns, batch.weights.copy(), batch.indices.copy())


@pytest.mark.parametrize("num_buffers", [1, 3])
@pytest.mark.parametrize("routing", ["round_robin", "least_filled", "by_source"])
def test_timing_changes_nothing(monkeypatch, num_buffers, routing):
    rounds = rounds_of()
    quick = run(memory_of(num_buffers=num_buffers, routing=routing), rounds)
    patient = run(memory_of(num_buffers=num_buffers, routing=routing), rounds, wait=lambda memory: memory.settle())
    assert len(quick) > 50
    np.testing.assert_equal(quick, patient)
    monkeypatch.setattr(prefetch, "MIN_THREADED_BYTES", 1 << 40)
    told = draw_first_and_update_later(memory_of(num_buffers=num_buffers, routing=routing), rounds)
    assert len(told) == len(quick)
    for one, other in zip(quick, told, strict=True):
        np.testing.assert_array_equal(one["indices"], other.indices)
        np.testing.assert_array_equal(one["weights"], other.weights)
        np.testing.assert_array_equal(one["obs"], other["obs"])


def test_batches_take_turns_in_two_sets_of_arrays():
    memory = memory_of(prioritized=False)
    for segments in rounds_of(3):
        memory.add(segments)
    places = [memory.sample()["obs"].ctypes.data for _ in range(6)]
    assert places[0::2] == [places[0]] * 3
    assert places[1::2] == [places[1]] * 3
    assert places[0] != places[1]
    memory.settle()


def test_batches_become_tensors_without_a_copy():
    memory = memory_of()
    for segments in rounds_of(3):
        memory.add(segments)
    for _ in range(3):
        batch = memory.sample()
        for column in [*batch.columns.values(), batch.weights]:
            assert as_tensor(column, torch.device("cpu")).data_ptr() == column.ctypes.data
    memory.settle()


def test_what_fails_in_the_thread_is_told():
    memory = memory_of()
    for segments in rounds_of(3):
        memory.add(segments)
    batch = memory.sample()
    batch.indices = batch.indices + 10**6
    memory.update(batch, Learned(1, priorities=np.ones(8)))
    with pytest.raises(UsageError, match="never sampled"):
        memory.settle()


def test_no_thread_is_left_when_all_is_settled():
    before = threading.active_count()
    memory = memory_of()
    run(memory, rounds_of(3))
    memory.state()
    assert threading.active_count() == before


@pytest.mark.parametrize("learned_from", [1, 2, 5])
def test_a_batch_that_was_drawn_ahead_is_part_of_the_state(learned_from):
    rounds, one, other = rounds_of(), memory_of(), memory_of()
    for segments in rounds[:4]:
        one.add(segments)
    for _ in range(learned_from):
        batch = one.sample()
        one.update(batch, Learned(1, priorities=0.1 + np.abs(batch["reward"])))
    state = codec.unpack(codec.pack(one.state()))
    assert "ahead" in state
    other.restore(state)
    np.testing.assert_equal(run(one, rounds[4:]), run(other, rounds[4:]))


class TestPrefetchingMemory(MemoryConformance):
    def make(self):
        return memory_of()


class TestPrefetchingUniformMemory(MemoryConformance):
    def make(self):
        return memory_of(prioritized=False, num_buffers=1, capacity=120)
