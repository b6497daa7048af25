"""The manager with a scripted evaluator and archive: when it evaluates, what it keeps and reports."""

from __future__ import annotations

import math

import pytest

from steppe.core.config.run import EvalConfig
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING
from steppe.roles import manager as manager_module
from steppe.roles.context import FINISH, POLICY, RUN, STOP
from steppe.roles.evaluation import Evaluation
from steppe.roles.manager import Manager
from tests.support.role_fakes import ScriptedPolicy, ScriptedWorld, make_context, weights_of

pytestmark = pytest.mark.unit


class ScriptedEvaluator:
    """Evaluations whose return depends on the version only."""

    def __init__(self, policy, scores, before=None):
        self.policy, self.scores, self.before = policy, scores, before
        self.evaluated = []
        self.env = ScriptedWorld()

    def evaluate(self, episodes, stopping, *, explore=False, record=False):
        version = self.policy.version
        if self.before is not None:
            self.before()
        if stopping():
            return None
        self.evaluated.append((version, episodes, explore, record))
        score = self.scores.get(version, 0.0)
        frames = [self.env.render()] if record else []
        return Evaluation([score - 1.0, score + 1.0], [3, 4], frames=frames)


class ListArchive:
    """An Archive in lists."""

    def __init__(self, written=None, best_score=-math.inf):
        self.recorded, self.best, self.results, self.recordings, self.closed = [], [], [], [], False
        self.numbers, self.written = [], written or {}
        self.best_score = lambda: best_score

    def record(self, report, number):
        self.recorded.append(report)
        self.numbers.append(number)

    def save_best(self, weights, score):
        self.best.append((weights.version, score))

    def save_result(self, weights):
        self.results.append(weights.version)

    def save_video(self, evaluation, version):
        self.recordings.append(version)
        return f"recordings/{version}.gif"

    def close(self):
        self.closed = True


class LocalManager:
    def __init__(self, *, scores=None, target=None, before=None, **config):
        self.context, self.album, policy = make_context("manager"), ListArchive(), ScriptedPolicy()
        self.judge = ScriptedEvaluator(policy, scores or {}, before)
        self.made = 0
        given = EvalConfig(**{"every_steps": 100, "episodes": 7, "max_share": 1.0, **config})
        self.manager = Manager(policy, self.make_evaluator, given, target, self.album, self.context)

    def make_evaluator(self):
        self.made += 1
        return self.judge

    def publish(self, version, **counters):
        self.context.weights.publish(POLICY, weights_of(version, **counters))
        return self.manager.step()

    def reports(self):
        return [EvaluationReport.read(record) for _, record in self.context.board.read(EVALUATIONS)]

    @property
    def evaluated(self):
        return [version for version, *_ in self.judge.evaluated]


class TestWhen:
    def test_evaluates_only_when_due(self):
        bench = LocalManager()
        for version, env_steps in enumerate([0, 50, 99, 100, 150, 199, 200, 290, 310, 405]):
            assert bench.publish(version, env_steps=env_steps) == (env_steps in (100, 200, 310))
            assert bench.evaluated[-1:] == ([version] if env_steps in (100, 200, 310) else bench.evaluated[-1:])
        assert bench.evaluated == [3, 6, 8]  # 405 is less than 100 after 310

    def test_evaluates_by_episodes(self):
        bench = LocalManager(every_steps=10**9, every_episodes=10)
        for version, episodes in enumerate([0, 9, 10, 15, 19, 20]):
            bench.publish(version, env_steps=version, episodes=episodes)
        assert bench.evaluated == [2, 5]

    @pytest.mark.parametrize(
        ("target", "given", "rest_s"), [(None, None, 18.0), (475.0, None, 2.0), (475.0, 0.25, 6.0), (None, 1.0, 0.0)]
    )
    def test_evaluations_take_at_most_their_share_of_time(self, monkeypatch, target, given, rest_s):
        clock = [50.0]
        monkeypatch.setattr("steppe.roles.manager.time.perf_counter", lambda: clock[0])
        bench = LocalManager(max_share=given, target=target, before=lambda: clock.__setitem__(0, clock[0] + 2.0))
        bench.publish(0, env_steps=100)
        if rest_s:
            clock[0] += rest_s - 0.1
            assert not bench.publish(1, env_steps=1000)
        clock[0] += 0.2
        assert bench.publish(2, env_steps=1001)
        assert bench.evaluated == [0, 2]

    def test_does_nothing_without_weights(self):
        bench = LocalManager()
        assert not bench.manager.step()
        assert bench.made == 0

    def test_the_same_weights_are_evaluated_once(self):
        bench = LocalManager()
        bench.publish(0, env_steps=100)
        assert not bench.manager.step()
        assert bench.evaluated == [0]

    def test_weights_are_fetched_once_each(self):
        """A copy of large weights for every check would cost more than the evaluation."""
        bench = LocalManager()
        fetched = []
        newer_than = bench.context.weights.newer_than
        bench.context.weights.newer_than = lambda policy, version: fetched.append(newer_than(policy, version)) or fetched[-1]  # fmt: skip
        bench.publish(0, env_steps=10)
        for _ in range(5):
            bench.manager.step()
        assert [weights is None for weights in fetched] == [False, True, True, True, True, True]

    def test_uses_the_configured_evaluator(self):
        bench = LocalManager(explore=True, record=True)
        bench.publish(1, env_steps=100)
        assert bench.judge.evaluated == [(1, 7, True, True)]


