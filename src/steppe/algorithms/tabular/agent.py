"""Tabular algorithms as agents: they act in many environments and learn from rollouts; the weights are the table.

The update rules are in the algorithms' own files. Axes are [T, B, …].
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import numpy as np

from steppe.algorithms.tabular.base import BaseAlgorithm
from steppe.algorithms.tabular.config import ClassicConfig
from steppe.algorithms.tabular.double_q import DoubleQLearning
from steppe.algorithms.tabular.multistep import MultiStepAlgorithm, NStepQLearning, QLambda
from steppe.algorithms.tabular.q_learning import OptimalQLearning
from steppe.algorithms.tabular.rng import WordStream
from steppe.algorithms.tabular.sarsa import SARSA, ExpectedSARSA
from steppe.algorithms.tabular.schedules import from_plain
from steppe.algorithms.tabular.table import TableAlgorithm
from steppe.core.config import references
from steppe.core.config.fields import SCHEDULE_STEPS
from steppe.core.config.tunables import validate_changes
from steppe.core.config.validation import validate_config
from steppe.core.contracts.algorithm import Learned, Progress, Tree
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.weights import Weights, WeightsLayout


class TabularAgent:
    """One table that acts and learns. Its rates follow the run's progress; epsilon is published with the weights."""

    algorithm_class: ClassVar[type[TableAlgorithm]]
    options: ClassVar[tuple[str, ...]] = ()  # configuration fields that the algorithm's constructor takes

    def __init__(self, config: Any, spec: EnvSpec, *, seed: int, device: str = "cpu") -> None:
        if device not in ("cpu", "auto"):
            raise ConfigError(f"device={device!r}: tables are learned on the CPU, leave device out")
        assert spec.num_states is not None, "a table needs numbered states"
        self.config, self.spec, self.version = config, spec, -1
        self.algorithm: Any = self._make(spec.num_states, spec.action.sizes[0], seed)
        storage = get_table_storage(self.algorithm)
        self._weights = Weights.from_arrays({"q_table": storage, "epsilon": np.array([self.algorithm.epsilon])})
        arrays = self._weights.arrays()
        set_table_storage(self.algorithm, arrays["q_table"])
        self._epsilon = arrays["epsilon"]
        self._all_allowed = np.ones((0, *spec.action.sizes), np.bool_)

    def _make(self, num_states: int, num_actions: int, seed: int) -> BaseAlgorithm:
        config = self.config
        chosen = {name: getattr(config, name) for name in self.options}
        rates = {"learning_rate": config.learning_rate or 0.1, "discount_factor": config.gamma}
        quiet = {"epsilon": config.epsilon, "epsilon_decay": 1.0, "epsilon_min": 0.0}
        return self.algorithm_class(num_states, num_actions, **rates, **quiet, **chosen, seed=seed)

    @property
    def table(self) -> np.ndarray:
        """The learned values, one row per state (and table), sharing this agent's memory."""
        storage = get_table_storage(self.algorithm)
        return storage.reshape(-1, storage.shape[-1])

    @property
    def pull(self) -> float:
        """Share of a value's error that one visit removes, over all updates that follow the visit."""
        algorithm = self.algorithm
        if isinstance(algorithm, QLambda):
            return float(algorithm.learning_rate / max(1e-3, 1.0 - algorithm.discount_factor * algorithm.trace_decay))
        return float(algorithm.learning_rate)

    def begin(self, num_envs: int, stream: np.random.Generator, *, actor: int = 0, num_actors: int = 1) -> None:
        """Take all randomness from `stream` from now on."""
        self.algorithm.words = WordStream(int(stream.integers(2**63)))

    def act(
        self, obs: np.ndarray, starts: np.ndarray, *, explore: bool = True, masks: np.ndarray | None = None
    ) -> Mapping[str, np.ndarray]:
        """Return an action for each state; `masks` [B, A] says which are allowed, and is recorded with them."""
        if masks is None:
            if len(self._all_allowed) != len(obs):
                self._all_allowed = np.ones((len(obs), *self.spec.action.sizes), np.bool_)
            masks = self._all_allowed
        flags = None if masks.all() else masks
        return {"action": self._choose(obs, flags, explore=explore), "mask": masks}

    def _choose(self, states: np.ndarray, masks: np.ndarray | None, *, explore: bool) -> np.ndarray:
        chosen: np.ndarray = self.algorithm.select_actions(states, masks, deterministic=not explore)
        return chosen

    def acting_state(self) -> Tree:
        """Return the position of the random stream."""
        return {"words": self.algorithm.words.state()}

    def restore_acting(self, state: Tree) -> None:
        """Restore the position of the random stream."""
        self.algorithm.words.restore(state["words"])

    def load(self, weights: Weights) -> None:
        """Adopt a table and its epsilon."""
        weights.require(self._weights.layout, f"this {type(self).__name__}")
        np.copyto(self._weights.buffer, weights.buffer)
        counts = (weights.version, weights.updates, weights.env_steps, weights.episodes)
        version, updates, env_steps, episodes = counts
        self._weights = self._weights.stamped(
            version=version, updates=updates, env_steps=env_steps, episodes=episodes, train_s=weights.train_s
        )
        self.algorithm.epsilon = float(self._epsilon[0])
        self.version = version

    def observe(self, segment: Segment, progress: Progress) -> None:
        """Update the rates to the run's progress."""
        self.follow(progress)

    def follow(self, progress: Progress) -> None:
        """Set learning rate and epsilon to their values at this point of the run."""
        config, steps = self.config, progress.total_steps or SCHEDULE_STEPS
        begun = min(1.0, progress.env_steps / (config.exploration_fraction * steps))
        done = min(1.0, progress.env_steps / steps)
        rate = config.learning_rate or 0.1
        end = rate if config.learning_rate_end is None else config.learning_rate_end
        self.algorithm.step_count = progress.env_steps
        self.algorithm.learning_rate = rate + (end - rate) * done
        self.set_epsilon(config.epsilon + (config.epsilon_end - config.epsilon) * begun)

    def retune(self, values: Mapping[str, Any]) -> None:
        """Change rates from the next rollout on; ConfigError, and no change, if a value is invalid."""
        changes = validate_changes(self.config, values)
        self.config = validate_config(type(self.config), self.config.model_dump() | changes, "agent.")
        self.algorithm.discount_factor = self.config.gamma

    def set_epsilon(self, epsilon: float) -> None:
        """Set epsilon here and in the weights, so that every process that loads them adopts it."""
        self.algorithm.epsilon = float(epsilon)
        self._epsilon[0] = epsilon

    def learn(self, batch: Batch) -> Learned:
        """Learn from a rollout in one pass, step by step in the order in which the steps happened.

        Trajectories are followed to the rollout's end and bootstrapped there.
        """
        columns, more = flatten_rollout(batch, self.spec.num_states or 0)
        algorithm = self.algorithm
        more["turn_based"] = self.spec.in_turns
        truncated, streams, following = (more.pop(name) for name in ("truncated", "streams", "following"))
        if isinstance(algorithm, MultiStepAlgorithm):
            more |= {"truncated": truncated, "streams": streams}
        elif isinstance(algorithm, SARSA):
            more["next_actions"] = self._next_actions(columns, following, more.pop("next_masks"))
        algorithm.learn(*columns, **more)
        stats = {"epsilon": algorithm.epsilon, "learning_rate": algorithm.learning_rate}
        return Learned(len(columns[0]), stats)

    def _next_actions(
        self, columns: tuple[np.ndarray, ...], following: np.ndarray, masks: np.ndarray | None
    ) -> np.ndarray:
        """Return the actions taken next; where the rollout does not contain them, those that would be selected now."""
        unknown = np.flatnonzero((following < 0) & ~columns[4])
        if len(unknown):
            allowed = None if masks is None else masks[unknown]
            following[unknown] = self.algorithm.select_actions(columns[3][unknown], allowed)
        known: np.ndarray = np.maximum(following, 0)
        return known

    def gradients(self, batch: Batch) -> NoReturn:
        """Raise UsageError: tables have no gradients."""
        raise UsageError("a table is learned without gradients: share it with mode 'workers'")

    def apply(self, gradient: np.ndarray) -> NoReturn:
        """Raise UsageError: tables take no gradients."""
        raise UsageError("a table is learned without gradients: share it with mode 'workers'")

    def weights(self) -> Weights:
        """Return the current table, sharing this agent's memory."""
        return self._weights

    @property
    def layout(self) -> WeightsLayout:
        """Layout of the weights."""
        return self._weights.layout

    def state(self) -> Tree:
        """Return random stream, rates and counters. Pending steps are not included: none outlives a rollout."""
        algorithm = self.algorithm
        counts = {"steps": algorithm.step_count, "episodes": algorithm.episode_count}
        return {"words": algorithm.words.state(), "learning_rate": algorithm.learning_rate, **counts}

    def restore(self, state: Tree) -> None:
        """Restore what `state` returned."""
        algorithm = self.algorithm
        algorithm.words.restore(state["words"])
        algorithm.learning_rate = float(state["learning_rate"])
        algorithm.step_count, algorithm.episode_count = int(state["steps"]), int(state["episodes"])


