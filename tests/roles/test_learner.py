"""The learner with a scripted agent and memory: what it counts, and when it publishes, saves, reports and ends."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest

from steppe.core.contracts.errors import DiskFull, NotFinite, RunFailed
from steppe.core.contracts.reports import EventReport, TrainingReport
from steppe.core.contracts.transport import EVENTS, TRAINING
from steppe.core.io import codec
from steppe.roles.actor import Actor
from steppe.roles.context import FINISH, PAUSE, POLICY, RUN, STOP
from steppe.roles.learner import REPORT_EVERY_S, Learner, RunLimits
from steppe.roles.scheduling import FreeCollectPolicy, LockstepCollectPolicy, RoundBatchPolicy, WindowBatchPolicy
from tests.support.role_fakes import (
    SPEC,
    ScriptedAgent,
    ScriptedMemory,
    ScriptedPolicy,
    ScriptedWorld,
    make_context,
    segment_of,
)

pytestmark = pytest.mark.unit

STEPS = SPEC.num_steps * SPEC.num_envs  # of one segment whose rows are all valid


class LocalLearner:
    """A learner with local channels and weights, stepped one round at a time."""

    def __init__(self, *, num_actors=1, batches=1, warm_up=1, agent=None, window=False, slots=2, **limits):
        self.context = make_context("learner", num_actors=num_actors, slots=slots)
        self.num_actors, self.saved = num_actors, []
        self.agent, self.memory = agent or ScriptedAgent(), ScriptedMemory(batches, warm_up)
        self.published = []
        publish = self.context.weights.publish
        self.context.weights.publish = lambda policy, weights: (self.published.append(weights.copy()), publish(policy, weights))  # fmt: skip
        channel = self.context.channel
        intake = (
            WindowBatchPolicy(channel, num_actors, 0.0, 2, self.context.clock)
            if window
            else RoundBatchPolicy(channel, num_actors)
        )
        save = lambda weights, state, counters: self.saved.append((weights.copy(), state, dict(counters)))  # noqa: E731
        self.learner = Learner(self.agent, self.memory, intake, RunLimits(**limits), save, self.context)
        self.sequence = 0

    def send(self, *, version=0, started_s=0.0, spoil=None):
        """Send one segment of every actor, the last actor's first."""
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


def play(bench, begin, end, steps=1000):
    """Send segments `begin` to `end` of actors that wait for their version; limit the number of learner steps. Return
    the version with which each segment was collected.
    """
    policy, collected, idle = LockstepCollectPolicy(bench.learner.limits.ahead), {}, 0
    bench.sequence = begin
    while steps > 0 and idle < 2 and not bench.learner.done:
        newest = bench.published[-1].version if bench.published else -1
        room = all(bench.context.channel.blank(actor) is not None for actor in range(bench.num_actors))
        if room and bench.sequence < end and policy.allows(bench.sequence, newest):
            collected[bench.sequence] = newest
            bench.send(version=newest)
        idle = 0 if bench.learner.step() else idle + 1
        steps -= 1
    return collected


class TestPublishing:
    def test_the_first_weights_are_published_before_any_segment(self):
        bench = LocalLearner()
        bench.until_idle()
        assert bench.versions == [0]
        assert bench.published[0].env_steps == 0

    @pytest.mark.parametrize("batches", [1, 5])
    def test_weights_are_published_once_per_round(self, batches):
        bench = LocalLearner(num_actors=2, batches=batches)
        for _ in range(3):
            bench.round()
        assert bench.versions == [0, 1, 2, 3]
        assert [weights.updates for weights in bench.published] == [0, batches, 2 * batches, 3 * batches]
        assert [weights.arrays()["w"][0] for weights in bench.published] == [0, batches, 2 * batches, 3 * batches]
        assert [weights.env_steps for weights in bench.published] == [2 * STEPS * k for k in range(4)]

    def test_warm_up_rounds_publish_too(self):
        bench = LocalLearner(batches=4, warm_up=3)
        for _ in range(4):
            bench.round()
        assert bench.versions == [0, 1, 2, 3, 4]
        assert [weights.updates for weights in bench.published] == [0, 0, 0, 4, 8]

    def test_publish_every_limits_the_updates_between_versions(self):
        bench = LocalLearner(batches=10, publish_every=4)
        bench.round()
        assert [weights.updates for weights in bench.published] == [0, 4, 8, 10]

    def test_each_step_learns_one_batch_and_takes_no_segments_while_learning(self):
        """A step is bounded: other roles in the process are stepped between batches."""
        bench = LocalLearner(batches=3)
        bench.send()
        bench.send()
        for learned in (1, 2, 3):
            assert bench.learner.step()
            assert (len(bench.agent.learned), len(bench.memory.intakes)) == (learned, 1)

    def test_an_incomplete_round_changes_nothing(self):
        bench = LocalLearner(num_actors=2)
        bench.until_idle()
        segment_of(bench.context.channel, 1, 0)
        bench.until_idle()
        assert bench.versions == [0]
        assert bench.memory.intakes == []

    def test_the_last_checkpoint_has_all_updates(self):
        bench = LocalLearner(batches=10)
        bench.send()
        bench.learner.step()
        bench.learner.step()
        bench.context.orders["now"] = STOP
        assert not bench.learner.step()
        assert bench.learner.done
        bench.learner.close()
        assert (bench.saved[-1][0].updates, bench.saved[-1][0].arrays()["w"][0]) == (2, 2)


