"""A run that begins with the weights of another one."""

from __future__ import annotations

import json

import pytest

from steppe.compose.main_loop import MainLoop
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError, RunNotFound
from steppe.records.checkpoints import Checkpoints, load_weights
from steppe.records.run_directory import RunDirectory
from steppe.training.resume import resume
from steppe.training.train import run_experiment

pytestmark = pytest.mark.integration

SMALL = {
    "env": "CartPole-v1", "hidden": (8,), "envs": 4, "segment_steps": 16, "steps": 500, "runtime": "inline",
    "evaluation.episodes": 2, "evaluation.every_steps": 10**9,
}  # fmt: skip
LEARN_NOTHING = {"ppo": {"epochs": 1, "learning_rate": 1e-30}, "dqn": {"learning_rate": 1e-30}}


def experiment(**settings):
    return resolve_config(("call", {**SMALL, **settings}))


def train(observers=(), **settings):
    return run_experiment(experiment(**settings), observers=observers)


@pytest.mark.parametrize("runtime", ["inline", "processes"])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_the_first_version_is_the_other_run(algo, runtime):
    """With a step size of nothing the trained parameters stay what they were, so the end shows the beginning."""
    source = train(name="source", algo=algo)
    result = train(name="heir", algo=algo, init_from="source", seed=9, runtime=runtime, **LEARN_NOTHING[algo])
    old, new = (load_weights(run.path / "weights.safetensors").arrays() for run in (source, result))
    layers = [name for name in old if old[name].ndim > 0]  # what is a single number is a schedule's
    assert any(old[name].ndim > 1 for name in layers)
    for name in layers:
        assert (old[name] == new[name]).all(), name
    start = Checkpoints(result.path / "start").latest()
    assert start.weights.sha256() == source.weights_sha256
    assert (start.weights.version, start.weights.updates, start.weights.env_steps) == (0, 0, 0)
    assert not start.state["agent"]["adam"], "the optimizer begins anew"
    record = RunDirectory.open(result.path).record
    assert record["config"]["init_from"] == "source"
    assert record["init_from"]["weights_sha256"] == source.weights_sha256
    assert (record["init_from"]["run"], record["init_from"]["version"]) == ("source", source.version)


def test_it_makes_a_difference_and_the_same_one_on_both_runtimes():
    train(name="source")
    hashes = {
        (init, runtime): train(name=f"{runtime}-{init}", init_from=init, seed=9, runtime=runtime).weights_sha256
        for init in (None, "source")
        for runtime in ("inline", "processes")
    }
    assert hashes["source", "inline"] == hashes["source", "processes"]
    assert hashes["source", "inline"] != hashes[None, "inline"] == hashes[None, "processes"]


def test_a_path_will_do_and_a_stopped_run_gives_its_newest_checkpoint(tmp_path):
    stopped = train(name="stopped", steps=10**6, observers=[lambda view: view.training is not None])
    assert stopped.state == "STOPPED"
    heir = train(run_dir=tmp_path / "heir", init_from=str(stopped.path))
    record = json.loads((heir.path / "run.json").read_text())
    assert record["init_from"]["weights_sha256"] == stopped.weights_sha256


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"init_from": "sourse"}, RunNotFound, "there is no run 'sourse'.*Did you mean 'source'"),
        ({"init_from": "source", "hidden": (16,)}, ConfigError, r"do not fit ppo for CartPole-v1 .*\b16\b.* here, .*\b8\b.* there"),
        ({"init_from": "source", "env": "Acrobot-v1"}, ConfigError, "do not fit ppo for Acrobot-v1"),
        ({"init_from": "source", "algo": "dqn"}, ConfigError, "do not fit dqn for CartPole-v1.*absent"),
        ({"init_from": "empty"}, RunNotFound, "empty has no weights yet"),
        ({"init_from": "damaged"}, ConfigError, r"init_from='damaged'.*weights\.safetensors is damaged"),
    ],
    ids=["unknown", "other layers", "other world", "other algorithm", "nothing there", "damaged"],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_nothing_is_written(settings, error, words, tmp_path):
    train(name="source")
    empty = experiment(name="empty")
    RunDirectory.create(empty.config, empty.sources).release()
    damaged = train(name="damaged")
    weights = damaged.path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    before = {path.name for path in (tmp_path / "runs").iterdir()}
    with pytest.raises(error, match=words):
        train(name="heir", **settings)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == before


def test_only_the_first_run_of_a_loop_begins_there():
    source = train(name="source")
    loop = MainLoop.of(experiment(init_from="source", seed=9))
    first, second = loop.run(), loop.run()
    records = [RunDirectory.open(result.path) for result in (first, second)]
    assert [record.config().init_from for record in records] == ["source", None]
    started = [Checkpoints(record.start).latest().weights.sha256() for record in records]
    assert started == [source.weights_sha256, first.weights_sha256]


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_a_resumed_run_needs_the_other_no_more(runtime):
    """Without any checkpoint of its own it begins once more with what it was given."""
    import shutil

    source = train(name="source")
    whole = train(name="heir", init_from="source", seed=9, runtime=runtime)
    shutil.rmtree(source.path)
    shutil.rmtree(whole.path / "checkpoints")
    (whole.path / "weights.safetensors").unlink()
    again = resume("heir", steps=SMALL["steps"])
    assert again.weights_sha256 == whole.weights_sha256
