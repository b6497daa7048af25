"""Every memory of the house passes the suite that is shipped to users."""

import numpy as np
import pytest

from steppe.replay import ReplayBufferPool, ReplayMemory, RolloutBuffer, SamplingConfig
from steppe.testing.memory import MemoryConformance

pytestmark = pytest.mark.unit


class TestRollout(MemoryConformance):
    def make(self):
        return RolloutBuffer(self.spec)


class TestReplay(MemoryConformance):
    n_step = 1
    prioritized = False
    num_buffers = 1

    def make(self):
        pool = ReplayBufferPool(self.num_buffers, 120 // self.num_buffers, use_prioritized=self.prioritized)
        draws = SamplingConfig(16, learning_starts=20, samples_per_insert=2.0, n_step=self.n_step, total_steps=300)
        return ReplayMemory(self.spec, pool, draws, stream=np.random.default_rng(5))


class TestNStepReplay(TestReplay):
    n_step = 3


class TestLongNStepReplay(TestReplay):
    n_step = 8  # longer than a segment


class TestPrioritizedReplay(TestReplay):
    prioritized = True


class TestPrioritizedNStepReplayInSeveralBuffers(TestReplay):
    n_step = 3
    prioritized = True
    num_buffers = 4
