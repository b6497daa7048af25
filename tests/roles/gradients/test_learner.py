"""Where gradients become weights: the same as one learner with everybody's batch, every push accounted for, none twice."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.algorithms import make_agent
from steppe.core.config.run import resolve_config
from steppe.core.contracts.algorithm import trainable_entries
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec, PushSpec
from steppe.core.io import codec
from steppe.roles.gradients.learner import GradientMemory, make_server
from steppe.testing.agent import invented_draw, invented_segment

pytestmark = pytest.mark.unit

SPEC = EnvSpec("invented", FieldSpec("obs", (3,), "float32"), ActionSpec("discrete", (4,)))


def config_of(algo="a2c", actors=3, **settings):
    layer = {"env": "x", "algo": algo, "mode": "workers", "actors": actors, "hidden": (16,), "learning_rate": 0.01}
    config = resolve_config(("test", {**layer, **settings})).config
    return config.model_copy(update={"agent": config.agent.resolve_defaults(SPEC, actors, None)[0]})


def agent_of(config, seed=0):
    agent = make_agent(config.algo, config.agent, SPEC, seed=seed)
    agent.begin(4, np.random.default_rng(seed))
    return agent


def store_of(config, **more):
    agent = agent_of(config)
    pushes_per_update = None if config.params.in_rounds else config.params.update_every or 1
    return GradientMemory(
        agent,
        make_server(config, agent),
        config.actors,
        pushes_per_update=pushes_per_update,
        **{"use_agent_learning_rate": True, **more},
    )


def push_of(gradient, worker=0, sequence=0, *, rows=1, updates=0, size=None):
    push = Segment.blank(PushSpec.of(size or len(gradient) + 5))
    push["gradient"][0, 0, : len(gradient)] = gradient
    push["counts"][0, 0] = (rows, rows, 0, updates)
    push.header = SegmentHeader("run", worker, 0, sequence, 0)
    return push


def rollouts(agent, config, count, seed):
    return [
        Batch(invented_segment(agent, config.agent, SPEC, np.random.default_rng([seed, n])).columns)
        for n in range(count)
    ]


def joined(batches):
    return Batch({name: np.concatenate([b[name] for b in batches], axis=1) for name in batches[0].columns})


def draws(count, seed):
    return [invented_draw(SPEC, np.random.default_rng([seed, n])) for n in range(count)]


def appended(batches):
    columns = {name: np.concatenate([b[name] for b in batches]) for name in batches[0].columns}
    return Batch(columns, weights=np.concatenate([b.weights for b in batches]))


def parameters(agent):
    arrays = agent.weights().arrays()
    return np.concatenate([arrays[entry.name].ravel() for entry in trainable_entries(agent)])


@pytest.mark.parametrize("algo", ["a2c", "dqn"])
def test_a_round_of_workers_is_one_learner_with_the_joint_batch(algo):
    """Eight updates, clipped and by Adam: the store's parameters are those of the agent's own optimizer to float tolerance."""
    config = config_of(algo, **{"params.in_rounds": True})
    store, alone = store_of(config), agent_of(config)
    for number in range(8):
        if algo == "a2c":
            batches = rollouts(store.agent, config, 3, number)
            rows, whole = [int(b["valid"].sum()) for b in batches], joined(batches)
        else:
            batches = draws(3, number)
            rows, whole = [len(b["reward"]) for b in batches], appended(batches)
        gradients = [store.agent.gradients(batch) for batch in batches]
        store.add([
            push_of(gradient, worker, number, rows=count, updates=number)
            for worker, (gradient, count) in enumerate(zip(gradients, rows, strict=True))
        ])  # fmt: skip
        assert store.ready()
        assert store.learn(store.sample()).updates == 1
        alone.apply(alone.gradients(whole))
        np.testing.assert_allclose(parameters(store.agent), parameters(alone), rtol=1e-3, atol=2e-6)
    assert not np.allclose(parameters(alone), parameters(agent_of(config)), atol=1e-3), "nothing was learned"


def test_gradients_that_come_alone_are_applied_one_after_the_other():
    config = config_of("a3c")
    store, alone = store_of(config), agent_of(config)
    for number in range(4):
        batches = rollouts(alone, config, 2, number)
        gradients = [alone.gradients(batch) for batch in batches]  # both made with the same weights
        store.add([push_of(g, worker, number, updates=2 * number) for worker, g in enumerate(gradients)])
        assert store.learn(store.sample()).updates == 2
        for gradient in gradients:
            alone.apply(gradient)
        np.testing.assert_allclose(parameters(store.agent), parameters(alone), rtol=1e-3, atol=2e-6)
    assert store.stats()["staleness"] == 0.5, "every second one was one update old"
    assert store.stats()["pushes"] == 8.0


def test_several_may_be_applied_together_without_rounds():
    store = store_of(config_of("a3c", **{"params.update_every": 3}))
    size = len(parameters(store.agent))
    for number in range(7):
        store.add([push_of(np.ones(size), number % 2, number)])
        assert store.ready() == (number % 3 == 2)
        if store.ready():
            store.learn(store.sample())
    assert store.server.updates == 2


def test_every_push_is_accounted_for_and_bad_ones_change_nothing():
    config = config_of("a3c", **{"params.max_staleness": 1, "params.optimizer": "sgd"})
    store = store_of(config)
    before, size = parameters(store.agent).copy(), len(parameters(store.agent))
    good = np.full(size, 1e-3, np.float32)
    store.add([push_of(np.full(size, np.nan), 0, 0), push_of(good, 1, 0), push_of(good, 2, 0)])
    store.learn(store.sample())
    np.testing.assert_allclose(parameters(store.agent), before - 2 * 0.01 * 1e-3, rtol=1e-4)
    store.add([push_of(good, 0, 1, updates=0), push_of(np.empty(0), 1, 1, rows=0, size=size)])
    assert dict(store.refused) == {"not_finite": 1, "too_stale": 1}
    workers = store.server.get_server_stats()["workers"]
    assert {name: (found["accepted"], found["refused"]) for name, found in workers.items()} == {
        "worker-0": (0, {"not_finite": 1, "too_stale": 1}), "worker-1": (1, {}), "worker-2": (1, {}),
    }  # fmt: skip
    assert store.stats()["refused"] == 2.0


def test_an_update_into_infinity_is_dropped_and_the_next_one_counts():
    store = store_of(config_of("a3c", **{"params.optimizer": "sgd", "params.max_grad_norm": 0.0}))
    before, size = parameters(store.agent).copy(), len(parameters(store.agent))
    store.agent.learning_rate = 1e30
    store.add([push_of(np.full(size, 1e30), 0, 0)])
    assert dict(store.refused) == {"not_applied": 1}
    assert not store.ready()
    store.agent.learning_rate = 0.5
    store.add([push_of(np.full(size, 0.5), 0, 1)])
    store.learn(store.sample())
    np.testing.assert_allclose(parameters(store.agent), before - 0.25, rtol=1e-5)


@pytest.mark.parametrize("in_rounds", [False, True])
def test_a_checkpoint_goes_on_exactly(in_rounds):
    config = config_of("a3c", 2, **{"params.in_rounds": in_rounds})
    whole, saved = store_of(config), store_of(config)
    size, stream = len(parameters(whole.agent)), np.random.default_rng(0)
    pushes = [
        [push_of(stream.standard_normal(size).astype(np.float32), worker, n, updates=n) for worker in range(2)]
        for n in range(6)
    ]
    for pair in pushes[:3]:
        for store in (whole, saved):
            store.add(pair)
            store.learn(store.sample())
    tree, weights = codec.unpack(codec.pack(saved.state())), saved.agent.weights().copy()
    resumed = store_of(config)
    resumed.agent.load(weights)
    resumed.restore(tree)
    for pair in pushes[3:]:
        for store in (whole, resumed):
            store.add(pair)
            store.learn(store.sample())
    assert resumed.agent.weights().sha256() == whole.agent.weights().sha256()
    assert resumed.server.get_server_stats()["accepted_pushes"] == 12


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"params.aggregation": "krum"}, "needs 3 gradients, 1 are applied together"),
        ({"params.in_rounds": True, "params.update_every": 2}, "a round is one gradient of each of the 3 workers"),
        ({"params.in_rounds": True, "params.damping": 0.5}, "in rounds none is old"),
        ({"params.optimizer": "sgd", "params.beta1": 0.5}, "params.beta1 means nothing to the optimizer 'sgd'"),
        ({"normalize_obs": True}, "normalize_obs needs the experience of all workers in one process"),
        ({"flow.window_s": 1.0}, "flow.window_s means nothing in mode 'workers'"),
        ({"flow.refresh_every": 2}, "flow.refresh_every means nothing in mode 'workers' with a3c"),
        ({"mode": "sync", "params.damping": 0.5}, "params.damping is for workers"),
    ],
)
def test_what_does_not_go_together_gets_one_sentence(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config_of("a3c", **settings)


def test_replays_of_workers_are_plain():
    for key, value in (("prioritized", True), ("buffer_storage", "disk")):
        with pytest.raises(ConfigError, match=key):
            config_of("dqn", **{key: value})
    with pytest.raises(ConfigError, match="sequences are drawn by priorities"):
        config_of("r2d2")


def test_parameters_of_another_agent_are_refused():
    config = config_of("a3c")
    with pytest.raises(ConfigError, match="the parameter server lacks 'towers"):
        make_server(config, agent_of(config), {"other": np.zeros(3, np.float32)})
