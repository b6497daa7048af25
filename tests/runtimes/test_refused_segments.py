"""A whole run in which one actor sends actions out of range: its segments are refused and counted, and the run ends well.

Ray and MPI do the same in their own suites (tests/runtimes/ray/world_suite.py, tests/runtimes/mpi/world_suite.py).
"""

from __future__ import annotations

import pytest

from tests.support.kafka_runs import on
from tests.support.refusals import require_refusals

pytestmark = pytest.mark.integration


def test_an_actor_in_a_process_that_sends_actions_out_of_range_is_refused(tmp_path) -> None:
    require_refusals(tmp_path / "run", runtime="processes")


@pytest.mark.slow
def test_an_actor_over_kafka_that_sends_actions_out_of_range_is_refused(kafka, tmp_path) -> None:
    require_refusals(tmp_path / "run", **on(kafka))
