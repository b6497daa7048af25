"""NaN and infinity are named by field, step, environment and value."""

import numpy as np
import pytest

from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import NotFinite
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import ActionSpec, FieldSpec, SegmentSpec
from steppe.envs import make_segment_env, require_finite

pytestmark = pytest.mark.unit
ACTION = ActionSpec("discrete", (2,)).field


def _segment(dtype="float32", shape=(3,)):
    segment = Segment.blank(SegmentSpec(5, 2, FieldSpec("obs", shape, dtype), ACTION))
    if dtype == "float32":
        segment["final_obs"][...] = np.nan  # as if never written
    return segment


def test_a_sound_segment_passes():
    segment = _segment()
    segment["obs"][...] = np.random.default_rng(0).normal(size=segment["obs"].shape)
    require_finite(segment, 5, "actor 0")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_observation_is_named(value):
    segment = _segment()
    segment["obs"][3, 1, 2] = value
    with pytest.raises(NotFinite, match=rf"actor 4: obs is {value} at step 3 .* environment 1, component 2"):
        require_finite(segment, 5, "actor 4")


def test_a_bad_reward_is_named():
    segment = _segment()
    segment["reward"][2, 0] = np.nan
    with pytest.raises(NotFinite, match="reward is nan at step 2 of the segment in environment 0"):
        require_finite(segment, 5, "actor 4")


def test_infinities_that_cancel_are_found():
    segment = _segment()
    segment["reward"][2] = [np.inf, -np.inf]
    with pytest.raises(NotFinite, match="reward is inf at step 2 of the segment in environment 0"):
        require_finite(segment, 5, "actor 4")


def test_the_last_observation_counts_and_what_comes_after_does_not():
    segment = _segment()
    segment["obs"][3, 0, 0] = np.nan
    segment["reward"][2, 1] = np.nan
    require_finite(segment, 2, "actor 4")
    segment["reward"][2, 1] = 0
    with pytest.raises(NotFinite, match="obs is nan at step 3"):
        require_finite(segment, 3, "actor 4")


@pytest.mark.parametrize("column", ["terminated", "truncated"])
def test_final_observations_count_where_an_episode_was_cut(column):
    segment = _segment()
    segment[column][1, 1] = True
    segment["final_obs"][1, 1] = [0, np.nan, 0]
    with pytest.raises(NotFinite, match="final_obs is nan at step 1 of the segment in environment 1, component 1"):
        require_finite(segment, 5, "actor 4")
    segment["final_obs"][1, 1] = 0
    require_finite(segment, 5, "actor 4")


def test_large_numbers_are_not_infinite():
    segment = _segment()
    segment["obs"][...] = 3e38
    require_finite(segment, 5, "actor 4")


def test_images_have_no_nan():
    require_finite(_segment("uint8", (1, 4, 4)), 5, "actor 4")


@pytest.mark.parametrize(("field", "value"), [("obs", np.nan), ("reward", np.inf)])
def test_the_built_in_nan_environment_is_caught_at_its_step(field, value):
    config = EnvConfig(kwargs={"at_step": 2, "field": field, "value": float(value)})
    world = make_segment_env("steppe/NaN-v0", config, 1, np.random.SeedSequence(0))
    segment = Segment.blank(SegmentSpec(4, 1, world.spec.obs, world.spec.action.field))
    world.reset(segment["obs"][0])
    for t in range(2):
        require_finite(segment, t, "actor 0")
        world.step(np.zeros(1, np.int64), segment, t)
    step = 2 if field == "obs" else 1  # an observation is found in the row that it is acted on
    with pytest.raises(NotFinite, match=f"{field} is {value} at step {step}"):
        require_finite(segment, 2, "actor 0")
    world.close()
