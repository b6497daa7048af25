"""Whole runs on every runtime and in every mode: changes of hyperparameters during a run are acknowledged and in use.

In `single` and `sync` the following updates are those of a run in one process that changed the values at the same
point; tests/roles/test_tuning.py shows field by field that a resumed run learns the same. In `async` and `workers`
the weights stay constant until the values are set, and change from then on. Ray and MPI run the same matrix in their
own suites, on one cluster and in MPI worlds.
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
def test_changes_apply_on_inline(mode, kind, tmp_path):
    require_tuned(kind, tmp_path / "run", runtime="inline", mode=mode)


@pytest.mark.parametrize(
    ("mode", "kind"), rest_slow(("workers", "rollout"), *(c for c in MATRIX if c != ("workers", "rollout")))
)
def test_changes_apply_on_processes(mode, kind, tmp_path):
    require_tuned(kind, tmp_path / "run", runtime="processes", mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), [case for case in MATRIX if case[0] != "workers"])  # which it does not have
def test_changes_apply_on_kafka(mode, kind, kafka, tmp_path):
    require_tuned(kind, tmp_path / "run", **on(kafka, mode=mode))