class TestOneRoundAhead:
    """Round k is learned from while round k + 1 is collected; its weights are published when that round is complete."""

    def test_weights_are_published_when_the_next_round_is_complete(self):
        bench = LocalLearner(num_actors=2, batches=3, ahead=1)
        bench.round(version=0)
        assert bench.versions == [0]
        bench.round(version=0)
        assert bench.versions == [0, 1]
        bench.round(version=1)
        assert bench.versions == [0, 1, 2]
        assert [weights.updates for weights in bench.published] == [0, 3, 6]
        assert [weights.arrays()["w"][0] for weights in bench.published] == [0, 3, 6]
        assert [weights.env_steps for weights in bench.published] == [0, 2 * STEPS, 4 * STEPS], (
            "of what they learned from"
        )

    def test_weights_are_published_before_the_next_round_is_processed(self):
        """Statistics and schedules, which are part of the weights, are those of the round before."""
        seen = []

        class Watching(ScriptedAgent):
            def observe(self, segment, progress):
                super().observe(segment, progress)
                seen.append((segment.header.sequence, bench.versions[-1]))

            def learn(self, batch):
                seen.append(("learn", bench.versions[-1]))
                return super().learn(batch)

        bench = LocalLearner(agent=Watching(), ahead=1)
        for version in (0, 0, 1):
            bench.round(version=version)
        assert seen == [(0, 0), ("learn", 0), (1, 1), ("learn", 1), (2, 2), ("learn", 2)]

    def test_segments_are_released_before_learning(self):
        """So that the next round can be collected meanwhile."""
        bench = LocalLearner(batches=5, ahead=1, slots=1)
        for sequence in range(3):
            bench.send(version=max(0, sequence - 1))
            bench.learner.step()
            assert bench.memory.ready(), "it has only begun to learn"
            assert bench.context.channel.blank(0) is not None
            bench.until_idle()

    def test_warm_up_rounds_count(self):
        bench = LocalLearner(batches=4, warm_up=3, ahead=1)
        for version in (0, 0, 1, 2):
            bench.round(version=version)
        assert bench.versions == [0, 1, 2, 3]
        assert [weights.updates for weights in bench.published] == [0, 0, 0, 4]

    def test_lag_is_one_from_the_second_round_on(self):
        bench = LocalLearner(num_actors=2, ahead=1)
        for version in (0, 0, 1, 2):
            bench.round(version=version)
        assert bench.learner.lags == {0: 2, 1: 6}

    def test_no_segment_is_taken_before_the_last_round_is_learned(self):
        """Otherwise the order of learning would depend on the actors' speed."""

        class Greedy(ScriptedMemory):
            def wants_data(self):
                return True

        bench = LocalLearner(ahead=1)
        bench.learner.memory = bench.memory = Greedy(batches=3)
        bench.send()
        bench.send()
        for _ in range(3):
            bench.learner.step()
            assert len(bench.memory.intakes) == 1
        bench.learner.step()
        assert len(bench.memory.intakes) == 2

    def test_the_last_weights_are_published_at_the_end(self):
        bench = LocalLearner(num_actors=2, batches=2, steps=3 * 2 * STEPS, ahead=1)
        for version in (0, 0, 1):
            bench.round(version=version)
        assert bench.learner.done
        assert bench.versions == [0, 1, 2, 3]
        assert (bench.published[-1].updates, bench.published[-1].env_steps) == (6, 6 * STEPS)
        bench.learner.close()
        (report,) = bench.reports()
        assert (report.version, report.updates, report.env_steps) == (3, 6, 6 * STEPS)
        assert report.weights_sha256 == bench.published[-1].sha256()

    def test_segments_collected_beyond_the_end_are_counted(self):
        bench = LocalLearner(num_actors=2, steps=2 * STEPS, ahead=1)
        bench.send()
        bench.learner.step()
        segment_of(bench.context.channel, 1, 1)
        bench.until_idle()
        assert bench.learner.done
        bench.learner.close()
        (report,) = bench.reports()
        assert report.dropped == {"ahead": 1}
        assert bench.saved[-1][1]["ledger"]["dropped"] == {}, "a run that goes on collects it again"

    def test_a_stopped_run_does_not_publish(self):
        """A resumed run publishes when it has taken the first round."""
        bench = LocalLearner(batches=2, ahead=1)
        bench.round()
        bench.context.orders["now"] = STOP
        bench.until_idle()
        assert bench.learner.done
        assert bench.versions == [0]


