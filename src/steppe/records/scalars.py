"""Converts reports to points of named curves (train/return_mean, loss/entropy, time/learn, …) over environment steps.

TensorBoard events and the control plane's curves are computed here.
"""

from __future__ import annotations

from collections import deque

from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, Report, TrainingReport
from steppe.records.new_episodes import EpisodeDeduplicator

WINDOW_EPISODES = 100  # episodes that train/return_mean averages over


class Scalars:
    """Converts the reports of one run, which must be passed in order."""

    def __init__(self) -> None:
        self.env_steps = 0
        self._episodes: deque[tuple[float, int]] = deque(maxlen=WINDOW_EPISODES)
        self._episode_deduplicator = EpisodeDeduplicator()
        self._agent_returns: dict[str, float] = {}
        self._before: TrainingReport | None = None

    def rewind(self, env_steps: int) -> None:
        """Handle that the run resumed from an older checkpoint."""
        self.env_steps, self._before = env_steps, None
        self._episode_deduplicator.rewind()

    def of(self, report: Report) -> dict[str, float]:
        """Return the points that a report adds to the curves, at `env_steps`."""
        if isinstance(report, ActorReport):
            self._episodes.extend(self._episode_deduplicator.new_episodes(report))
            self._agent_returns |= report.agent_returns
            # Actors' final reports come after the learner's: no later training report would include their episodes.
            return self._averages() if self._before is not None and self._before.final else {}
        if isinstance(report, EvaluationReport):
            self.env_steps = max(self.env_steps, report.env_steps)
            returns = {"eval/return_mean": report.return_mean, "eval/return_std": report.return_std}
            if report.terminated_share is not None:
                returns["eval/terminated_share"] = report.terminated_share
            return returns | {f"eval/agent_return/{agent}": value for agent, value in report.agent_returns.items()}
        if isinstance(report, TrainingReport):
            return self._training_scalars(report)
        if isinstance(report, EventReport):
            return self._event_scalars(report)
        return {}

    def _event_scalars(self, report: EventReport) -> dict[str, float]:
        if is_rewind(report):
            self.rewind(int(report.details.get("env_steps", 0)))
        if report.kind != "metric":
            return {}
        self.env_steps = max(self.env_steps, int(report.details["env_steps"]))
        return {f"custom/{name}": float(value) for name, value in report.details["values"].items()}  # user metrics

    def _training_scalars(self, report: TrainingReport) -> dict[str, float]:
        self.env_steps = max(self.env_steps, report.env_steps)
        scalars = {f"loss/{name}": value for name, value in report.stats.items()}
        scalars |= {f"memory/{name}": value for name, value in report.memory.items()}
        scalars |= {"train/updates": report.updates, "train/version": report.version}
        if report.agent_steps is not None:
            scalars["train/agent_steps"] = report.agent_steps
        scalars |= self._averages()
        segments = sum(report.lags.values())
        if segments:
            scalars["lag/mean"] = sum(lag * count for lag, count in report.lags.items()) / segments
            scalars["lag/max"] = max(report.lags)
        scalars |= {f"dropped/{cause}": count for cause, count in report.dropped.items()}
        scalars |= self._pace(report)
        self._before = report
        return scalars

    def _averages(self) -> dict[str, float]:
        """Averages over the newest training episodes of all actors."""
        averages = {f"train/agent_return/{agent}": value for agent, value in self._agent_returns.items()}
        if self._episodes:
            averages["train/return_mean"] = sum(score for score, _ in self._episodes) / len(self._episodes)
            averages["train/length_mean"] = sum(length for _, length in self._episodes) / len(self._episodes)
        return averages

    def _pace(self, report: TrainingReport) -> dict[str, float]:
        """Steps per second and time shares since the last report."""
        before = self._before
        elapsed = report.train_s - (before.train_s if before else 0.0)
        pace = {}
        if elapsed > 0:
            pace["time/steps_per_s"] = (report.env_steps - (before.env_steps if before else 0)) / elapsed
        spent = {phase: s - (before.phases.get(phase, 0.0) if before else 0.0) for phase, s in report.phases.items()}
        total = sum(spent.values())
        return pace | ({f"time/{phase}": s / total for phase, s in spent.items()} if total > 0 else {})


def is_rewind(event: EventReport) -> bool:
    """Whether the run resumed from a checkpoint; actors report how they resumed in events of the same kind."""
    return event.kind == "resume" and event.role == "supervisor"
