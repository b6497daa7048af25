"""Rollouts of tabular workers: environments and an algorithm that acts and learns in them, a number of steps at a time.

Three kinds: compiled games, where everything is one call; a segment environment with an agent; and one environment with
an algorithm that plays whole episodes. The worker merges the results into the shared table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from steppe.algorithms.tabular.agent import TabularAgent
from steppe.algorithms.tabular.q_learning import OptimalQLearning
from steppe.algorithms.tabular.table import TableAlgorithm
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.algorithm import Progress
from steppe.core.contracts.env import SegmentEnv
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.transport import TableTotals
from steppe.envs.factory import compiled_game
from steppe.envs.vector.finite import require_finite
from steppe.roles.bound_policy import BoundPolicy
from steppe.roles.quota import EpisodeClaims
from steppe.roles.tabular.game_trainer import GameTrainer

ESTIMATE_EVERY = 16  # runs
NO_ROWS = np.empty(0, np.int64)


StepCallback = Callable[[], bool]  # called at every step as a heartbeat; True: the rollout must end


@dataclass
class RolloutResult:
    """Steps of a rollout, and the (return, length) of its finished episodes, or one pair with the means."""

    steps: int
    episodes: int
    finished: list[tuple[float, int]]


class TabularRollout(Protocol):
    """Acts and learns in `agent.table`. `candidates` are the rows that the last run may have changed; empty: any row.
    `kept` is the remaining weight of each entry's value from before the run, by its number of updates
    (core/table_merge.py)."""

    agent: TabularAgent
    candidates: np.ndarray
    kept: np.ndarray
    min_steps: int  # fewer steps between two merges would only add overhead
    num_envs: int

    def run(
        self, num_steps: int, on_step: StepCallback = lambda: False, max_episodes: int | None = None
    ) -> RolloutResult:
        """Act and learn for about `num_steps` over all environments, at least one; fewer if `on_step` returns True.

        At most `max_episodes` end. Episodes in progress count when they end, in a later run.
        """

    def update_schedules(self, totals: TableTotals, limit: int | None) -> None:
        """Advance schedules to the progress of all workers together."""

    def close(self) -> None:
        """Close the environments."""


class _TabularRolloutBase:
    """Shared parts: schedules that follow all workers' steps and episodes, and visit counts of table entries."""

    def __init__(self, agent: TabularAgent) -> None:
        self.agent = agent
        self.candidates, self.min_steps, self.num_envs = NO_ROWS, 1, 1
        self.kept = np.ones(agent.table.shape, np.float32)
        self._visited = NO_ROWS
        self._own_episodes = self._other_episodes = 0

    def _record_visits(self, states: np.ndarray, actions: np.ndarray) -> None:
        """Record the updates of a run, and discard those of the previous run."""
        num_states, num_actions = self.agent.spec.num_states or 0, len(self.kept[0])
        tables = self.kept.reshape(-1, num_states * num_actions)
        tables[:, self._visited] = 1.0
        self._visited, counts = np.unique(states * num_actions + actions, return_counts=True)
        tables[:, self._visited] = remaining_weight(counts * (self.agent.pull / len(tables)))
        if isinstance(self.agent.algorithm, TableAlgorithm):
            rows = np.unique(self._visited // num_actions)
            self.candidates = (rows + num_states * np.arange(len(tables))[:, None]).ravel()

    def update_schedules(self, totals: TableTotals, limit: int | None) -> None:
        self.agent.follow(Progress(totals.steps, limit))
        other_episodes = max(0, totals.episodes - self._own_episodes)
        if other_episodes > self._other_episodes:
            self.agent.algorithm.count_episodes(other_episodes - self._other_episodes)
            self._other_episodes = other_episodes


class VectorTabularRollout(_TabularRolloutBase):
    """A segment environment: a rollout of up to `num_rows` steps of every environment, learned as one batch."""

    def __init__(self, agent: TabularAgent, env: SegmentEnv, num_rows: int, seeds: np.random.SeedSequence) -> None:
        super().__init__(agent)
        self.env, self.num_envs = env, env.num_envs
        self._bound_policy = BoundPolicy(agent, env)
        self._claims: EpisodeClaims | None = None
        spec = SegmentSpec(num_rows, env.num_envs, env.spec.obs, env.spec.action.field, agent.config.columns(env.spec))
        self._segment = Segment.blank(spec)
        self._seeds = seeds
        self._obs = np.zeros(env.num_envs, np.int64)
        self._begun = False

    def run(
        self, num_steps: int, on_step: StepCallback = lambda: False, max_episodes: int | None = None
    ) -> RolloutResult:
        if not self._begun:
            self.env.reset(self._obs, self._seeds)
            self._begun = True
        segment, env = self._segment, self.env
        rows = min(segment.spec.num_steps, max(1, math.ceil(num_steps / env.num_envs)))
        claims = self._episode_claims(max_episodes, rows)
        segment["obs"][0] = self._obs
        for t in range(rows):
            columns = self._bound_policy.act(segment["obs"][t])
            segment["action"][t], segment["mask"][t] = columns["action"], columns["mask"]
            env.step(segment["action"][t], segment, t)
            if claims is not None:
                claims.count(segment, t)
            if on_step() or (claims is not None and claims.exhausted):
                rows = t + 1
                break
        masks = self._bound_policy.action_masks
        segment["mask"][rows] = True if masks is None else masks
        require_finite(segment, rows, "worker")
        self._obs[...] = segment["obs"][rows]
        with_final_row = ("obs", "mask")
        self.agent.learn(
            Batch({name: column[: rows + (name in with_final_row)] for name, column in segment.columns.items()})
        )
        valid, finished = segment["valid"][:rows], env.take_finished()
        if claims is not None:
            finished = claims.counted_only(finished)
        self._record_visits(segment["obs"][:rows][valid], segment["action"][:rows][valid])
        self._own_episodes += len(finished)
        return RolloutResult(int(np.count_nonzero(valid)), len(finished), finished)

    def _episode_claims(self, max_episodes: int | None, rows: int) -> EpisodeClaims | None:
        """Return the counter of episodes for the next rows, or None if the limit cannot be exceeded."""
        if max_episodes is None:
            return None
        if self._claims is None:
            self._claims = EpisodeClaims(self.env)
        self._claims.set_remaining(max_episodes)
        self._segment["valid"].fill(True)  # the environment may leave it unchanged, and closed ones may be open now
        return None if self._claims.cannot_exhaust(rows) else self._claims

    def close(self) -> None:
        self.env.close()


class GameTabularRollout(_TabularRolloutBase):
    """Compiled two-player games: action selection, move, opponent's reply and update of all games in one call."""

    def __init__(self, agent: TabularAgent, trainer: GameTrainer) -> None:
        super().__init__(agent)
        self.trainer, self.num_envs, self.min_steps = trainer, trainer.num_games, 16 * trainer.num_games
        self.candidates = np.flatnonzero(trainer.game.reachable & (trainer.game.legal > 0))
        self._state_counts = np.zeros(len(agent.table))  # how often each state occurred at the end of a run
        self._runs = 0

    def run(
        self, num_steps: int, on_step: StepCallback = lambda: False, max_episodes: int | None = None
    ) -> RolloutResult:
        result = self.trainer.run(num_steps, max_episodes)
        self._estimate_visits(num_steps)
        self._own_episodes += result.num_games
        if not result.num_games:
            return RolloutResult(result.num_steps, 0, [])
        mean = ((result.won - result.lost) / result.num_games, round(result.num_steps / result.num_games))
        return RolloutResult(result.num_steps, result.num_games, [mean])

    def _estimate_visits(self, num_steps: int) -> None:
        """Estimate the visits per run of each entry from the games' states at the ends of runs.

        Recomputed after 1, 2, 4, 8 and then every ESTIMATE_EVERY runs, as the distribution changes slowly.
        """
        self._state_counts += np.bincount(self.trainer.states, minlength=len(self._state_counts))
        self._runs += 1
        if self._runs & (self._runs - 1) and self._runs % ESTIMATE_EVERY:
            return
        rows, algorithm, game = self.candidates, self.agent.algorithm, self.trainer.game
        state_frequency = self._state_counts[rows] / self._state_counts.sum()
        legal = game.legal_table[rows]
        best = np.where(legal, self.agent.table[rows], -np.inf).argmax(axis=1)
        share = legal * (algorithm.epsilon / np.maximum(1, legal.sum(axis=1)))[:, None]
        share[np.arange(len(rows)), best] += 1.0 - algorithm.epsilon
        self.kept[rows] = remaining_weight(state_frequency[:, None] * share * (num_steps * self.agent.pull))

    def close(self) -> None:
        """Do nothing: compiled games hold no resources."""


class EpisodeTabularRollout(_TabularRolloutBase):
    """One environment and the algorithm's own `train_episode`: for user-defined algorithms and environments."""

    def __init__(self, agent: TabularAgent, env: Any, seed: int) -> None:
        super().__init__(agent)
        self._env, self._seed = _RecordingEnv(env), seed
        self._begun = False

    def run(
        self, num_steps: int, on_step: StepCallback = lambda: False, max_episodes: int | None = None
    ) -> RolloutResult:
        algorithm, self._env.on_step = self.agent.algorithm, on_step
        if not self._begun:
            self._env.reset(seed=self._seed)  # later resets continue this random stream
            self._begun = True
        finished: list[tuple[float, int]] = []
        start = algorithm.step_count
        max_finished = math.inf if max_episodes is None else max_episodes
        while (
            (taken := algorithm.step_count - start) < num_steps
            and len(finished) < max_finished
            and not (taken and on_step())
        ):
            total = algorithm.train_episode(self._env)
            finished.append((total, algorithm.step_count - start - taken))
        self._record_visits(*self._env.take_visits())
        self._own_episodes += len(finished)
        return RolloutResult(algorithm.step_count - start, len(finished), finished)

    def close(self) -> None:
        if isinstance(self._env.env, CloseableEnv):
            self._env.env.close()


@runtime_checkable
class CloseableEnv(Protocol):
    """A user's environment that holds resources."""

    def close(self) -> object: ...


class _RecordingEnv:
    """Wrapper that records visited states and actions, and forwards everything else to the environment."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.on_step: StepCallback = lambda: False
        self._state: Any = 0
        self._states: list[Any] = []
        self._actions: list[Any] = []

    def reset(self, **options: Any) -> Any:
        result = self.env.reset(**options)
        self._state = result[0]
        return result

    def step(self, action: Any) -> Any:
        self._states.append(self._state)
        self._actions.append(action)
        self.on_step()
        result = self.env.step(action)
        self._state = result[0]
        return result

    def take_visits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the states and actions since the last call."""
        taken = np.array(self._states, np.int64), np.array(self._actions, np.int64)
        self._states.clear()
        self._actions.clear()
        return taken

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # before __init__ has set it
            raise AttributeError(name)
        return getattr(self.env, name)


def remaining_weight(total_rate: np.ndarray) -> np.ndarray:
    """Return the remaining weight of a value after updates whose learning rates sum to `total_rate`: a fast exp(−total_rate)."""
    weight: np.ndarray = 1.0 / (1.0 + total_rate + 0.5 * total_rate * total_rate)
    return weight


def make_game_trainer(
    agent: TabularAgent, env: str, config: EnvConfig, num_games: int, seed: int
) -> GameTrainer | None:
    """Return the compiled trainer of a game, or None if there is none or the configuration alters the game."""
    is_unmodified = (
        config.vector != "loop" and not config.time_limit and not config.reward_clip and config.reward_scale == 1.0
    )
    if not is_unmodified or type(agent.algorithm) is not OptimalQLearning:
        return None
    game = compiled_game(env, config)
    if game is None:
        return None
    opponent, opening_moves = game.opponent, config.kwargs.get("opening_moves")
    return GameTrainer(
        agent.algorithm, game.rules, opponent, num_games=num_games, opening_moves=opening_moves, seed=seed
    )