class TestTheEnd:
    def test_the_last_weights_are_evaluated_even_if_they_were_before(self):
        bench = LocalManager(scores={4: 12.0})
        bench.publish(4, env_steps=100)
        bench.context.orders["now"] = FINISH
        assert bench.manager.step()
        assert bench.manager.done
        assert bench.evaluated == [4, 4]
        assert [report.final for report in bench.reports()] == [False, True]
        assert bench.album.results == [4]

    def test_the_last_evaluation_need_not_be_due(self):
        bench = LocalManager()
        bench.publish(1, env_steps=3)
        bench.context.orders["now"] = FINISH
        bench.manager.step()
        assert bench.evaluated == [1]

    def test_without_weights_there_is_no_last_evaluation(self):
        bench = LocalManager()
        bench.context.orders["now"] = FINISH
        bench.manager.step()
        assert bench.manager.done
        assert bench.reports() == []

    def test_stop_ends_without_a_last_evaluation(self):
        bench = LocalManager()
        bench.context.orders["now"] = STOP
        assert not bench.publish(0, env_steps=1000)
        assert bench.manager.done
        assert bench.evaluated == []

    def test_a_running_evaluation_is_replaced_by_the_last_one(self):
        bench = LocalManager()
        bench.judge.before = lambda: bench.context.orders.update(now=FINISH)
        bench.publish(0, env_steps=100)
        assert bench.evaluated == []
        bench.manager.step()
        assert bench.evaluated == [0]
        assert bench.reports()[0].final

    def test_only_stop_ends_the_last_evaluation(self):
        bench = LocalManager()
        bench.publish(0)
        bench.context.orders["now"] = FINISH
        bench.judge.before = lambda: bench.context.orders.update(now=STOP)
        bench.manager.step()
        assert bench.reports() == []
        assert bench.manager.done

    @pytest.mark.parametrize("asked", [RUN, FINISH])
    def test_a_long_evaluation_sends_heartbeats(self, asked):
        bench = LocalManager()
        beats = []
        bench.context.heartbeat = lambda: beats.append(1)
        bench.context.orders["now"] = asked
        bench.publish(0, env_steps=100)
        assert bench.evaluated == [0]
        assert beats == [1], "each time the judge asks whether to go on, which is before every step"

    def test_closing_closes_evaluator_and_archive(self):
        bench = LocalManager()
        bench.publish(0, env_steps=100)
        bench.manager.close()
        assert bench.judge.env.closed
        assert bench.album.closed


class TestResults:
    def test_evaluations_are_reported(self):
        bench = LocalManager(scores={3: 10.0})
        bench.publish(3, env_steps=100, episodes=2, value=1.5)
        (report,) = bench.reports()
        assert (report.version, report.updates, report.env_steps, report.train_s) == (3, 3, 100, 1.5)
        assert (report.returns, report.lengths) == ([9.0, 11.0], [3, 4])
        assert (report.return_mean, report.return_std) == (10.0, 1.0)
        assert report.weights_sha256 == weights_of(3, value=1.5).sha256()
        assert not report.reached
        assert not report.final
        assert report.recording is None
        assert bench.album.recorded[-1].record() == report.record()

    def test_the_best_weights_are_saved(self):
        bench = LocalManager(scores={1: -5.0, 2: 3.0, 3: 2.0, 4: 3.0, 5: 8.0})
        for version in range(1, 6):
            bench.publish(version, env_steps=100 * version)
        assert bench.album.best == [(1, -5.0), (2, 3.0), (5, 8.0)]
        assert bench.album.results == []

    def test_the_target_is_reached_by_the_mean(self):
        bench = LocalManager(scores={1: 9.9, 2: 10.0}, target=10.0)
        bench.publish(1, env_steps=100)
        bench.publish(2, env_steps=200)
        assert [report.reached for report in bench.reports()] == [False, True]
        assert [report.final for report in bench.reports()] == [False, True]
        assert bench.album.results == [2]

    def test_a_video_is_saved_if_configured(self):
        bench = LocalManager(record=True)
        bench.publish(6, env_steps=100)
        assert bench.album.recordings == [6]
        assert bench.reports()[0].recording == "recordings/6.gif"


