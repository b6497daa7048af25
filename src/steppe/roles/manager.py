"""The manager: evaluates the versions that are due during training, and records scores and reports."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from steppe.core.config.run import EvalConfig
from steppe.core.contracts.algorithm import Policy
from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, Report, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING
from steppe.core.contracts.weights import Weights
from steppe.core.system.process import rss_bytes
from steppe.records.evaluation_queue import EvaluationQueue, WaitingWeights
from steppe.records.scalars import is_rewind
from steppe.roles.context import FINISH, POLICY, STOP, Context
from steppe.roles.evaluation import Evaluation, Evaluator
from steppe.roles.evaluation_schedule import EvaluationSchedule

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
    def record(self, report: Report, number: int) -> None: ...
    def save_if_best(self, weights: Weights, score: float) -> None: ...
    def save_result(self, weights: Weights) -> None: ...
    def save_video(self, evaluation: Evaluation, version: int) -> str | None: ...
    def close(self) -> None: ...


class Manager:
    """Evaluate and record beside the learner, so that a slow evaluation never delays it.

    If the learner queues the versions that are due, the manager evaluates them in order. If it does not, or if the queue is
    on another machine, the manager evaluates the newest weights when an evaluation is due. A restarted manager, in the same
    run or a resumed one, continues where the previous one stopped.
    """

    def __init__(
        self,
        policy: Policy,
        make_evaluator: Callable[[], Evaluator],
        config: EvalConfig,
        target_return: float | None,
        archive: Archive,
        context: Context,
        queue: EvaluationQueue,
    ) -> None:
        self.name = context.name
        self.done = False
        self.policy, self.config, self.target_return = policy, config, target_return
        self.archive, self.context, self.queue = archive, context, queue
        self._make_evaluator = make_evaluator
        self._evaluator: Evaluator | None = None
        self._newest_version = -1
        self._schedule = EvaluationSchedule(config)
        self._next_allowed_s = 0.0  # earliest time of the next evaluation, with a max_share
        self._overdue = 0  # versions without a queue that were due since the last evaluation
        self._left_out = 0  # versions that were not evaluated since the last report
        self._reached = False  # whether the target return was reached: the run ends, and those weights are its result
        self._cursors = dict.fromkeys(_RECORDED, 0) | dict(archive.written)
        self._recorded_s = 0.0
        self._earlier_evaluations = self._read_earlier_evaluations()

    def step(self) -> bool:
        """Record new reports, and evaluate one version that is due."""
        requested = self.context.requested()
        if requested == STOP:
            self.done = True
            return False
        recorded = self._record_if_due()
        finishing = requested == FINISH
        if self._reached:
            self.done = finishing
            return recorded or finishing
        if (weights := self._next_queued(finishing=finishing)) is not None:
            self.evaluate(weights, final=False, queued=True)
            return True
        if finishing:
            self.done = True
            self._left_out, self._overdue = self._left_out + self._overdue, 0
        if not self.done and self.queue.exists:
            return recorded
        weights = self.context.weights.newer_than(POLICY, -1 if self.done else self._newest_version)
        if weights is None:
            return recorded or self.done
        if self._newest_version < 0:
            self._restore_schedule(weights)
        self._newest_version = weights.version
        if self.done or self._is_due(weights):
            self.evaluate(weights, final=self.done)
            return True
        return recorded

    def _next_queued(self, *, finishing: bool) -> Weights | None:
        """Return the oldest version that waits; None if there is none, or if evaluations have had their share of the time.

        With a `max_share`, all but the newest are left out and counted, at the run's end that one too.
        """
        waiting = self.queue.waiting()
        if self.config.max_share is not None and waiting:
            if not finishing and time.perf_counter() < self._next_allowed_s:
                return None
            late = waiting if finishing else waiting[:-1]
            self._left_out += len(late)
            for entry in late:
                entry.remove()
            waiting = waiting[len(late) :]
        for entry in waiting:
            if self._was_reported(entry):
                entry.remove()
                continue
            try:
                return entry.load()
            except DamagedFile as error:
                self._left_out += 1
                entry.remove()
                message = f"{error}: version {entry.version} is not evaluated"
                self.context.event("warning", message=message)
        return None

    def _was_reported(self, entry: WaitingWeights) -> bool:
        """Whether a manager that was killed had reported this version but not removed it from the queue."""
        times = [reported_s for _, _, version, reported_s in self._earlier_evaluations if version == entry.version]
        return bool(times) and max(times) >= entry.queued_s

    def evaluate(self, weights: Weights, *, final: bool, queued: bool = False) -> None:
        """Evaluate these weights and record the result.

        Nothing is recorded if the run is stopped meanwhile. The run's last evaluation interrupts one that was not queued.
        """
        if self._evaluator is None:
            self._evaluator = self._make_evaluator()
        started, started_s = time.perf_counter(), self.context.clock()
        self.policy.load(weights)
        context = self.context

        def stopping() -> bool:
            context.heartbeat()  # an evaluation may be long; only a step that does not return counts as hung
            return context.requested() == STOP if final or queued else context.ending

        episodes = self.config.final_episodes if final else self.config.episodes
        evaluation = self._evaluator.evaluate(
            self.config.episodes if episodes is None else episodes,
            stopping,
            explore=self.config.explore,
            record=self.config.record,
        )
        if evaluation is None:
            self._left_out += not (final or queued)
            return
        self.context.span("evaluate", started_s, version=weights.version)
        ended = time.perf_counter()
        if self.config.max_share is not None:
            self._next_allowed_s = ended + (ended - started) * (1.0 / self.config.max_share - 1.0)
        self._record_evaluation(weights, evaluation, ended - started, final=final, queued=queued)
        if queued:
            for entry in self.queue.waiting():
                if entry.version == weights.version:
                    entry.remove()

    def _record_evaluation(
        self, weights: Weights, evaluation: Evaluation, duration_s: float, *, final: bool, queued: bool
    ) -> None:
        reached = self.target_return is not None and evaluation.mean >= self.target_return
        self.archive.save_if_best(weights, evaluation.mean)
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
            left_out=self._left_out,
            waiting=max(0, len(self.queue.waiting()) - queued),
            recording=self.archive.save_video(evaluation, weights.version) if evaluation.frames else None,
        )
        self._left_out = 0
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

    def _read_earlier_evaluations(self) -> list[tuple[int, int, int, float]]:
        """Return (env_steps, episodes, version, time) of the evaluations that an earlier manager of this run posted."""
        found: list[tuple[int, int, int, float]] = []
        after = 0
        while page := self.context.board.read(EVALUATIONS, after):
            after = page[-1][0]
            reports = [EvaluationReport.read(record) for _, record in page]
            found += [(report.env_steps, report.episodes, report.version, report.time_s) for report in reports]
        return found

    def _restore_schedule(self, weights: Weights) -> None:
        """Schedule from the last evaluation at or before these weights: a resumed run may have been rewound."""
        earlier = [evaluation[:2] for evaluation in self._earlier_evaluations if evaluation[0] <= weights.env_steps]
        if earlier:
            self._schedule.follow(*max(earlier))

    def _is_due(self, weights: Weights) -> bool:
        """Whether an evaluation is due, and evaluations have not had their share of the time."""
        self._overdue += self._schedule.due(weights.env_steps, weights.episodes)
        if not self._overdue or time.perf_counter() < self._next_allowed_s:
            return False
        self._left_out, self._overdue = self._left_out + self._overdue - 1, 0
        return True

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
