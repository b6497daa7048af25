"""Deprecated names of DHC's hyperparameters: they work with a warning, and without one in stored runs."""

import os
import subprocess
import sys
import warnings

import pytest

from steppe.algorithms.dhc.config import DHCConfig
from steppe.compose.settings import DEFAULT_ARGUMENTS, resolve_agent_config
from steppe.core.config.run import flatten, resolve_config, unflatten
from steppe.core.config.tunables import validate_changes
from steppe.core.contracts.errors import ConfigError, RenamedKeyWarning

pytestmark = pytest.mark.unit

OLD = {
    "advice": 1.0,
    "advice_margin": 0.2,
    "lesson_agents": [1, 2],
    "lesson_sizes": [5],
    "lesson_episodes": 10,
    "lesson_pass": 0.5,
}
CURRENT = DHCConfig(
    expert_coef=1.0, expert_margin=0.2, stage_agents=[1, 2], stage_sizes=[5], stage_episodes=10, stage_pass=0.5
)
RUN = {"env": "steppe/Pathfinding-v0", "algo": "dhc"}


def test_deprecated_names_work_with_a_warning_each():
    with pytest.warns(RenamedKeyWarning) as caught:
        assert DHCConfig(**OLD) == CURRENT
    assert str(caught[0].message) == "the configuration key advice is now called expert_coef"
    assert len(caught) == len(OLD)


@pytest.mark.parametrize("prefix", ["", "agent."])
def test_layers_take_deprecated_names_in_their_order(prefix):
    with pytest.warns(RenamedKeyWarning, match="advice is now called expert_coef"):
        resolved = resolve_config(("file", {**RUN, f"{prefix}advice": 1.0}), ("flag", {"expert_coef": 2.0}))
    assert resolved.config.agent.expert_coef == 2.0
    assert resolved.sources["agent.expert_coef"] == "flag"


def test_changes_of_a_live_run_and_the_composition_api_take_deprecated_names():
    with pytest.warns(RenamedKeyWarning):
        assert validate_changes(DHCConfig(), {"advice": 2}) == {"expert_coef": 2.0}
    with pytest.warns(RenamedKeyWarning):
        config, decided = resolve_agent_config("dhc", DEFAULT_ARGUMENTS, {"lesson_pass": 0.5})
    assert config.stage_pass == decided["stage_pass"] == 0.5


def test_both_names_of_a_key_are_an_error():
    with pytest.raises(ConfigError, match="advice is the deprecated name of expert_coef"):
        DHCConfig(advice=1.0, expert_coef=1.0)
    with pytest.raises(ConfigError, match="lesson_pass is the deprecated name of stage_pass"):
        resolve_config(("file", {**RUN, "lesson_pass": 0.5, "agent.stage_pass": 0.5}))


def test_stored_runs_have_deprecated_names_without_a_warning():
    current = resolve_config(("call", {**RUN, **CURRENT.model_dump(exclude_unset=True)})).config
    stored = flatten(current)
    for old, new in DHCConfig.renamed.items():
        stored[f"agent.{old}"] = stored.pop(f"agent.{new}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unflatten(stored) == current
        assert unflatten(flatten(current) | {"agent.advice": 3.0}).agent.expert_coef == 3.0  # a recorded later change


def test_the_command_line_prints_one_sentence():
    command = "from steppe.cli.main import entry; entry()"
    arguments = ["config", "show", "-s", "algo=dhc", "-s", "advice=1.0"]
    shown = subprocess.run(
        [sys.executable, "-c", command, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": ""},
        check=True,
    )
    assert shown.stderr == "steppe: the configuration key advice is now called expert_coef\n"
