"""Curves: incremental reading, downsampling that keeps extremes, and limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from steppe.control.curves import Curves, downsample_extremes
from steppe.core.contracts.reports import EventReport, TrainingReport
from steppe.core.contracts.transport import EVENTS, TRAINING
from steppe.records.store import RunStore

pytestmark = pytest.mark.unit


def report(step: int, value: float) -> dict:
    training = TrainingReport(
        run="r", version=step, updates=step, env_steps=10 * step, train_s=step, stats={"x": value}
    )
    return training.record()


def test_downsampling_keeps_minimum_and_maximum_of_every_part():
    values = np.random.default_rng(0).normal(size=10_000).tolist()
    values[4_321], values[7_777] = 99.0, -99.0
    rows = downsample_extremes(values, range(len(values)), 200)
    assert len(rows) <= 200
    assert rows == sorted(rows)
    assert {4_321, 7_777} <= set(rows)
    for part in np.array_split(np.array(values), 100):
        assert part.max() in {values[row] for row in rows}
        assert part.min() in {values[row] for row in rows}
    assert downsample_extremes(values, range(50), 200) == list(range(50))
    assert downsample_extremes([math.nan] * 10, range(10), 4) == []


def test_only_new_reports_are_read_after_a_cursor(tmp_path):
    store = RunStore(tmp_path / "run.sqlite")
    curves = Curves(store)
    for step in range(1, 4):
        store.post(TRAINING, report(step, float(step)))
    curves.refresh()
    points, total = curves.points("loss/x", 0, 100)
    assert [(steps, value) for steps, _, value in points] == [(10, 1.0), (20, 2.0), (30, 3.0)]
    assert total == 3
    cursor = curves.cursor
    store.post(TRAINING, report(4, math.inf))
    curves.refresh()
    assert curves.points("loss/x", cursor, 100)[0][0][2] is None, "JSON has no infinity"
    assert curves.points("nothing", 0, 100) == ([], 0)


def test_reports_of_several_kinds_keep_their_order(tmp_path):
    store = RunStore(tmp_path / "run.sqlite")
    curves = Curves(store)
    for step in range(1, 2_501):  # more than are read at once
        stats = {"x": step / 2, "y": -1.0} if step % 3 else {"x": step / 2}
        training = TrainingReport(
            run="r", version=step, updates=step, env_steps=step, train_s=step, time_s=step, stats=stats
        )
        store.post(TRAINING, training.record())
    curves.refresh()
    assert curves.points("loss/x", 0, 5_000)[0] == [(step, step, step / 2) for step in range(1, 2_501)]
    assert curves.points("loss/y", 0, 5_000)[0] == [(step, step, -1.0) for step in range(1, 2_501) if step % 3]
    assert curves.points("loss/y", 2_499, 9)[0] == [(2_500, 2_500, -1.0)]


def test_after_a_resume_steps_may_decrease(tmp_path):
    store = RunStore(tmp_path / "run.sqlite")
    curves = Curves(store)
    store.post(TRAINING, report(9, 1.0))
    event = EventReport(run="r", kind="resume", role="supervisor", details={"env_steps": 50})
    store.post(EVENTS, event.record())
    store.post(TRAINING, report(6, 2.0))
    curves.refresh()
    assert [point[0] for point in curves.points("loss/x", 0, 100)[0]] == [90, 60]


def test_memory_is_bounded(tmp_path):
    store = RunStore(tmp_path / "run.sqlite")
    curves = Curves(store, most_points=100)
    for step in range(1, 1_001):
        store.post(TRAINING, report(step, 1e6 if step == 500 else step % 7))
    curves.refresh()
    points, total = curves.points("loss/x", 0, 1_000)
    assert len(points) == total <= 100
    assert max(point[2] for point in points) == 1e6
    assert points[-1][0] == 10_000
