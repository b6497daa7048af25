"""Any sequence of adds, samples, updates, clears and balancings, against the slow model in replay_model.py."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steppe.core.contracts.errors import UsageError
from steppe.replay import ReplayBufferPool
from steppe.replay.kernels.sumtree import SumTree
from tests.support.replay_model import Model, images

pytestmark = pytest.mark.unit

ALPHA = 0.7


class PoolMachine(RuleBasedStateMachine):
    prioritized = True
    frame_stack = 1

    @initialize(num_parts=st.integers(1, 3), capacity=st.integers(1, 40), seed=st.integers(0, 99))
    def begin(self, num_parts, capacity, seed):
        options = {"alpha": ALPHA, "frame_stack": self.frame_stack, "seed": seed}
        self.pool = ReplayBufferPool(num_parts, capacity, use_prioritized=self.prioritized, **options)
        self.model = Model(num_parts, capacity)
        self.count = 0
        self.known: dict[int, int] = {}  # good and bad indices that were given out, with their numbers
        self.spoiled: set[int] = set()  # indices of rows that were moved since

    def experiences(self, numbers):
        block = {"number": np.array(numbers, np.int64), "half": np.array(numbers, np.float32) / 2}
        if self.frame_stack > 1:
            stacks = [images(number) for number in numbers]
            block |= {"obs": np.stack([one for one, _ in stacks]), "next_obs": np.stack([two for _, two in stacks])}
        return block

    @rule(
        size=st.integers(0, 90),
        part=st.one_of(st.none(), st.integers(0, 2)),
        given=st.booleans(),
        seed=st.integers(0, 9),
    )
    def add(self, size, part, given, seed):
        numbers = list(range(self.count, self.count + size))
        self.count += size
        part = None if part is None else part % self.pool.num_buffers
        priorities = None
        if given and self.prioritized and size:
            priorities = np.random.default_rng(seed).exponential(size=size).tolist()
        self.model.add(part, numbers, priorities)
        block = self.experiences(numbers) if size else []
        self.pool.add_experiences(block, part, priorities=None if priorities is None else np.array(priorities))

    @precondition(lambda self: len(self.model))
    @rule(share=st.floats(0, 1), part=st.one_of(st.none(), st.integers(0, 2)))
    def sample(self, share, part):
        part = None if part is None else part % self.pool.num_buffers
        there = set(self.model.numbers(part)) if part is not None else self.everything()
        size = max(1, int(share * len(there)))
        if not there:
            with pytest.raises(UsageError, match="cannot sample"):
                self.pool.sample_batch(size, part)
            return
        if self.prioritized and not any(self.odds(part)):
            with pytest.raises(UsageError, match="every priority is 0"):
                self.pool.sample_batch(size, part)
            return
        batch = self.pool.sample_batch(size, part)
        numbers = batch["number"].tolist()
        assert set(numbers) <= there
        np.testing.assert_array_equal(batch["half"], np.array(numbers, np.float32) / 2)
        if self.frame_stack > 1:
            for row, number in enumerate(numbers):
                np.testing.assert_array_equal(batch["obs"][row], images(number)[0])
                np.testing.assert_array_equal(batch["next_obs"][row], images(number)[1])
        if self.prioritized:
            self.known |= dict(zip(batch["indices"].tolist(), numbers, strict=True))
            self.spoiled -= set(batch["indices"].tolist())

    @precondition(lambda self: self.prioritized and self.known)
    @rule(seed=st.integers(0, 999), size=st.integers(1, 30))
    def update(self, seed, size):
        stream = np.random.default_rng(seed)
        indices = stream.choice(sorted(self.known), size)
        priorities = stream.exponential(size=size) * stream.integers(0, 2, size)
        updates = [(self.known[i], i not in self.spoiled, p) for i, p in zip(indices, priorities.tolist(), strict=True)]
        self.model.update(updates)
        self.pool.update_priorities(indices, priorities)

    @rule(part=st.one_of(st.none(), st.integers(0, 2)))
    def clear(self, part):
        if part is None:
            self.model.clear()
            self.pool.clear_all_buffers()
        else:
            part %= self.pool.num_buffers
            self.model.clear(part)
            self.pool.buffers[part].clear()

    @rule()
    def balance(self):
        moved = self.model.balance()
        self.spoiled |= {index for index, number in self.known.items() if number in moved}
        self.pool.balance_buffers()

    def odds(self, part):
        parts = range(self.pool.num_buffers) if part is None else [part]
        return [priority for each in parts for priority in self.model.priorities(each)]

    def everything(self):
        return {number for part in range(self.pool.num_buffers) for number in self.model.numbers(part)}

    @invariant()
    def same_content(self):
        if not hasattr(self, "pool"):
            return
        store = self.pool.store
        assert len(store) == len(self.model)
        assert store.stale == self.model.stale
        for part in range(store.num_parts):
            assert self.pool.buffers[part].size() == len(self.model.parts[part])
            if not store.fields:
                continue
            slots = store.slots_oldest_first(part)
            assert store.columns["number"][slots].tolist() == self.model.numbers(part)
            if store.tree is not None:
                leaves = np.array(self.model.priorities(part)) ** ALPHA
                np.testing.assert_allclose(store.tree.leaves.reshape(-1)[leaf_places(store, slots)], leaves, rtol=1e-6)

    @invariant()
    def sums_are_those_of_the_leaves(self):
        if not hasattr(self, "pool") or self.pool.store.tree is None:
            return
        tree = self.pool.store.tree
        again = SumTree(tree.capacity, len(tree.leaves))
        again.leaves[...] = tree.leaves
        again.rebuild()
        assert again.nodes.tobytes() == tree.nodes.tobytes()

    @invariant()
    def every_frame_is_held_as_often_as_it_is_used(self):
        if not hasattr(self, "pool") or self.pool.store.frames is None:
            return
        store = self.pool.store
        used = np.concatenate(
            [
                store.columns[name][store.slots_oldest_first(part)].ravel()
                for name in store.stacked
                for part in range(store.num_parts)
            ]
        )
        held = (
            np.bincount(used, minlength=len(store.frames.refs)) if len(used) else np.zeros(len(store.frames.refs), int)
        )
        np.testing.assert_array_equal(store.frames.refs, held)
        assert len(store.frames) == np.count_nonzero(held)


def leaf_places(store, slots):
    width = store.tree.leaves.shape[1]
    return slots // store.capacity * width + slots % store.capacity


class UniformMachine(PoolMachine):
    prioritized = False


class FramesMachine(PoolMachine):
    frame_stack = 4


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
UniformMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
FramesMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestPrioritized = PoolMachine.TestCase
TestUniform = UniformMachine.TestCase
TestFrames = FramesMachine.TestCase
