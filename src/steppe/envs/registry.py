"""Ids of the built-in environments; their code is imported only when one is built."""

from __future__ import annotations

import gymnasium as gym

_BUILTINS = {
    "steppe/Identity-v0": ("IdentityEnv", {}),
    "steppe/ImageIdentity-v0": ("ImageIdentityEnv", {}),
    "steppe/ContinuousIdentity-v0": ("ContinuousIdentityEnv", {}),
    "steppe/TwoStateChain-v0": ("TwoStateChainEnv", {}),
    "steppe/TwoStateChainTruncated-v0": ("TwoStateChainEnv", {"truncate": True}),
    "steppe/Counting-v0": ("CountingEnv", {}),
    "steppe/Sleep-v0": ("SleepEnv", {}),
    "steppe/Failing-v0": ("FailingEnv", {}),
    "steppe/NaN-v0": ("NaNEnv", {}),
}
_TWO_ARMED_BANDIT, _TICTACTOE = "steppe/TwoArmedBandit-v0", "steppe/TicTacToe-v0"
_RECALL, _TEAMWORK, PATHFINDING = "steppe/Recall-v0", "steppe/Teamwork-v0", "steppe/Pathfinding-v0"


def register_builtins() -> None:
    """Register the built-in environments with Gymnasium; idempotent."""
    for name, (kind, kwargs) in _BUILTINS.items():
        if name not in gym.registry:
            gym.register(name, f"steppe.envs.toy.builtin:{kind}", kwargs=dict(kwargs))
    if _TWO_ARMED_BANDIT not in gym.registry:
        gym.register(_TWO_ARMED_BANDIT, "steppe.envs.toy.bandit:TwoArmedBanditEnv")
    if _TICTACTOE not in gym.registry:
        gym.register(
            _TICTACTOE,
            "steppe.envs.tictactoe.env:TicTacToeEnv",
            vector_entry_point="steppe.envs.tictactoe.vector:TicTacToeVectorEnv",
            kwargs={"opponent": "random"},
        )
    if _RECALL not in gym.registry:
        gym.register(
            _RECALL,
            "steppe.envs.toy.recall:RecallEnv",
            vector_entry_point="steppe.envs.toy.recall:RecallVectorEnv",
            reward_threshold=0.95,
        )
    if _TEAMWORK not in gym.registry:  # PettingZoo environments: Gymnasium itself can build only their vector versions
        gym.register(_TEAMWORK, "steppe.envs.toy.teamwork:TeamworkEnv")
    if PATHFINDING not in gym.registry:
        gym.register(
            PATHFINDING,
            "steppe.envs.pathfinding.parallel:PathfindingParallel",
            vector_entry_point="steppe.envs.pathfinding.vector:PathfindingVectorEnv",
        )
