"""The learner with a scripted agent and memory: what it counts, when it publishes, saves, reports and ends."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from role_fakes import SPEC, ScriptedAgent, ScriptedMemory, make_context, segment_of

from steppe.core import codec
from steppe.core.errors import DiskFull, NotFinite
from steppe.core.links import EVENTS, TRAINING
from steppe.core.reports import EventReport, TrainingReport
from steppe.roles.context import FINISH, PAUSE, POLICY, RUN, STOP
from steppe.roles.gates import Rounds, Window
from steppe.roles.learner import REPORT_EVERY_S, Learner, Limits

pytestmark = pytest.mark.unit

STEPS = SPEC.num_steps * SPEC.num_envs  # of one segment whose rows are all valid


class Bench:
    """A learner over local links, one round at a time."""

    def __init__(self, *, num_actors=1, batches=1, warm_up=1, agent=None, window=False, **limits):
        self.context = make_context("learner", num_actors=num_actors, slots=2)
        self.num_actors, self.saved = num_actors, []
        self.agent, self.memory = agent or ScriptedAgent(), ScriptedMemory(batches, warm_up)
        self.published = []
        publish = self.context.weights.publish
        self.context.weights.publish = lambda policy, weights: (self.published.append(weights.copy()), publish(policy, weights))  # fmt: skip
        channel = self.context.channel
        intake = Window(channel, num_actors, 0.0, 2, self.context.clock) if window else Rounds(channel, num_actors)
        save = lambda weights, state, counters: self.saved.append((weights.copy(), state, dict(counters)))  # noqa: E731
        self.learner = Learner(self.agent, self.memory, intake, Limits(**limits), save, self.context)
        self.sequence = 0

    def send(self, *, version=0, started_s=0.0, spoil=None):
        """One segment of every actor, the last actor's first."""
        for actor in reversed(range(self.num_actors)):
            segment = segment_of(self.context.channel, actor, self.sequence, version, started_s=started_s + actor)
            if spoil is not None:
                spoil(segment)
        self.sequence += 1

    def until_idle(self):
        for _ in range(100):
            if not self.learner.step():
                return
        raise AssertionError("never idle")

    def round(self, **options):
        self.send(**options)
        self.until_idle()

    @property
    def versions(self):
        return [weights.version for weights in self.published]

    def reports(self):
        return [TrainingReport.read(record) for _, record in self.context.board.read(TRAINING)]


class TestPublishing:
    def test_the_first_weights_go_out_before_anything_arrives(self):
        bench = Bench()
        bench.until_idle()
        assert bench.versions == [0]
        assert bench.published[0].env_steps == 0

    @pytest.mark.parametrize("batches", [1, 5])
    def test_once_per_round(self, batches):
        bench = Bench(num_actors=2, batches=batches)
        for _ in range(3):
            bench.round()
        assert bench.versions == [0, 1, 2, 3]
        assert [weights.updates for weights in bench.published] == [0, batches, 2 * batches, 3 * batches]
        assert [weights.arrays()["w"][0] for weights in bench.published] == [0, batches, 2 * batches, 3 * batches]
        assert [weights.env_steps for weights in bench.published] == [2 * STEPS * k for k in range(4)]

    def test_rounds_that_only_warm_up_publish_too(self):
        bench = Bench(batches=4, warm_up=3)
        for _ in range(4):
            bench.round()
        assert bench.versions == [0, 1, 2, 3, 4]
        assert [weights.updates for weights in bench.published] == [0, 0, 0, 4, 8]

    def test_publish_every_so_many_updates_at_the_latest(self):
        bench = Bench(batches=10, publish_every=4)
        bench.round()
        assert [weights.updates for weights in bench.published] == [0, 4, 8, 10]

    def test_one_batch_a_step_and_no_intake_while_learning(self):
        """A step is bounded: others in the same process get their turn between batches."""
        bench = Bench(batches=3)
        bench.send()
        bench.send()
        for learned in (1, 2, 3):
            assert bench.learner.step()
            assert (len(bench.agent.learned), len(bench.memory.intakes)) == (learned, 1)

    def test_an_incomplete_round_changes_nothing(self):
        bench = Bench(num_actors=2)
        bench.until_idle()
        segment_of(bench.context.channel, 1, 0)
        bench.until_idle()
        assert bench.versions == [0]
        assert bench.memory.intakes == []

    def test_what_was_learned_since_is_in_the_last_checkpoint(self):
        bench = Bench(batches=10)
        bench.send()
        bench.learner.step()
        bench.learner.step()
        bench.context.orders["now"] = STOP
        assert not bench.learner.step()
        assert bench.learner.done
        bench.learner.close()
        assert (bench.saved[-1][0].updates, bench.saved[-1][0].arrays()["w"][0]) == (2, 2)


