"""A whole run in which one actor sends actions out of range: its segments are refused and counted, and the run
succeeds.

Ray and MPI do the same in their own suites (tests/runtimes/ray/world_suite.py, tests/runtimes/mpi/world_suite.py).
"""

from __future__ import annotations

import pytest

from tests.support.kafka_runs import on
from tests.support.refusals import require_refusals

pytestmark = pytest.mark.integration


def test_segments_of_an_actor_process_with_actions_out_of_range_are_refused(tmp_path) -> None:
    require_refusals(tmp_path / "run", runtime="processes")


@pytest.mark.slow
def test_segments_over_kafka_with_actions_out_of_range_are_refused(kafka, tmp_path) -> None:
    require_refusals(tmp_path / "run", **on(kafka))
