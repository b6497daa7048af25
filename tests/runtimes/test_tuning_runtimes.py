"""Whole runs on every runtime and in every mode: what is set while a run goes on is acknowledged and in use.

In `single` and `sync` the updates that follow are those of a run in one process that took the values over at the same place, and
that this is what a resumed run would learn is shown field by field in tests/roles/test_tuning.py. In `async` and `workers` weights
stay where they are until the values are set, and move from then on. Ray and MPI run the same matrix in their own suites, on one
cluster and in worlds of their own.
"""

from __future__ import annotations

import pytest

from tests.support.cases import rest_slow
from tests.support.kafka_runs import on
from tests.support.tuning import MATRIX, require_tuned

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
INLINE = [("workers", "table"), ("sync", "minibatches"), *MATRIX]


@pytest.mark.parametrize(
    ("mode", "kind"), rest_slow(("single", "rollout"), *(c for c in INLINE if c != ("single", "rollout")))
)
def test_inline(mode, kind, tmp_path):
    require_tuned(kind, tmp_path / "run", runtime="inline", mode=mode)


@pytest.mark.parametrize(
    ("mode", "kind"), rest_slow(("workers", "rollout"), *(c for c in MATRIX if c != ("workers", "rollout")))
)
def test_processes(mode, kind, tmp_path):
    require_tuned(kind, tmp_path / "run", runtime="processes", mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), [case for case in MATRIX if case[0] != "workers"])  # which it does not have
def test_kafka(mode, kind, kafka, tmp_path):
    require_tuned(kind, tmp_path / "run", **on(kafka, mode=mode))
