"""Names, shapes and dtypes: how a segment lies in memory."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec, SegmentSpec

pytestmark = pytest.mark.unit

dtypes = st.sampled_from(["float32", "float64", "int64", "uint8", "bool", "int16"])
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def segment_specs(draw):
    obs = FieldSpec("obs", draw(shapes), draw(dtypes))
    action = FieldSpec("action", draw(shapes), draw(dtypes))
    extras = tuple(FieldSpec(f"extra{i}", draw(shapes), draw(dtypes)) for i in range(draw(st.integers(0, 3))))
    return SegmentSpec(draw(st.integers(1, 7)), draw(st.integers(1, 6)), obs, action, extras)


@given(segment_specs())
@settings(max_examples=60, deadline=None)
def test_columns_fill_their_own_memory_and_no_other(spec):
    """Each column is filled with bytes of its own and still has them when all are filled."""
    buffer = bytearray(spec.nbytes)
    columns = spec.columns(buffer)
    for number, column in enumerate(columns.values(), start=1):
        column.view(np.uint8).reshape(-1)[:] = number
    for number, field in enumerate(spec.fields, start=1):
        column = columns[field.name]
        rows = spec.num_steps + (field.name == "obs")
        assert column.shape == (rows, spec.num_envs, *field.shape)
        assert column.dtype == np.dtype(field.dtype)
        assert (column.view(np.uint8) == number).all()
        assert spec.offsets[field.name] % 64 == 0


@given(segment_specs())
@settings(max_examples=30, deadline=None)
def test_a_spec_is_its_values(spec):
    again = SegmentSpec(spec.num_steps, spec.num_envs, spec.obs, spec.action, spec.extras)
    assert again == spec
    assert hash(again) == hash(spec)
    assert spec.nbytes == sum(
        -(-int(np.prod(spec.shape(field))) * np.dtype(field.dtype).itemsize // 64) * 64 for field in spec.fields
    )


def test_the_columns_every_segment_has():
    spec = SegmentSpec(2, 3, FieldSpec("obs", (4,), "float32"), FieldSpec("action", (), "int64"))
    columns = spec.columns(bytearray(spec.nbytes))
    assert {name: (column.shape, column.dtype.name) for name, column in columns.items()} == {
        "obs": ((3, 3, 4), "float32"),
        "action": ((2, 3), "int64"),
        "reward": ((2, 3), "float32"),
        "terminated": ((2, 3), "bool"),
        "truncated": ((2, 3), "bool"),
        "valid": ((2, 3), "bool"),
        "final_obs": ((2, 3, 4), "float32"),
    }


def test_too_little_memory_is_refused():
    spec = SegmentSpec(2, 3, FieldSpec("obs", (4,), "float32"), FieldSpec("action", (), "int64"))
    with pytest.raises(TypeError):
        spec.columns(bytearray(spec.nbytes // 2))


@pytest.mark.parametrize(
    ("action", "shape", "dtype"),
    [
        (ActionSpec("discrete", (5,)), (), "int64"),
        (ActionSpec("multi_discrete", (2, 3, 4)), (3,), "int64"),
        (ActionSpec("box", (2, 3), (-1.0,) * 6, (1.0,) * 6), (2, 3), "float32"),
    ],
)
def test_how_actions_are_written_down(action, shape, dtype):
    assert action.field == FieldSpec("action", shape, dtype)


def test_images_have_three_dimensions():
    action = ActionSpec("discrete", (2,))
    assert EnvSpec("x", FieldSpec("obs", (4, 84, 84), "uint8"), action).is_image
    assert not EnvSpec("x", FieldSpec("obs", (84,), "float32"), action).is_image


def test_bytes_of_one_cell():
    assert FieldSpec("x", (), "bool").nbytes == 1
    assert FieldSpec("x", (3, 2), "float64").nbytes == 48


def test_a_recorded_spec_is_read_again_also_by_the_former_name_of_a_field():
    spec = EnvSpec("maps", FieldSpec("obs", (4,), "float32"), ActionSpec("discrete", (2,)), largest_stage=(3, 20))
    record = json.loads(json.dumps(asdict(spec)))
    assert EnvSpec.from_record(record) == spec
    record["largest_lesson"] = record.pop("largest_stage")
    assert EnvSpec.from_record(record) == spec
