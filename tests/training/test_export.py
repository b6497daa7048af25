"""Exported tables choose what the policy chooses, without Steppe."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest

import steppe as product
from steppe.core.contracts.errors import UsageError
from steppe.training.export import export_table

pytestmark = pytest.mark.integration
QUICK = {"runtime": "inline", "evaluation.episodes": 1, "evaluation.every_steps": 10**6}


@pytest.mark.parametrize("algo", ["q-learning", "double-q"])
def test_an_exported_table_plays_as_the_policy(algo, steppe, tmp_path):
    run = product.train(
        "CliffWalking-v1", algo=algo, steps=20_000, name="cliff", **{"environment.time_limit": 200}, **QUICK
    )
    done = steppe("export", "cliff", "--npz", "table.npz", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["states"] == 48
    table = np.load(tmp_path / "table.npz")
    policy, env = product.load(run.path), gym.make("CliffWalking-v1")
    seen = [env.reset(seed=0)[0]]
    for _ in range(20):
        seen.append(env.step(int(table["greedy"][seen[-1]]))[0])
    assert [policy.act(state) for state in seen] == [int(table["greedy"][state]) for state in seen]
    visited = np.unique(seen)
    assert (table["q_table"][visited].argmax(axis=1) == table["greedy"][visited]).all()


def test_a_network_is_no_table(tmp_path):
    run = product.train("steppe/Identity-v0", steps=64, **QUICK)
    with pytest.raises(UsageError, match="did not learn a table"):
        export_table(run.path, tmp_path / "table.npz")
    assert not (tmp_path / "table.npz").exists()