class TestRecording:
    def test_reports_of_other_roles_are_recorded_once_and_in_order(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(manager_module.time, "monotonic", lambda: now[0])
        bench = LocalManager()
        board = bench.context.board
        training = [TrainingReport(run="run", version=v, updates=v, env_steps=v, train_s=0.0) for v in range(3)]
        board.post(TRAINING, training[0].record())
        board.post(ACTORS, ActorReport(run="run", actor=1, epoch=0, version=0, sequence=0, env_steps=0).record())
        assert bench.manager.step()
        assert not bench.manager.step()
        board.post(TRAINING, training[1].record())
        assert not bench.manager.step()  # not yet time to poll again
        now[0] += manager_module.RECORD_EVERY_S
        assert bench.manager.step()
        board.post(TRAINING, training[2].record())
        bench.manager.close()
        kinds = [type(report).__name__ for report in bench.album.recorded]
        assert kinds == ["TrainingReport", "ActorReport", "TrainingReport", "TrainingReport"]
        assert [r.version for r in bench.album.recorded if isinstance(r, TrainingReport)] == [0, 1, 2]


class TestRestarted:
    """A second manager on the same board, as after a kill of the first one."""

    def again(self, bench, **archive):
        """Return another manager with the board and weights of the first one."""
        other = LocalManager()
        other.context.board, other.context.weights = bench.context.board, bench.context.weights
        other.album = ListArchive(**archive)
        other.manager = Manager(
            other.judge.policy, other.make_evaluator, other.manager.config, None, other.album, other.context
        )
        return other

    def test_records_only_what_the_curves_lack(self, monkeypatch):
        monkeypatch.setattr(manager_module, "RECORD_EVERY_S", 0.0)
        bench = LocalManager()
        bench.publish(0, env_steps=100)
        for version in range(3):
            report = TrainingReport(run="run", version=version, updates=0, env_steps=0, train_s=0.0)
            bench.context.board.post(TRAINING, report.record())
        other = self.again(bench, written={TRAINING: 2, EVALUATIONS: 1})
        other.manager.step()
        assert [(type(report).__name__, report.version) for report in other.album.recorded] == [("TrainingReport", 2)]
        assert other.album.numbers == [3]

    def test_keeps_the_evaluation_interval(self):
        bench = LocalManager()
        bench.publish(1, env_steps=130)
        other = self.again(bench)
        other.manager.step()  # 130 was evaluated
        other.publish(2, env_steps=200)
        other.publish(3, env_steps=229)
        assert other.evaluated == []
        other.publish(4, env_steps=230)
        assert other.evaluated == [4]

    def test_keeps_the_evaluation_interval_in_episodes(self):
        bench = LocalManager(every_steps=10**9, every_episodes=10)
        bench.publish(1, env_steps=130, episodes=12)
        (report,) = bench.reports()
        assert report.episodes == 12

    def test_a_run_resumed_from_an_earlier_checkpoint_is_evaluated_again(self):
        bench = LocalManager()
        bench.publish(1, env_steps=110)
        bench.publish(2, env_steps=220)
        other = LocalManager()
        other.context.board = bench.context.board
        other.manager = Manager(
            other.judge.policy, other.make_evaluator, other.manager.config, None, other.album, other.context
        )
        other.publish(1, env_steps=150)  # from a checkpoint before the second evaluation
        other.publish(2, env_steps=209)
        assert other.evaluated == []
        other.publish(3, env_steps=210)
        assert other.evaluated == [3]

    def test_keeps_the_best(self):
        bench = LocalManager(scores={1: 50.0})
        bench.publish(1, env_steps=100)
        other = self.again(bench, best_score=50.0)
        other.judge.scores = {2: 49.0, 3: 51.0}
        other.publish(2, env_steps=200)
        assert other.album.best == []
        other.publish(3, env_steps=300)
        assert other.album.best == [(3, 51.0)]

    def test_curves_are_truncated_for_a_resumed_run(self, monkeypatch):
        monkeypatch.setattr(manager_module, "RECORD_EVERY_S", 0.0)
        bench = LocalManager()
        for kind, role in [("resume", "supervisor"), ("resume", "actor-0"), ("checkpoint", "learner")]:
            bench.context.board.post(EVENTS, EventReport(run="run", kind=kind, role=role).record())
        bench.manager.step()
        assert [(report.kind, report.role) for report in bench.album.recorded] == [("resume", "supervisor")]
