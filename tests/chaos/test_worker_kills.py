"""Workers that push gradients, killed with -9: rounds go on to the same weights, free workers go on without; all is counted."""

from __future__ import annotations

import pytest

from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.training.resume import resume
from tests.chaos.test_kills import Reaper
from tests.support.chaos import events, pace, require_single_records, train

pytestmark = pytest.mark.integration

COMMON = {
    "env": "CartPole-v1", "mode": "workers", "actors": 2, "envs": 2, "seed": 3, "hidden": (16,), "segment_steps": 8,
    "environment.wrappers": ("tests.support.chaos_envs:Paced",), "environment.vector": "loop", "evaluation.episodes": 2,
    "evaluation.max_episode_steps": 20, "checkpoint.every_s": 0.05,
}  # fmt: skip
PACED_S = 0.004


def settings(path, algo, steps, **more):
    return {**COMMON, "algo": algo, "steps": steps, "run_dir": str(path), "runtime": "processes", **more}


def ledger_of(path):
    checkpoint = Checkpoints(path / "checkpoints", run=RunDirectory.open(path).key).latest()
    return checkpoint.state["ledger"], checkpoint.state["memory"]["server"]["roster"]["accounts"], checkpoint.counters


@pytest.mark.slow
def test_a_round_goes_on_with_the_worker_that_comes_in_place_of_a_killed_one(tmp_path):
    with pace(0.0):
        twin = train(settings(tmp_path / "twin", "a2c", 1600, runtime="inline"))
    reaper = Reaper(["worker-0", "worker-1", "worker-0"], 0)
    with pace(PACED_S):
        result = train(settings(tmp_path / "killed", "a2c", 1600), [reaper])
    assert len(reaper.killed) == 3
    assert result.state == "SUCCEEDED", result.message
    assert result.weights_sha256 == twin.weights_sha256
    assert result.actor_restarts == 3
    ledger, accounts, counters = ledger_of(tmp_path / "killed")
    rounds = counters["updates"]
    assert ledger["dropped"] == {}
    assert {actor: expected for actor, expected, _ in ledger["actors"]} == {0: rounds, 1: rounds}
    assert {name: account["accepted"] for name, account in accounts.items()} == {"worker-0": rounds, "worker-1": rounds}


@pytest.mark.slow
def test_free_workers_go_on_without_one_that_is_killed_too_often(tmp_path):
    reaper = Reaper(["worker-0", "worker-0"], 1)
    with pace(PACED_S):
        result = train(settings(tmp_path / "run", "a3c", 2000, **{"flow.max_restarts": 1}), [reaper])
    assert reaper.killed == ["worker-0", "worker-0"]
    assert result.state == "SUCCEEDED", result.message
    assert result.env_steps >= 2000
    assert len(events(tmp_path / "run", "restart")) == 1
    (warning,) = events(tmp_path / "run", "warning")
    assert "the others continue without it" in warning["details"]["message"]
    _, accounts, counters = ledger_of(tmp_path / "run")
    assert sum(account["accepted"] for account in accounts.values()) == counters["updates"]


@pytest.mark.slow
def test_a_killed_learner_is_resumed_with_its_accounts(tmp_path):
    with pace(0.0):
        twin = train(settings(tmp_path / "twin", "a2c", 1200, runtime="inline"))
    reaper = Reaper(["learner"], 2)
    with pace(PACED_S):
        result = train(settings(tmp_path / "killed", "a2c", 1200, restarts=1), [reaper])
    assert reaper.killed == ["learner"]
    assert result.state == "SUCCEEDED", result.message
    assert result.weights_sha256 == twin.weights_sha256
    require_single_records(tmp_path / "killed")


@pytest.mark.slow
def test_in_rounds_a_worker_that_cannot_be_mended_ends_the_run_and_a_resume_goes_on(tmp_path):
    with pace(0.0):
        twin = train(settings(tmp_path / "twin", "a2c", 1600, runtime="inline"))
    with pace(PACED_S):
        failed = train(settings(tmp_path / "run", "a2c", 1600, **{"flow.max_restarts": 0}), [Reaper(["worker-1"], 3)])
    assert (failed.state, failed.summary["reason"]) == ("FAILED", "role_died")
    with pace(0.0):
        again = resume(tmp_path / "run")
    assert again.state == "SUCCEEDED", again.message
    assert again.weights_sha256 == twin.weights_sha256
