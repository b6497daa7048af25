"""Which versions a learner queues for evaluation, and what happens when the queue or the disk is full."""

from __future__ import annotations

import threading

import pytest

from steppe.core.config.run import EvalConfig, resolve_config
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS
from steppe.records.evaluation_queue import EvaluationQueue
from steppe.roles import evaluation_schedule
from steppe.roles.context import POLICY, STOP
from steppe.roles.evaluation_schedule import QueueingWeightStore
from tests.support.role_fakes import make_context, weights_of

pytestmark = pytest.mark.unit


class Bench:
    def __init__(self, path, **config):
        self.queue, self.context = EvaluationQueue(path / "evaluations"), make_context("learner")
        settings = EvalConfig(**{"every_steps": 100, **config})
        self.store = QueueingWeightStore(self.context.weights, self.queue, settings, self.context)

    def publish(self, *env_steps, episodes=0, since=0):
        for version, steps in enumerate(env_steps, since):
            self.store.publish(POLICY, weights_of(version, env_steps=steps, episodes=episodes))

    @property
    def queued(self):
        return [entry.version for entry in self.queue.waiting()]

    def events(self):
        return [EventReport.read(record) for _, record in self.context.board.read(EVENTS)]


def test_the_first_version_after_each_multiple(tmp_path):
    bench = Bench(tmp_path)
    bench.publish(0, 99, 100, 199, 250, 299, 300, 301, 650, 700)
    assert bench.queued == [2, 4, 6, 8, 9]
    assert bench.store.newer_than(POLICY, 8).version == 9
    assert bench.queue.waiting()[0].load().env_steps == 100


def test_by_episodes_too(tmp_path):
    bench = Bench(tmp_path, every_steps=10**9, every_episodes=10)
    for version, episodes in enumerate([0, 9, 10, 15, 21]):
        bench.store.publish(POLICY, weights_of(version, env_steps=version, episodes=episodes))
    assert bench.queued == [2, 4]


def test_other_records_are_only_passed_on(tmp_path):
    bench = Bench(tmp_path)
    bench.store.publish("settings", weights_of(0, env_steps=0))
    bench.store.publish("settings", weights_of(1, env_steps=500))
    assert bench.queued == []


def test_a_resumed_run_queues_what_the_whole_run_would(tmp_path):
    whole, first, second = (Bench(tmp_path / name) for name in ("whole", "first", "second"))
    steps = [0, 60, 120, 180, 240, 300]
    whole.publish(*steps)
    first.publish(*steps[:4])
    kept = first.store.schedule
    second.store.resume_after(kept.env_steps, kept.episodes)
    second.store.publish(POLICY, weights_of(3, env_steps=205))  # again, with what was received since
    second.publish(*steps[4:], since=4)
    assert (first.queued, second.queued) == ([2], [4, 5])
    assert whole.queued == [2, 4, 5]


def test_a_full_disk_leaves_one_out_and_says_so(tmp_path, monkeypatch):
    bench = Bench(tmp_path)

    def full(weights):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bench.queue, "add", full)
        bench.publish(0, 100)
    bench.publish(200, since=2)
    assert bench.queued == [2]
    (event,) = bench.events()
    assert event.details["evaluations_left_out"] == 1
    assert "version 1 will not be evaluated" in event.details["message"]


def test_the_learner_waits_while_the_queue_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_schedule, "MAX_WAITING", 2)
    bench = Bench(tmp_path)
    beating = threading.Event()
    bench.context.heartbeat = beating.set
    learner = threading.Thread(target=lambda: bench.publish(0, 100, 200, 300))
    learner.start()
    assert beating.wait(60)
    assert bench.queued == [1, 2]
    bench.queue.waiting()[0].remove()
    learner.join(60)
    assert bench.queued == [2, 3]
    bench.context.orders["now"] = STOP
    bench.publish(400, since=4)  # a run that ends does not wait
    assert bench.queued == [2, 3, 4]
    assert "training waits" in bench.events()[0].details["message"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (20_000, 20, "auto")),
        ({"steps": 5_000_000}, (100_000, 20, "auto")),
        ({"steps": 5_000_000, "evaluation.every_steps": 7}, (7, 20, "auto")),
        ({"episodes": 10}, (20_000, 20, "auto")),
        ({"evaluation.episodes": 3}, (20_000, 3, 3)),
        ({"evaluation.episodes": 3, "evaluation.final_episodes": "auto"}, (20_000, 3, "auto")),
        ({"evaluation.final_episodes": 50}, (20_000, 20, 50)),
    ],
)
def test_defaults_follow_from_the_length_of_the_run(given, expected):
    evaluation = resolve_config(("call", {"env": "CartPole-v1", **given})).config.evaluation
    assert (evaluation.every_steps, evaluation.episodes, evaluation.final_episodes) == expected


@pytest.mark.parametrize(
    ("given", "max_share"),
    [
        ({"mode": "sync"}, None),
        ({"mode": "single", "target_return": 475.0}, None),
        ({"mode": "sync", "evaluation.max_share": 0.3}, 0.3),
        ({"mode": "async"}, 0.1),
        ({"mode": "async", "target_return": 475.0}, 0.5),
        ({"mode": "async", "evaluation.max_share": 1.0}, 1.0),
        ({"mode": "workers", "algo": "a3c"}, 0.1),
    ],
)
def test_only_modes_without_a_queue_limit_the_time_of_evaluations(given, max_share):
    config = resolve_config(("call", {"env": "CartPole-v1", "runtime": "processes", **given})).config
    assert config.evaluation.max_share == max_share
    assert config.queues_evaluations == (config.mode in ("single", "sync"))
