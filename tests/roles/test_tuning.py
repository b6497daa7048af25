"""Hyperparameters that are acknowledged take effect: with the next update, and as if the run had been resumed with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.config.tunables import tunable_fields
from steppe.core.contracts.transport import COMMANDS
from steppe.records.run_directory import RunDirectory
from steppe.roles.gradients.worker import GradientWorker
from tests.support.tuning import CHANGES, Life, command_of, copy_of, settings

pytestmark = pytest.mark.integration
ROUNDS = 6
FIELDS = [(algo, field) for algo, kind in ALGORITHMS.items() for field in kind.live]


@pytest.fixture(autouse=True)
def attentive(monkeypatch):
    """Learners look for commands before every step."""
    monkeypatch.setattr("steppe.roles.learner.POLL_COMMANDS_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Runs that were stopped after a few updates, and what the next updates are if nothing is changed; made once each."""
    known = {}

    def make(algo, field):
        key = (algo, field if field == "bounds_coef" else None)
        if key not in known:
            path = tmp_path_factory.mktemp(algo) / "run"
            life = Life.begin(path, settings(*key))
            life.learn(ROUNDS)
            life.stop()
            plain = Life.resume(copy_of(path, path.with_name("plain")))
            known[key] = path, plain.learn(ROUNDS)
            plain.stop()
        return known[key]

    return make


@pytest.mark.parametrize(("algo", "field"), FIELDS)
def test_every_live_field_of_every_algorithm_changes_the_next_updates_exactly(algo, field, begun, tmp_path):
    path, untouched = begun(algo, field)
    change = {field: CHANGES[field]}
    live = Life.resume(copy_of(path, tmp_path / "live"))
    live.set(change)
    hashes = live.learn(ROUNDS)
    (answer,) = live.answers()
    live.stop()
    assert answer["obeyed"]
    assert (answer["live"], answer["values"]) == ([field], change)
    assert hashes != untouched
    stopped = copy_of(path, tmp_path / "stopped")
    RunDirectory.open(stopped).store.post(COMMANDS, command_of(change))
    resumed = Life.resume(stopped)
    assert resumed.learn(ROUNDS) == hashes
    (recorded,) = resumed.answers()
    resumed.stop()
    assert (recorded["live"], recorded["env_steps"]) == ([field], answer["env_steps"]), "a change, with its step"


def test_rewards_are_normalized_by_returns_with_the_new_gamma(tmp_path):
    """The run that is resumed makes its normalizer from the new value; the one that goes on has to change its own."""
    path = tmp_path / "run"
    first = Life.begin(path, settings("a2c", "bounds_coef") | {"normalize_reward": True})
    first.learn(ROUNDS)
    first.stop()
    live, stopped = (copy_of(path, tmp_path / name) for name in ("live", "stopped"))
    RunDirectory.open(stopped).store.post(COMMANDS, command_of({"gamma": 0.5}))
    tuned, resumed = Life.resume(live), Life.resume(stopped)
    tuned.set({"gamma": 0.5})
    assert tuned.learn(ROUNDS) == resumed.learn(ROUNDS)
    assert tuned.learner.agent.network.reward_normalizer.gamma == 0.5
    for life in (tuned, resumed):
        life.stop()


WORKERS = {
    "rollout": settings("a2c") | {"mode": "workers", "actors": 2},
    "rollout, as they come": settings("a3c") | {"mode": "workers", "actors": 2},
    "transitions": settings("dqn") | {"mode": "workers", "actors": 2},
    "sequences": settings("r2d2") | {"mode": "workers", "actors": 2, "prioritized": False},
}


class TestWorkers:
    """Workers compute the gradients: what is set reaches them with the weights, and counts when their gradients are applied."""

    @pytest.mark.parametrize("kind", WORKERS)
    def test_gradients_are_made_with_what_was_acknowledged(self, kind, tmp_path):
        """In this process workers and learner take turns, so two runs of the same seed are the same."""
        plain, tuned = (Life.begin(tmp_path / name, WORKERS[kind]) for name in ("plain", "tuned"))
        assert plain.learn(ROUNDS) == tuned.learn(ROUNDS)
        fields = [name for name in tunable_fields(tuned.plan.config) if name != "bounds_coef"]
        change = {name: CHANGES[name] for name in fields}
        tuned.set(change)
        before = tuned.learner.updates
        assert tuned.learn(2 * ROUNDS) != plain.learn(2 * ROUNDS)
        (answer,) = tuned.answers()
        assert (answer["obeyed"], answer["live"]) == (True, sorted(fields))
        assert answer["updates"] > before, "a gradient that was made with it has been applied"
        for worker in tuned.handle._roles["worker"]:
            config = worker.gradient_source.agent.config
            assert {name: getattr(config, name) for name in fields} == change
        for life in (plain, tuned):
            life.stop()

    def test_a_change_of_the_loss_alone_moves_the_weights(self, tmp_path):
        """No part of it is the learner's: only workers use the entropy bonus."""
        plain, tuned = (Life.begin(tmp_path / name, WORKERS["rollout"]) for name in ("plain", "tuned"))
        tuned.set({"entropy_coef": 1e4})
        assert tuned.learn(ROUNDS) != plain.learn(ROUNDS)
        for life in (plain, tuned):
            life.stop()

    @pytest.mark.parametrize("kind", ["transitions", "sequences"])
    def test_target_networks_are_copied_as_often_as_was_set(self, kind, tmp_path):
        """Only workers use target networks, and nothing else depends on `target_every`. (dhc has no mode `workers`.)"""
        plain, tuned = (Life.begin(tmp_path / name, WORKERS[kind]) for name in ("plain", "tuned"))
        tuned.set({"target_every": 1})
        assert tuned.learn(3 * ROUNDS) != plain.learn(3 * ROUNDS)
        (answer,) = tuned.answers()
        assert (answer["obeyed"], answer["live"]) == (True, ["target_every"])
        for life in (plain, tuned):
            life.stop()

    def test_in_rounds_it_is_exactly_a_run_that_was_resumed_with_the_value(self, tmp_path):
        first = Life.begin(tmp_path / "run", WORKERS["rollout"])
        first.learn(ROUNDS)
        first.stop()
        copy_of(tmp_path / "run", tmp_path / "stopped")
        live = Life.resume(tmp_path / "run")
        live.set({"entropy_coef": 0.3, "learning_rate": 0.02})
        RunDirectory.open(tmp_path / "stopped").store.post(
            COMMANDS, command_of({"entropy_coef": 0.3, "learning_rate": 0.02})
        )
        resumed = Life.resume(tmp_path / "stopped")
        assert live.learn(ROUNDS) == resumed.learn(ROUNDS)
        for life in (live, resumed):
            assert len(life.answers()) == 1
            life.stop()

    def test_a_worker_that_begins_later_has_it_too(self, tmp_path):
        life = Life.begin(tmp_path / "run", WORKERS["rollout"])
        life.learn(2)
        life.set({"gamma": 0.5})
        life.learn(2)
        worker = life.handle._roles["worker"][0]
        late = GradientWorker(0, worker.env, late_making(worker), worker.collect_policy, worker.context)
        late.update_weights()
        assert late.gradient_source.agent.config.gamma == 0.5
        life.stop()


def late_making(worker):
    """What a worker that is started again is made with: the configuration that the run began with."""
    agent = type(worker.gradient_source.agent)(
        worker.gradient_source.agent.config.model_copy(update={"gamma": 0.99}), worker.env.spec, seed=0
    )
    return replace(worker.gradient_source, agent=agent)
