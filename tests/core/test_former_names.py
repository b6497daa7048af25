"""Names of Steppe 0.1 that users' code has: they work, and say what they are called now."""

from __future__ import annotations

import pytest

import steppe
from steppe import envs
from steppe.algorithms.ppo.config import PPOConfig
from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import EnvConfig

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("old", "new"), [("check", "check_env"), ("make_world", "make_segment_env"), ("require_sound", "require_valid_env")]
)
def test_functions_of_environments(old: str, new: str):
    with pytest.warns(DeprecationWarning, match=f"steppe.envs.{old} is now called {new}"):
        found = getattr(envs, old)
    assert found is getattr(envs, new)


def test_choosing_defaults_for_an_environment():
    spec = envs.probe("CartPole-v1", EnvConfig())
    with pytest.warns(DeprecationWarning, match="fitted is now called resolve_defaults"):
        found = PPOConfig().fitted(spec, 2, None)
    assert found == PPOConfig().resolve_defaults(spec, 2, None)


def test_overriding_it_by_the_former_name_is_refused():
    with pytest.raises(TypeError, match=r"Mine\.fitted: call it resolve_defaults"):

        class Mine(AgentConfig):
            def fitted(self, spec: steppe.EnvSpec, num_actors: int, num_envs: int | None):
                return self, 1
