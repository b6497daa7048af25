"""Write a learned table for use without Steppe. Nothing is written that chooses other actions than the policy."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.errors import RunFailed, UsageError
from steppe.core.io.atomic_files import write_atomic
from steppe.training.load import LoadedPolicy, load


def export_table(run: str | Path, file: Path) -> dict[str, Any]:
    """Write a run's table as .npz: `q_table` [states, actions], and the policy's action `greedy` [states].

    The actions are compared with the table's best ones before anything is written.
    """
    policy = load(run)
    if not isinstance(policy, LoadedPolicy) or policy.spec.num_states is None:
        raise UsageError(f"{run} did not learn a table with numbered states: it cannot be written as .npz")
    agent: Any = policy.agent
    states = policy.spec.num_states
    table = np.asarray(agent.algorithm.q_table, np.float64)
    greedy = np.asarray(agent.act(np.arange(states), np.zeros(states, np.bool_), explore=False)["action"])
    worse = table[np.arange(states), greedy] < table.max(axis=1)  # of equal values any may be chosen
    if worse.any():
        raise RunFailed(f"the table's best actions differ from the policy's in {int(worse.sum())} states: not written")
    packed = io.BytesIO()
    np.savez_compressed(packed, q_table=table, greedy=greedy)
    write_atomic(file, packed.getvalue())
    return {"file": str(file), "states": states, "actions": table.shape[1]}
