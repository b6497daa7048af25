"""Configurations and snapshots that name a module as an earlier version called it are still understood."""

from __future__ import annotations

import importlib.util
from enum import Enum

import pytest

from steppe.algorithms.ppo.ppo import PPO
from steppe.core.config import references
from steppe.core.config.algorithm_table import agent_class
from steppe.core.config.moved_modules import MOVED
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import CannotResume
from steppe.envs import probe
from steppe.envs.lookup import find_env
from steppe.envs.snapshot.reader import SnapshotReader
from steppe.envs.snapshot.writer import SnapshotWriter
from steppe.envs.tictactoe.env import TicTacToeEnv
from steppe.envs.toy.builtin import CountingEnv
from steppe.runtimes import find_launcher
from steppe.runtimes.inline import launch as inline
from steppe.runtimes.processes import launch as processes

pytestmark = pytest.mark.unit


def test_every_module_that_moved_is_where_the_table_says() -> None:
    assert [new for new in MOVED.values() if importlib.util.find_spec(new) is None] == []


def test_an_old_name_is_no_module_with_code_of_its_own() -> None:
    """A package that took the name of a module defines no function or class, so nothing that is there today is hidden by the table."""
    both = {old for old in MOVED if (package := old.rpartition(".")[0]) and _exists(package) and _exists(old)}
    packages = {old: importlib.import_module(old) for old in both}
    assert "steppe.envs.pathfinding" in packages
    own = {name: [thing for thing in vars(module).values() if callable(thing)] for name, module in packages.items()}
    assert {name for name, things in own.items() if any(thing.__module__ == name for thing in things)} == set()


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_references_of_an_earlier_version_are_resolved() -> None:
    assert references.resolve_reference("steppe.envs.builtin:CountingEnv") is CountingEnv
    assert references.resolve_reference("steppe.envs.tictactoe:TicTacToeEnv") is TicTacToeEnv
    assert agent_class("steppe.agents.ppo:PPO") is PPO
    assert agent_class("steppe.agents:PPO") is PPO
    assert find_launcher("steppe.runtimes.processes:launch") is processes.launch
    assert find_launcher("steppe.runtimes.inline:launch") is inline.launch


def test_environments_of_an_earlier_version_are_found() -> None:
    spec = probe("steppe.envs.builtin:CountingEnv", EnvConfig())
    assert spec.obs == probe("steppe.envs.toy.builtin:CountingEnv", EnvConfig()).obs
    old, new = find_env("steppe.envs.tictactoe_aec"), find_env("steppe.envs.tictactoe.aec")
    assert old is new
    wrapped = EnvConfig(wrappers=("steppe.envs.flattening:FlattenMultiDiscreteWrapper",))
    assert probe("steppe/Counting-v0", wrapped).obs == probe("steppe/Counting-v0", EnvConfig()).obs


def test_a_snapshot_of_an_earlier_version_is_restored() -> None:
    env, other = CountingEnv(), CountingEnv()
    env.reset(seed=0)
    other.reset(seed=1)
    env.step(env.action_space.sample())
    tree = SnapshotReader().object(env)
    assert tree["class"] == "steppe.envs.toy.builtin.CountingEnv"
    tree["class"] = "steppe.envs.builtin.CountingEnv"
    building = SnapshotWriter()
    building.fill(other, tree)
    building.finish()
    assert SnapshotReader().object(other) == {**tree, "class": "steppe.envs.toy.builtin.CountingEnv"}


def test_an_enumeration_of_an_earlier_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = Enum("Colour", ["RED"], module="steppe.envs.toy.builtin")
    monkeypatch.setattr("steppe.envs.toy.builtin.Colour", colour, raising=False)
    tree = SnapshotReader().value(colour["RED"])
    assert SnapshotWriter().value({**tree, "module": "steppe.envs.builtin"}) is colour["RED"]


def test_what_a_snapshot_left_out_may_have_had_another_name() -> None:
    """Objects that are not read must be there again, of the class that the snapshot says."""
    env, other = CountingEnv(), CountingEnv()
    env.reset(seed=0)
    other.reset(seed=0)
    tree = SnapshotReader().object(env)
    other.held = TicTacToeEnv()  # type: ignore[attr-defined]
    SnapshotWriter().fill(other, {**tree, "left": {"held": "steppe.envs.tictactoe.TicTacToeEnv"}})
    with pytest.raises(CannotResume, match=r"should be a steppe\.envs\.bandit\.TicTacToeEnv"):
        SnapshotWriter().fill(other, {**tree, "left": {"held": "steppe.envs.bandit.TicTacToeEnv"}})
