"""Names of other libraries lead to the right key."""

from __future__ import annotations

import pytest

from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.config.foreign_names import algorithm_hint
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError

pytestmark = pytest.mark.unit


def refusal(**settings) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve_config(("call", {"env": "CartPole-v1", **settings}))
    return str(raised.value)


@pytest.mark.parametrize(
    ("algo", "name", "hint"),
    [
        ("ppo", "lr", "Did you mean 'learning_rate'?"),
        ("ppo", "total_timesteps", "Did you mean 'steps'?"),
        ("ppo", "n_steps", "Did you mean 'segment_steps'?"),
        ("ppo", "batch_size", "Did you mean 'minibatch_size'?"),
        ("dqn", "target_update_interval", "Did you mean 'target_every'?"),
        ("ppo", "policy_kwargs", "Did you mean 'hidden', the width of each hidden layer: hidden=[64, 64]?"),
        ("ppo", "agent.net_arch", "Did you mean 'hidden', the width"),
        ("ppo", "verbose", "The progress is always shown"),
        ("ppo", "learning_rat", "Did you mean 'learning_rate'?"),
    ],
)
def test_a_key_leads_to_ours(algo, name, hint):
    assert f"unknown key {name!r}. {hint}" in refusal(algo=algo, **{name: 1})


def test_a_hint_names_only_what_the_algorithm_has():
    assert "mean 'clip'" not in refusal(algo="dqn", clip_range=0.1)


def test_one_number_of_layers_is_answered_with_how_to_write_it():
    assert refusal(hidden=256) == "agent.hidden=256: write a list, such as agent.hidden=[256, 256]"


def test_an_algorithm_that_others_have():
    assert "In its place, for continuous actions there is 'ppo'" in algorithm_hint("SAC", ALGORITHMS)
    assert algorithm_hint("nothing", ALGORITHMS) == ""
    with pytest.raises(ConfigError, match=r"there is no algorithm 'td3'.* there is 'ppo'"):
        resolve_config(("call", {"env": "Pendulum-v1", "algo": "td3"}))
