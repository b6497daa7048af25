"""The learner with a scripted agent and memory: what it counts, when it publishes, saves, reports and ends."""

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


class Bench:
    """A learner over local links, one round at a time."""

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


def play(bench, begin, end, steps=1000):
    """Segments `begin` to `end` of actors that wait for their version, at most so many steps of the learner.

    Returns the version that each was collected with.
    """
    gate, collected, idle = LockstepCollectPolicy(bench.learner.limits.ahead), {}, 0
    bench.sequence = begin
    while steps > 0 and idle < 2 and not bench.learner.done:
        newest = bench.published[-1].version if bench.published else -1
        room = all(bench.context.channel.blank(actor) is not None for actor in range(bench.num_actors))
        if room and bench.sequence < end and gate.allows(bench.sequence, newest):
            collected[bench.sequence] = newest
            bench.send(version=newest)
        idle = 0 if bench.learner.step() else idle + 1
        steps -= 1
    return collected


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


class TestOneRoundAhead:
    """Round k is learned from while round k + 1 is collected: its weights go out when that round is in."""

    def test_weights_go_out_when_the_next_round_is_in(self):
        bench = Bench(num_actors=2, batches=3, ahead=1)
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

    def test_they_go_out_before_anything_is_done_with_that_round(self):
        """Statistics and schedules, which are weights too, are those of the round before."""
        seen = []

        class Watching(ScriptedAgent):
            def observe(self, segment, progress):
                super().observe(segment, progress)
                seen.append((segment.header.sequence, bench.versions[-1]))

            def learn(self, batch):
                seen.append(("learn", bench.versions[-1]))
                return super().learn(batch)

        bench = Bench(agent=Watching(), ahead=1)
        for version in (0, 0, 1):
            bench.round(version=version)
        assert seen == [(0, 0), ("learn", 0), (1, 1), ("learn", 1), (2, 2), ("learn", 2)]

    def test_memory_is_free_before_learning(self):
        """So that the next round is collected meanwhile."""
        bench = Bench(batches=5, ahead=1, slots=1)
        for sequence in range(3):
            bench.send(version=max(0, sequence - 1))
            bench.learner.step()
            assert bench.memory.ready(), "it has only begun to learn"
            assert bench.context.channel.blank(0) is not None
            bench.until_idle()

    def test_rounds_that_only_warm_up_count(self):
        bench = Bench(batches=4, warm_up=3, ahead=1)
        for version in (0, 0, 1, 2):
            bench.round(version=version)
        assert bench.versions == [0, 1, 2, 3]
        assert [weights.updates for weights in bench.published] == [0, 0, 0, 4]

    def test_lag_is_one_from_the_second_round_on(self):
        bench = Bench(num_actors=2, ahead=1)
        for version in (0, 0, 1, 2):
            bench.round(version=version)
        assert bench.learner.lags == {0: 2, 1: 6}

    def test_nothing_is_taken_in_before_the_last_round_is_digested(self):
        """Otherwise it would depend on the actors' speed what is learned from."""

        class Greedy(ScriptedMemory):
            def wants_data(self):
                return True

        bench = Bench(ahead=1)
        bench.learner.memory = bench.memory = Greedy(batches=3)
        bench.send()
        bench.send()
        for _ in range(3):
            bench.learner.step()
            assert len(bench.memory.intakes) == 1
        bench.learner.step()
        assert len(bench.memory.intakes) == 2

    def test_the_last_weights_go_out_at_the_end(self):
        bench = Bench(num_actors=2, batches=2, steps=3 * 2 * STEPS, ahead=1)
        for version in (0, 0, 1):
            bench.round(version=version)
        assert bench.learner.done
        assert bench.versions == [0, 1, 2, 3]
        assert (bench.published[-1].updates, bench.published[-1].env_steps) == (6, 6 * STEPS)
        bench.learner.close()
        (report,) = bench.reports()
        assert (report.version, report.updates, report.env_steps) == (3, 6, 6 * STEPS)
        assert report.weights_sha256 == bench.published[-1].sha256()

    def test_what_was_collected_ahead_of_the_end_is_counted(self):
        bench = Bench(num_actors=2, steps=2 * STEPS, ahead=1)
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
        """A resumed one publishes when it has taken in the round that comes first."""
        bench = Bench(batches=2, ahead=1)
        bench.round()
        bench.context.orders["now"] = STOP
        bench.until_idle()
        assert bench.learner.done
        assert bench.versions == [0]


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
        assert report.phases.keys() == {"wait", "sample", "remember", "learn", "publish", "other"}
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

    @pytest.mark.parametrize("steps_before", range(1, 14))
    def test_one_round_ahead_it_goes_on_from_anywhere(self, steps_before):
        """Written down after so many steps of the learner, between rounds and within one."""
        options = {"num_actors": 2, "batches": 3, "warm_up": 2, "ahead": 1, "slots": 1}
        whole, first, second = Bench(**options), Bench(**options), Bench(**options)
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

    def test_one_round_ahead_a_complete_run_can_be_prolonged(self):
        """Its actors go on with what they had, not with the last weights, which went out for the judge alone."""
        whole, first, second = Bench(ahead=1, steps=5 * STEPS), Bench(ahead=1, steps=3 * STEPS), Bench(ahead=1, steps=5 * STEPS)  # fmt: skip
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

    def test_one_round_ahead_the_end_comes_again(self):
        """Killed after its end, before it was judged."""
        first, second = Bench(ahead=1, steps=2 * STEPS), Bench(ahead=1, steps=2 * STEPS)
        play(first, 0, 2)
        first.learner.close()
        second.learner.restore(*first.saved[-1])
        second.until_idle()
        assert second.learner.done
        assert second.published[-1].version == 2
        assert second.published[-1].sha256() == first.published[-1].sha256()

    def test_a_checkpoint_without_a_word_on_what_actors_have(self):
        """As it was written before runs could be a round ahead."""
        first, second = Bench(), Bench()
        first.round()
        first.learner.close()
        weights, state, counters = first.saved[-1]
        assert "acting" not in state
        second.learner.restore(weights, state, counters)
        second.until_idle()
        assert second.versions == [1]
        assert second.published[0].sha256() == first.published[-1].sha256()

    def test_what_was_learned_before_is_not_learned_again(self):
        first, second = Bench(), Bench()
        for _ in range(2):
            first.round()
        first.learner.close()
        second.learner.restore(*first.saved[-1])
        second.sequence = 1
        second.round()
        assert second.memory.intakes == []
        assert second.learner.batch_policy.tracker.dropped == {"repeated": 1}

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


