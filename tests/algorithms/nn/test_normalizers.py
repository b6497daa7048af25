"""Running statistics against NumPy over everything at once."""

import numpy as np
import pytest
import torch

from steppe.algorithms.nn.normalizers import ObsNormalizer, RewardNormalizer, RunningMeanStd
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec

pytestmark = pytest.mark.unit

SPEC = SegmentSpec(7, 3, FieldSpec("obs", (1,), "float32"), FieldSpec("action", (), "int64"))


def test_folding_in_parts_is_the_mean_and_variance_of_all():
    stream = np.random.default_rng(0)
    moments, other = RunningMeanStd((4,)), RunningMeanStd((4,))
    parts = [stream.normal(3.0, 2.0, (rows, 4)).astype(np.float32) for rows in (1, 50, 7, 0, 200)]
    for part in parts[:3]:
        moments.update_from_rows(part)
    for part in parts[3:]:
        other.update_from_rows(part)
    moments.take(other)
    everything = np.concatenate(parts).astype(np.float64)
    assert float(moments.count) == 258
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-12)
    assert float(other.count) == 0


def test_observations_become_standard_and_outliers_are_clipped():
    stream = np.random.default_rng(0)
    rows = stream.normal([5.0, -300.0], [0.1, 40.0], (5000, 2)).astype(np.float32)
    normalizer = ObsNormalizer((2,))
    normalizer.update_from_rows(rows)
    scaled = normalizer(torch.from_numpy(rows))
    np.testing.assert_allclose(scaled.mean(0), 0.0, atol=1e-3)
    np.testing.assert_allclose(scaled.std(0), 1.0, atol=1e-2)
    assert normalizer(torch.tensor([[1e6, -1e6]])).tolist() == [[10.0, -10.0]]


def random_segment(actor, stream):
    segment = Segment.blank(SPEC)
    segment.header = SegmentHeader("run", actor, 0, 0, 0)
    draw = stream.random((7, 3))
    segment["valid"][...] = stream.random((7, 3)) < 0.8
    segment["terminated"][...] = (draw < 0.1) & segment["valid"]
    segment["truncated"][...] = (draw > 0.9) & segment["valid"]
    segment["reward"][...] = np.where(segment["valid"], stream.normal(size=(7, 3)), np.nan)
    return segment


def test_rewards_are_scaled_by_the_deviation_of_returns_kept_per_actor_and_environment():
    stream = np.random.default_rng(4)
    normalizer = RewardNormalizer(0.9)
    running, returns = {}, []
    for actor in (0, 1, 0, 1, 1):
        segment = random_segment(actor, stream)
        normalizer.observe(segment)
        for env in range(3):
            total = running.get((actor, env), 0.0)
            for t in range(7):
                if segment["valid"][t, env]:
                    total = 0.9 * total + float(segment["reward"][t, env])
                    returns.append(total)
                    if segment["terminated"][t, env] or segment["truncated"][t, env]:
                        total = 0.0
            running[actor, env] = total
    np.testing.assert_allclose(float(normalizer.var), np.var(returns), rtol=1e-9)
    scaled = normalizer.normalize(np.array([2.0], np.float32))
    np.testing.assert_allclose(scaled, 2.0 / np.std(returns), rtol=1e-6)
    assert scaled.dtype == np.float32
