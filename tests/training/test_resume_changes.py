"""Resuming with a new total, from an older checkpoint, and with other hyperparameters."""

from __future__ import annotations

import pytest

import steppe
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView

pytestmark = pytest.mark.integration

SMALL = {
    "runtime": "inline", "hidden": (8,), "segment_steps": 16, "envs": 2, "minibatch_size": 16, "epochs": 1, "steps": 64,
    "evaluation.episodes": 1, "evaluation.max_episode_steps": 10, "evaluation.every_steps": 10**9, "checkpoint.every_s": 1e-6,
}  # fmt: skip


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path))


def details(run: str, kind: str) -> list[dict]:
    records = [record for _, record in RunDirectory.open(run).store.read(EVENTS)]
    return [record["details"] | {"role": record["role"]} for record in records if record["kind"] == kind]


def test_progress_is_shown_against_the_new_total():
    first = steppe.train("CartPole-v1", name="run", **SMALL)
    before = RunView(RunDirectory.open("run"))  # as a view that was opened before the run was resumed
    before.refresh()
    assert before.total_steps == 64
    steppe.resume("run", steps=128)
    before.refresh()
    assert before.total_steps == 128 <= before.env_steps
    directory = RunDirectory.open("run")
    assert (directory.config().steps, directory.sources["steps"]) == (128, "resume")
    assert RunView(directory).total_steps == 128
    assert first.summary["eval_steps"] == first.env_steps


def test_a_changed_hyperparameter_takes_effect_and_is_recorded_with_its_step():
    hashes = []
    for name, changed in (("plain", {}), ("changed", {"learning_rate": 0.5}), ("again", {"agent.learning_rate": 0.5})):
        first = steppe.train("CartPole-v1", name=name, **SMALL)
        hashes.append(steppe.resume(name, steps=128, hyperparameters=changed).weights_sha256)
    assert hashes[1] == hashes[2] != hashes[0]
    (change,) = details("changed", "command")
    assert (change["role"], change["values"], change["obeyed"]) == ("learner", {"learning_rate": 0.5}, True)
    assert change["env_steps"] == first.env_steps


def test_hyperparameters_set_on_a_stopped_run_take_effect():
    for name in ("resumed", "set"):
        steppe.train("CartPole-v1", name=name, **SMALL)
    command = {"command": "set", "id": "x", "values": {"learning_rate": 0.5}, "live": ["learning_rate"]}
    RunDirectory.open("set").store.post(COMMANDS, command)
    expected = steppe.resume("resumed", steps=128, hyperparameters={"learning_rate": 0.5}).weights_sha256
    assert steppe.resume("set", steps=128).weights_sha256 == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learning_rat": 1.0}, "no hyperparameter 'learning_rat'.*learning_rate"),
        ({"learning_rate": -1.0}, "agent.learning_rate"),
        ({"hidden": (4,)}, "hidden cannot change in a run that has begun"),
        ({"evaluation.episodes": 3}, "evaluation.episodes cannot change when a run resumes"),
        ({"seed": 3}, "seed cannot change when a run resumes"),
    ],
)
def test_what_cannot_change_is_refused_before_anything_is_written(changes, sentence):
    steppe.train("CartPole-v1", name="run", **SMALL)
    with pytest.raises(ConfigError, match=sentence):
        steppe.resume("run", steps=128, hyperparameters=changes)
    directory = RunDirectory.open("run")
    assert directory.config().steps == 64
    assert not directory.store.read(COMMANDS)


def test_an_older_checkpoint_is_continued_exactly():
    whole = steppe.train("CartPole-v1", name="run", **SMALL | {"steps": 128, "checkpoint.keep": 10})
    directory = RunDirectory.open("run")
    kept = Checkpoints(directory.checkpoints, run=directory.key).kept()
    early = next(entry for entry in kept if entry.env_steps >= 64)
    again = steppe.resume(f"run@{early.number}", steps=128)
    assert again.weights_sha256 == whole.weights_sha256
    (event,) = [event for event in details("run", "resume") if event["role"] == "supervisor"]
    assert event["env_steps"] == early.env_steps < whole.env_steps


def test_the_best_weights_can_be_loaded_evaluated_and_started_from():
    result = steppe.train("CartPole-v1", name="run", **SMALL | {"evaluation.every_steps": 32, "steps": 128})
    best = Checkpoints(result.path / "checkpoints").best()
    assert result.summary["best_eval_steps"] == best.weights.env_steps
    assert result.summary["best_eval_return_mean"] == best.counters["score"]
    assert steppe.load("run", "best").weights.sha256() == best.weights.sha256()
    assert steppe.evaluate("run@best", episodes=1)["weights_sha256"] == best.weights.sha256()
    heir = steppe.train("CartPole-v1", name="heir", init_from="run@best", **SMALL)
    assert RunDirectory.open(heir.path).record["init_from"]["weights_sha256"] == best.weights.sha256()
