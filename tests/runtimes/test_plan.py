"""Plans: which roles there are, where they live, and what is fitted to the world."""

from __future__ import annotations

import pytest

from steppe.core.config import references
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import FactoryError, WorldError
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec
from steppe.runtimes.plan import make_plan

pytestmark = pytest.mark.unit

WORLD = EnvSpec("world", FieldSpec("obs", (4,), "float32"), ActionSpec("discrete", (2,)))
FAST = EnvSpec("fast", FieldSpec("obs", (4,), "float32"), ActionSpec("discrete", (2,)), native_vector=True)
CONTINUOUS = EnvSpec("arm", FieldSpec("obs", (4,), "float32"), ActionSpec("box", (2,), (-1.0, -1.0), (1.0, 1.0)))


def plan_of(spec=WORLD, **layer):
    return make_plan(resolve_config(("flag", {"env": "CartPole-v1", **layer})).config, spec)


def names(plan):
    return {worker_slot: [role.name for role in roles] for worker_slot, roles in plan.worker_slots().items()}


def test_in_mode_single_actor_and_learner_share_a_worker_slot():
    assert names(plan_of(mode="single")) == {"learner": ["actor-0", "learner"], "manager": ["manager"]}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_in_other_modes_each_role_has_its_own_worker_slot(mode):
    plan = plan_of(mode=mode, actors=2)
    assert names(plan) == {"actor-0": ["actor-0"], "actor-1": ["actor-1"], "learner": ["learner"], "manager": ["manager"]}  # fmt: skip
    assert plan.readers == ("actor-0", "actor-1")


@pytest.mark.parametrize(
    ("layer", "lockstep", "slots"),
    [
        ({"mode": "single"}, True, 1),
        ({"mode": "sync", "actors": 2}, True, 1),
        ({"mode": "async", "actors": 1}, False, 2),
        ({"mode": "async", "actors": 2}, False, 1),
        ({"mode": "async", "actors": 2, "flow.slots_per_actor": 3}, False, 3),
    ],
)
def test_lockstep_and_slots_by_mode(layer, lockstep, slots):
    plan = plan_of(**layer)
    assert (plan.lockstep, plan.slots_per_actor) == (lockstep, slots)
    assert plan.channel_bytes == plan.segment.nbytes * slots * plan.config.actors


@pytest.mark.parametrize(
    ("layer", "ahead"),
    [
        ({}, 1),
        ({"mode": "sync", "actors": 2}, 1),
        ({"mode": "sync", "flow.ahead": 0}, 0),
        ({"mode": "single"}, 0),
        ({"mode": "async"}, 0),
    ],
)
def test_rounds_ahead(layer, ahead):
    """One slot is enough for them: it is free again when the learner has taken the segment, before it learns."""
    plan = plan_of(**layer)
    assert plan.ahead == ahead
    assert plan.slots_per_actor == (2 if plan.config.mode == "async" else 1)


def test_what_was_left_open_is_chosen_and_written_down():
    plan = plan_of(FAST, actors=2)
    assert (plan.config.envs, plan.config.agent.segment_steps, plan.config.agent.minibatch_size) == (64, 32, 512)
    assert (plan.segment.num_envs, plan.segment.num_steps) == (64, 32)
    plan = plan_of(WORLD, algo="dqn")
    assert plan.config.envs * plan.config.agent.segment_steps == 256


def test_given_settings_are_kept():
    plan = plan_of(FAST, envs=3, segment_steps=5, minibatch_size=7)
    assert (plan.num_envs, plan.segment.num_steps, plan.config.agent.minibatch_size) == (3, 5, 7)


def test_a_fitted_configuration_gives_the_same_plan():
    """Every process makes its plan from the configuration that the supervisor fitted."""
    for spec in (WORLD, FAST):
        for algo in ("ppo", "dqn"):
            plan = plan_of(spec, algo=algo, actors=2)
            assert make_plan(plan.config, spec) == plan


def test_columns_of_the_agent_are_in_the_segment():
    assert [field.name for field in plan_of(algo="ppo").segment.extras] == ["logp", "value"]
    assert plan_of(algo="dqn").segment.extras == ()
    assert plan_of(CONTINUOUS).segment.action == FieldSpec("action", (2,), "float32")


def test_an_action_space_the_algorithm_cannot_do():
    with pytest.raises(
        WorldError, match="dqn cannot choose continuous actions, which arm has; these can: a2c, a3c, ppo"
    ):
        plan_of(CONTINUOUS, algo="dqn")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"env": "local"}, "the environment"),
        ({"network": "local"}, "the network"),
        ({"environment.wrappers": ("local",)}, "a wrapper"),
    ],
)
def test_what_other_processes_cannot_find_is_refused(layer, words):
    text = references.make_reference(lambda: None)
    key, value = next(iter(layer.items()))
    given = {key: (text,) if isinstance(value, tuple) else text}
    with pytest.raises(FactoryError, match=words):
        plan_of(runtime="processes", **given)
    plan_of(runtime="inline", **given)
