"""Rows that no table can learn from: a sentence for each, whatever they are made of, and nothing is learned."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from safetensors.numpy import load, save

from steppe.classic import (
    SARSA,
    DoubleQLearning,
    ExpectedSARSA,
    ListQLearning,
    MemoryOptimizedQLearning,
    NStepQLearning,
    NumpyQLearning,
    OptimalQLearning,
    QLambda,
    vectorized_q_update,
)
from steppe.core.contracts.errors import DamagedFile, SteppeError

pytestmark = pytest.mark.unit

TABLES = [OptimalQLearning, NumpyQLearning, MemoryOptimizedQLearning, ExpectedSARSA, DoubleQLearning, SARSA]
ALL = [*TABLES, NStepQLearning, QLambda, ListQLearning]
GOOD = (1, 1, 0.5, 2, False)
# What is put in the place of a state, action, reward, next state and done.
BAD_NUMBERS = [-1, 4, 10**8, -(2**63), 10**30, 1.5, float("nan"), "a", None, [1, 2], np.array([1, 2])]
BAD_REWARDS = [float("nan"), float("inf"), "a", None, [1.0, 2.0], 1j]
BAD = [(place, value) for place in (0, 1, 3) for value in BAD_NUMBERS] + [(2, value) for value in BAD_REWARDS]


def broken(place: int, value: Any) -> tuple[Any, ...]:
    return (*GOOD[:place], value, *GOOD[place + 1 :])


@pytest.mark.parametrize("kind", ALL)
def test_a_bad_value_in_a_single_step_or_a_batch_is_refused(kind: type) -> None:
    agent = kind(4, 3, epsilon=0.0, seed=1)
    before = np.array(agent.q_table)
    for place, value in [*BAD, (4, np.array([True, False]))]:
        row = broken(place, value)
        with pytest.raises(SteppeError):
            agent.update(*row)
        with pytest.raises(SteppeError):
            agent.update_turn(*row)
        if hasattr(agent, "batch_update") and place != 4:
            with pytest.raises(SteppeError):
                agent.batch_update([row])
    np.testing.assert_array_equal(np.array(agent.q_table), before)


@pytest.mark.parametrize("kind", [OptimalQLearning, SARSA, NStepQLearning, DoubleQLearning])
def test_invalid_states_and_masks_are_refused(kind: type) -> None:
    agent = kind(4, 3, seed=1)
    for state in BAD_NUMBERS:
        with pytest.raises(SteppeError):
            agent.select_action(state)
    for states in ([-1], [4], [[0, 1]], ["a"], [[0], [0, 1]], [10**30], [0.5]):
        with pytest.raises(SteppeError):
            agent.select_actions(states)
    for mask in ([True], [[True], [True, False]], "abc", [False] * 3, np.ones((2, 3))):
        with pytest.raises(SteppeError):
            agent.select_action(0, mask)
        with pytest.raises(SteppeError):
            agent.update(*GOOD, mask)
        with pytest.raises(SteppeError):
            agent.select_actions([0], mask)


@pytest.mark.parametrize("kind", ALL)
def test_experiences_that_are_no_steps_are_refused(kind: type) -> None:
    agent = kind(4, 3, seed=1)
    if not hasattr(agent, "batch_update"):
        return
    for experiences in ([1], [(1, 2)], [GOOD, (1,)], ["ab"], [None]):
        with pytest.raises(SteppeError, match="every experience needs 5 values"):
            agent.batch_update(experiences)


def test_trajectories_have_numbers_that_fit_in_memory() -> None:
    agent = NStepQLearning(4, 3)
    columns = [np.array([value]) for value in GOOD]
    for lane in (-1, 10**15, 2**63 - 1):
        with pytest.raises(SteppeError, match="numbered"):
            agent.learn(*columns, streams=np.array([lane]))


def test_a_table_that_cannot_be_written_to_is_refused() -> None:
    agent, table = OptimalQLearning(4, 3), np.zeros((4, 3), np.float32)
    table.flags.writeable = False
    with pytest.raises(SteppeError, match="contiguous, writable array"):
        agent.q_table = table


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize(
    "column",
    [
        np.array([-1, 0]), np.array([10**8, 0]), np.array([0]), np.zeros((2, 2)), np.array([np.nan, 0.0]),
        np.array(["a", "b"]), np.array([2**63, 0], np.uint64), np.array([1j, 0]), "ab", None,
    ],
)  # fmt: skip
def test_the_bare_kernel_checks_what_it_is_given(place: int, column: Any) -> None:
    table = np.zeros((4, 3), np.float32)
    columns: list[Any] = [np.array([value, value]) for value in GOOD]
    columns[place] = column
    if place in (2, 4) and isinstance(column, np.ndarray) and column.shape == (2,) and column.dtype.kind in "iu":
        columns[place] = np.zeros(3)  # numbers are rewards, though no table has such states
    with pytest.raises(SteppeError):
        vectorized_q_update(table, *columns, 0.1, 0.9)
    assert not table.any()
    for wrong in (np.zeros(3), np.zeros((4, 3), np.int64), [[0.0]], np.broadcast_to(np.float32(0), (4, 3))):
        with pytest.raises(SteppeError, match="q_table"):
            vectorized_q_update(wrong, *columns, 0.1, 0.9)


def test_the_bare_kernel_can_be_called_from_compiled_code() -> None:
    columns = [np.array([value, value]) for value in GOOD]
    plain, compiled = np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32)

    @numba.njit
    def learn(q, s, a, r, n, d):
        vectorized_q_update(q, s, a, r, n, d, 0.1, 0.9)

    learn(compiled, *columns)
    vectorized_q_update(plain, *columns, 0.1, 0.9)
    np.testing.assert_array_equal(plain, compiled)
    assert plain.any()
    with pytest.raises(SteppeError, match="outside the table"):
        learn(compiled, columns[0] + 10**8, *columns[1:])
    if not numba.config.DISABLE_JIT:  # coverage is measured without the compiler, which is what checks types
        with pytest.raises(numba.TypingError, match="whole numbers"):
            learn(compiled, columns[0] * 1.0, *columns[1:])


def signature(about: str, arrays: dict[str, np.ndarray]) -> str:
    """The sha256 of a saved table: of its description, and of names and bytes of its arrays in the order of their names."""
    parts = [part for name, array in sorted(arrays.items()) for part in (name.encode(), array.tobytes())]
    return hashlib.sha256(b"".join([about.encode(), *parts])).hexdigest()


@pytest.mark.parametrize("name", ["heads", "counts", "states", "actions", "ahead"])
def test_a_file_with_rings_out_of_range_is_damaged(name: str, tmp_path: Path) -> None:
    path, agent = tmp_path / "table", NStepQLearning(4, 3, n_step=2)
    agent.update(*GOOD)
    agent.save(path)
    data = path.read_bytes()
    about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    for bad in (-1, 10**8):
        arrays = {key: array.copy() for key, array in load(data).items()}
        arrays[f"ring_{name}"].flat[0] = bad
        path.write_bytes(save(arrays, about | {"sha256": signature(about["steppe_table"], arrays)}))
        with pytest.raises(DamagedFile, match=f"ring_{name}"):
            NStepQLearning.load(path)
