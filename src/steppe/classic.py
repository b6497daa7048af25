"""Classic reinforcement learning in one place: tabular learners, their schedules, small worlds and what goes with them.

Every name is loaded when it is first used. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.agents.tabular.algorithm import BaseAlgorithm
    from steppe.agents.tabular.double_q import DoubleQLearning
    from steppe.agents.tabular.kernels import vectorized_q_update
    from steppe.agents.tabular.memory import MemoryPool
    from steppe.agents.tabular.multistep import NStepQLearning, QLambda
    from steppe.agents.tabular.q_learning import (
        ListQLearning,
        MemoryOptimizedQLearning,
        NumpyQLearning,
        OptimalQLearning,
    )
    from steppe.agents.tabular.sarsa import SARSA, ExpectedSARSA
    from steppe.agents.tabular.schedules import ConstantSchedule, ExponentialSchedule, LinearSchedule, Schedule
    from steppe.agents.tabular.table import TableAlgorithm
    from steppe.agents.tabular.trainer import GameTally, GameTrainer
    from steppe.core.games import TurnGame, exact_return, worst_return
    from steppe.envs.bandit import TwoArmedBanditEnv
    from steppe.envs.classic import DistClassicRLEnv
    from steppe.envs.discretizing import DiscretizeWrapper
    from steppe.envs.flattening import FlattenMultiDiscreteWrapper
    from steppe.envs.tictactoe import TicTacToeEnv, tictactoe
    from steppe.envs.tictactoe_vector import TicTacToeVectorEnv
    from steppe.loops.classic import DistAsyncQLearning, ParallelQLearning, SingleThreadQLearning
    from steppe.records.statistics import TrainingStatistics
    from steppe.replay.buffer import ExperienceBuffer

_HOMES = {
    "BaseAlgorithm": "agents.tabular.algorithm",
    "ConstantSchedule": "agents.tabular.schedules",
    "DiscretizeWrapper": "envs.discretizing",
    "DistAsyncQLearning": "loops.classic",
    "DistClassicRLEnv": "envs.classic",
    "DoubleQLearning": "agents.tabular.double_q",
    "ExpectedSARSA": "agents.tabular.sarsa",
    "ExperienceBuffer": "replay.buffer",
    "ExponentialSchedule": "agents.tabular.schedules",
    "FlattenMultiDiscreteWrapper": "envs.flattening",
    "GameTally": "agents.tabular.trainer",
    "GameTrainer": "agents.tabular.trainer",
    "LinearSchedule": "agents.tabular.schedules",
    "ListQLearning": "agents.tabular.q_learning",
    "MemoryOptimizedQLearning": "agents.tabular.q_learning",
    "MemoryPool": "agents.tabular.memory",
    "NStepQLearning": "agents.tabular.multistep",
    "NumpyQLearning": "agents.tabular.q_learning",
    "OptimalQLearning": "agents.tabular.q_learning",
    "ParallelQLearning": "loops.classic",
    "QLambda": "agents.tabular.multistep",
    "SARSA": "agents.tabular.sarsa",
    "Schedule": "agents.tabular.schedules",
    "SingleThreadQLearning": "loops.classic",
    "TableAlgorithm": "agents.tabular.table",
    "TicTacToeEnv": "envs.tictactoe",
    "TicTacToeVectorEnv": "envs.tictactoe_vector",
    "TrainingStatistics": "records.statistics",
    "TurnGame": "core.games",
    "TwoArmedBanditEnv": "envs.bandit",
    "exact_return": "core.games",
    "tictactoe": "envs.tictactoe",
    "vectorized_q_update": "agents.tabular.kernels",
    "worst_return": "core.games",
}

__all__ = [
    "SARSA",
    "BaseAlgorithm",
    "ConstantSchedule",
    "DiscretizeWrapper",
    "DistAsyncQLearning",
    "DistClassicRLEnv",
    "DoubleQLearning",
    "ExpectedSARSA",
    "ExperienceBuffer",
    "ExponentialSchedule",
    "FlattenMultiDiscreteWrapper",
    "GameTally",
    "GameTrainer",
    "LinearSchedule",
    "ListQLearning",
    "MemoryOptimizedQLearning",
    "MemoryPool",
    "NStepQLearning",
    "NumpyQLearning",
    "OptimalQLearning",
    "ParallelQLearning",
    "QLambda",
    "Schedule",
    "SingleThreadQLearning",
    "TableAlgorithm",
    "TicTacToeEnv",
    "TicTacToeVectorEnv",
    "TrainingStatistics",
    "TurnGame",
    "TwoArmedBanditEnv",
    "exact_return",
    "tictactoe",
    "vectorized_q_update",
    "worst_return",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"steppe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
