"""Evaluations are part of the reproducible run: the same versions with the same returns, however slow the evaluator is."""

from __future__ import annotations

import os
import signal

import pytest

import steppe
from steppe.core.contracts.reports import EvaluationReport
from steppe.core.contracts.transport import EVALUATIONS
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from tests.support.chaos import child, events

pytestmark = pytest.mark.integration

ENV = "tests.support.evaluated_slowly:EvaluatedSlowly"
SMALL = {
    "seed": 3, "envs": 2, "hidden": (8,), "segment_steps": 16, "minibatch_size": 16, "epochs": 1, "steps": 1_000,
    "evaluation.every_steps": 50, "evaluation.episodes": 4, "environment.vector": "loop", "learning_rate": 0.01,
}  # fmt: skip


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path))


def evaluations(run: str) -> list[EvaluationReport]:
    return [EvaluationReport.read(record) for _, record in RunDirectory.open(run).store.read(EVALUATIONS)]


def outcomes(run: str) -> list[tuple[int, bool, list[float], str]]:
    """Version, whether it is the final one, returns and weights of each evaluation, by version."""
    found = {(r.version, r.final, tuple(r.returns), r.weights_sha256) for r in evaluations(run)}
    return sorted(found)


def best(run: str) -> tuple[int, float]:
    found = Checkpoints(RunDirectory.open(run).checkpoints).best()
    return found.weights.version, found.counters["score"]


@pytest.mark.parametrize("mode", [pytest.param("single", marks=pytest.mark.slow), "sync"])
def test_a_slow_evaluator_evaluates_the_same_versions(mode):
    quick = steppe.train(ENV, name="quick", mode=mode, runtime="inline", **SMALL)
    slow = steppe.train(
        ENV, name="slow", mode=mode, runtime="processes", **SMALL | {"environment.kwargs": {"slow": True}}
    )
    assert max(report.waiting for report in evaluations("slow")) > 1, "the evaluator was not slow"
    assert outcomes("slow") == outcomes("quick")
    assert len(outcomes("slow")) == 20 + 1, "one after each multiple of 50, and the final one"
    assert best("slow") == best("quick")
    assert slow.weights_sha256 == quick.weights_sha256
    assert (slow.summary["evaluations"], slow.summary["evaluations_left_out"]) == (21, 0)
    assert not any((slow.path / "evaluations").iterdir())


def test_evaluations_that_wait_when_a_run_is_stopped_are_made_when_it_resumes():
    settings = SMALL | {"mode": "sync", "environment.kwargs": {"slow": True}, "checkpoint.every_s": 1e-6}
    steppe.train(ENV, name="whole", runtime="inline", **settings | {"environment.kwargs": {}})

    def stop(view):
        return view.evaluations_waiting > 1

    stopped = steppe.train(ENV, name="stopped", runtime="processes", callbacks=[stop], **settings)
    assert stopped.state == "STOPPED"
    assert any((stopped.path / "evaluations").iterdir())
    steppe.resume("stopped")
    assert outcomes("stopped") == outcomes("whole")


def test_a_killed_manager_loses_no_evaluation_that_waits():
    settings = SMALL | {"mode": "sync"}
    steppe.train(ENV, name="whole", runtime="inline", **settings)
    killed = []

    def kill(view):
        if not killed and view.evaluations_waiting > 1 and (manager := child("manager")) is not None:
            killed.append(manager.pid)
            os.kill(manager.pid, signal.SIGKILL)

    slow = settings | {"environment.kwargs": {"slow": True}}
    result = steppe.train(ENV, name="killed", runtime="processes", callbacks=[kill], **slow)
    assert len(killed) == 1
    assert result.state == "SUCCEEDED", result.message
    assert [event["role"] for event in events(result.path, "restart")] == ["manager"]
    assert outcomes("killed") == outcomes("whole")
    assert len(evaluations("killed")) == len(outcomes("killed")), "a version was evaluated twice"
    assert not any((result.path / "evaluations").iterdir())
