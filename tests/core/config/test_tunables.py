"""Which hyperparameters can change while a run goes on, and which values are taken at all."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.config.run import SECTIONS, RunConfig, resolve_config
from steppe.core.config.tunables import needs_spec, tunable_fields, validate_changes
from steppe.core.contracts.errors import ConfigError, SteppeError
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec

pytestmark = pytest.mark.unit

_VECTOR, _IMAGE, _MAP = (
    FieldSpec("obs", shape, dtype) for shape, dtype in (((4,), "float32"), ((3, 9, 9), "uint8"), ((6, 9, 9), "uint8"))
)
_CHOICE, _BOX = ActionSpec("discrete", (5,)), ActionSpec("box", (1,), (-1.0,), (1.0,))
SPECS = [
    EnvSpec("vector", _VECTOR, _CHOICE),
    EnvSpec("continuous", _VECTOR, _BOX),
    EnvSpec("team", _VECTOR, _CHOICE, num_agents=2, agents=("a", "b")),
    EnvSpec("numbered", FieldSpec("obs", (), "int64"), _CHOICE, num_states=7),
    EnvSpec("numbered team", FieldSpec("obs", (), "int64"), _CHOICE, num_states=7, num_agents=2, agents=("a", "b")),
    EnvSpec("images", _IMAGE, _CHOICE),
    EnvSpec("maps", _MAP, _CHOICE, num_agents=2, agents=("a", "b"), largest_stage=(2, 20)),
]


def config_of(algo, **more):
    return resolve_config(("call", {"env": "CartPole-v1", "algo": algo, **more})).config


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_live_name_is_a_field_that_may_change(algo):
    kind = ALGORITHMS[algo]
    assert set(kind.live) <= set(kind.model_fields)
    assert set(kind.own_steps) <= set(kind.live)
    assert not set(kind.live) & set(kind.fixed)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_what_some_environments_refuse_is_declared(algo):
    """By trying: a value that one environment takes and another refuses, where both take the algorithm as it was."""
    agent = config_of(algo).agent
    fields = [name for name in type(agent).model_fields if name not in agent.fixed]
    found = set()
    for name, value in itertools.product(fields, (0.5, 1, 2, True, [1], "own", "disk", "first", {"a": "one"})):
        with contextlib.suppress(ConfigError):
            changed = validate_changes(agent, {name: value})
            if len({_takes(agent, changed, spec) for spec in SPECS if _takes(agent, {}, spec)}) == 2:
                found.add(name)
                assert needs_spec(agent, changed) == [name]
                after = type(agent).model_validate({**agent.model_dump(), **changed})
                assert needs_spec(after, changed) == [], "it has that value already"
    never = {"policies"} if agent.memory != "rollout" else set()  # no environment lets these have several
    assert found == (set(agent.by_spec) & set(fields)) - never


def _takes(agent, changed, spec):
    try:
        agent.model_copy(update=changed).require(spec, "it")
    except SteppeError:
        return False
    return True


def test_workers_take_no_optimizer_steps_of_their_own():
    alone, pushing = config_of("ppo"), config_of("ppo", mode="workers", actors=2)
    assert set(tunable_fields(alone)) - set(tunable_fields(pushing)) == {
        "epochs",
        "minibatch_size",
        "clip",
        "target_kl",
    }
    assert "learning_rate" not in tunable_fields(config_of("a3c", **{"params.learning_rate": 0.1}))
    assert tunable_fields(config_of("q-learning", mode="workers")) == ()
    assert "learning_rate" in tunable_fields(config_of("q-learning"))


@pytest.mark.parametrize(
    ("algo", "key", "value"),
    [
        ("ppo", "clip", 1e308),
        ("ppo", "hidden", [1_000_000_000]),
        ("ppo", "hidden", [8] * 65),
        ("ppo", "entropy_coef", 1e300),
        ("ppo", "learning_rate", 1e9),
        ("ppo", "epochs", 10**9),
        ("ppo", "segment_steps", 10**12),
        ("ppo", "max_grad_norm", 1e300),
        ("dqn", "batch_size", 10**9),
        ("dqn", "n_step", 10**9),
        ("dqn", "buffer_size", 10**18),
        ("r2d2", "cell_size", 10**9),
        ("dhc", "channels", 8 * 10**9),
        ("ppo", "steps", 10**18),
        ("ppo", "envs", 10**9),
        ("ppo", "actors", 10**9),
        ("ppo", "flow.window_s", 1e300),
        ("ppo", "flow.hang_s", 1e12),
        ("ppo", "flow.trace_spans", 10**18),
        ("a3c", "params.eps", 1e300),
        ("ppo", "ray.actor_cpus", 1e300),
        ("ppo", "kafka.replan_s", 1e300),
        ("ppo", "environment.resize", 10**9),
    ],
)
def test_a_value_beyond_all_measure_is_refused_in_one_sentence(algo, key, value):
    with pytest.raises(ConfigError, match=r"less than or equal to|at most"):
        config_of(algo, **{key: value})


@pytest.mark.parametrize("kind", [RunConfig, *SECTIONS.values(), *ALGORITHMS.values()])
def test_every_number_has_an_upper_bound(kind):
    schema = kind.model_json_schema()
    for name, part in (("", schema), *schema.get("$defs", {}).items()):
        for field, values in part.get("properties", {}).items():
            for number in _numbers(values):
                assert {"maximum", "exclusiveMaximum"} & set(number), f"{name or kind.__name__}.{field}"


def _numbers(schema):
    """The schemas of all numbers in a field: alone, as one of several kinds of value, in a list, or in a table."""
    if schema.get("type") in ("number", "integer") and "enum" not in schema:
        yield schema
    inner = [*schema.get("anyOf", ()), schema.get("items"), *schema.get("prefixItems", ())]
    for part in (*inner, schema.get("additionalProperties")):
        if isinstance(part, dict):
            yield from _numbers(part)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"clip": 1e308}, "less than or equal to 10"),
        ({"learning_rate": None}, "has been chosen"),
        ({"hidden": [8]}, "cannot change"),
        ({"learning_rat": 1.0}, "Did you mean 'learning_rate'"),
        ({"minibatch_size": 8, "recurrent": True}, "no whole sequence of 16 steps"),
    ],
)
def test_changes_that_would_be_refused_at_the_start_are_refused_later(values, words):
    agent = config_of("ppo", learning_rate=1e-3, segment_steps=16).agent
    with pytest.raises(ConfigError, match=words):
        validate_changes(agent, values)


def test_no_limit_on_divergence_is_a_value_too():
    agent = config_of("ppo", target_kl=0.1).agent
    assert validate_changes(agent, {"target_kl": None}) == {"target_kl": None}