class TestCounting:
    def test_segments_are_stored_in_the_order_of_the_actors(self):
        bench = LocalLearner(num_actors=3)
        bench.round()
        bench.round()
        assert bench.memory.intakes == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]]
        assert bench.agent.observed == [(0, 0, STEPS), (1, 0, 2 * STEPS), (2, 0, 3 * STEPS), (0, 1, 4 * STEPS), (1, 1, 5 * STEPS), (2, 1, 6 * STEPS)]  # fmt: skip

    def test_invalid_rows_are_not_counted(self):
        def spoil(segment):
            segment["valid"][1, 0] = False
            segment["terminated"][1, 0] = True  # no episode ends in a reset row
            segment["truncated"][2, 1] = True
            segment["terminated"][0, 1] = segment["truncated"][0, 1] = True

        bench = LocalLearner()
        bench.round(spoil=spoil)
        assert (bench.learner.env_steps, bench.learner.episodes) == (STEPS - 1, 2)
        assert (bench.published[-1].env_steps, bench.published[-1].episodes) == (STEPS - 1, 2)

    def test_segment_memory_is_returned_to_the_actor(self):
        bench = LocalLearner()
        for _ in range(5):  # more than there are slots
            bench.round()
        assert len(bench.memory.intakes) == 5

    def test_lag_is_counted_in_versions(self):
        bench = LocalLearner(window=True)
        for version in (0, 0, 1, 3):  # while the learner is at 0, 1, 2, 3
            bench.round(version=version)
        assert bench.learner.lags == {0: 2, 1: 2}

    def test_too_old_segments_are_dropped_and_reported(self):
        bench = LocalLearner(window=True)
        for _ in range(5):  # at most 2 versions behind
            bench.round(version=0)
        bench.learner.close()
        assert bench.learner.env_steps == 3 * STEPS
        assert bench.reports()[-1].dropped == {"too_old": 2}

    def test_elapsed_time_is_from_the_first_actor_step_to_the_last_update(self):
        bench = LocalLearner(num_actors=2, batches=2)
        bench.context.clock.now_s = 50.0
        bench.round(started_s=40.0)  # actor 1 started a second later, and its segment arrived first
        assert bench.learner.train_s == 10.0
        bench.context.clock.now_s = 63.0
        assert bench.learner.train_s == 10.0
        bench.round(started_s=51.0)
        assert bench.learner.train_s == 23.0
        assert bench.published[-1].train_s == 23.0


class TestTheEnd:
    def test_the_run_ends_after_its_steps(self):
        bench = LocalLearner(steps=2 * STEPS + 1)
        for _ in range(2):
            bench.round()
            assert not bench.learner.done
        bench.round()
        assert bench.learner.done
        assert bench.learner.env_steps == 3 * STEPS

    def test_the_run_ends_after_its_episodes(self):
        def spoil(segment):
            segment["truncated"][0, 0] = segment["terminated"][1, 1] = True

        bench = LocalLearner(episodes=3)
        bench.round(spoil=spoil)
        assert not bench.learner.done
        bench.round(spoil=spoil)
        assert bench.learner.done

    def test_taken_segments_are_learned_before_the_end(self):
        bench = LocalLearner(batches=6, steps=STEPS)
        bench.round()
        assert bench.learner.done
        assert len(bench.agent.learned) == 6
        assert bench.published[-1].updates == 6

    @pytest.mark.parametrize("order", [FINISH, STOP])
    def test_the_learner_stops_at_once_on_request(self, order):
        bench = LocalLearner(batches=6)
        bench.send()
        bench.learner.step()
        bench.context.orders["now"] = order
        bench.learner.step()
        assert bench.learner.done
        assert len(bench.agent.learned) == 1

    def test_a_paused_learner_does_nothing(self):
        bench = LocalLearner()
        bench.context.orders["now"] = PAUSE
        bench.round()
        assert (bench.versions, bench.memory.intakes) == ([0], [])
        bench.context.orders["now"] = RUN
        bench.until_idle()
        assert bench.versions == [0, 1]