class TestCounting:
    def test_segments_are_remembered_in_the_order_of_the_actors(self):
        bench = Bench(num_actors=3)
        bench.round()
        bench.round()
        assert bench.memory.intakes == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]]
        assert bench.agent.observed == [(0, 0, STEPS), (1, 0, 2 * STEPS), (2, 0, 3 * STEPS), (0, 1, 4 * STEPS), (1, 1, 5 * STEPS), (2, 1, 6 * STEPS)]  # fmt: skip

    def test_rows_that_are_not_valid_count_for_nothing(self):
        def spoil(segment):
            segment["valid"][1, 0] = False
            segment["terminated"][1, 0] = True  # no episode ends in a reset row
            segment["truncated"][2, 1] = True
            segment["terminated"][0, 1] = segment["truncated"][0, 1] = True

        bench = Bench()
        bench.round(spoil=spoil)
        assert (bench.learner.env_steps, bench.learner.episodes) == (STEPS - 1, 2)
        assert (bench.published[-1].env_steps, bench.published[-1].episodes) == (STEPS - 1, 2)

    def test_memory_goes_back_to_the_actor(self):
        bench = Bench()
        for _ in range(5):  # more than there are slots
            bench.round()
        assert len(bench.memory.intakes) == 5

    def test_lag_is_in_versions(self):
        bench = Bench(window=True)
        for version in (0, 0, 1, 3):  # while the learner is at 0, 1, 2, 3
            bench.round(version=version)
        assert bench.learner.lags == {0: 2, 1: 2}

    def test_segments_that_are_too_old_are_dropped_and_told(self):
        bench = Bench(window=True)
        for _ in range(5):  # at most 2 versions behind
            bench.round(version=0)
        bench.learner.close()
        assert bench.learner.env_steps == 3 * STEPS
        assert bench.reports()[-1].dropped == {"too_old": 2}

    def test_the_clock_runs_from_the_first_step_of_any_actor_to_the_last_update(self):
        bench = Bench(num_actors=2, batches=2)
        bench.context.clock.now_s = 50.0
        bench.round(started_s=40.0)  # actor 1 began a second later, and its segment came first
        assert bench.learner.train_s == 10.0
        bench.context.clock.now_s = 63.0
        assert bench.learner.train_s == 10.0
        bench.round(started_s=51.0)
        assert bench.learner.train_s == 23.0
        assert bench.published[-1].train_s == 23.0


class TestTheEnd:
    def test_after_its_steps(self):
        bench = Bench(steps=2 * STEPS + 1)
        for _ in range(2):
            bench.round()
            assert not bench.learner.done
        bench.round()
        assert bench.learner.done
        assert bench.learner.env_steps == 3 * STEPS

    def test_after_its_episodes(self):
        def spoil(segment):
            segment["truncated"][0, 0] = segment["terminated"][1, 1] = True

        bench = Bench(episodes=3)
        bench.round(spoil=spoil)
        assert not bench.learner.done
        bench.round(spoil=spoil)
        assert bench.learner.done

    def test_what_was_taken_in_is_learned_from_first(self):
        bench = Bench(batches=6, steps=STEPS)
        bench.round()
        assert bench.learner.done
        assert len(bench.agent.learned) == 6
        assert bench.published[-1].updates == 6

    @pytest.mark.parametrize("order", [FINISH, STOP])
    def test_at_once_when_asked(self, order):
        bench = Bench(batches=6)
        bench.send()
        bench.learner.step()
        bench.context.orders["now"] = order
        bench.learner.step()
        assert bench.learner.done
        assert len(bench.agent.learned) == 1

    def test_rests_while_paused(self):
        bench = Bench()
        bench.context.orders["now"] = PAUSE
        bench.round()
        assert (bench.versions, bench.memory.intakes) == ([0], [])
        bench.context.orders["now"] = RUN
        bench.until_idle()
        assert bench.versions == [0, 1]


class TestCheckpoints:
    def test_by_time(self):
        bench = Bench(checkpoint_every_s=30.0)
        bench.round()
        bench.context.clock.now_s += 29.0
        bench.round()
        assert bench.saved == []
        bench.context.clock.now_s += 1.0
        bench.round()
        bench.round()
        ((weights, state, counters),) = bench.saved
        assert (weights.version, weights.updates, weights.env_steps) == (3, 3, 3 * STEPS)
        assert state["agent"] == {"learned": 3}
        assert counters == {"version": 3, "updates": 3, "env_steps": 3 * STEPS, "episodes": 0, "train_s": 130.0}

    def test_by_episodes(self):
        def spoil(segment):
            segment["terminated"][0, :] = True

        bench = Bench(checkpoint_every_episodes=4)
        for _ in range(5):
            bench.round(spoil=spoil)
        assert [counters["episodes"] for *_, counters in bench.saved] == [4, 8]

    def test_one_at_the_end(self):
        bench = Bench()
        bench.round()
        bench.learner.close()
        assert [counters["updates"] for *_, counters in bench.saved] == [1]


