"""Acknowledged changes of hyperparameters take effect with the next update, as if the run had been resumed with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.config.tunables import tunable_fields
from steppe.core.contracts.transport import COMMANDS
from steppe.records.run_directory import RunDirectory
from steppe.roles.gradients.worker import GradientWorker
from tests.support.tuning import CHANGES, SteppedRun, command_of, copy_of, settings

pytestmark = pytest.mark.integration
ROUNDS = 6
FIELDS = [(algo, field) for algo, kind in ALGORITHMS.items() for field in kind.live]


@pytest.fixture(autouse=True)
def _poll_before_every_step(monkeypatch):
    """Learners poll for commands before every step."""
    monkeypatch.setattr("steppe.roles.learner.POLL_COMMANDS_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Runs that were stopped after a few updates, and their next updates without changes; created once each."""
    known = {}

    def make(algo, field):
        key = (algo, field if field == "bounds_coef" else None)
        if key not in known:
            path = tmp_path_factory.mktemp(algo) / "run"
            stepped = SteppedRun.begin(path, settings(*key))
            stepped.learn(ROUNDS)
            stepped.stop()
            plain = SteppedRun.resume(copy_of(path, path.with_name("plain")))
            known[key] = path, plain.learn(ROUNDS)
            plain.stop()
        return known[key]

    return make


@pytest.mark.parametrize(("algo", "field"), FIELDS)
def test_every_live_field_of_every_algorithm_changes_the_next_updates_exactly(algo, field, begun, tmp_path):
    path, untouched = begun(algo, field)
    change = {field: CHANGES[field]}
    live = SteppedRun.resume(copy_of(path, tmp_path / "live"))
    live.set(change)
    hashes = live.learn(ROUNDS)
    (answer,) = live.answers()
    live.stop()
    assert answer["obeyed"]
    assert (answer["live"], answer["values"]) == ([field], change)
    assert hashes != untouched
    stopped = copy_of(path, tmp_path / "stopped")
    RunDirectory.open(stopped).store.post(COMMANDS, command_of(change))
    resumed = SteppedRun.resume(stopped)
    assert resumed.learn(ROUNDS) == hashes
    (recorded,) = resumed.answers()
    resumed.stop()
    assert (recorded["live"], recorded["env_steps"]) == ([field], answer["env_steps"]), "a change, with its step"


def test_rewards_are_normalized_by_returns_with_the_new_gamma(tmp_path):
    """A resumed run creates its normalizer with the new value; a running one has to change its own."""
    path = tmp_path / "run"
    first = SteppedRun.begin(path, settings("a2c", "bounds_coef") | {"normalize_reward": True})
    first.learn(ROUNDS)
    first.stop()
    live, stopped = (copy_of(path, tmp_path / name) for name in ("live", "stopped"))
    RunDirectory.open(stopped).store.post(COMMANDS, command_of({"gamma": 0.5}))
    tuned, resumed = SteppedRun.resume(live), SteppedRun.resume(stopped)
    tuned.set({"gamma": 0.5})
    assert tuned.learn(ROUNDS) == resumed.learn(ROUNDS)
    assert tuned.learner.agent.network.reward_normalizer.gamma == 0.5
    for stepped in (tuned, resumed):
        stepped.stop()


WORKERS = {
    "rollout": settings("a2c") | {"mode": "workers", "actors": 2},
    "rollout, as they come": settings("a3c") | {"mode": "workers", "actors": 2},
    "transitions": settings("dqn") | {"mode": "workers", "actors": 2},
    "sequences": settings("r2d2") | {"mode": "workers", "actors": 2, "prioritized": False},
}


class TestWorkers:
    """Workers compute the gradients: they get new values with the weights, which count once their gradients are
    applied.
    """

    @pytest.mark.parametrize("kind", WORKERS)
    def test_gradients_are_computed_with_the_acknowledged_values(self, kind, tmp_path):
        """In this process workers and learner are stepped in turn, so two runs of the same seed are equal."""
        plain, tuned = (SteppedRun.begin(tmp_path / name, WORKERS[kind]) for name in ("plain", "tuned"))
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
        for stepped in (plain, tuned):
            stepped.stop()

    def test_a_change_of_the_loss_alone_changes_the_weights(self, tmp_path):
        """The learner does not compute it: only workers use the entropy bonus."""
        plain, tuned = (SteppedRun.begin(tmp_path / name, WORKERS["rollout"]) for name in ("plain", "tuned"))
        tuned.set({"entropy_coef": 1e4})
        assert tuned.learn(ROUNDS) != plain.learn(ROUNDS)
        for stepped in (plain, tuned):
            stepped.stop()

    @pytest.mark.parametrize("kind", ["transitions", "sequences"])
    def test_target_networks_are_copied_at_the_new_interval(self, kind, tmp_path):
        """Only workers use target networks, and nothing else depends on `target_every`. (dhc has no mode `workers`.)"""
        plain, tuned = (SteppedRun.begin(tmp_path / name, WORKERS[kind]) for name in ("plain", "tuned"))
        tuned.set({"target_every": 1})
        assert tuned.learn(3 * ROUNDS) != plain.learn(3 * ROUNDS)
        (answer,) = tuned.answers()
        assert (answer["obeyed"], answer["live"]) == (True, ["target_every"])
        for stepped in (plain, tuned):
            stepped.stop()

    def test_in_rounds_it_equals_a_run_resumed_with_the_value(self, tmp_path):
        first = SteppedRun.begin(tmp_path / "run", WORKERS["rollout"])
        first.learn(ROUNDS)
        first.stop()
        copy_of(tmp_path / "run", tmp_path / "stopped")
        live = SteppedRun.resume(tmp_path / "run")
        live.set({"entropy_coef": 0.3, "learning_rate": 0.02})
        RunDirectory.open(tmp_path / "stopped").store.post(
            COMMANDS, command_of({"entropy_coef": 0.3, "learning_rate": 0.02})
        )
        resumed = SteppedRun.resume(tmp_path / "stopped")
        assert live.learn(ROUNDS) == resumed.learn(ROUNDS)
        for stepped in (live, resumed):
            assert len(stepped.answers()) == 1
            stepped.stop()

    def test_a_worker_started_later_has_the_new_value(self, tmp_path):
        stepped = SteppedRun.begin(tmp_path / "run", WORKERS["rollout"])
        stepped.learn(2)
        stepped.set({"gamma": 0.5})
        stepped.learn(2)
        worker = stepped.handle._roles["worker"][0]
        late = GradientWorker(0, worker.env, source_of_restarted_worker(worker), worker.collect_policy, worker.context)
        late.update_weights()
        assert late.gradient_source.agent.config.gamma == 0.5
        stepped.stop()


def source_of_restarted_worker(worker):
    """Return the gradient source of a restarted worker, with the configuration of the run's beginning."""
    agent = type(worker.gradient_source.agent)(
        worker.gradient_source.agent.config.model_copy(update={"gamma": 0.99}), worker.env.spec, seed=0
    )
    return replace(worker.gradient_source, agent=agent)