class TestCheckpoints:
    def test_checkpoints_are_saved_by_time(self):
        bench = LocalLearner(checkpoint_every_s=30.0)
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

    def test_checkpoints_are_saved_by_episodes(self):
        def spoil(segment):
            segment["terminated"][0, :] = True

        bench = LocalLearner(checkpoint_every_episodes=4)
        for _ in range(5):
            bench.round(spoil=spoil)
        assert [counters["episodes"] for *_, counters in bench.saved] == [4, 8]

    def test_a_checkpoint_is_saved_at_the_end(self):
        bench = LocalLearner()
        bench.round()
        bench.learner.close()
        assert [counters["updates"] for *_, counters in bench.saved] == [1]


class TestFullDisk:
    def full(self, bench):
        def refuse(weights, state, counters):
            raise DiskFull("there is no disk space")

        bench.learner.save, before = refuse, bench.learner.save
        return before

    def warnings(self, bench):
        found = [EventReport.read(record) for _, record in bench.context.board.read(EVENTS)]
        return [event.details["message"] for event in found if event.kind == "warning"]

    def test_learning_continues_with_a_warning_and_a_retry(self):
        bench = LocalLearner(checkpoint_every_s=30.0)
        save = self.full(bench)
        for count in (1, 2):
            bench.context.clock.now_s += 30.0
            bench.round()
            bench.round()
            assert len(self.warnings(bench)) == count
        assert "there is no disk space" in self.warnings(bench)[0]
        bench.learner.save = save
        bench.context.clock.now_s += 30.0
        bench.round()
        assert [counters["updates"] for *_, counters in bench.saved] == [5]

    def test_the_run_ends_at_its_limit(self):
        bench = LocalLearner(checkpoint_every_s=30.0, stop_on_full_disk=True)
        self.full(bench)
        bench.context.clock.now_s += 30.0
        with pytest.raises(DiskFull):
            bench.round()

    def test_a_failed_last_checkpoint_is_reported_after_the_last_report(self):
        bench = LocalLearner()
        bench.round()
        self.full(bench)
        with pytest.raises(DiskFull):
            bench.learner.close()
        assert bench.reports()[-1].final


class TestReports:
    def test_reports_every_second_with_means_since_the_last_report(self):
        bench = LocalLearner()
        bench.round()
        bench.round()
        assert bench.reports() == []
        bench.context.clock.now_s += REPORT_EVERY_S
        bench.round()
        (report,) = bench.reports()
        assert report.stats == {"loss": 2.0}  # of 1, 2, 3
        assert (report.version, report.updates, report.env_steps) == (3, 3, 3 * STEPS)
        assert report.memory == {"size": 3.0}
        assert report.phases.keys() == {"wait", "sample", "remember", "learn", "publish", "other"}
        assert report.weights_sha256 is None
        assert not report.final
        bench.context.clock.now_s += REPORT_EVERY_S
        bench.round()
        assert bench.reports()[-1].stats == {"loss": 4.0}

    def test_the_last_report_has_the_hash_of_the_weights(self):
        bench = LocalLearner(steps=STEPS)
        bench.round()
        bench.learner.close()
        (report,) = bench.reports()
        assert report.final
        assert report.weights_sha256 == hashlib.sha256(np.array([1.0], "<f4").tobytes()).hexdigest()
        assert report.lags == {0: 1}

    def test_exceptions_of_the_agent_are_raised(self):
        class Diverged(ScriptedAgent):
            def learn(self, batch):
                raise NotFinite("loss is nan at update 0")

        bench = LocalLearner(agent=Diverged())
        bench.send()
        with pytest.raises(NotFinite):
            bench.learner.step()
        assert bench.context.weights.newer_than(POLICY, 0) is None


