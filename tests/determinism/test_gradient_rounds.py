"""Workers that push gradients in rounds: the same weights on every runtime, after a stop and a resume, and beyond the end."""

from __future__ import annotations

import pytest

from steppe.core.config.run import resolve_config
from steppe.training.resume import resume
from steppe.training.train import run_experiment

pytestmark = pytest.mark.integration

SMALL = {"mode": "workers", "actors": 3, "envs": 2, "hidden": (16,), "seed": 7, "evaluation.episodes": 3}
CASES = {
    "a2c": {"algo": "a2c", "env": "CartPole-v1", "segment_steps": 8, "steps": 2400, "anneal": True},
    "a2c, our loop": {"algo": "a2c", "env": "CartPole-v1", "environment.vector": "loop", "segment_steps": 8, "steps": 1200},
    "ppo, median": {
        "algo": "ppo", "env": "CartPole-v1", "segment_steps": 16, "steps": 1500,
        "params.in_rounds": True, "params.aggregation": "median",
    },
    "dqn": {
        "algo": "dqn", "env": "steppe/Identity-v0", "segment_steps": 8, "batch_size": 16, "learning_starts": 60,
        "samples_per_insert": 4.0, "steps": 900, "params.in_rounds": True,
    },
    "a2c, recurrent": {
        "algo": "a2c", "env": "steppe/Recall-v0", "segment_steps": 8, "steps": 900, "recurrent": True, "cell_size": 8,
    },
    "r2d2": {
        "algo": "r2d2", "env": "steppe/Recall-v0", "segment_steps": 8, "batch_size": 4, "sequence_length": 4, "burn_in": 2,
        "learning_starts": 60, "samples_per_insert": 2.0, "steps": 900, "prioritized": False, "cell_size": 8,
        "params.in_rounds": True,
    },
    "a2c, continuous": {"algo": "a2c", "env": "Pendulum-v1", "segment_steps": 8, "steps": 900},
}  # fmt: skip
FIGURES = ("weights_sha256", "env_steps", "updates", "version", "eval_return_mean", "eval_episodes")


def run(runtime, path, observers=(), **settings):
    layer = {**SMALL, "runtime": runtime, "run_dir": path, **settings}
    return run_experiment(resolve_config(("call", layer)), observers=observers)


def figures(result):
    assert result.state == "SUCCEEDED", result.message
    assert result.updates > 0
    return {name: result.summary[name] for name in FIGURES}


@pytest.mark.parametrize("case", CASES)
def test_rounds_are_the_same_on_every_runtime(case, tmp_path):
    one, two, beside = (run(runtime, tmp_path / name, **CASES[case]) for runtime, name in
                        (("inline", "one"), ("inline", "two"), ("processes", "beside")))  # fmt: skip
    assert figures(one) == figures(two) == figures(beside)


def test_taking_turns_makes_free_workers_repeat_themselves(tmp_path):
    settings = {**CASES["a2c"], "algo": "a3c"}
    one, two = (run("inline", tmp_path / name, **settings) for name in ("one", "two"))
    assert figures(one) == figures(two)
    assert figures(one)["updates"] > 100


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_a_stopped_run_resumes_exactly(runtime, tmp_path):
    settings = {**CASES["a2c, our loop"], "steps": 10**6}
    once = run(runtime, tmp_path / "halves", [lambda view: view.env_steps > 0], **settings)
    assert once.state == "STOPPED"
    steps = once.env_steps + 480
    again = resume(tmp_path / "halves", steps=steps)
    assert again.resume == "exact"
    whole = run("inline", tmp_path / "whole", **{**settings, "steps": steps})
    assert figures(again) == figures(whole)