class TestChangedHyperparameters:
    """A learner that hears commands takes over what its agent can change, before the next update, and says so."""

    class Tuned(ScriptedAgent):
        def __init__(self):
            super().__init__()
            self.values = {}

        def retune(self, values):
            self.values |= values

    def heard(self, agent, values, live):
        commands = [(7, {"command": "stop"}), (9, {"command": "set", "id": "c", "values": values, "live": live})]
        bench = Bench(agent=agent)
        bench.context.commands = lambda after: [row for row in commands if row[0] > after]
        bench.learner.step()
        bench.context.clock.now_s += 1
        bench.learner.step()
        events = [record["details"] for _, record in bench.context.board.read("events")]
        return [details for details in events if details.get("command") == "set"]

    def test_what_is_live_is_taken_over_once(self):
        agent = self.Tuned()
        (told,) = self.heard(agent, {"clip": 0.1, "hidden": [8]}, ["clip"])
        assert agent.values == {"clip": 0.1}
        assert (told["id"], told["obeyed"], told["live"], told["version"]) == ("c", True, ["clip"], 0)

    def test_an_agent_that_cannot_says_so(self):
        (told,) = self.heard(ScriptedAgent(), {"clip": 0.1}, ["clip"])
        assert told["obeyed"] is False


def test_actor_and_learner_by_the_names_of_the_pathfinding_project():
    """`Actor.run` in a thread of its own and `Learner.train` in this one, over common links; weights that are stored are
    the ones that an actor's `update_weights` finds, once."""
    bench = Bench(steps=4 * STEPS, window=True)
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
def test_a_segment_that_cannot_be_learned_from_is_refused_and_the_run_goes_on(spoil) -> None:
    bench = Bench(num_actors=2)
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


def test_refused_segments_are_summed_up_once_a_second() -> None:
    bench = Bench(num_actors=2)
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
def test_a_run_in_which_everything_is_refused_is_over(spoil, error, words) -> None:
    bench = Bench()
    for version in range(9):
        bench.round(version=version, spoil=spoil)
    with pytest.raises(error, match=words):
        bench.round(version=9, spoil=spoil)
    assert bench.learner.batch_policy.tracker.dropped == {"refused": 10}
