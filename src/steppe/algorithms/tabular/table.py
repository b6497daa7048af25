"""Base classes of algorithms whose table is one contiguous float32 array, updated by compiled kernels.

The array may be in any memory, shared memory included: assign it to `q_table`. The update rules are in the algorithms'
own files; this one validates inputs and reports errors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from operator import index
from typing import Any, ClassVar, NamedTuple

import numpy as np

from steppe.algorithms.tabular import batch_kernels, step_kernels
from steppe.algorithms.tabular.base import (
    BaseAlgorithm,
    as_bool,
    as_bools,
    is_turn_based,
    require_action_mask,
    require_finite_reward,
    require_index,
    step_limit,
)
from steppe.algorithms.tabular.memory_limits import require_memory
from steppe.core.array_checks import as_column, as_numeric_array
from steppe.core.contracts.errors import ConfigError, SteppeError

EXPERIENCE_KEYS = ("state", "action", "reward", "next_state", "done")
EXPERIENCE_DTYPES = (np.int64, np.int64, np.float64, np.int64, np.bool_)
_INT, _REAL, _BOOL = np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.bool_)
_STRIDES, _FLAG_STRIDES = (8,), (1,)
ExperienceBatch = Sequence[tuple[Any, ...]] | Mapping[str, Any]
Row = tuple[Any, Any, Any, Any, Any]  # state, action, reward, next state, done
Rates = tuple[float, float, float, float]  # learning rate, discount, epsilon now and in the next step


class TransitionColumns(NamedTuple):
    """A batch as arrays of one length: integers int64, rewards float32 or float64, `dones` bool."""

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_states: np.ndarray
    dones: np.ndarray


class TableAlgorithm(BaseAlgorithm):
    """Learns from single steps or from arrays of them; a batch gives the same result as its rows in order."""

    takes_masks = True
    num_tables: ClassVar[int] = 1
    storage: np.ndarray  # everything learned, in one array
    _choose: ClassVar[Any] = staticmethod(step_kernels.select_action)
    _learn_and_choose: ClassVar[Any] = None  # a kernel of step_kernels.py; None: batches of one row

    def _initialize_q_table(self) -> np.ndarray:
        require_memory(self.state_size, self.action_size, 4, self.num_tables)
        return np.zeros(self._storage_shape, np.float32)

    @property
    def _storage_shape(self) -> tuple[int, ...]:
        tables = (self.num_tables,) if self.num_tables > 1 else ()
        return (*tables, self.state_size, self.action_size)

    @property
    def q_table(self) -> np.ndarray:
        """The values [state_size, action_size]. Assigning an array makes the algorithm use that array's memory."""
        return self.storage

    @q_table.setter
    def q_table(self, table: np.ndarray) -> None:
        self.adopt(table)

    def adopt(self, storage: np.ndarray) -> None:
        """Learn in this memory from now on, starting from its contents."""
        shape = self._storage_shape
        if not isinstance(storage, np.ndarray) or storage.shape != shape or storage.dtype != np.float32:
            what = (
                f"{storage.dtype}{list(storage.shape)}" if isinstance(storage, np.ndarray) else type(storage).__name__
            )
            raise ConfigError(f"the table must be float32{list(shape)}, not {what}")
        if not storage.flags.carray:
            raise ConfigError("the table must lie in memory in one piece that can be written to: copy it first")
        self.storage = storage

    def select_action(self, state: int, action_mask: Any = None, *, deterministic: bool = False) -> int:
        """Return the best allowed action, the first of equals, or with probability `epsilon` a random allowed one."""
        row, masks = require_index(state, "state", self.state_size), self._one_mask(action_mask, state)
        epsilon, words = 0.0 if deterministic else self.epsilon, self.words
        action = self._choose(self.storage, row, masks, epsilon, words.block, words.cursor)
        if action == step_kernels.OUT_OF_WORDS:
            words.refill()
            action = self._choose(self.storage, row, masks, epsilon, words.block, words.cursor)
        return int(action)

    def select_actions(
        self, states: np.ndarray, action_masks: np.ndarray | None = None, *, deterministic: bool = False
    ) -> np.ndarray:
        """Return an action for each state, as `select_action` would choose them one after another."""
        states = as_int64(states, "states")
        return self._select_actions(self.storage, states, states, action_masks, deterministic=deterministic)

    def update(
        self, state: int, action: int, reward: float, next_state: int, done: bool, next_mask: Any = None
    ) -> None:
        """Learn from one step; `next_mask` says which actions are allowed in `next_state`."""
        self._update((state, action, reward, next_state, done), next_mask, turn_based=False)

    def update_turn(
        self, state: int, action: int, reward: float, next_state: int, done: bool, next_mask: Any = None
    ) -> None:
        """Learn from one move in a turn-based game, where the opponent moves in `next_state`."""
        self._update((state, action, reward, next_state, done), next_mask, turn_based=True)

    def train_episode(self, env: Any) -> float:
        """Play one episode and learn from every step; return the sum of rewards (see BaseAlgorithm)."""
        if self._learn_and_choose is None or not uses_builtin_steps(type(self)):
            return super().train_episode(env)
        in_turns, limit = is_turn_based(env), step_limit(env)
        discount = self._discount(turn_based=in_turns)
        scheduled = self.learning_rate_schedule is not None or self.epsilon_schedule is not None
        seen, info = env.reset()
        state = require_index(seen, "state", self.state_size)
        action = self.select_action(state, info.get("action_mask"))
        total, sign, length, ended, step = 0.0, 1.0, 0, False, env.step
        while not ended:
            seen, reward, done, truncated, info = step(action)
            length += 1
            ended = bool(done or truncated or length >= limit)
            rate, epsilon = self.learning_rate, self.epsilon  # of this step; the choice below is the next step's
            if scheduled:
                self.count_steps(1)
            else:
                self.step_count += 1
            rates, mask = (rate, discount, epsilon, self.epsilon), info.get("action_mask")
            action = self._step(state, action, reward, seen, done, ended, mask, rates)
            state = index(seen)
            total += sign * float(reward)
            sign = -sign if in_turns else sign
        self.end_episode()
        return total

    def batch_update(self, experiences: ExperienceBatch) -> None:
        """Learn from (state, action, reward, next_state, done) tuples, or from columns under those names."""
        if isinstance(experiences, Mapping):
            if set(experiences) != set(EXPERIENCE_KEYS):
                raise ConfigError(
                    f"experiences need the columns {', '.join(EXPERIENCE_KEYS)}, not {', '.join(experiences)}"
                )
            self.learn(*(experiences[key] for key in EXPERIENCE_KEYS))
        elif not hasattr(experiences, "__len__"):
            raise ConfigError(f"experiences are a list of tuples or a dictionary of columns, not {experiences!r:.60}")
        elif len(experiences):
            self._learn_tuples(experiences)

    @abstractmethod
    def learn(
        self,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_states: np.ndarray,
        dones: np.ndarray,
        *,
        next_masks: np.ndarray | None = None,
        turn_based: bool = False,
    ) -> None:
        """Learn from arrays of one length, row by row; all of it or, if a row is invalid, none.

        `dones` marks where an episode terminated; a truncated one bootstraps from `next_states`. `next_masks` [B, A]
        says which actions are allowed there. With `turn_based` the opponent moves in the next state. int64, float64 and
        bool arrays are used without a copy.
        """

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything learned or pending, by name, sharing this algorithm's memory."""
        return {"q_table": self.storage}

    def _discount(self, *, turn_based: bool) -> float:
        return -self.discount_factor if turn_based else self.discount_factor

    def _learn_tuples(self, experiences: Sequence[tuple[Any, ...]]) -> None:
        require_lengths(experiences, len(EXPERIENCE_KEYS))
        self.learn(
            *(
                as_numeric_array(column, name)
                for name, column in zip(EXPERIENCE_KEYS, zip(*experiences, strict=True), strict=True)
            )
        )

    def _select_actions(
        self, table: np.ndarray, rows: np.ndarray, states: np.ndarray, masks: np.ndarray | None, *, deterministic: bool
    ) -> np.ndarray:
        if states.ndim != 1:
            raise ConfigError(f"states have one axis, not the shape {states.shape}")
        count = len(states)
        flags = self._next_masks(masks, count)
        epsilon = 0.0 if deterministic else self.epsilon
        words = self.words.take(count) if epsilon > 0.0 else self.words.block[:0]
        actions = np.empty(count, np.int64)
        wrong = int(batch_kernels.select_actions(table, rows, flags, epsilon, words, actions))
        if wrong >= 0:
            require_index(states[wrong], f"row {wrong}: state", self.state_size)
            raise ConfigError(f"the action mask of row {wrong} (state {states[wrong]}) allows no action")
        return actions

    def _update(self, row: Row, mask: Any, *, turn_based: bool) -> None:
        if self._learn_and_choose is None or not uses_builtin_steps(type(self)):
            self._require(row)
            masks = None if mask is None else as_bools(mask, "the action mask")[None]
            self.learn(*(np.array([value]) for value in row), next_masks=masks, turn_based=turn_based)
        else:
            rates = self.learning_rate, self._discount(turn_based=turn_based), self.epsilon, self.epsilon
            self._step(*row, True, mask, rates)

    def _step(
        self, state: Any, action: Any, reward: Any, next_state: Any, done: Any, ended: bool, mask: Any, rates: Rates
    ) -> int:
        """Learn from a step and select the next action; kept short, because it is called for every step."""
        masks = batch_kernels.NO_MASKS if mask is None else as_bools(mask, "the action mask").reshape(1, -1)
        words = self.words
        try:
            step = (
                *self._memory(), index(state), index(action), float(reward), index(next_state), bool(done), ended, masks,
                *rates,
            )  # fmt: skip
            chosen: int = self._learn_and_choose(*step, words.block, words.cursor)
        except (TypeError, ValueError, OverflowError):  # includes integers outside int64
            self._require((state, action, reward, next_state, done))
            raise
        if chosen == step_kernels.OUT_OF_WORDS:
            words.refill()
            chosen = self._learn_and_choose(*step, words.block, words.cursor)
        if chosen < 0:
            self._require((state, action, reward, next_state, done))
            require_action_mask(mask, self.action_size, f"state {next_state}")
        return chosen

    def _memory(self) -> tuple[Any, ...]:
        """Return the memory that the step kernel works in."""
        return (self.storage,)

    def _require(self, row: Row) -> None:
        """Raise an error if a value of a step is invalid."""
        state, action, reward, next_state, done = row
        require_index(state, "state", self.state_size)
        require_index(action, "action", self.action_size)
        require_index(next_state, "next state", self.state_size)
        require_finite_reward(reward)
        as_bool(done, "done")

    def _one_mask(self, mask: Any, state: Any) -> np.ndarray:
        return (
            batch_kernels.NO_MASKS
            if mask is None
            else require_action_mask(mask, self.action_size, f"state {state}")[None]
        )

    def _next_masks(self, masks: np.ndarray | None, count: int) -> np.ndarray:
        if masks is None:
            return batch_kernels.NO_MASKS
        flags = as_bools(masks, "action masks")
        if flags.shape != (count, self.action_size):
            raise ConfigError(f"action masks have shape {flags.shape}, not {(count, self.action_size)}")
        return flags

    def _columns(self, states: Any, actions: Any, rewards: Any, next_states: Any, dones: Any) -> TransitionColumns:
        columns = TransitionColumns(
            as_int64(states, "states"), as_int64(actions, "actions"), as_rewards(rewards), as_int64(next_states, "next_states"),
            as_bools(dones, "dones"),
        )  # fmt: skip
        shape = columns.states.shape
        if len(shape) != 1 or any(column.shape != shape for column in columns):
            shapes = ", ".join(f"{name} {column.shape}" for name, column in columns._asdict().items())
            raise ConfigError(f"the columns of a batch need one axis and one length, not {shapes}")
        return columns

    def _invalid_row_error(self, columns: TransitionColumns, masks: np.ndarray, row: int) -> SteppeError:
        """Return an error that says why a row is invalid."""
        try:
            require_index(columns.states[row], f"row {row}: state", self.state_size)
            require_index(columns.actions[row], f"row {row}: action", self.action_size)
            require_index(columns.next_states[row], f"row {row}: next state", self.state_size)
            require_finite_reward(columns.rewards[row])
        except SteppeError as error:
            return type(error)(f"{error}; nothing of the batch was learned")
        return ConfigError(f"the action mask of row {row} (next state {columns.next_states[row]}) allows no action")


