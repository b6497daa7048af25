"""Classic reinforcement learning: tabular algorithms, schedules, small environments and related tools.

Every name is imported on first use. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.algorithms.tabular.base import BaseAlgorithm
    from steppe.algorithms.tabular.batch_kernels import vectorized_q_update
    from steppe.algorithms.tabular.double_q import DoubleQLearning
    from steppe.algorithms.tabular.memory_limits import MemoryPool
    from steppe.algorithms.tabular.multistep import NStepQLearning, QLambda
    from steppe.algorithms.tabular.q_learning import (
        ListQLearning,
        MemoryOptimizedQLearning,
        NumpyQLearning,
        OptimalQLearning,
    )
    from steppe.algorithms.tabular.sarsa import SARSA, ExpectedSARSA
    from steppe.algorithms.tabular.schedules import ConstantSchedule, ExponentialSchedule, LinearSchedule, Schedule
    from steppe.algorithms.tabular.table import TableAlgorithm
    from steppe.envs.tictactoe.env import TicTacToeEnv, tictactoe
    from steppe.envs.tictactoe.rules import TurnGame, exact_return, worst_return
    from steppe.envs.tictactoe.vector import TicTacToeVectorEnv
    from steppe.envs.toy.bandit import TwoArmedBanditEnv
    from steppe.envs.toy.base import DistClassicRLEnv
    from steppe.envs.wrappers.discretize import DiscretizeWrapper
    from steppe.envs.wrappers.flatten import FlattenMultiDiscreteWrapper
    from steppe.records.statistics import TrainingStatistics
    from steppe.replay.buffer import ExperienceBuffer
    from steppe.roles.tabular.game_trainer import GameTally, GameTrainer
    from steppe.training.tabular import DistAsyncQLearning, ParallelQLearning, SingleThreadQLearning

_HOMES = {
    "BaseAlgorithm": "algorithms.tabular.base",
    "ConstantSchedule": "algorithms.tabular.schedules",
    "DiscretizeWrapper": "envs.wrappers.discretize",
    "DistAsyncQLearning": "training.tabular",
    "DistClassicRLEnv": "envs.toy.base",
    "DoubleQLearning": "algorithms.tabular.double_q",
    "ExpectedSARSA": "algorithms.tabular.sarsa",
    "ExperienceBuffer": "replay.buffer",
    "ExponentialSchedule": "algorithms.tabular.schedules",
    "FlattenMultiDiscreteWrapper": "envs.wrappers.flatten",
    "GameTally": "roles.tabular.game_trainer",
    "GameTrainer": "roles.tabular.game_trainer",
    "LinearSchedule": "algorithms.tabular.schedules",
    "ListQLearning": "algorithms.tabular.q_learning",
    "MemoryOptimizedQLearning": "algorithms.tabular.q_learning",
    "MemoryPool": "algorithms.tabular.memory_limits",
    "NStepQLearning": "algorithms.tabular.multistep",
    "NumpyQLearning": "algorithms.tabular.q_learning",
    "OptimalQLearning": "algorithms.tabular.q_learning",
    "ParallelQLearning": "training.tabular",
    "QLambda": "algorithms.tabular.multistep",
    "SARSA": "algorithms.tabular.sarsa",
    "Schedule": "algorithms.tabular.schedules",
    "SingleThreadQLearning": "training.tabular",
    "TableAlgorithm": "algorithms.tabular.table",
    "TicTacToeEnv": "envs.tictactoe.env",
    "TicTacToeVectorEnv": "envs.tictactoe.vector",
    "TrainingStatistics": "records.statistics",
    "TurnGame": "envs.tictactoe.rules",
    "TwoArmedBanditEnv": "envs.toy.bandit",
    "exact_return": "envs.tictactoe.rules",
    "tictactoe": "envs.tictactoe.env",
    "vectorized_q_update": "algorithms.tabular.batch_kernels",
    "worst_return": "envs.tictactoe.rules",
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
