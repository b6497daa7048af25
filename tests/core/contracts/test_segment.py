"""Segments: what follows a step, and the flat view of the steps that count."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.testing.memory import SPEC, ScriptedActor

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_transitions_are_the_steps_that_were_taken(seed, next_step):
    """The scripted actor writes its steps down in plain Python beside the arrays."""
    actor = ScriptedActor(seed=seed, next_step=next_step)
    for sequence in range(4):
        segment = actor.segment()
        flat = segment.transitions()
        taken = [step for step in actor.steps if step.sequence == sequence]
        assert segment.num_valid == len(taken)
        names = ("obs", "action", "reward", "next_obs", "terminated", "truncated")
        found = [[flat[name][row].tolist() for name in names] for row in range(len(taken))]
        assert found == [[_plain(getattr(step, name)) for name in names] for step in taken]


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_they_are_in_the_order_of_time():
    actor = ScriptedActor(seed=1)
    flat = actor.segment().transitions()
    assert flat["obs"][:, 1].astype(int).tolist() == list(range(SPEC.num_envs)) * SPEC.num_steps


def test_extras_come_along_and_bookkeeping_does_not():
    spec = SegmentSpec(3, 2, FieldSpec("obs", (1,), "float32"), FieldSpec("action", (), "int64"), (FieldSpec("logp", (), "float32"),))  # fmt: skip
    segment = Segment.blank(spec)
    segment["valid"][...] = [[True, False], [True, True], [False, True]]
    segment["logp"][...] = np.arange(6).reshape(3, 2)
    flat = segment.transitions()
    assert flat.keys() == {"obs", "action", "reward", "terminated", "truncated", "logp", "next_obs"}
    assert flat["logp"].tolist() == [0, 2, 3, 5]


def test_truncation_bootstraps_from_the_final_observation():
    spec = SegmentSpec(2, 3, FieldSpec("obs", (), "float32"), FieldSpec("action", (), "int64"))
    segment = Segment.blank(spec)
    segment["obs"][...] = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    segment["final_obs"][...] = -1
    segment["terminated"][0, 0] = segment["truncated"][1, 2] = segment["truncated"][0, 0] = True
    np.testing.assert_array_equal(segment.next_obs(), [[-1, 4, 5], [6, 7, -1]])
    np.testing.assert_array_equal(segment.cut, [[True, False, False], [False, False, True]])
    np.testing.assert_array_equal(segment["obs"], [[0, 1, 2], [3, 4, 5], [6, 7, 8]])


def test_columns_by_name():
    segment = Segment.blank(SPEC)
    assert segment["reward"] is segment.columns["reward"]
    with pytest.raises(KeyError):
        segment["rewards"]
    assert Batch({"x": np.ones(2)})["x"].sum() == 2.0