class OneStepAlgorithm(TableAlgorithm):
    """Algorithms whose target is one reward and the value right after it."""

    def learn(
        self,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_states: np.ndarray,
        dones: np.ndarray,
        *,
        next_masks: np.ndarray | None = None,
        turn_based: bool = False,
    ) -> None:
        """Learn from arrays (see TableAlgorithm.learn)."""
        columns: Any = (states, actions, rewards, next_states, dones)
        if not is_kernel_ready(*columns):
            columns = self._columns(*columns)
        masks = batch_kernels.NO_MASKS if next_masks is None else self._next_masks(next_masks, len(columns[0]))
        wrong = self._learn(columns, masks, -self.discount_factor if turn_based else self.discount_factor)
        if wrong != batch_kernels.VALID:
            raise self._invalid_row_error(self._columns(*columns), masks, wrong)

    @abstractmethod
    def _learn(self, columns: TransitionColumns, masks: np.ndarray, discount: float) -> int:
        """Learn from columns; return the first invalid row, or another result of `first_invalid_row`."""


@cache
def uses_builtin_steps(kind: type) -> bool:
    """Whether this class uses the step methods of this package, not a subclass's own."""
    names = ("learn", "select_action", "update", "update_turn")
    return all(getattr(kind, name).__module__.startswith("steppe.algorithms.tabular.") for name in names)