class TestResuming:
    def test_a_resumed_learner_continues_exactly(self):
        """Compare one learner over six rounds with two over three rounds each."""
        whole = LocalLearner(num_actors=2, batches=3)
        for _ in range(6):
            whole.round()
        first, second = LocalLearner(num_actors=2, batches=3), LocalLearner(num_actors=2, batches=3)
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

    @pytest.mark.parametrize("steps_before", range(1, 14))
    def test_one_round_ahead_resumes_exactly_from_any_step(self, steps_before):
        """Saved after any number of learner steps, between rounds and within one."""
        options = {"num_actors": 2, "batches": 3, "warm_up": 2, "ahead": 1, "slots": 1}
        whole, first, second = LocalLearner(**options), LocalLearner(**options), LocalLearner(**options)
        expected = play(whole, 0, 6)
        collected = play(first, 0, 6, steps=steps_before)
        first.learner.close()
        weights, state, counters = first.saved[-1]
        second.learner.restore(weights, codec.unpack(codec.pack(state)), counters)
        second.memory.intakes = list(first.memory.intakes)
        taken = len(first.memory.intakes)
        collected = {sequence: version for sequence, version in collected.items() if sequence < taken}
        collected |= play(second, taken, 6)
        assert collected == expected == {0: 0, 1: 0, 2: 1, 3: 2, 4: 3, 5: 4}
        known = {weights.version: weights for weights in whole.published}
        for found in second.published:
            same = known[found.version]
            assert (found.sha256(), found.updates, found.env_steps) == (same.sha256(), same.updates, same.env_steps)
        for name in ("updates", "env_steps", "version", "lags"):
            assert getattr(second.learner, name) == getattr(whole.learner, name)

    def test_one_round_ahead_a_finished_run_can_be_extended(self):
        """Its actors continue with their weights, not with the last ones, which were published for the evaluation only."""
        whole, first, second = LocalLearner(ahead=1, steps=5 * STEPS), LocalLearner(ahead=1, steps=3 * STEPS), LocalLearner(ahead=1, steps=5 * STEPS)  # fmt: skip
        play(whole, 0, 5)
        play(first, 0, 3)
        assert first.learner.done
        first.learner.close()
        assert first.saved[-1][2]["version"] == 3
        second.learner.restore(*first.saved[-1])
        assert play(second, 3, 5) == {3: 2, 4: 3}
        assert second.versions == [2, 3, 4, 5]
        assert second.published[0].sha256() == whole.published[2].sha256()
        assert second.published[-1].sha256() == whole.published[-1].sha256()
        assert second.published[-1].updates == 5

    def test_one_round_ahead_the_end_is_repeated_after_a_kill(self):
        """Killed after its end, before the evaluation."""
        first, second = LocalLearner(ahead=1, steps=2 * STEPS), LocalLearner(ahead=1, steps=2 * STEPS)
        play(first, 0, 2)
        first.learner.close()
        second.learner.restore(*first.saved[-1])
        second.until_idle()
        assert second.learner.done
        assert second.published[-1].version == 2
        assert second.published[-1].sha256() == first.published[-1].sha256()

    def test_a_checkpoint_without_the_actors_version_can_be_resumed(self):
        """As saved before runs could be a round ahead."""
        first, second = LocalLearner(), LocalLearner()
        first.round()
        first.learner.close()
        weights, state, counters = first.saved[-1]
        assert "acting" not in state
        second.learner.restore(weights, state, counters)
        second.until_idle()
        assert second.versions == [1]
        assert second.published[0].sha256() == first.published[-1].sha256()

    def test_repeated_segments_are_not_learned_again(self):
        first, second = LocalLearner(), LocalLearner()
        for _ in range(2):
            first.round()
        first.learner.close()
        second.learner.restore(*first.saved[-1])
        second.sequence = 1
        second.round()
        assert second.memory.intakes == []
        assert second.learner.batch_policy.tracker.dropped == {"repeated": 1}

    def test_elapsed_time_continues(self):
        first, second = LocalLearner(), LocalLearner()
        first.context.clock.now_s = 50.0
        first.round(started_s=30.0)
        first.learner.close()
        second.learner.restore(*first.saved[-1])
        assert second.learner.train_s == 20.0
        second.sequence = 1
        second.context.clock.now_s = 1005.0
        second.round(started_s=1000.0)
        assert second.learner.train_s == 25.0


