"""The documented attributes of the classic interface before, during and after training."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.classic import DistAsyncQLearning, ExperienceBuffer, OptimalQLearning, ParallelQLearning
from tests.support.tabular_envs import Corridor

pytestmark = pytest.mark.integration


def test_an_experience_buffer_shows_its_content() -> None:
    buffer = ExperienceBuffer(capacity=3)
    assert (len(buffer.buffer), buffer.buffer.maxlen, buffer.position) == (0, 3, 0)
    assert list(buffer.buffer) == []
    for number in range(5):
        buffer.push(number, 1, float(number), number + 1, number == 4)
    assert list(buffer.buffer) == [(2, 1, 2.0, 3, False), (3, 1, 3.0, 4, False), (4, 1, 4.0, 5, True)]
    assert buffer.buffer[-1] == (4, 1, 4.0, 5, True)
    assert buffer.buffer[:2] == [(2, 1, 2.0, 3, False), (3, 1, 3.0, 4, False)]
    assert buffer.position == 2
    with pytest.raises(IndexError):
        _ = buffer.buffer[3]


def test_parallel_learners_share_their_table_while_they_train() -> None:
    runtime = ParallelQLearning(OptimalQLearning, 2, state_size=5, action_size=2, epsilon=0.5, seed=0)
    assert (runtime.shared_q_table, runtime.processes) == (None, [])
    assert isinstance(runtime.algorithm, OptimalQLearning)
    assert not runtime.algorithm.q_table.any()
    seen: list[tuple[np.ndarray | None, list[bool]]] = []
    runtime.train(
        Corridor,
        40_000,
        steps_per_sync=100,
        callbacks=[lambda view: seen.append((runtime.shared_q_table, [one.is_alive() for one in runtime.processes]))],
    )
    assert any(table is not None and table.shape == (5, 2) for table, _ in seen)
    assert any(alive == [True, True] for _, alive in seen)
    assert [one.is_alive() for one in runtime.processes] == [False, False]
    np.testing.assert_array_equal(runtime.shared_q_table, runtime.algorithm.q_table)
    assert runtime.shared_q_table.any()


def test_distributed_learners_have_a_communicator_and_count_their_messages() -> None:
    pytest.importorskip("mpi4py")
    runtime = DistAsyncQLearning(OptimalQLearning, batch_size=10, state_size=5, action_size=2, epsilon=0.5, seed=0)
    assert (runtime.update_buffer, runtime.sync_counter) == ([], 0)
    assert isinstance(runtime.algorithm, OptimalQLearning)
    assert (runtime.comm.Get_rank(), runtime.comm.Get_size()) == (runtime.rank, runtime.size) == (0, 1)
    runtime.train(Corridor(), 3_000)
    assert runtime.sync_counter >= 10
    assert runtime.update_buffer == []
    assert runtime.algorithm.q_table.any()
    assert DistAsyncQLearning(OptimalQLearning).algorithm is None
