"""Batches by hand with values that no agent can learn from: one sentence each, and nothing is learned."""

from __future__ import annotations

import numpy as np
import pytest

from steppe import DistributedAgent, EnvSpec, FieldSpec
from steppe.core.contracts.errors import NotFinite, UsageError
from steppe.core.contracts.specs import ActionSpec

pytestmark = pytest.mark.integration

SPECS = {
    "discrete": EnvSpec("test", FieldSpec("obs", (3,), "float32"), ActionSpec("discrete", (2,))),
    "multi_discrete": EnvSpec("test", FieldSpec("obs", (3,), "float32"), ActionSpec("multi_discrete", (2, 4))),
    "box": EnvSpec("test", FieldSpec("obs", (3,), "float32"), ActionSpec("box", (2,), (-1.0, -1.0), (1.0, 1.0))),
    "table": EnvSpec("test", FieldSpec("obs", (), "int64"), ActionSpec("discrete", (2,)), num_states=5),
}
KINDS = [("dqn", "discrete"), ("ppo", "discrete"), ("a2c", "multi_discrete"), ("ppo", "box"), ("q-learning", "table")]


def rows(spec: EnvSpec, count: int = 6) -> dict[str, np.ndarray]:
    """Flat transitions with all that these agents need."""
    stream = np.random.default_rng(0)
    seen = stream.integers(5, size=count) if spec.num_states else stream.random((count, 3), np.float32)
    field = spec.action.field
    return {
        "obs": seen,
        "action": np.zeros((count, *field.shape), field.dtype),
        "reward": stream.random(count, np.float32),
        "next_obs": np.roll(seen, -1, axis=0),
        "terminated": np.zeros(count, bool),
        "logp": np.full(count, -0.7, np.float32),
        "value": np.zeros(count, np.float32),
        "mask": np.ones((count, 2), bool),
    }


@pytest.mark.parametrize(("algorithm", "kind"), [(a, k) for a, k in KINDS if k != "box"])
@pytest.mark.parametrize("bad", [10**8, 1000, 7, -5])
def test_an_action_out_of_range_is_refused_and_nothing_is_learned(algorithm: str, kind: str, bad: int) -> None:
    agent, batch = DistributedAgent(algorithm).bind(SPECS[kind]), rows(SPECS[kind])
    batch["action"][3] = bad
    before = agent.get_policy_parameters()
    calls = [agent.learn_from_batch] + ([] if kind == "table" else [agent.compute_gradients])
    steps = [{name: column[row] for name, column in batch.items()} for row in range(6)]
    for call, given in [*((call, batch) for call in calls), (agent.update_policy, steps)]:
        with pytest.raises(UsageError, match=rf"'action' is {bad} .*where whole numbers from 0 to 1 are allowed"):
            call(given)
    after = agent.get_policy_parameters()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("algorithm", "kind"), KINDS)
@pytest.mark.parametrize("column", ["obs", "reward"])
def test_what_is_not_finite_is_refused(algorithm: str, kind: str, column: str) -> None:
    agent, batch = DistributedAgent(algorithm).bind(SPECS[kind]), rows(SPECS[kind])
    batch[column] = batch[column].astype(np.float64)
    batch[column][2] = np.nan
    with pytest.raises((NotFinite, UsageError), match=f"'{column}'.* nan"):
        agent.learn_from_batch(batch)


def test_states_out_of_range_are_refused() -> None:
    agent = DistributedAgent("q-learning").bind(SPECS["table"])
    for column in ("obs", "next_obs"):
        batch = rows(SPECS["table"])
        batch[column][2] = 5
        with pytest.raises(UsageError, match=r"(obs|final_obs)' is 5 .*from 0 to 4"):
            agent.learn_from_batch(batch)


def test_importance_weights_of_another_length_are_refused() -> None:
    agent = DistributedAgent("dqn").bind(SPECS["discrete"])
    for weights in (np.ones(5), np.ones(0), np.float64(1), np.ones((6, 2))):
        with pytest.raises(UsageError, match="'weights' has shape"):
            agent.learn_from_batch(rows(SPECS["discrete"]) | {"weights": weights})


def test_a_rollout_without_a_valid_row_has_no_gradient() -> None:
    agent, flat = DistributedAgent("ppo").bind(SPECS["discrete"]), rows(SPECS["discrete"])
    rollout = {name: column[:, None] for name, column in flat.items()}
    rollout |= {"obs": np.concatenate([rollout["obs"], rollout["obs"][:1]]), "truncated": rollout["terminated"]}
    rollout |= {"final_obs": rollout.pop("next_obs"), "valid": np.zeros((6, 1), bool)}
    with pytest.raises(UsageError, match="no valid row"):
        agent.compute_gradients(rollout)
    assert agent.learn_from_batch(rollout)["updates"] == 0


def test_parameters_and_gradients_must_be_finite_numbers() -> None:
    agent = DistributedAgent("ppo").bind(SPECS["discrete"])
    good = agent.get_policy_parameters()
    name = next(iter(good))
    gradients = agent.compute_gradients(rows(SPECS["discrete"]))
    for bad in (np.nan, np.inf, 1e300):
        broken = {key: value.astype(np.float64) for key, value in good.items()}
        broken[name].flat[0] = bad
        with pytest.raises(NotFinite, match=f"'{name}'"):
            agent.set_policy_parameters(broken)
        slope = {key: value.astype(np.float64) for key, value in gradients.items()}
        slope[name].flat[0] = bad
        with pytest.raises(NotFinite, match=f"'{name}'"):
            agent.apply_gradients(slope)
    with pytest.raises(UsageError, match="no gradients"):
        agent.apply_gradients({})
    assert all(np.array_equal(good[key], value) for key, value in agent.get_policy_parameters().items())