class TestChangedHyperparameters:
    """A learner applies changes that its agent supports before the next update, and reports it."""

    class Tuned(ScriptedAgent):
        def __init__(self):
            super().__init__()
            self.values = {}

        def retune(self, values):
            self.values |= values

    def apply_set_command(self, agent, values, live):
        commands = [(7, {"command": "stop"}), (9, {"command": "set", "id": "c", "values": values, "live": live})]
        bench = LocalLearner(agent=agent)
        bench.context.commands = lambda after: [row for row in commands if row[0] > after]
        bench.learner.step()
        bench.context.clock.now_s += 1
        bench.learner.step()
        events = [record["details"] for _, record in bench.context.board.read("events")]
        return [details for details in events if details.get("command") == "set"]

    def test_live_changes_are_applied_once(self):
        agent = self.Tuned()
        (told,) = self.apply_set_command(agent, {"clip": 0.1, "hidden": [8]}, ["clip"])
        assert agent.values == {"clip": 0.1}
        assert (told["id"], told["obeyed"], told["live"], told["version"]) == ("c", True, ["clip"], 0)

    def test_an_agent_without_support_refuses_the_change(self):
        (told,) = self.apply_set_command(ScriptedAgent(), {"clip": 0.1}, ["clip"])
        assert told["obeyed"] is False


def test_actor_and_learner_have_the_methods_of_the_pathfinding_project():
    """`Actor.run` in another thread and `Learner.train` in this one, with shared channels; an actor's `update_weights`
    finds stored weights once.
    """
    bench = LocalLearner(steps=4 * STEPS, window=True)
    context = make_context("actor-0", channel=bench.context.channel, weights=bench.context.weights)
    actor = Actor(0, ScriptedWorld(), ScriptedPolicy(), FreeCollectPolicy(), context)
    assert not actor.update_weights()
    bench.learner.publish_initial()
    bench.learner.store_weights()
    assert (actor.update_weights(), actor.update_weights(), actor.version) == (True, False, 1)
    thread = threading.Thread(target=actor.run)
    thread.start()
    bench.learner.train()
    context.orders["now"] = STOP
    thread.join()
    assert bench.learner.env_steps >= 4 * STEPS
    assert actor.done
    assert len(bench.saved) == 1, "it is closed at the end"


def out_of_range(segment):
    segment["action"][1, 1] = 100


@pytest.mark.parametrize(
    "spoil",
    [
        out_of_range,
        lambda segment: segment["action"].fill(-1),
        lambda segment: segment["obs"].fill(np.nan),
        lambda segment: segment["reward"].fill(np.inf),
        lambda segment: segment["logp"].fill(np.nan),
        lambda segment: segment["valid"].view(np.uint8).fill(2),
        lambda segment: segment["truncated"].view(np.uint8).fill(255),
    ],
)
def test_an_invalid_segment_is_refused_and_the_run_continues(spoil) -> None:
    bench = LocalLearner(num_actors=2)
    bench.round()
    bench.round(version=1, spoil=lambda segment: spoil(segment) if segment.header.actor == 1 else None)
    bench.round(version=2)
    assert bench.learner.batch_policy.tracker.dropped == {"refused": 1}
    assert bench.learner.env_steps == 5 * STEPS
    assert bench.versions == [0, 1, 2, 3]
    warned = [EventReport.read(record) for _, record in bench.context.board.read(EVENTS)]
    assert [event.details["actor"] for event in warned if event.kind == "warning"] == [1]
    bench.learner.close()
    assert bench.reports()[-1].dropped == {"refused": 1}


def test_refused_segments_are_summarized_once_a_second() -> None:
    bench = LocalLearner(num_actors=2)
    for version in range(3):
        bench.round(version=version, spoil=lambda segment: out_of_range(segment) if segment.header.actor else None)
    bench.context.clock.now_s += 1.0
    bench.round(version=3, spoil=lambda segment: out_of_range(segment) if segment.header.actor else None)
    events = [EventReport.read(record) for _, record in bench.context.board.read(EVENTS)]
    assert [event.details["refused"] for event in events if event.kind == "warning"] == [1, 4]


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (out_of_range, RunFailed, r"last 10 batches was refused: 'action' is 100 at \(1, 1\)"),
        (lambda segment: segment["obs"].fill(np.nan), NotFinite, "last 10 batches was refused: 'obs' is nan"),
    ],
)
def test_a_run_whose_segments_are_all_refused_fails(spoil, error, words) -> None:
    bench = LocalLearner()
    for version in range(9):
        bench.round(version=version, spoil=spoil)
    with pytest.raises(error, match=words):
        bench.round(version=9, spoil=spoil)
    assert bench.learner.batch_policy.tracker.dropped == {"refused": 10}
