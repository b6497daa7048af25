"""The manager with a scripted judge and archive: when it evaluates, what it keeps, what it tells."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from steppe.core.config.run import EvalConfig
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING
from steppe.records.evaluation_queue import EvaluationQueue
from steppe.roles import manager as manager_module
from steppe.roles.context import FINISH, POLICY, RUN, STOP
from steppe.roles.evaluation import Evaluation
from steppe.roles.manager import Manager
from tests.support.role_fakes import ScriptedPolicy, ScriptedWorld, make_context, weights_of

pytestmark = pytest.mark.unit


class ScriptedEvaluator:
    """The return of an evaluation is looked up by version."""

    def __init__(self, policy, scores, before=None):
        self.policy, self.scores, self.before = policy, scores, before
        self.judged = []
        self.env = ScriptedWorld()

    def evaluate(self, episodes, stopping, *, explore=False, record=False):
        version = self.policy.version
        if self.before is not None:
            self.before()
        if stopping():
            return None
        self.judged.append((version, episodes, explore, record))
        score = self.scores.get(version, 0.0)
        frames = [self.env.render()] if record else []
        return Evaluation([score - 1.0, score + 1.0], [3, 4], frames=frames)


class ListArchive:
    """An Archive in lists."""

    def __init__(self, written=None):
        self.recorded, self.best, self.results, self.recordings, self.closed = [], [], [], [], False
        self.numbers, self.written = [], written or {}

    def record(self, report, number):
        self.recorded.append(report)
        self.numbers.append(number)

    def save_if_best(self, weights, score):
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
        given = EvalConfig(**{"every_steps": 100, "episodes": 7, **config})
        self.queue = EvaluationQueue(Path(tempfile.mkdtemp()) / "evaluations")
        self.manager = Manager(policy, self.make_evaluator, given, target, self.album, self.context, self.queue)

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
        return [version for version, *_ in self.judge.judged]


class TestWhen:
    def test_only_when_due(self):
        bench = LocalManager()
        for version, env_steps in enumerate([0, 50, 99, 100, 150, 199, 200, 290, 310, 405]):
            assert bench.publish(version, env_steps=env_steps) == (env_steps in (100, 200, 310, 405))
        assert bench.evaluated == [3, 6, 8, 9]  # the first ones after each multiple

    def test_by_episodes_too(self):
        bench = LocalManager(every_steps=10**9, every_episodes=10)
        for version, episodes in enumerate([0, 9, 10, 15, 19, 20]):
            bench.publish(version, env_steps=version, episodes=episodes)
        assert bench.evaluated == [2, 5]

    @pytest.mark.parametrize(
        ("target", "given", "rest_s"), [(None, None, 0.0), (475.0, None, 0.0), (475.0, 0.25, 6.0), (None, 0.1, 18.0)]
    )
    def test_no_more_than_their_share_of_the_time_if_it_is_limited(self, monkeypatch, target, given, rest_s):
        clock = [50.0]
        monkeypatch.setattr("steppe.roles.manager.time.perf_counter", lambda: clock[0])
        bench = LocalManager(max_share=given, target=target, before=lambda: clock.__setitem__(0, clock[0] + 2.0))
        bench.publish(0, env_steps=100)
        if rest_s:
            clock[0] += rest_s - 0.1
            assert not bench.publish(1, env_steps=1000)
        clock[0] += 0.2
        assert bench.publish(2, env_steps=1001 if rest_s else 2001), "still due, or due again"
        assert bench.evaluated == [0, 2]
        assert [report.left_out for report in bench.reports()] == [0, 0]

    def test_nothing_to_do_without_weights(self):
        bench = LocalManager()
        assert not bench.manager.step()
        assert bench.made == 0

    def test_the_same_weights_are_judged_once(self):
        bench = LocalManager()
        bench.publish(0, env_steps=100)
        assert not bench.manager.step()
        assert bench.evaluated == [0]

    def test_weights_are_fetched_once_each(self):
        """A copy of large weights for every look would cost more than the evaluation."""
        bench = LocalManager()
        fetched = []
        newer_than = bench.context.weights.newer_than
        bench.context.weights.newer_than = lambda policy, version: fetched.append(newer_than(policy, version)) or fetched[-1]  # fmt: skip
        bench.publish(0, env_steps=10)
        for _ in range(5):
            bench.manager.step()
        assert [weights is None for weights in fetched] == [False, True, True, True, True, True]

    def test_as_configured(self):
        bench = LocalManager(explore=True, record=True)
        bench.publish(1, env_steps=100)
        assert bench.judge.judged == [(1, 7, True, True)]


class TestTheEnd:
    def test_the_last_weights_are_judged_even_if_they_were_before(self):
        bench = LocalManager(scores={4: 12.0})
        bench.publish(4, env_steps=100)
        bench.context.orders["now"] = FINISH
        assert bench.manager.step()
        assert bench.manager.done
        assert bench.evaluated == [4, 4]
        assert [report.final for report in bench.reports()] == [False, True]
        assert bench.album.results == [4]

    def test_they_need_not_be_due(self):
        bench = LocalManager()
        bench.publish(1, env_steps=3)
        bench.context.orders["now"] = FINISH
        bench.manager.step()
        assert bench.evaluated == [1]

    def test_without_weights_there_is_nothing_to_judge(self):
        bench = LocalManager()
        bench.context.orders["now"] = FINISH
        bench.manager.step()
        assert bench.manager.done
        assert bench.reports() == []

    def test_stop_ends_it_without_judging(self):
        bench = LocalManager()
        bench.context.orders["now"] = STOP
        assert not bench.publish(0, env_steps=1000)
        assert bench.manager.done
        assert bench.evaluated == []

    def test_an_evaluation_under_way_gives_way_to_the_last_one(self):
        bench = LocalManager()
        bench.judge.before = lambda: bench.context.orders.update(now=FINISH)
        bench.publish(0, env_steps=100)
        assert bench.evaluated == []
        bench.manager.step()
        assert bench.evaluated == [0]
        (report,) = bench.reports()
        assert (report.final, report.left_out) == (True, 1)

    def test_what_was_due_and_not_evaluated_is_counted(self):
        bench = LocalManager(max_share=1e-6)
        for version, env_steps in enumerate([100, 200, 300, 350]):
            bench.publish(version, env_steps=env_steps)
        bench.context.orders["now"] = FINISH
        bench.manager.step()
        assert bench.evaluated == [0, 3]
        assert [report.left_out for report in bench.reports()] == [0, 2]

    def test_the_last_one_is_ended_by_stop_only(self):
        bench = LocalManager()
        bench.publish(0)
        bench.context.orders["now"] = FINISH
        bench.judge.before = lambda: bench.context.orders.update(now=STOP)
        bench.manager.step()
        assert bench.reports() == []
        assert bench.manager.done

    @pytest.mark.parametrize("asked", [RUN, FINISH])
    def test_a_long_evaluation_is_no_hung_one(self, asked):
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


class TestVerdicts:
    def test_what_is_told(self):
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

    def test_each_is_offered_as_the_best(self):
        bench = LocalManager(scores={1: -5.0, 2: 3.0, 3: 2.0})
        for version in range(1, 4):
            bench.publish(version, env_steps=100 * version)
        assert bench.album.best == [(1, -5.0), (2, 3.0), (3, 2.0)]
        assert bench.album.results == []

    def test_the_target_is_reached_by_the_mean(self):
        bench = LocalManager(scores={1: 9.9, 2: 10.0}, target=10.0)
        bench.publish(1, env_steps=100)
        bench.publish(2, env_steps=200)
        assert [report.reached for report in bench.reports()] == [False, True]
        assert [report.final for report in bench.reports()] == [False, True]
        assert bench.album.results == [2]

    def test_a_recording_is_kept_where_asked_for(self):
        bench = LocalManager(record=True)
        bench.publish(6, env_steps=100)
        assert bench.album.recordings == [6]
        assert bench.reports()[0].recording == "recordings/6.gif"


class TestRecording:
    def test_what_others_report_is_recorded_once_and_in_order(self, monkeypatch):
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
        assert not bench.manager.step()  # not yet time to look again
        now[0] += manager_module.RECORD_EVERY_S
        assert bench.manager.step()
        board.post(TRAINING, training[2].record())
        bench.manager.close()
        kinds = [type(report).__name__ for report in bench.album.recorded]
        assert kinds == ["TrainingReport", "ActorReport", "TrainingReport", "TrainingReport"]
        assert [r.version for r in bench.album.recorded if isinstance(r, TrainingReport)] == [0, 1, 2]


class TestQueue:
    """What a learner queued is evaluated in order, whatever is the newest."""

    def bench(self, *versions, **config):
        bench = LocalManager(**config)
        bench.queue.open()
        for version in versions:
            bench.queue.add(weights_of(version, env_steps=100 * version))
        bench.context.weights.publish(POLICY, weights_of(50, env_steps=5000))
        return bench

    def left(self, bench):
        return [entry.version for entry in bench.queue.waiting()]

    def test_an_evaluation_under_way_is_finished_before_the_last_one(self):
        bench = self.bench(1)
        bench.judge.before = lambda: bench.context.orders.update(now=FINISH)
        bench.manager.step()
        bench.manager.step()
        assert bench.evaluated == [1, 50]
        assert [report.final for report in bench.reports()] == [False, True]

    def test_each_in_order_and_then_the_newest(self):
        bench = self.bench(2, 1, 11)
        assert bench.manager.step()
        assert (bench.evaluated, self.left(bench)) == ([1], [2, 11])
        bench.context.orders["now"] = FINISH
        while not bench.manager.done:
            bench.manager.step()
        assert bench.evaluated == [1, 2, 11, 50]
        assert [report.final for report in bench.reports()] == [False, False, False, True]
        assert [report.waiting for report in bench.reports()] == [2, 1, 0, 0]
        assert self.left(bench) == []

    def test_nothing_else_is_evaluated(self):
        bench = self.bench()
        assert not bench.publish(60, env_steps=6000)
        assert bench.evaluated == []

    def test_what_was_stopped_waits_for_the_next_manager(self):
        bench = self.bench(1, 2)
        bench.judge.before = lambda: bench.context.orders.update(now=STOP)
        bench.manager.step()
        assert (bench.reports(), self.left(bench)) == ([], [1, 2])
        other = TestRestarted().again(bench)
        other.manager.step()
        assert other.evaluated == [1]

    def test_what_a_killed_manager_reported_is_not_evaluated_twice(self):
        bench = self.bench(1, 2)
        data = bench.queue.waiting()[0].path.read_bytes()
        queued_s = bench.queue.waiting()[0].queued_s
        bench.manager.step()
        again = bench.queue.directory / "0000000001.safetensors"
        again.write_bytes(data)
        os.utime(again, (queued_s, queued_s))  # as if the manager had died before removing it
        other = TestRestarted().again(bench)
        other.manager.step()
        assert other.evaluated == [2]

    def test_what_a_rewound_run_queued_again_is_evaluated_again(self):
        bench = self.bench(1)
        bench.manager.step()
        bench.queue.add(weights_of(1, env_steps=100))
        later = bench.queue.waiting()[0]
        os.utime(later.path, (later.queued_s + 60, later.queued_s + 60))
        other = TestRestarted().again(bench)
        other.manager.step()
        assert other.evaluated == [1]

    def test_with_a_share_all_but_the_newest_are_left_out_and_counted(self):
        bench = self.bench(1, 2, 3, max_share=0.5)
        bench.manager.step()
        assert bench.evaluated == [3]
        bench.queue.add(weights_of(4))
        bench.context.orders["now"] = FINISH
        bench.manager.step()
        assert bench.evaluated == [3, 50]
        assert [report.left_out for report in bench.reports()] == [2, 1]

    def test_damaged_weights_are_left_out_with_a_warning(self):
        bench = self.bench(1, 2)
        bench.queue.waiting()[0].path.write_bytes(b"not weights")
        bench.manager.step()
        assert bench.evaluated == [2]
        assert bench.reports()[0].left_out == 1
        (event,) = [EventReport.read(record) for _, record in bench.context.board.read(EVENTS)]
        assert (event.kind, "version 1 is not evaluated" in event.details["message"]) == ("warning", True)

    def test_the_first_that_reaches_the_target_is_the_result(self):
        bench = self.bench(1, 2, 3, scores={1: 1.0, 2: 10.0, 3: 99.0}, target=10.0)
        bench.context.orders["now"] = FINISH
        while not bench.manager.done:
            bench.manager.step()
        assert bench.evaluated == [1, 2]
        assert bench.album.results == [2]

    def test_the_last_one_has_its_own_number_of_episodes(self):
        bench = self.bench(1, final_episodes="auto")
        bench.context.orders["now"] = FINISH
        bench.manager.step()
        bench.manager.step()
        assert [episodes for _, episodes, *_ in bench.judge.judged] == [7, "auto"]


class TestRestarted:
    """A second manager on the same board, as after a kill of the first."""

    def again(self, bench, **archive):
        """Another bench whose board and weights are those of the first."""
        other = LocalManager()
        other.context.board, other.context.weights = bench.context.board, bench.context.weights
        other.album = ListArchive(**archive)
        other.queue = bench.queue
        other.manager = Manager(
            other.judge.policy,
            other.make_evaluator,
            other.manager.config,
            None,
            other.album,
            other.context,
            bench.queue,
        )
        return other

    def test_it_records_only_what_the_curves_lack(self, monkeypatch):
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

    def test_it_keeps_the_pace(self):
        bench = LocalManager()
        bench.publish(1, env_steps=130)
        other = self.again(bench)
        other.manager.step()  # 130 was judged
        other.publish(2, env_steps=160)
        other.publish(3, env_steps=199)
        assert other.evaluated == []
        other.publish(4, env_steps=200)
        assert other.evaluated == [4]

    def test_it_keeps_the_pace_in_episodes(self):
        bench = LocalManager(every_steps=10**9, every_episodes=10)
        bench.publish(1, env_steps=130, episodes=12)
        (report,) = bench.reports()
        assert report.episodes == 12

    def test_a_run_that_went_back_is_judged_again_from_there(self):
        bench = LocalManager()
        bench.publish(1, env_steps=110)
        bench.publish(2, env_steps=220)
        other = LocalManager()
        other.context.board = bench.context.board
        other.manager = Manager(
            other.judge.policy,
            other.make_evaluator,
            other.manager.config,
            None,
            other.album,
            other.context,
            other.queue,
        )
        other.publish(1, env_steps=150)  # from a checkpoint before the second evaluation
        other.publish(2, env_steps=199)
        assert other.evaluated == []
        other.publish(3, env_steps=205)
        assert other.evaluated == [3]

    def test_the_curves_hear_of_a_resumed_run(self, monkeypatch):
        monkeypatch.setattr(manager_module, "RECORD_EVERY_S", 0.0)
        bench = LocalManager()
        for kind, role in [("resume", "supervisor"), ("resume", "actor-0"), ("checkpoint", "learner")]:
            bench.context.board.post(EVENTS, EventReport(run="run", kind=kind, role=role).record())
        bench.manager.step()
        assert [(report.kind, report.role) for report in bench.album.recorded] == [("resume", "supervisor")]
