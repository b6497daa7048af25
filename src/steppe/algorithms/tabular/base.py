"""BaseAlgorithm: the interface of all tabular algorithms, and the training loop of one episode.

A user's algorithm needs only `_initialize_q_table`, `update` and `select_action`; algorithms in compiled code are based
on table.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from operator import index
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from steppe.algorithms.tabular import io
from steppe.algorithms.tabular.rng import WordStream
from steppe.algorithms.tabular.schedules import Schedule, from_plain, require_rate, to_plain
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import ConfigError, NotFinite, WorldError

_EPSILON_DECAY, _EPSILON_MIN = 0.995, 0.01


class BaseAlgorithm(ABC):
    """Learns action values Q(state, action) for states and actions numbered from 0.

    `learning_rate` and `epsilon` are numbers or schedules over environment steps; a number for `epsilon` is multiplied
    by `epsilon_decay` after every episode, down to `epsilon_min`. Without a `seed`, random choices differ in every
    instance.
    """

    takes_masks: ClassVar[bool] = False  # whether select_action and update take a mask of allowed actions

    def __init__(
        self,
        state_size: int,
        action_size: int,
        learning_rate: float | Schedule = 0.1,
        discount_factor: float = 0.99,
        epsilon: float | Schedule = 0.1,
        epsilon_decay: float = _EPSILON_DECAY,
        epsilon_min: float = _EPSILON_MIN,
        seed: int | None = None,
    ) -> None:
        self.state_size = _require_size(state_size, "state_size")
        self.action_size = _require_size(action_size, "action_size")
        self.learning_rate_schedule = learning_rate if isinstance(learning_rate, Schedule) else None
        self.epsilon_schedule = epsilon if isinstance(epsilon, Schedule) else None
        if self.epsilon_schedule is not None and (epsilon_decay, epsilon_min) != (_EPSILON_DECAY, _EPSILON_MIN):
            raise ConfigError(
                "epsilon is a schedule: epsilon_decay and epsilon_min would have no effect, leave them out"
            )
        self.learning_rate = _initial_rate(learning_rate, "learning_rate")
        self.discount_factor = require_rate(discount_factor, "discount_factor")
        self.epsilon = _initial_rate(epsilon, "epsilon")
        self.epsilon_decay = require_rate(epsilon_decay, "epsilon_decay")
        self.epsilon_min = require_rate(epsilon_min, "epsilon_min")
        self.words = WordStream(seed)
        self.step_count = 0
        self.episode_count = 0
        self.q_table = self._initialize_q_table()

    @abstractmethod
    def _initialize_q_table(self) -> Any:
        """Return a new table: an array [state_size, action_size] or a list of lists."""

    @abstractmethod
    def update(self, state: int, action: int, reward: float, next_state: int, done: bool) -> None:
        """Learn from one step; `done` means terminated, not truncated: there is no value after `next_state`."""

    @abstractmethod
    def select_action(self, state: int) -> int:
        """Select an action in `state`, exploring with probability `epsilon`."""

    def update_turn(self, state: int, action: int, reward: float, next_state: int, done: bool) -> None:
        """Learn from a move in a turn-based game, where the opponent is next to move: towards r − γ max Q(s′, ·)."""
        following = 0.0 if done else max(float(value) for value in self.q_table[next_state])
        value = float(self.q_table[state][action])
        target = reward - self.discount_factor * following
        self.q_table[state][action] = value + self.learning_rate * (target - value)

    def train_episode(self, env: Any) -> float:
        """Play one episode and learn from every step; return the sum of rewards.

        An episode ends when the environment terminates or truncates it, or after its `max_episode_steps`; only
        termination means that no value follows. With two agents that take turns, the second agent's rewards count
        negative.
        """
        in_turns, limit = is_turn_based(env), step_limit(env)
        learn = self.update_turn if in_turns else self.update
        state, info = env.reset()
        total, sign, length, ended, masks = 0.0, 1.0, 0, False, self._masks(info)
        while not ended:
            action = self.select_action(state, *masks)
            next_state, reward, terminated, truncated, info = env.step(action)
            masks = self._masks(info)
            learn(state, action, reward, next_state, bool(terminated), *masks)
            state, length = next_state, length + 1
            total += sign * float(reward)
            sign = -sign if in_turns else sign
            self.count_steps(1)
            ended = terminated or truncated or length >= limit
        self.end_episode()
        return total

    def count_steps(self, num_steps: int) -> None:
        """Count environment steps and update scheduled rates."""
        self.step_count += num_steps
        if self.learning_rate_schedule is not None:
            self.learning_rate = self.learning_rate_schedule(self.step_count)
        if self.epsilon_schedule is not None:
            self.epsilon = self.epsilon_schedule(self.step_count)

    def rates(self, num_rows: int, steps_per_row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return learning rates and epsilons for the next rows of `steps_per_row` steps each, for batched kernels."""
        steps = self.step_count + steps_per_row * np.arange(num_rows)
        rate, epsilon = self.learning_rate_schedule, self.epsilon_schedule
        return (
            np.full(num_rows, self.learning_rate) if rate is None else rate.values(steps),
            np.full(num_rows, self.epsilon) if epsilon is None else epsilon.values(steps),
        )

    def end_episode(self) -> None:
        """Count the end of an episode, whatever its reason."""
        self.episode_count += 1
        self._update_epsilon()

    def count_episodes(self, num_episodes: int) -> None:
        """Count episodes that ended in parallel environments; epsilon decays once for each."""
        self.episode_count += num_episodes
        if self.epsilon_schedule is None:
            fallen = self.epsilon * self.epsilon_decay**num_episodes
            self.epsilon = min(self.epsilon, max(self.epsilon_min, fallen))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything learned or pending, by name."""
        return {"q_table": np.asarray(self.q_table)}

    def settings(self) -> Tree:
        """Return the constructor arguments that rebuild this algorithm, as plain data."""
        rate, epsilon = self.learning_rate_schedule, self.epsilon_schedule
        plain = {
            "state_size": self.state_size,
            "action_size": self.action_size,
            "learning_rate": to_plain(self.learning_rate if rate is None else rate),
            "discount_factor": self.discount_factor,
            "epsilon": to_plain(self.epsilon if epsilon is None else epsilon),
        }
        if epsilon is None:
            plain |= {"epsilon_decay": self.epsilon_decay, "epsilon_min": self.epsilon_min}
        return plain

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with everything needed to continue exactly from here; the write is atomic."""
        io.save(Path(path), self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Build an algorithm from a file of `save`."""
        saved = io.read(Path(path), cls.__name__)
        rates = {name: from_plain(saved.settings[name]) for name in ("learning_rate", "epsilon")}
        agent = cls(**{**saved.settings, **rates})
        agent._take(saved)
        return agent

    def restore(self, path: str | Path) -> None:
        """Restore what `save` wrote: table, counters, rates and random stream; the file must fit this algorithm."""
        self._take(io.read(Path(path), type(self).__name__))

    def _take(self, saved: io.SavedLearner) -> None:
        """Restore all of a file or, if it does not fit, nothing; arrays stay where they are in memory."""
        io.require_fit(saved, self.arrays())
        self.words.restore(saved.words)
        for name, array in saved.arrays.items():
            self._put(name, array)
        for name, value in saved.counters.items():
            setattr(self, name, value)

    def _put(self, name: str, array: np.ndarray) -> None:
        if isinstance(self.q_table, list):
            self.q_table = array.tolist()
        else:
            self.arrays()[name][...] = array

    def _update_epsilon(self) -> None:
        """Decay epsilon after an episode; an epsilon below the minimum stays as it was set."""
        if self.epsilon_schedule is None:
            self.epsilon = min(self.epsilon, max(self.epsilon_min, self.epsilon * self.epsilon_decay))

    def _masks(self, info: dict[str, Any]) -> tuple[Any, ...]:
        return (info.get("action_mask"),) if self.takes_masks else ()


def is_turn_based(env: Any) -> bool:
    """Whether two agents take turns in this environment."""
    num_agents = find_wrapped_attribute(env, "num_agents", 1)
    if num_agents not in (1, 2):
        raise WorldError(f"num_agents={num_agents}: classic learners know one agent, or two that take turns")
    return bool(num_agents == 2)


def step_limit(env: Any) -> float:
    """Return the number of steps after which an episode is truncated; inf if the environment does not declare it.

    Environments with their own time limit need not declare it.
    """
    limit = find_wrapped_attribute(env, "max_episode_steps", None)
    return math.inf if limit is None else float(limit)


def find_wrapped_attribute(env: Any, name: str, default: Any) -> Any:
    """Return an attribute of an environment or of one that it wraps."""
    while True:
        if hasattr(env, name):
            return getattr(env, name)
        if getattr(env, "env", None) is None:
            return default
        env = env.env


def require_index(value: Any, name: str, size: int) -> int:
    """Return a state or action as a plain int; ConfigError unless it is an index of the table."""
    try:
        number = index(value)
    except TypeError:
        raise ConfigError(
            f"{name} {value!r} is not a whole number: FlattenMultiDiscreteWrapper numbers several choices, and "
            "gymnasium.wrappers.DiscretizeObservation real ones"
        ) from None
    if not 0 <= number < size:
        raise ConfigError(f"{name} {number} is outside the table: there are {size}, numbered from 0")
    return number


def require_finite_reward(reward: Any) -> float:
    """Return a reward as a plain float; ConfigError or NotFinite unless it is a finite number."""
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"the reward {reward!r:.60} is not a number; nothing was learned from it") from None
    if not math.isfinite(value):
        raise NotFinite(f"the reward is {value}; nothing was learned from it")
    return value


def require_action_mask(mask: Any, size: int, where: str) -> np.ndarray:
    """Return a mask as booleans; ConfigError unless it fits the actions and allows at least one."""
    flags = as_bools(mask, f"the action mask of {where}")
    if flags.shape != (size,):
        raise ConfigError(f"the action mask of {where} has shape {flags.shape}, but there are {size} actions")
    if not flags.any():
        raise ConfigError(f"the action mask of {where} allows no action")
    return flags


def as_bools(values: Any, name: str) -> np.ndarray:
    """Return values as a contiguous bool array; ConfigError if they cannot be converted."""
    try:
        return np.ascontiguousarray(values, np.bool_)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be truth values: {error}") from None


def as_bool(value: Any, name: str) -> bool:
    """Return a value as a plain bool; ConfigError if it cannot be converted."""
    try:
        return bool(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be a truth value: {error}") from None


def _require_size(value: Any, name: str) -> int:
    try:
        size = index(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r} must be a whole number") from None
    if size < 1:
        raise ConfigError(f"{name}={size} must be at least 1")
    return size


def _initial_rate(rate: float | Schedule, name: str) -> float:
    return rate(0) if isinstance(rate, Schedule) else require_rate(rate, name)
