"""The actor with a scripted environment and policy: every value of its segments is calculated by hand."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.core.contracts.errors import CannotResume, EnvironmentFault, NotFinite
from steppe.core.contracts.reports import ActorReport
from steppe.core.contracts.segment import SegmentHeader
from steppe.core.contracts.transport import ACTORS, EVENTS
from steppe.roles.actor import REPORT_EVERY_S, Actor
from steppe.roles.context import FINISH, PAUSE, POLICY, RUN, STOP
from steppe.roles.scheduling import FreeCollectPolicy, LockstepCollectPolicy
from tests.support.role_fakes import SPEC, ScriptedPolicy, ScriptedWorld, make_context, weights_of

pytestmark = pytest.mark.unit


def make_actor(gate=None, world=None, **options):
    context = make_context("actor-0", **options)
    return Actor(0, world or ScriptedWorld(), ScriptedPolicy(), gate or FreeCollectPolicy(), context, epoch=4), context


def collected(actor, context, count=1):
    """Poll `count` segments, copy each, and release its memory at once."""
    found = []
    for _ in range(count):
        assert actor.step()
        segment = context.channel.poll()
        found.append((segment.header, {name: column.copy() for name, column in segment.columns.items()}))
        context.channel.release(segment)
    return found


class TestSegments:
    def test_two_segments_have_the_expected_content(self):
        """Environment 0 terminates after 4 steps, environment 1 is truncated after 5."""
        actor, context = make_actor()
        context.weights.publish(POLICY, weights_of(2))
        context.clock.now_s = 7.5
        (first_header, first), (second_header, second) = collected(actor, context, 2)
        assert first_header == SegmentHeader("run", 0, epoch=4, sequence=0, version=2, started_s=7.5)
        assert (second_header.sequence, second_header.version) == (1, 2)
        np.testing.assert_array_equal(first["obs"][:, 0], [[0, 0], [0, 1], [0, 2], [0, 3]])
        np.testing.assert_array_equal(second["obs"][:, 0], [[0, 3], [0, 0], [0, 1], [0, 2]])
        np.testing.assert_array_equal(second["obs"][:, 1], [[1, 3], [1, 4], [1, 0], [1, 1]])
        np.testing.assert_array_equal(first["action"], [[20, 20], [21, 21], [22, 22]])
        np.testing.assert_array_equal(second["action"], [[23, 23], [20, 24], [21, 20]])
        np.testing.assert_array_equal(second["reward"], [[4, 4], [1, 5], [2, 1]])
        np.testing.assert_array_equal(second["terminated"], [[True, False], [False, False], [False, False]])
        np.testing.assert_array_equal(second["truncated"], [[False, False], [False, True], [False, False]])
        np.testing.assert_array_equal(second["final_obs"][0, 0], [0, 4])
        np.testing.assert_array_equal(second["final_obs"][1, 1], [1, 5])
        np.testing.assert_array_equal(first["logp"], np.full((3, 2), -2.0))
        assert first["valid"].all()
        assert second["valid"].all()

    def test_the_environment_gets_the_recorded_actions(self):
        actor, context = make_actor()
        context.weights.publish(POLICY, weights_of(0))
        found = collected(actor, context, 4)
        written = np.concatenate([columns["action"] for _, columns in found])
        np.testing.assert_array_equal(written, actor.env.actions)

    def test_the_policy_receives_episode_starts(self):
        actor, context = make_actor(world=ScriptedWorld((2, 3), next_step=True))
        context.weights.publish(POLICY, weights_of(0))
        collected(actor, context, 2)
        starts = np.array(actor.policy.starts)
        np.testing.assert_array_equal(starts[:, 0], [True, False, False, True, False, False])
        np.testing.assert_array_equal(starts[:, 1], [True, False, False, False, True, False])

    def test_reset_rows_are_not_counted_as_steps(self):
        actor, context = make_actor(world=ScriptedWorld((2, 3), next_step=True))
        context.weights.publish(POLICY, weights_of(0))
        found = collected(actor, context, 2)
        valid = np.concatenate([columns["valid"] for _, columns in found])
        np.testing.assert_array_equal(valid[:, 0], [True, True, False, True, True, False])
        np.testing.assert_array_equal(valid[:, 1], [True, True, True, False, True, True])
        assert actor.env_steps == 9

    def test_the_environment_is_reset_once_and_only_when_needed(self):
        actor, context = make_actor()
        assert not actor.step()
        assert actor.env.seeds == []
        context.weights.publish(POLICY, weights_of(0))
        collected(actor, context, 3)
        assert actor.env.seeds == [None]


class TestWeights:
    def test_the_actor_waits_for_the_first_weights(self):
        actor, context = make_actor()
        assert not actor.step()
        assert context.channel.poll() is None
        assert actor.env.actions == []

    def test_newer_weights_are_adopted_between_segments_only(self):
        """They are published during a segment, whose rows and header all keep the older version."""
        actor, context = make_actor()
        context.weights.publish(POLICY, weights_of(1))
        step = actor.env.step

        def publishing(actions, segment, t):
            if len(actor.env.actions) == 1:
                context.weights.publish(POLICY, weights_of(2))
            step(actions, segment, t)

        actor.env.step = publishing
        (first_header, first), (second_header, second) = collected(actor, context, 2)
        assert (first_header.version, second_header.version) == (1, 2)
        assert (first["action"] // 10 == 1).all()
        assert (second["action"] // 10 == 2).all()
        assert actor.policy.loaded == [1, 2]

    def test_lockstep_waits_for_the_next_version(self):
        actor, context = make_actor(LockstepCollectPolicy())
        context.weights.publish(POLICY, weights_of(0))
        assert collected(actor, context)[0][0].version == 0
        assert not actor.step()
        assert context.channel.poll() is None
        context.weights.publish(POLICY, weights_of(1))
        assert collected(actor, context)[0][0].version == 1

    def test_free_running_actors_continue_with_old_weights(self):
        actor, context = make_actor(FreeCollectPolicy())
        context.weights.publish(POLICY, weights_of(0))
        assert [head.version for head, _ in collected(actor, context, 3)] == [0, 0, 0]


class TestBackPressure:
    def test_a_full_channel_blocks_the_actor(self):
        actor, context = make_actor(slots=2)
        context.weights.publish(POLICY, weights_of(0))
        assert [actor.step() for _ in range(4)] == [True, True, False, False]
        assert len(actor.env.actions) == 2 * SPEC.num_steps
        context.channel.release(context.channel.poll())
        assert [actor.step() for _ in range(2)] == [True, False]
        assert [context.channel.poll().header.sequence for _ in range(2)] == [1, 2]

    def test_a_refused_segment_is_offered_again(self):
        actor, context = make_actor()
        context.weights.publish(POLICY, weights_of(0))
        offer, refusals = context.channel.offer, [False, False]
        context.channel.offer = lambda segment: refusals.pop() if refusals else offer(segment)
        assert [actor.step() for _ in range(2)] == [True, False]  # the first weights that the actor uses
        assert context.channel.poll() is None
        context.weights.publish(POLICY, weights_of(5))
        assert actor.step()
        segment = context.channel.poll()
        assert (segment.header.sequence, segment.header.version) == (0, 0)
        assert len(actor.env.actions) == SPEC.num_steps


class TestCommands:
    @pytest.mark.parametrize("order", [FINISH, STOP])
    def test_stop_takes_effect_within_a_segment(self, order):
        actor, context = make_actor()
        context.weights.publish(POLICY, weights_of(0))
        step = actor.env.step

        def stopping(actions, segment, t):
            step(actions, segment, t)
            if t == 1:
                context.orders["now"] = order

        actor.env.step = stopping
        actor.step()
        assert actor.done
        assert len(actor.env.actions) == 2
        assert context.channel.poll() is None
        assert actor.env_steps == 0

    def test_a_paused_actor_does_not_step(self):
        actor, context = make_actor(slots=2)
        context.weights.publish(POLICY, weights_of(0))
        context.orders["now"] = PAUSE
        assert not actor.step()
        assert context.channel.poll() is None
        assert not actor.done
        context.orders["now"] = RUN
        assert actor.step()

    def test_a_stop_ends_a_pause(self):
        actor, context = make_actor()
        context.orders["now"] = PAUSE
        actor.step()
        context.orders["now"] = STOP
        actor.step()
        assert actor.done


class TestBadNumbers:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("obs", np.nan, r"actor-0, segment 1: obs is nan at step 2 .* environment 1, component 0"),
            ("reward", np.inf, r"actor-0, segment 1: reward is inf at step 1 .* environment 1"),
        ],
    )
    def test_error_names_field_step_and_environment(self, field, value, message):
        actor, context = make_actor(slots=2)
        context.weights.publish(POLICY, weights_of(0))
        actor.env.poison[SPEC.num_steps + 2] = (field, value)
        assert actor.step()
        with np.errstate(invalid="ignore"), pytest.raises(NotFinite, match=message):
            actor.step()
        assert context.channel.poll().header.sequence == 0
        assert context.channel.poll() is None

    def test_a_nan_explains_the_fault_that_follows_it(self):
        actor, context = make_actor(world=ScriptedWorld(fail_at=3))
        context.weights.publish(POLICY, weights_of(0))
        actor.env.poison[1] = ("obs", np.nan)
        with np.errstate(invalid="ignore"), pytest.raises(NotFinite, match="obs is nan"):
            actor.step()

    def test_a_nan_explains_a_policy_that_fails_on_it(self):
        actor, context = make_actor()
        context.weights.publish(POLICY, weights_of(0))
        actor.env.poison[1] = ("obs", np.nan)
        act = actor.policy.act

        def strict(obs, starts, **options):
            if np.isnan(obs).any():
                raise ValueError("the policy cannot look at this")
            return act(obs, starts, **options)

        actor.policy.act = strict
        with pytest.raises(NotFinite, match="obs is nan at step 1"):
            actor.step()

    def test_an_unrelated_fault_is_unchanged(self):
        actor, context = make_actor(world=ScriptedWorld(fail_at=2))
        context.weights.publish(POLICY, weights_of(0))
        with pytest.raises(EnvironmentFault, match="the script says so"):
            actor.step()


class TestReports:
    def reports(self, context):
        return [ActorReport.read(record) for _, record in context.board.read(ACTORS)]

    def test_reports_every_two_seconds_with_new_episodes(self):
        actor, context = make_actor()
        context.weights.publish(POLICY, weights_of(3))
        collected(actor, context, 2)
        assert self.reports(context) == []
        context.clock.now_s += REPORT_EVERY_S
        collected(actor, context)
        collected(actor, context)
        (report,) = self.reports(context)
        assert report.episodes == [(10.0, 4), (15.0, 5), (10.0, 4)]
        assert (report.sequence, report.version, report.env_steps, report.epoch) == (3, 3, 18, 4)
        assert report.state == "running"
        assert report.phases.keys() == {"env", "policy", "blocked", "other"}

    def test_a_final_report_is_sent(self):
        actor, context = make_actor()
        context.weights.publish(POLICY, weights_of(0))
        collected(actor, context, 2)
        actor.close()
        (report,) = self.reports(context)
        assert (report.state, report.env_steps) == ("stopped", 12)
        assert report.episodes == [(10.0, 4), (15.0, 5)]
        assert actor.env.closed

    def test_environments_are_closed_even_if_the_board_fails(self):
        actor, context = make_actor()

        def deaf(topic, record):
            raise OSError("the board is gone")

        context.board.post = deaf
        with pytest.raises(OSError, match="the board is gone"):
            actor.close()
        assert actor.env.closed

    def test_spans_are_recorded_up_to_a_limit(self):
        actor, context = make_actor()
        context.trace_spans = 2
        context.weights.publish(POLICY, weights_of(0))
        collected(actor, context, 4)
        actor.close()
        details = [record["details"] for _, record in context.board.read(EVENTS)]
        assert [(span["phase"], span["sequence"]) for span in details] == [("collect", 0), ("collect", 1)]


class TestResuming:
    def states(self, world):
        """Return five consecutive segments with the actor state that was sent with each."""
        actor, context = make_actor(world=world)
        context.weights.publish(POLICY, weights_of(1))
        found = []
        for _ in range(5):
            actor.step()
            segment = context.channel.poll()
            found.append((segment.state, {name: column.copy() for name, column in segment.columns.items()}))
            context.channel.release(segment)
        return found

    @pytest.mark.parametrize("next_step", [False, True])
    def test_a_resumed_actor_continues_exactly(self, next_step):
        life = self.states(ScriptedWorld(next_step=next_step))
        actor, context = make_actor(world=ScriptedWorld(next_step=next_step))
        context.weights.publish(POLICY, weights_of(1))
        assert actor.resume(1, life[1][0], np.random.SeedSequence(0)) == "exact"
        for sequence, (head, columns) in enumerate(collected(actor, context, 3), start=2):
            assert head.sequence == sequence
            for name, column in columns.items():
                if name != "final_obs":  # meaningless where no episode was truncated
                    np.testing.assert_array_equal(column, life[sequence][1][name], err_msg=name)
        assert actor.env_steps == sum(int(columns["valid"].sum()) for _, columns in life)
        assert actor.env.seeds == []

    @pytest.mark.parametrize("known", [True, False])
    def test_an_environment_without_snapshots_starts_new_episodes(self, known):
        world = ScriptedWorld()
        world.snapshot = lambda: None
        state = self.states(world)[1][0] if known else None
        actor, context = make_actor()
        context.weights.publish(POLICY, weights_of(1))
        seeds = np.random.SeedSequence(9)
        assert actor.resume(1, state, seeds) == "episode-boundary"
        ((head, columns),) = collected(actor, context)
        assert head.sequence == 2
        np.testing.assert_array_equal(columns["obs"][0], [[0, 0], [1, 0]])
        assert actor.env.seeds == [seeds]
        assert actor.env_steps == (18 if known else 6)

    def test_an_environment_that_refuses_its_snapshot_starts_new_episodes(self):
        state = self.states(ScriptedWorld())[1][0]
        actor, _ = make_actor()

        def refuse(state):
            raise CannotResume("made otherwise")

        actor.env.restore = refuse
        assert actor.resume(1, state, np.random.SeedSequence(9)) == "episode-boundary"
