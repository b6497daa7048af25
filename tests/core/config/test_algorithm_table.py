"""The table of algorithms: which configuration classes there are, and that a lookup imports one algorithm only."""

from __future__ import annotations

import subprocess
import sys

import pytest

from steppe.core.config.agent import AgentConfig
from steppe.core.config.algorithm_table import ALGORITHMS, agent_class, config_class

pytestmark = pytest.mark.unit


def test_every_name_has_a_configuration_of_its_own_and_an_agent() -> None:
    assert len(ALGORITHMS) == len(list(ALGORITHMS)) == len({*ALGORITHMS.values()})
    for name, config in ALGORITHMS.items():
        assert issubclass(config, AgentConfig)
        assert config_class(name) is config
        assert f"{agent_class(name).__module__}:{agent_class(name).__name__}" == config.implementation
    assert "ppo" in ALGORITHMS
    assert "no-such-algorithm" not in ALGORITHMS


def test_configuration_imports_only_the_algorithm_that_is_asked_for() -> None:
    script = (
        "import sys; from steppe.core.config.run import resolve_config; "
        "found = lambda: sorted(name.split('.')[2] for name in sys.modules if name.endswith('.config') and "
        "name.startswith('steppe.algorithms.')); print(found()); "
        "resolve_config(('call', {'env': 'CartPole-v1', 'algo': 'dqn'})); print(found(), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["[]", "['dqn'] False"]
