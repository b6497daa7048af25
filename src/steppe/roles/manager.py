"""The manager: evaluates the newest weights during training, and records scores and reports."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from steppe.core.config.run import EvalConfig
from steppe.core.contracts.algorithm import Policy
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, Report, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING
from steppe.core.contracts.weights import Weights
from steppe.core.system.process import rss_bytes
from steppe.records.scalars import is_rewind
from steppe.roles.context import FINISH, POLICY, STOP, Context
from steppe.roles.evaluation import Evaluation, Evaluator

RECORD_EVERY_S = 0.5
_RECORDED: dict[str, type[Report]] = {
    TRAINING: TrainingReport,
    ACTORS: ActorReport,
    EVALUATIONS: EvaluationReport,
    EVENTS: EventReport,
}


class Archive(Protocol):
    """Where the manager writes: curves, best weights, final weights, videos."""

    @property
    def written(self) -> Mapping[str, int]: ...
    def best_score(self) -> float: ...
    def record(self, report: Report, number: int) -> None: ...
    def save_best(self, weights: Weights, score: float) -> None: ...
    def save_result(self, weights: Weights) -> None: ...
    def save_video(self, evaluation: Evaluation, version: int) -> str | None: ...
    def close(self) -> None: ...


class Manager:
    """Evaluate and record beside the learner, so that a slow evaluation never delays it.

    A restarted manager, in the same run or a resumed one, continues where the previous one stopped.
    """

    def __init__(
        self,
        policy: Policy,
        make_evaluator: Callable[[], Evaluator],
        config: EvalConfig,
        target_return: float | None,
        archive: Archive,
        context: Context,
    ) -> None:
        self.name = context.name
        self.done = False
        self.policy, self.config, self.target_return = policy, config, target_return
        self.archive, self.context = archive, context
        self._make_evaluator = make_evaluator
        self._evaluator: Evaluator | None = None
        self._newest_version = -1
        self._next_steps, self._next_episodes = config.every_steps, config.every_episodes or math.inf
        self._max_share = config.max_share or (0.1 if target_return is None else 0.5)
        self._next_allowed_s = 0.0  # earliest time of the next evaluation
        self._reached = False  # whether the target return was reached: the run ends, and those weights are its result
        self._best = archive.best_score()
        self._cursors = dict.fromkeys(_RECORDED, 0) | dict(archive.written)
        self._recorded_s = 0.0
        self._earlier_evaluations = self._read_earlier_evaluations()

    def step(self) -> bool:
        """Record new reports, and evaluate the newest weights if an evaluation is due."""
        requested = self.context.requested()
        if requested == STOP:
            self.done = True
            return False
        recorded = self._record_if_due()
        if requested == FINISH:
            self.done = True
        weights = self.context.weights.newer_than(POLICY, -1 if self.done else self._newest_version)
        if weights is None:
            return recorded or self.done
        if self._newest_version < 0:
            self._restore_schedule(weights)
        self._newest_version = weights.version  # weights that were not due are not evaluated later
        if self.done or self._due(weights):
            self.evaluate(weights, final=self.done)
            return True
        return recorded

    def evaluate(self, weights: Weights, *, final: bool) -> None:
        """Evaluate these weights and record the result."""
        if self._evaluator is None:
            self._evaluator = self._make_evaluator()
        started, started_s = time.perf_counter(), self.context.clock()
        self.policy.load(weights)
        context = self.context

        def stopping() -> bool:
            context.heartbeat()  # an evaluation may be long; only a step that does not return counts as hung
            return context.requested() == STOP if final else context.ending

        evaluation = self._evaluator.evaluate(
            self.config.episodes,
            stopping,
            explore=self.config.explore,
            record=self.config.record,
        )
        if evaluation is None:
            return
        self._schedule_after(weights.env_steps, weights.episodes)
        self.context.span("evaluate", started_s, version=weights.version)
        ended = time.perf_counter()
        self._next_allowed_s = ended + (ended - started) * (1.0 / self._max_share - 1.0)
        self._record_evaluation(weights, evaluation, ended - started, final=final)

    def _record_evaluation(self, weights: Weights, evaluation: Evaluation, duration_s: float, *, final: bool) -> None:
        reached = self.target_return is not None and evaluation.mean >= self.target_return
        if evaluation.mean > self._best:
            self._best = evaluation.mean
            self.archive.save_best(weights, evaluation.mean)
        self._reached = self._reached or reached
        if final or reached:
            self.archive.save_result(weights)
        report = EvaluationReport(
            run=self.context.run,
            version=weights.version,
            updates=weights.updates,
            env_steps=weights.env_steps,
            train_s=weights.train_s,
            episodes=weights.episodes,
            returns=evaluation.returns,
            lengths=evaluation.lengths,
            return_mean=evaluation.mean,
            return_std=evaluation.std,
            agent_returns=evaluation.agent_returns,
            terminated_share=evaluation.terminated_share,
            duration_s=duration_s,
            weights_sha256=weights.sha256(),
            rss_bytes=rss_bytes(),
            reached=reached,
            final=final or reached,
            recording=self.archive.save_video(evaluation, weights.version) if evaluation.frames else None,
        )
        self.context.board.post(EVALUATIONS, report.record())
        self.context.flush_spans()
        self._record()

    def close(self) -> None:
        """Record the remaining reports, and close the evaluation environment and the archive."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.archive.close)
            if self._evaluator is not None:
                stack.callback(self._evaluator.env.close)
            self._record()

    def _read_earlier_evaluations(self) -> list[tuple[int, int]]:
        """Return (env_steps, episodes) of the evaluations that an earlier manager of this run posted."""
        found: list[tuple[int, int]] = []
        after = 0
        while page := self.context.board.read(EVALUATIONS, after):
            after = page[-1][0]
            reports = [EvaluationReport.read(record) for _, record in page]
            found += [(report.env_steps, report.episodes) for report in reports]
        return found

    def _restore_schedule(self, weights: Weights) -> None:
        """Schedule from the last evaluation at or before these weights: a resumed run may have been rewound."""
        earlier = [evaluation for evaluation in self._earlier_evaluations if evaluation[0] <= weights.env_steps]
        if earlier:
            self._schedule_after(*max(earlier))

    def _schedule_after(self, env_steps: int, episodes: int) -> None:
        self._next_steps = env_steps + self.config.every_steps
        self._next_episodes = episodes + (self.config.every_episodes or math.inf)

    def _due(self, weights: Weights) -> bool:
        """Whether steps or episodes since the last evaluation suffice, within the evaluations' share of the time."""
        counted = weights.env_steps >= self._next_steps or weights.episodes >= self._next_episodes
        return counted and not self._reached and time.perf_counter() >= self._next_allowed_s

    def _record_if_due(self) -> bool:
        if time.monotonic() - self._recorded_s < RECORD_EVERY_S:
            return False
        return self._record()

    def _record(self) -> bool:
        self._recorded_s = time.monotonic()
        recorded_any = False
        pages = {topic: self.context.board.read(topic, self._cursors[topic]) for topic in _RECORDED}
        posted = [(number, topic, record) for topic, page in pages.items() for number, record in page]
        for number, topic, record in sorted(posted, key=lambda post: post[0]):
            self._cursors[topic] = number
            report = _RECORDED[topic].read(record)
            if not isinstance(report, EventReport) or _is_curve_event(report):
                self.archive.record(report, number)
                recorded_any = True
        return recorded_any


def _is_curve_event(event: EventReport) -> bool:
    """Whether the curves need this event: a callback's metric, or a rewind to a checkpoint."""
    return event.kind == "metric" or is_rewind(event)
