"""Runs with several agents: the same weights on every runtime, exact resume, and counts that say what they count."""

from __future__ import annotations

import json
import shutil

import pytest

from steppe.core.config.run import resolve_config
from steppe.records.checkpoints import Checkpoints
from steppe.training.resume import resume
from steppe.training.train import run_experiment
from tests.support.cases import rest_slow

pytestmark = pytest.mark.integration

SMALL = {
    "actors": 2, "envs": 3, "seed": 5, "hidden": (8,), "mode": "sync", "segment_steps": 16, "minibatch_size": 32, "epochs": 1,
    "steps": 5 * 96, "evaluation.episodes": 3, "evaluation.max_episode_steps": 30, "evaluation.every_steps": 10**9,
}  # fmt: skip
MAZE = {
    "env": "steppe/Pathfinding-v0",
    "environment.kwargs": {"num_agents": 3, "size": 6, "density": 0.1, "max_steps": 12},
}
CASES = {
    "maze": MAZE,
    "maze, our loop": {**MAZE, "environment.vector": "loop"},
    "maze, two policies": {**MAZE, "policies": {"agent_0": "leader", "*": "others"}},
    "maze, two that remember": {**MAZE, "policies": {"agent_0": "leader", "*": "others"}, "recurrent": True},
    "pettingzoo": {"env": "pettingzoo.classic.rps_v2"},
    "turns": {"env": "pettingzoo.classic.tictactoe_v3", "policies": "own"},
    "maze, dqn": {**MAZE, "algo": "dqn", "batch_size": 16, "learning_starts": 70, "samples_per_insert": 1.0},
}
ROLLOUT = ("minibatch_size", "epochs")


def train(path, case, **more):
    layer = {**SMALL, **CASES[case], "runtime": "inline", "run_dir": path, **more}
    layer = {key: value for key, value in layer.items() if layer.get("algo") != "dqn" or key not in ROLLOUT}
    return run_experiment(resolve_config(("call", layer)))


def figures(result):
    names = (
        "weights_sha256",
        "env_steps",
        "agent_steps",
        "updates",
        "version",
        "eval_return_mean",
        "eval_agent_returns",
    )
    return {name: result.summary[name] for name in names}


@pytest.mark.parametrize("case", rest_slow(*CASES))
def test_sync_is_the_same_in_one_process_as_in_many(case, tmp_path):
    one, beside = train(tmp_path / "one", case), train(tmp_path / "beside", case, runtime="processes")
    assert one.state == beside.state == "SUCCEEDED"
    assert figures(one) == figures(beside)


@pytest.mark.parametrize(
    "case", rest_slow("maze", "maze, two policies", "maze, two that remember", "turns", "maze, dqn")
)
def test_a_run_resumed_from_each_of_its_checkpoints_ends_the_same(case, tmp_path):
    whole = train(tmp_path / "whole", case, **{"checkpoint.every_s": 1e-9, "checkpoint.keep": 10_000})
    numbers = [info.number for info in Checkpoints(whole.path / "checkpoints").list() if not info.best]
    assert len(numbers) > 3
    for number in (numbers[1], numbers[len(numbers) // 2]):
        path = tmp_path / f"from-{number}"
        shutil.copytree(whole.path, path)
        for later in numbers[numbers.index(number) + 1 :]:
            shutil.rmtree(path / "checkpoints" / f"{later:08d}")
        again = resume(path, steps=SMALL["steps"])
        assert again.resume == "exact"
        assert figures(again) == figures(whole), f"from checkpoint {number} of {numbers[-1]}"


def test_steps_are_the_environments_and_episodes_are_counted_once(tmp_path):
    result = train(tmp_path / "run", "maze")
    assert result.env_steps == SMALL["steps"]
    assert result.summary["agent_steps"] == 3 * SMALL["steps"]
    lines = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    reports = [line for line in lines if line["kind"] == "actor" and line["episodes"]]
    assert reports
    assert all(length <= 12 for line in reports for _, length in line["episodes"])
    for line in reports:
        mean = sum(total for total, _ in line["episodes"]) / len(line["episodes"])
        assert sum(line["agent_returns"].values()) == pytest.approx(mean)
        assert list(line["agent_returns"]) == ["agent_0", "agent_1", "agent_2"]
    judged = next(line for line in lines if line["kind"] == "evaluation")
    assert len(judged["returns"]) == 3
    assert sum(judged["agent_returns"].values()) == pytest.approx(judged["return_mean"])


def test_workers_refuse_environments_of_several_agents(tmp_path):
    from steppe.core.contracts.errors import UsageError

    layer = {"env": "pettingzoo.classic.rps_v2", "algo": "q-learning", "mode": "workers", "run_dir": tmp_path / "run"}
    with pytest.raises(UsageError, match="mode 'workers' is not for PettingZoo environments"):
        run_experiment(resolve_config(("call", layer)))
