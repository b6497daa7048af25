"""The current state of a run, computed from what its roles reported.

Live view, `steppe watch` and the final summary all use it, so they never disagree. Rendering is left to others.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from steppe.core.config.run import RunConfig
from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, Report, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING, Board
from steppe.core.io.atomic_files import free_bytes
from steppe.records.new_episodes import EpisodeDeduplicator
from steppe.records.phase_times import PhaseTimes, Seconds, TimeTotals
from steppe.records.run_directory import RunDirectory
from steppe.records.store import FAILED, LOST, STOPPED, SUCCEEDED, Status

ENDED = (SUCCEEDED, FAILED, STOPPED, LOST)
MIN_FREE_BYTES = 1 << 20  # of free disk space
WINDOW_EPISODES = 100
WINDOW_S = 10.0  # length of the window that "recent" means
DIAGNOSIS_S = 30.0  # length of the window that a diagnosis covers
_SNAPSHOT_INTERVAL_S = 1.0
_KINDS: dict[str, type[Report]] = {
    TRAINING: TrainingReport,
    ACTORS: ActorReport,
    EVALUATIONS: EvaluationReport,
    EVENTS: EventReport,
}
_PAGE = 1_000
_time_s = attrgetter("time_s")
_HISTORY = 2_048  # points kept; every second one is dropped when they are full


class RunView:
    """Each `refresh` reads only new reports. Attributes are as of the last one; None means not known yet."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.config: RunConfig = directory.config()
        self.status: Status = Status()
        self.training: TrainingReport | None = None
        self.final_training: TrainingReport | None = None
        self.actors: dict[int, ActorReport] = {}
        self.last_evaluation: EvaluationReport | None = None
        self.best_evaluation: EvaluationReport | None = None
        self.final_evaluation: EvaluationReport | None = None
        self.reached_evaluation: EvaluationReport | None = None
        self.events: deque[EventReport] = deque(maxlen=50)  # newest last, without spans
        self.history: list[tuple[int, float]] = []  # (env_steps, mean training return)
        self.metrics: dict[str, float] = {}  # the newest values that callbacks returned
        self.evaluations: list[tuple[int, float]] = []  # (env_steps, mean evaluation return)
        self.episodes = 0  # as the learner counts them, each once; never more than the run should play
        self.resumed: str | None = None  # how a resumed run continued: exact, or at an episode boundary
        self.damaged: list[str] = []  # descriptions of checkpoints that a resumed run had to skip
        self.checkpoint_bytes = 0
        self.checkpoint_s = 0.0  # spent on all checkpoints
        self.evaluation_s = self.final_evaluation_s = 0.0  # spent on evaluations during training, and on final ones
        self.spent = PhaseTimes()
        self._free_bytes: int | None = None  # free disk space in bytes, while the run is live
        self._episode_deduplicator = EpisodeDeduplicator()
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW_EPISODES)
        self._progress: deque[tuple[float, int]] = deque()  # (train_s, env_steps) over the last WINDOW_S
        self._snapshots: deque[TimeTotals] = deque()  # about one a second over the last DIAGNOSIS_S of training
        self._restarts: Counter[str] = Counter()
        self._cursors = dict.fromkeys(_KINDS, 0)

    def refresh(self) -> None:
        """Read everything that was reported since the last call."""
        self.status = self.directory.store.status()
        board: Board = self.directory.board
        reports_by_topic = (self._new_reports(board, topic, kind) for topic, kind in _KINDS.items())
        for report in heapq.merge(*reports_by_topic, key=_time_s):
            if isinstance(report, TrainingReport):
                self._apply_training(report)
            elif isinstance(report, ActorReport):
                self._apply_actor(report)
            elif isinstance(report, EvaluationReport):
                self._apply_evaluation(report)
            elif isinstance(report, EventReport) and report.kind != "span":
                self._apply_event(report)
        self._free_bytes = None if self.ended else free_bytes(self.directory.path)

    @property
    def state(self) -> str:
        return self.status.state

    @property
    def reason(self) -> str | None:
        return self.status.reason

    @property
    def message(self) -> str | None:
        return self.status.message

    @property
    def ended(self) -> bool:
        """Whether the run is over: no more reports are expected."""
        return self.state in ENDED

    @property
    def warning(self) -> str | None:
        """What needs attention while the run is live, or None."""
        warnings = [f"skipped a checkpoint: {damage}" for damage in self.damaged] if not self.ended else []
        if self._free_bytes is not None and self._free_bytes < max(MIN_FREE_BYTES, 2 * self.checkpoint_bytes):
            warnings.append(
                f"the disk is full: {self._free_bytes >> 10:,} KiB left for {self.directory.path}. Free some disk space; until then the "
                "newest checkpoint stays as it is"
            )
        return "; ".join(warnings) or None

    @property
    def target_reached(self) -> bool:
        return self.reached_evaluation is not None

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the run was asked for; None if its length is not given in steps."""
        return self.config.steps

    @property
    def env_steps(self) -> int:
        return self.training.env_steps if self.training else 0

    @property
    def updates(self) -> int:
        return self.training.updates if self.training else 0

    @property
    def version(self) -> int:
        return self.training.version if self.training else 0

    @property
    def train_s(self) -> float:
        return self.training.train_s if self.training else 0.0

    @property
    def wall_s(self) -> float | None:
        """Seconds from the run's start to its end, or to now."""
        if self.status.started_s is None:
            return None
        end = self.status.heartbeat_s if self.state == LOST else self.status.changed_s if self.ended else time.time()
        return (end or self.status.started_s) - self.status.started_s

    @property
    def steps_per_s(self) -> float | None:
        """Environment steps per second of training, over the whole run."""
        return self.env_steps / self.train_s if self.train_s > 0 else None

    @property
    def recent_steps_per_s(self) -> float | None:
        """Environment steps per second over the last WINDOW_S seconds of training."""
        if len(self._progress) < 2:
            return self.steps_per_s
        (start_s, start_steps), (end_s, end_steps) = self._progress[0], self._progress[-1]
        return (end_steps - start_steps) / (end_s - start_s) if end_s > start_s else None

    @property
    def recent(self) -> list[tuple[float, int]]:
        """(return, length) of the last 100 training episodes of all actors."""
        return list(self._recent)

    @property
    def train_return_mean(self) -> float | None:
        """Mean return of the last 100 training episodes of all actors."""
        return sum(score for score, _ in self._recent) / len(self._recent) if self._recent else None

    @property
    def train_length_mean(self) -> float | None:
        return sum(length for _, length in self._recent) / len(self._recent) if self._recent else None

    @property
    def lag_mean(self) -> float | None:
        lags = self.training.lags if self.training else {}
        segments = sum(lags.values())
        return sum(lag * count for lag, count in lags.items()) / segments if segments else None

    @property
    def lag_max(self) -> int | None:
        return max(self.training.lags) if self.training and self.training.lags else None

    @property
    def dropped(self) -> int:
        """Segments that were not learned from."""
        return sum(self.training.dropped.values()) if self.training else 0

    @property
    def played_steps(self) -> int:
        """Environment steps that the actors took, including those not learned from yet."""
        return max(self.env_steps, sum(report.env_steps for report in self.actors.values()))

    @property
    def played_episodes(self) -> int:
        """Episodes that the actors played, including those not learned from."""
        return max(self.episodes, sum(report.total_episodes or 0 for report in self.actors.values()))

    @property
    def memory(self) -> dict[str, float]:
        """What the learner last reported of its memory; empty before its first report."""
        return self.training.memory if self.training else {}

    @property
    def refused(self) -> int:
        """Segments that the learner rejected because of invalid values; they are among the dropped ones."""
        return self.training.dropped.get("refused", 0) if self.training else 0

    @property
    def actor_restarts(self) -> int:
        """Restarts as announced in events or as the actors count them, whichever is more."""
        announced = sum(count for role, count in self._restarts.items() if role.startswith(("actor", "worker")))
        return max(announced, sum(report.epoch for report in self.actors.values()))

    @property
    def time_shares(self) -> dict[str, dict[str, float]]:
        """Role → phase → share of its time, averaged over actors; roles that have not reported are left out."""
        return time_shares_of(self.spent.phases)

    @property
    def totals(self) -> TimeTotals:
        """What the run has spent so far, over all of its attempts."""
        training = self.training
        return TimeTotals(
            time_s=training.time_s if training else 0.0,
            phases=self.spent.phases,
            cpu_s=self.spent.cpu_s,
            evaluation_s=self.evaluation_s,
            checkpoint_s=self.checkpoint_s,
            too_old=training.dropped.get("too_old", 0) if training else 0,
            refused=self.refused,
            lags=dict(training.lags) if training else {},
        )

    @property
    def lately(self) -> TimeTotals:
        """What the run has spent over the last DIAGNOSIS_S seconds that its learner reported."""
        now = self.totals
        return now.since(self._snapshots[0]) if self._snapshots else now

    @property
    def phases(self) -> dict[str, Seconds]:
        """Role → phase → seconds over all of the run's attempts, per actor, and for the manager as far as known."""
        spent = self.spent.phases
        if "learner" in spent:
            total_evaluation_s = self.evaluation_s + self.final_evaluation_s
            rest_s = sum(spent["learner"].values()) - self.evaluation_s
            spent["manager"] = {"evaluate": total_evaluation_s, "other": max(0.0, rest_s)}
        return spent

    def summary(self, *, envs: int | None = None) -> dict[str, Any]:
        """Return the run's results as plain values, None for what does not apply.

        `envs` is the resolved number of environments, if the configuration leaves it open.
        """
        config, evaluation = self.config, self.final_evaluation
        evaluated = evaluation or self.final_training
        reached = self.reached_evaluation
        summary = {
            "run": self.directory.id,
            "state": self.state,
            "reason": self.reason,
            "env": config.env,
            "algo": config.algo,
            "runtime": config.runtime,
            "mode": config.mode,
            "actors": config.actors,
            "envs": envs or config.envs,
            "seed": config.seed,
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "agent_steps": self.training.agent_steps if self.training else None,
            "updates": self.updates,
            "version": evaluated.version if evaluated else self.version,
            "weights_sha256": evaluated.weights_sha256 if evaluated else None,
            "train_return_mean": self.train_return_mean,
            "eval_return_mean": evaluation.return_mean if evaluation else None,
            "eval_return_std": evaluation.return_std if evaluation else None,
            "eval_episodes": len(evaluation.returns) if evaluation else None,
            "eval_terminated_share": evaluation.terminated_share if evaluation else None,
            "eval_agent_returns": (evaluation.agent_returns or None) if evaluation else None,
            "wall_s": self.wall_s,
            "train_s": self.train_s,
            "time_to_target_s": reached.train_s if reached else None,
            "steps_per_s": self.steps_per_s,
            "lag_mean": self.lag_mean,
            "lag_max": self.lag_max,
            "dropped_segments": self.dropped,
            "refused_segments": self.refused,
            "actor_restarts": self.actor_restarts,
            "resume": self.resumed,
            "time_shares": self.time_shares or None,
            "profile": str(self.directory.profile) if config.flow.profile else None,
        }
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in summary.items()}

    def _new_reports(self, board: Board, topic: str, kind: type[Report]) -> Iterator[Report]:
        """Yield new reports, one page at a time: histories are long."""
        while page := board.read(topic, self._cursors[topic], _PAGE):
            reports = sorted((_decode_report(kind, topic, number, record) for number, record in page), key=_time_s)
            self._cursors[topic] = page[-1][0]
            yield from reports
            if len(page) < _PAGE:
                return

    def _apply_training(self, report: TrainingReport) -> None:
        self.training = report
        if report.episodes is not None:
            self.episodes = report.episodes
        self.spent.set_times("learner", report.phases, report.cpu_s)
        self._take_snapshot(report.time_s)
        if report.final:
            self.final_training = report
        self._progress.append((report.train_s, report.env_steps))
        while len(self._progress) > 2 and report.train_s - self._progress[0][0] > WINDOW_S:
            self._progress.popleft()
        if self.train_return_mean is not None:
            _add_point(self.history, report.env_steps, self.train_return_mean)

    def _take_snapshot(self, now_s: float) -> None:
        if self._snapshots and now_s - self._snapshots[-1].time_s < _SNAPSHOT_INTERVAL_S:
            return
        self._snapshots.append(self.totals if self._snapshots else TimeTotals(now_s))  # the first one: as of the start
        while len(self._snapshots) > 1 and now_s - self._snapshots[1].time_s >= DIAGNOSIS_S:
            self._snapshots.popleft()

    def _apply_actor(self, report: ActorReport) -> None:
        self.actors[report.actor] = report
        self.spent.set_times(f"actor-{report.actor}", report.phases, report.cpu_s)
        self.actors = dict(sorted(self.actors.items()))
        if report.total_episodes is None and (self.training is None or self.training.episodes is None):
            self.episodes += len(report.episodes) if report.num_episodes is None else report.num_episodes
        self._recent.extend(self._episode_deduplicator.new_episodes(report))
        if self.final_training is not None and self.train_return_mean is not None:  # final report after the learner's
            _add_point(self.history, self.final_training.env_steps, self.train_return_mean)

    def _apply_evaluation(self, report: EvaluationReport) -> None:
        self.last_evaluation = report
        if self.best_evaluation is None or report.return_mean > self.best_evaluation.return_mean:
            self.best_evaluation = report
        if report.final:
            self.final_evaluation = report
            self.final_evaluation_s += report.duration_s
        else:
            self.evaluation_s += report.duration_s
        if report.reached and self.reached_evaluation is None:
            self.reached_evaluation = report
        _add_point(self.evaluations, report.env_steps, report.return_mean)

    def _apply_event(self, report: EventReport) -> None:
        if report.kind == "metric":
            self.metrics.update(report.details["values"])
            return
        self.events.append(report)
        if report.kind == "checkpoint":
            self.checkpoint_bytes = int(report.details.get("new_bytes", report.details.get("size_bytes", 0)))
            self.checkpoint_s += float(report.details.get("write_s", 0.0))
        elif report.kind == "restart":
            self._restarts[report.role] += 1
            self.spent.end_attempt(report.role)
        elif report.kind == "resume":
            self._apply_resume(report)

    def _apply_resume(self, report: EventReport) -> None:
        """Handle that the run resumed from a checkpoint: the end of its previous attempt is not the run's end.

        Actors report whether they could resume exactly. Episodes that actors reported after that checkpoint are played
        again, so the checkpoint's own count is used.
        """
        if report.role == "supervisor":
            self.spent.end_attempt()
            self._episode_deduplicator.rewind()
            self.episodes = int(report.details.get("episodes", 0))
            self.final_training = self.final_evaluation = self.reached_evaluation = None
            self.resumed = "exact"
            self.damaged = [str(damage) for damage in report.details.get("damaged", ())]
        elif self.resumed is not None and report.details.get("how") != "exact":
            self.resumed = "episode-boundary"


