"""`steppe doctor RUN` on real runs with a known bottleneck, and on runs in every state."""

from __future__ import annotations

import json

import pytest

from steppe.records.profiling.diagnosis import MIN_MEASURED_S

pytestmark = pytest.mark.integration

QUIET = ("-s", "evaluation.every_steps=1_000_000_000", "-s", "evaluation.episodes=1")


@pytest.fixture
def cli_host(torch_host):
    return torch_host


def diagnosis(steppe, run):
    done = steppe("doctor", run, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--mode", "async", "--actors", "2"],
        ["--mode", "sync", "--actors", "2"],
        ["--mode", "single"],
        ["--runtime", "inline"],
    ],
)
def test_slow_environment_is_diagnosed(steppe, flags):
    words = (
        "--envs",
        "4",
        "--steps",
        "1_600" if "--actors" in flags else "800",
        "-s",
        "segment_steps=8",
        "-s",
        "epochs=1",
    )
    assert steppe("train", "steppe/Sleep-v0", "--name", "slow", *flags, *words, *QUIET).returncode == 0
    found = diagnosis(steppe, "slow")
    assert found["rule"] == "environment", found
    assert "the environment takes " in found["sentence"]
    assert "more actors" in found["sentence"]
    text = steppe("doctor", "slow").stdout
    assert text.startswith(f"slow: {found['sentence']}\n")
    assert "actor-0" in text
    assert "manager" in text
    assert "SUCCEEDED (steps_done)" in text


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--mode", "async", "--actors", "2"), ("--runtime", "inline")])
def test_slow_learner_is_diagnosed(steppe, flags):
    words = ("--steps", "15_000", "-s", "epochs=60", "-s", "minibatch_size=64", "-s", "checkpoint.every_s=1e9")
    assert steppe("train", "CartPole-v1", "--name", "busy", *flags, *words, *QUIET).returncode == 0
    found = diagnosis(steppe, "busy")
    assert found["rule"] == "learner", found
    assert "fewer epochs" in found["sentence"]
    assert set(found["phases"]) >= {"actor-0", "learner", "manager"}


@pytest.mark.slow
def test_evaluation_in_the_same_process_is_diagnosed(steppe):
    words = (
        "--runtime",
        "inline",
        "--steps",
        "150_000",
        "-s",
        "evaluation.every_steps=1_000",
        "-s",
        "evaluation.episodes=50",
    )
    assert steppe("train", "CartPole-v1", "--name", "judged", *words, "-s", "evaluation.max_share=0.9").returncode == 0
    assert diagnosis(steppe, "judged")["rule"] == "evaluation"


def test_running_run(steppe, live_run):
    found = diagnosis(steppe, "pole")
    assert found["state"] == "RUNNING"
    assert found["phases"]["actor-0"] == {"env": 5.0, "policy": 3.0, "blocked": 2.0, "other": 0.0}


@pytest.mark.slow
def test_resumed_run_sums_time_before_and_after(steppe):
    words = (
        "train",
        "steppe/Sleep-v0",
        "--name",
        "twice",
        "--runtime",
        "inline",
        "--envs",
        "4",
        "-s",
        "segment_steps=8",
        *QUIET,
    )
    assert steppe(*words, "--steps", "320").returncode == 0
    once = diagnosis(steppe, "twice")["phases"]["actor-0"]["env"]
    assert steppe("resume", "twice", "--steps", "640").returncode == 0
    assert diagnosis(steppe, "twice")["phases"]["actor-0"]["env"] >= 1.7 * once


@pytest.mark.slow
def test_failed_run(steppe):
    words = (
        "train",
        "steppe/Failing-v0",
        "--name",
        "broken",
        "--runtime",
        "inline",
        "-s",
        "environment.kwargs={at_step = 3}",
    )
    assert steppe(*words).returncode == 1
    done, found = steppe("doctor", "broken"), json.loads(steppe("doctor", "broken", "--json").stdout)
    assert done.returncode == 0
    assert done.stdout.startswith(f"broken: {found['sentence']}")
    assert (found["rule"] == "too_short") == (found["measured"]["seconds"] < MIN_MEASURED_S)  # allow for a busy machine
    assert "FAILED (environment_fault)" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "there is no run 'nope'"),
        (["nope", "--json"], "there is no run 'nope'"),
        (["pole", "--quick"], "--quick applies to the check of this machine"),
    ],
)
def test_usage_error_is_one_sentence(steppe, live_run, words, said):
    done = steppe("doctor", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