def is_kernel_ready(states: Any, actions: Any, rewards: Any, next_states: Any, dones: Any) -> bool:
    """Whether kernels can take these columns as they are, lengths aside; written out, because every batch calls it."""
    try:
        return bool(
            states.dtype is _INT and actions.dtype is _INT and next_states.dtype is _INT
            and rewards.dtype is _REAL and dones.dtype is _BOOL
            and states.strides == actions.strides == rewards.strides == next_states.strides == _STRIDES
            and dones.strides == _FLAG_STRIDES
        )  # fmt: skip
    except AttributeError:
        return False


def require_lengths(experiences: Sequence[Any], *lengths: int) -> None:
    """Raise ConfigError unless every experience has one of these numbers of values."""
    for experience in experiences:
        if not hasattr(experience, "__len__") or len(experience) not in lengths:
            more = " (and the next action, if there are six)" if len(lengths) > 1 else ""
            raise ConfigError(f"every experience needs {lengths[0]} values: {', '.join(EXPERIENCE_KEYS)}{more}")


def as_int64(values: Any, name: str) -> np.ndarray:
    """Return state or action indices as the kernels need them."""
    array = as_numeric_array(values, name)
    if array.dtype.kind not in "iu" and array.size:
        raise ConfigError(f"{name} must be whole numbers, not {array.dtype}")
    return np.atleast_1d(as_column(array, name, np.int64))


def as_rewards(values: Any) -> np.ndarray:
    """Return rewards as the kernels need them."""
    array = as_numeric_array(values, "rewards")
    return np.atleast_1d(as_column(array, "rewards", np.float32 if array.dtype == np.float32 else np.float64))
