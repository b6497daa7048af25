"""The summary of classic training, compared with values calculated by hand."""

import pytest

from steppe.classic import TrainingStatistics

pytestmark = pytest.mark.unit


def test_an_empty_record_has_no_summary():
    statistics = TrainingStatistics()
    statistics.record_metric("loss", 1.0)
    assert statistics.get_summary() == {}


def test_the_summary_matches_the_episodes():
    statistics = TrainingStatistics()
    for reward, length in ((1.0, 10), (3.0, None), (-1.0, 20)):
        statistics.record_episode(reward, length)
    statistics.record_step_time(0.5)
    statistics.record_step_time(1.5)
    statistics.record_metric("loss", 2)
    summary = statistics.get_summary()
    assert summary.pop("total_training_time") >= 0
    assert summary == {
        "total_episodes": 3, "mean_reward": 1.0, "std_reward": pytest.approx((8 / 3) ** 0.5), "min_reward": -1.0,
        "max_reward": 3.0, "mean_episode_length": 15.0, "mean_step_time": 1.0,
    }  # fmt: skip
    assert dict(statistics.metrics) == {"loss": [2.0]}


def test_lengths_and_times_may_be_unknown():
    statistics = TrainingStatistics()
    statistics.record_episode(1.0)
    summary = statistics.get_summary()
    assert summary["mean_episode_length"] is summary["mean_step_time"] is None
