"""Statistics of composed loops during and after runs of every kind. Ray and MPI run the same in their own suites."""

from __future__ import annotations

import pytest

from tests.support.cases import rest_slow
from tests.support.kafka_runs import on
from tests.support.loop_statistics import require_right_statistics

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("kind", "algo", "runtime"),
    rest_slow(
        ("sync", "ppo", "inline"),
        ("sync", "dqn", "inline"),
        ("workers", "a2c", "inline"),
        ("async", "ppo", "inline"),
        ("sync", "ppo", "processes"),
        ("workers", "a2c", "processes"),
        ("async", "dqn", "processes"),
    ),
)
def test_statistics_are_right_during_and_after_a_run(kind: str, algo: str, runtime: str) -> None:
    require_right_statistics(kind, algo, runtime)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "algo"), [("sync", "ppo"), ("async", "dqn")])
def test_statistics_over_kafka(kind: str, algo: str, kafka: str) -> None:
    require_right_statistics(kind, algo, **on(kafka))