def _decode_report(kind: type[Report], topic: str, number: int, record: dict[str, Any]) -> Report:
    try:
        return kind.read(record)
    except msgspec.ValidationError as error:
        raise DamagedFile(f"record {number} of {topic} is not what this version of Steppe writes: {error}") from None


def time_shares_of(spent: Mapping[str, Seconds]) -> dict[str, dict[str, float]]:
    """Return role → phase → share of its time, averaged over actors; roles that spent no time are left out."""
    by_actor = [
        shares for role, phases in spent.items() if role not in ("learner", "manager") and (shares := shares_of(phases))
    ]
    found = {}
    if by_actor:
        phases = dict.fromkeys(phase for shares in by_actor for phase in shares)
        found["actor"] = {p: sum(shares.get(p, 0.0) for shares in by_actor) / len(by_actor) for p in phases}
    if learner := shares_of(spent.get("learner", {})):
        found["learner"] = learner
    return found


def shares_of(phases: Mapping[str, float]) -> dict[str, float]:
    """Return each phase's share of the total; empty if no time was spent."""
    total = sum(phases.values())
    return {phase: seconds / total for phase, seconds in phases.items()} if total > 0 else {}


def _add_point(points: list[tuple[int, float]], env_steps: int, value: float) -> None:
    points.append((env_steps, value))
    if len(points) > _HISTORY:
        del points[1:-1:2]  # keep the first and the last