class TestFullDisk:
    def full(self, bench):
        def refuse(weights, state, counters):
            raise DiskFull("there is no room")

        bench.learner.save, before = refuse, bench.learner.save
        return before

    def warnings(self, bench):
        found = [EventReport.read(record) for _, record in bench.context.board.read(EVENTS)]
        return [event.details["message"] for event in found if event.kind == "warning"]

    def test_it_goes_on_says_so_each_time_and_tries_again(self):
        bench = Bench(checkpoint_every_s=30.0)
        save = self.full(bench)
        for count in (1, 2):
            bench.context.clock.now_s += 30.0
            bench.round()
            bench.round()
            assert len(self.warnings(bench)) == count
        assert "there is no room" in self.warnings(bench)[0]
        bench.learner.save = save
        bench.context.clock.now_s += 30.0
        bench.round()
        assert [counters["updates"] for *_, counters in bench.saved] == [5]

    def test_it_ends_where_asked_to(self):
        bench = Bench(checkpoint_every_s=30.0, stop_on_full_disk=True)
        self.full(bench)
        bench.context.clock.now_s += 30.0
        with pytest.raises(DiskFull):
            bench.round()

    def test_an_end_that_cannot_be_kept_is_told_after_the_last_report(self):
        bench = Bench()
        bench.round()
        self.full(bench)
        with pytest.raises(DiskFull):
            bench.learner.close()
        assert bench.reports()[-1].final


class TestReports:
    def test_every_second_with_means_since_the_last(self):
        bench = Bench()
        bench.round()
        bench.round()
        assert bench.reports() == []
        bench.context.clock.now_s += REPORT_EVERY_S
        bench.round()
        (report,) = bench.reports()
        assert report.stats == {"loss": 2.0}  # of 1, 2, 3
        assert (report.version, report.updates, report.env_steps) == (3, 3, 3 * STEPS)
        assert report.memory == {"size": 3.0}
        assert report.phases.keys() == {"wait", "sample", "learn", "publish", "other"}
        assert report.weights_sha256 is None
        assert not report.final
        bench.context.clock.now_s += REPORT_EVERY_S
        bench.round()
        assert bench.reports()[-1].stats == {"loss": 4.0}

    def test_the_last_one_names_the_weights(self):
        bench = Bench(steps=STEPS)
        bench.round()
        bench.learner.close()
        (report,) = bench.reports()
        assert report.final
        assert report.weights_sha256 == hashlib.sha256(np.array([1.0], "<f4").tobytes()).hexdigest()
        assert report.lags == {0: 1}

    def test_what_the_agent_raises_comes_through(self):
        class Diverged(ScriptedAgent):
            def learn(self, batch):
                raise NotFinite("loss is nan at update 0")

        bench = Bench(agent=Diverged())
        bench.send()
        with pytest.raises(NotFinite):
            bench.learner.step()
        assert bench.context.weights.newer_than(POLICY, 0) is None


class TestResuming:
    def test_it_goes_on_from_a_checkpoint(self):
        """One learner of six rounds, and one of three that another takes over from."""
        whole = Bench(num_actors=2, batches=3)
        for _ in range(6):
            whole.round()
        first, second = Bench(num_actors=2, batches=3), Bench(num_actors=2, batches=3)
        for _ in range(3):
            first.round()
        first.learner.close()
        weights, state, counters = first.saved[-1]
        second.learner.restore(weights, codec.unpack(codec.pack(state)), counters)
        second.sequence = 3
        for _ in range(3):
            second.round()
        assert second.versions == [3, 4, 5, 6]
        assert second.published[-1].sha256() == whole.published[-1].sha256()
        for name in ("updates", "env_steps", "version", "lags"):
            assert getattr(second.learner, name) == getattr(whole.learner, name)

    def test_what_was_learned_before_is_not_learned_again(self):
        first, second = Bench(), Bench()
        for _ in range(2):
            first.round()
        first.learner.close()
        second.learner.restore(*first.saved[-1])
        second.sequence = 1
        second.round()
        assert second.memory.intakes == []
        assert second.learner.intake.ledger.dropped == {"repeated": 1}

    def test_the_clock_goes_on_too(self):
        first, second = Bench(), Bench()
        first.context.clock.now_s = 50.0
        first.round(started_s=30.0)
        first.learner.close()
        second.learner.restore(*first.saved[-1])
        assert second.learner.train_s == 20.0
        second.sequence = 1
        second.context.clock.now_s = 1005.0
        second.round(started_s=1000.0)
        assert second.learner.train_s == 25.0