def flatten_rollout(batch: Batch, num_states: int) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """Return a rollout as time-major columns that all algorithms learn from, and those that only some need.

    The actions allowed in the last state of a truncated episode are unknown. If masks are used, such a step is left
    out, and its trajectory ends one step earlier.
    """
    obs, action, terminated, valid = batch["obs"], batch["action"], batch["terminated"], batch["valid"].copy()
    cut = terminated | batch["truncated"]
    after = np.where(cut, batch["final_obs"], obs[1:])
    masks = None if batch["mask"].all() else batch["mask"][1:]
    ends = cut & ~terminated
    if masks is not None:
        valid &= ~ends
        ends[:-1], ends[-1] = ends[1:], False
    ends[-1] |= ~terminated[-1]
    following = np.full(action.shape, -1, np.int64)
    following[:-1] = np.where(cut[:-1], -1, action[1:])
    keep, width = valid.ravel(), action.shape[1]
    streams = np.tile(np.arange(width), len(action))
    flat = (obs[:-1], action, batch["reward"].astype(np.float64), after, terminated)
    columns = tuple(np.ascontiguousarray(column.ravel()[keep]) for column in flat)
    more: dict[str, Any] = {
        "truncated": (ends & ~terminated).ravel()[keep],
        "streams": streams[keep],
        "following": following.ravel()[keep],
        "next_masks": None if masks is None else masks.reshape(-1, masks.shape[-1])[keep],
    }
    return columns, more


