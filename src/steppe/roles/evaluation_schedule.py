"""Which published versions are evaluated: the first one after every so many steps, or episodes, of training.

That depends on the learner's counts alone, not on the speed of any role.
"""

from __future__ import annotations

import time

from steppe.core.config.run import EvalConfig
from steppe.core.contracts.errors import DiskFull
from steppe.core.contracts.transport import WeightStore
from steppe.core.contracts.weights import Weights
from steppe.core.io.atomic_files import raising_disk_full
from steppe.records.evaluation_queue import EvaluationQueue
from steppe.roles.context import POLICY, Context

MAX_WAITING = 100  # versions in the queue; the learner waits until there are fewer
_POLL_S = 0.01


class EvaluationSchedule:
    """Whether a version is due, given the counts of the one before it."""

    def __init__(self, config: EvalConfig) -> None:
        self._every_steps, self._every_episodes = config.every_steps, config.every_episodes
        self.env_steps, self.episodes = 0, 0  # of the newest version that was looked at

    def follow(self, env_steps: int, episodes: int) -> None:
        """Continue after a version with these counts."""
        self.env_steps, self.episodes = env_steps, episodes

    def due(self, env_steps: int, episodes: int) -> bool:
        """Return whether a multiple of the interval was reached since the last call."""
        every_steps, every_episodes = self._every_steps, self._every_episodes
        due = every_steps is not None and env_steps // every_steps > self.env_steps // every_steps
        due = due or (every_episodes is not None and episodes // every_episodes > self.episodes // every_episodes)
        self.follow(env_steps, episodes)
        return due


class QueueingWeightStore:
    """A learner's WeightStore that also queues the versions that are due for evaluation."""

    def __init__(self, store: WeightStore, queue: EvaluationQueue, config: EvalConfig, context: Context) -> None:
        self.schedule = EvaluationSchedule(config)
        self._store, self._queue, self._context = store, queue, context
        self._first = True
        self._resumed = False
        queue.open()

    def resume_after(self, env_steps: int, episodes: int) -> None:
        """Continue after the newest version that was published before a checkpoint, which had these counts."""
        self.schedule.follow(env_steps, episodes)
        self._resumed = True

    def publish(self, policy: str, weights: Weights) -> None:
        self._store.publish(policy, weights)
        if policy != POLICY:
            return
        if self._first:  # the initial weights, or those that were published before a checkpoint
            self._first = False
            if not self._resumed:
                self.schedule.follow(weights.env_steps, weights.episodes)
        elif self.schedule.due(weights.env_steps, weights.episodes):
            self._add(weights)

    def newer_than(self, policy: str, version: int) -> Weights | None:
        return self._store.newer_than(policy, version)

    def _add(self, weights: Weights) -> None:
        self._wait_for_room()
        try:
            with raising_disk_full(self._queue.directory):
                self._queue.add(weights)
        except DiskFull as error:
            message = f"{error}; version {weights.version} will not be evaluated"
            self._context.event("warning", message=message, evaluations_left_out=1)

    def _wait_for_room(self) -> None:
        """Block while too many versions wait, so that the queue stays bounded and no evaluation is left out."""
        if len(self._queue.waiting()) < MAX_WAITING:
            return
        self._context.event("note", message=f"training waits: {MAX_WAITING} versions are not evaluated yet")
        while len(self._queue.waiting()) >= MAX_WAITING and not self._context.ending:
            self._context.heartbeat()
            time.sleep(_POLL_S)
