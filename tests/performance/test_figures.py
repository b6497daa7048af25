"""Figures of this machine, printed with `pytest -m performance -s`. No speed is asserted: machines differ and are noisy;
what is asserted is that the figures are there and agree with each other."""

import pytest

import steppe

pytestmark = pytest.mark.performance


@pytest.mark.parametrize("settings", [{"mode": "single"}, {"mode": "async", "actors": 1}], ids=["single", "async"])
def test_where_the_time_of_ppo_goes(settings):
    result = steppe.train("CartPole-v1", steps=60_000, seed=0, **settings)
    print(f"\n{settings}: {result.steps_per_s:,.0f} steps/s, {result.time_shares}")
    assert result.state == "SUCCEEDED"
    assert result.steps_per_s == pytest.approx(result.env_steps / result.train_s)
    for shares in result.time_shares.values():
        assert sum(shares.values()) == pytest.approx(1.0)
    assert result.time_shares["learner"]["learn"] > 0