def get_table_storage(algorithm: BaseAlgorithm) -> np.ndarray:
    """Return the array that an algorithm learns in; ConfigError if it has none that can be shared."""
    storage = getattr(algorithm, "storage", algorithm.q_table)
    if not isinstance(storage, np.ndarray) or storage.dtype.kind != "f":
        raise ConfigError(
            f"a {type(algorithm).__name__} keeps its table in a {type(storage).__name__}, which cannot lie in shared memory: "
            "use OptimalQLearning, or SingleThreadQLearning"
        )
    return storage


def set_table_storage(algorithm: BaseAlgorithm, storage: np.ndarray) -> None:
    """Make an algorithm learn in this memory, starting from its contents."""
    if isinstance(algorithm, TableAlgorithm):
        algorithm.adopt(storage)
    else:
        algorithm.q_table = storage


class QLearningAgent(TabularAgent):
    """Q-learning."""

    algorithm_class = OptimalQLearning


class SarsaAgent(TabularAgent):
    """SARSA."""

    algorithm_class = SARSA


class ExpectedSarsaAgent(TabularAgent):
    """Expected SARSA."""

    algorithm_class = ExpectedSARSA


class DoubleQAgent(TabularAgent):
    """Double Q-learning."""

    algorithm_class = DoubleQLearning


class NStepQAgent(TabularAgent):
    """n-step Q-learning."""

    algorithm_class = NStepQLearning
    options = ("n_step",)


class QLambdaAgent(TabularAgent):
    """Watkins's Q(λ)."""

    algorithm_class = QLambda
    options = ("trace_decay",)


class ClassicAgent(TabularAgent):
    """Any algorithm of `steppe.classic`, by its class and its constructor's options; it updates its rates itself."""

    Config = ClassicConfig

    def _make(self, num_states: int, num_actions: int, seed: int) -> BaseAlgorithm:
        kind = references.resolve_reference(self.config.learner)
        given = {
            name: from_plain(value) if _is_schedule(value) else value for name, value in self.config.options.items()
        }
        takes = inspect.signature(kind).parameters.values()
        if any(parameter.name == "seed" or parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
            given.setdefault("seed", seed)
        made: BaseAlgorithm = kind(num_states, num_actions, **given)
        return made

    def _choose(self, states: np.ndarray, masks: np.ndarray | None, *, explore: bool) -> np.ndarray:
        """Select actions one by one if the algorithm only handles single states."""
        algorithm = self.algorithm
        if isinstance(algorithm, TableAlgorithm):
            return super()._choose(states, masks, explore=explore)
        epsilon, algorithm.epsilon = algorithm.epsilon, algorithm.epsilon if explore else 0.0
        try:
            more = [()] * len(states) if masks is None or not algorithm.takes_masks else [(mask,) for mask in masks]
            rows = zip(states, more, strict=True)
            return np.array([algorithm.select_action(int(state), *mask) for state, mask in rows], np.int64)
        finally:
            algorithm.epsilon = epsilon

    def follow(self, progress: Progress) -> None:
        """Let the algorithm update its own rates, by its schedules or its episodes."""
        self.algorithm.step_count = progress.env_steps
        self.algorithm.count_steps(0)
        self._epsilon[0] = self.algorithm.epsilon


def _is_schedule(value: Any) -> bool:
    return isinstance(value, dict) and "kind" in value
