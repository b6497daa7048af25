"""Dictionaries become segments and batches: where trajectories are cut, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.compose.batches import stack_experiences, to_segment, to_transition_batch
from steppe.core.contracts.errors import NotFinite, UsageError
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec

pytestmark = pytest.mark.unit

SPEC = EnvSpec("test", FieldSpec("obs", (2,), "float32"), ActionSpec("discrete", (3,)))
EXTRAS = (FieldSpec("logp", (), "float32"),)


def step(place: float, following: float, *, end: str = "", episode: int = 0) -> dict:
    return {
        "obs": np.full(2, place),
        "action": 1,
        "reward": place,
        "next_obs": np.full(2, following),
        "terminated": end == "terminated",
        "truncated": end == "truncated",
        "logp": -place,
        "episode": episode,
    }


def test_flat_steps_become_one_column_that_is_cut_where_they_do_not_go_on() -> None:
    steps = [
        step(1, 2),
        step(2, 3, end="terminated"),
        step(10, 11),
        step(11, 12),  # unfinished: what follows is from elsewhere
        step(20, 21),
        step(21, 22, end="truncated"),
        step(30, 31),
    ]
    segment = to_segment(stack_experiences(steps), SPEC, EXTRAS)
    assert segment["obs"].shape == (8, 1, 2)
    assert segment["obs"].dtype == np.float32
    assert segment["obs"][:, 0, 0].tolist() == [1, 2, 10, 11, 20, 21, 30, 31]
    assert segment["terminated"][:, 0].tolist() == [False, True, False, False, False, False, False]
    assert segment["truncated"][:, 0].tolist() == [False, False, False, True, False, True, False]
    assert segment.next_obs()[:, 0, 0].tolist() == [2, 3, 11, 12, 21, 22, 31]
    assert segment["logp"][:, 0].tolist() == [-1, -2, -10, -11, -20, -21, -30]
    assert segment.num_valid == 7


def test_the_number_of_the_episode_cuts_where_observations_cannot_tell() -> None:
    steps = [step(1, 1, episode=0), step(1, 1, episode=0), step(1, 1, episode=1)]
    assert to_segment(stack_experiences(steps), SPEC, EXTRAS)["truncated"][:, 0].tolist() == [False, True, False]


def test_a_rollout_stays_as_it_is() -> None:
    flat = to_segment(stack_experiences([step(1, 2), step(2, 3, end="terminated")]), SPEC, EXTRAS)
    again = to_segment(flat.columns, SPEC, EXTRAS)
    assert all(np.array_equal(flat[name], again[name]) for name in flat.columns)


def test_transitions_of_one_step_have_the_discount_of_one_step() -> None:
    batch = to_transition_batch(stack_experiences([step(1, 2), step(2, 3, end="truncated")]), SPEC, 0.9)
    assert batch["discount"].tolist() == [np.float32(0.9)] * 2
    assert batch["action"].dtype == np.int64
    assert batch["reward"].dtype == np.float32
    assert not batch["terminated"].any(), "a truncated episode goes on from its last observation"
    given = to_transition_batch(stack_experiences([step(1, 2) | {"discount": 0.5}]), SPEC, 0.9)
    assert given["discount"].tolist() == [0.5]


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([], "no experiences"),
        ([step(1, 2), {"obs": 1}], "experience 1 has the keys obs"),
        ([{key: value for key, value in step(1, 2).items() if key != "logp"}], "has no 'logp'"),
        ([step(1, 2) | {"obs": np.zeros(3)}], r"'obs' has shape \(1, 3\), where \(1, 2\) is needed"),
    ],
)
def test_mistakes_get_one_sentence(steps: list[dict], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        to_segment(stack_experiences(steps), SPEC, EXTRAS)


@pytest.mark.parametrize("bad", [10**8, 1000, 7, 3, -1, -5])
def test_actions_out_of_range_are_refused_before_anything_is_learned(bad: int) -> None:
    flat = stack_experiences([step(1, 2), {**step(2, 3), "action": bad}, step(3, 4, end="terminated")])
    words = f"'action' is {bad} .*whole numbers from 0 to 2 are allowed"
    with pytest.raises(UsageError, match=words):
        to_transition_batch(flat, SPEC, 0.9)
    with pytest.raises(UsageError, match=words):
        to_segment(flat, SPEC, EXTRAS)


@pytest.mark.parametrize("column", ["obs", "next_obs", "reward", "discount", "weights"])
def test_transitions_that_are_not_finite_are_refused(column: str) -> None:
    flat = stack_experiences([step(1, 2), step(2, 3)]) | {"discount": np.ones(2), "weights": np.ones(2)}
    flat[column] = flat[column].astype(np.float64)
    flat[column][1] = np.nan
    with pytest.raises(NotFinite, match=f"'{column}' is nan"):
        to_transition_batch(flat, SPEC, 0.9)


@pytest.mark.parametrize("column", ["weights", "indices", "discount", "action", "terminated"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
def test_columns_of_another_length_are_refused(column: str, shape: tuple[int, ...]) -> None:
    flat = stack_experiences([step(1, 2), step(2, 3)]) | {column: np.ones(shape)}
    with pytest.raises(UsageError, match=f"'{column}' has shape"):
        to_transition_batch(flat, SPEC, 0.9)


def test_a_batch_without_rows_is_refused() -> None:
    flat = {name: column[:0] for name, column in stack_experiences([step(1, 2)]).items()}
    with pytest.raises(UsageError, match="no rows"):
        to_transition_batch(flat, SPEC, 0.9)
    with pytest.raises(UsageError, match="no rows"):
        to_segment(flat, SPEC, EXTRAS)


def test_experiences_of_several_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match="'obs' comes in different shapes"):
        stack_experiences([step(1, 2), {**step(1, 2), "obs": np.zeros(3)}])
