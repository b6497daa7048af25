"""Arrays from outside: what is converted, what is refused, and how the refusal reads."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.core.array_checks import (
    as_column,
    clear_segment,
    require_below,
    require_finite,
    require_flags,
    require_segment,
)
from steppe.core.contracts.errors import NotFinite, UsageError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import ActionSpec, AgentSpec, EnvSpec, FieldSpec, SegmentSpec

pytestmark = pytest.mark.unit

VECTOR = FieldSpec("obs", (2,), "float32")
EXTRAS = (FieldSpec("logp", (), "float32"), FieldSpec("own", (), "float32"), FieldSpec("mask", (3,), "bool"))


def segment_for(spec: EnvSpec, rows: int = 2) -> Segment:
    segment = Segment.blank(SegmentSpec(3, rows, *spec.fields, EXTRAS, spec.num_agents))
    segment["valid"][...] = True
    return segment


def test_an_array_that_fits_is_not_copied() -> None:
    column = np.arange(4)
    assert as_column(column, "action", "int64") is column
    assert as_column(column[::2], "action", "int64").flags.c_contiguous
    still = column.copy()
    still.flags.writeable = False
    assert as_column(still, "action", "int64").flags.writeable


@pytest.mark.parametrize("given", [[0.0, 1.0], np.array([0, 1], np.uint8), [False, True], np.array([0, 1], ">i8")])
def test_whole_numbers_of_any_kind_are_converted(given: object) -> None:
    assert as_column(given, "action", "int64").tolist() == [0, 1]
    assert as_column(given, "done", "bool").tolist() == [False, True]


@pytest.mark.parametrize(
    "given", [[0.5], [float("nan")], [2**63], ["a"], [None], [[1], [1, 2]], [1j], {"a": 1}, [10**30], [1e300]]
)
def test_what_is_no_whole_number_is_refused_by_name(given: object) -> None:
    with pytest.raises(UsageError, match="'action'"):
        as_column(given, "action", "int64")


@pytest.mark.parametrize("bad", [-1, -5, 3, 7, 1000, 10**8, -(2**63), 2**63 - 1])
def test_a_number_out_of_range_is_refused_with_value_and_range(bad: int) -> None:
    with pytest.raises(UsageError, match=rf"'action' is {bad} in row 1, where whole numbers from 0 to 2 are allowed"):
        require_below(np.array([0, bad, 2]), "action", (3,))


def test_bounds_repeat_over_components_and_agents() -> None:
    require_below(np.array([[1, 4], [0, 3]]), "action", (2, 5))
    with pytest.raises(UsageError, match=r"is 2 at \(1, 0\), where whole numbers from 0 to 1"):
        require_below(np.array([[1, 4], [2, 3]]), "action", (2, 5))
    with pytest.raises(UsageError, match="3 numbers"):
        require_below(np.array([4, 4, 4]), "action", (2, 5))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [5, 20_000])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_non_finite_values_are_refused(bad: float, size: int, dtype: type) -> None:
    column = np.full(size, np.finfo(dtype).max)  # whose sum and squares overflow
    require_finite(column, "reward")
    column[3] = bad
    with pytest.raises(NotFinite, match=rf"'reward' is {bad} in row 3"):
        require_finite(column, "reward")


def test_truth_values_have_one_bit() -> None:
    flags = np.zeros(4, np.bool_)
    require_flags(flags, "valid")
    flags.view(np.uint8)[2] = 2
    with pytest.raises(UsageError, match="'valid'"):
        require_flags(flags, "valid")


def test_a_sound_segment_passes_whatever_lies_where_nobody_wrote() -> None:
    segment = segment_for(EnvSpec("test", VECTOR, ActionSpec("discrete", (3,))))
    segment["final_obs"][...] = np.nan
    segment["own"][...] = np.nan  # a column of a user's agent
    require_segment(segment)


@pytest.mark.parametrize(
    ("column", "value"),
    [("action", 3), ("action", -1), ("reward", np.nan), ("obs", np.inf), ("logp", np.nan), ("final_obs", np.nan)],
)
def test_a_segment_with_a_bad_value_is_refused(column: str, value: float) -> None:
    segment = segment_for(EnvSpec("test", VECTOR, ActionSpec("discrete", (3,))))
    segment["terminated"][1] = True
    segment[column][1, 1] = value
    with pytest.raises((UsageError, NotFinite), match=f"'{column}'"):
        require_segment(segment)
    clear_segment(segment)
    require_segment(segment)
    assert segment.num_valid == segment.env_steps == 0


@pytest.mark.parametrize("column", ["valid", "terminated", "truncated", "mask"])
def test_a_segment_with_bytes_that_are_no_truth_values_is_refused(column: str) -> None:
    segment = segment_for(EnvSpec("test", VECTOR, ActionSpec("discrete", (3,))))
    segment[column].view(np.uint8)[1, 1] = 255
    with pytest.raises(UsageError, match=f"'{column}'"):
        require_segment(segment)


def test_a_segment_with_memory_of_another_shape_is_refused() -> None:
    segment = segment_for(EnvSpec("test", VECTOR, ActionSpec("discrete", (3,))))
    for wrong in (np.zeros((3, 2), np.int32), np.zeros((2, 2), np.int64), np.zeros((3, 4), np.int64)[:, ::2]):
        segment.columns["action"] = wrong
        with pytest.raises(UsageError, match=r"the segment's 'action' is int(32|64)"):
            require_segment(segment)
    del segment.columns["action"]
    with pytest.raises(UsageError, match="absent"):
        require_segment(segment)


def test_numbered_states_are_bounded_too() -> None:
    spec = EnvSpec("test", FieldSpec("obs", (), "int64"), ActionSpec("discrete", (3,)), num_states=4)
    segment = segment_for(spec)
    segment["final_obs"][...] = 99
    require_segment(segment)
    segment["truncated"][2] = True
    with pytest.raises(UsageError, match="'final_obs' is 99"):
        require_segment(segment)
    segment["final_obs"][2] = 3
    segment["obs"][3, 0] = 4
    with pytest.raises(UsageError, match=r"'obs' is 4 at \(3, 0\), where whole numbers from 0 to 3"):
        require_segment(segment)


def test_agents_that_differ_have_bounds_of_their_own() -> None:
    members = tuple(AgentSpec(VECTOR, ActionSpec("discrete", (count,))) for count in (2, 5))
    spec = EnvSpec("test", VECTOR, ActionSpec("discrete", (5,)), num_agents=2, agents=("a", "b"), members=members)
    segment = segment_for(spec, rows=4)
    segment["action"][:, 1::2] = 4
    require_segment(segment)
    segment["action"][2, 2] = 2  # fine for agent b, not for agent a
    with pytest.raises(UsageError, match=r"'action' is 2 at \(2, 2\), where whole numbers from 0 to 1"):
        require_segment(segment)


def test_agents_with_fewer_components_leave_the_rest_at_zero() -> None:
    members = tuple(AgentSpec(VECTOR, ActionSpec("multi_discrete", sizes)) for sizes in ((2,), (3, 4)))
    spec = EnvSpec("test", VECTOR, ActionSpec("multi_discrete", (3, 4)), num_agents=2, members=members)
    assert spec.fields[1].below == (2, 1, 3, 4)


def test_bounds_are_no_part_of_what_a_column_is() -> None:
    assert FieldSpec("action", (), "int64", below=(3,)) == FieldSpec("action", (), "int64")
