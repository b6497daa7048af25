"""Actor, learner and judge with several agents in an environment: what they tell the policy, write down, and count."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.core.config.run import EnvConfig
from steppe.core.contracts.env import get_comm_mask
from steppe.core.contracts.reports import ActorReport
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec, SegmentSpec
from steppe.core.contracts.transport import ACTORS
from steppe.envs import make_segment_env
from steppe.roles.actor import Actor
from steppe.roles.context import POLICY
from steppe.roles.evaluation import Evaluator, mean_returns_by_agent
from steppe.roles.learner import Learner, RunLimits
from steppe.roles.scheduling import FreeCollectPolicy, RoundBatchPolicy
from tests.support.role_fakes import ScriptedAgent, ScriptedMemory, ScriptedPolicy, make_context, weights_of

pytestmark = pytest.mark.unit

MAZE = EnvConfig(kwargs={"num_agents": 3, "size": 6, "density": 0.0, "max_steps": 5})
COMM = FieldSpec("comm_mask", (3,), "bool")


def maze(seed=0, num_envs=2):
    return make_segment_env("steppe/Pathfinding-v0", MAZE, num_envs, np.random.SeedSequence(seed))


class Listener(ScriptedPolicy):
    """Stays, and remembers whom it was told that agents hear."""

    communicates = True

    def __init__(self):
        super().__init__()
        self.heard = []

    def act(self, obs, starts, *, explore=True, comm_mask=None):
        self.starts.append(starts.copy())
        self.heard.append(comm_mask.copy())
        return {"action": np.zeros(len(obs), np.int64)}


class Deaf(ScriptedPolicy):
    def act(self, obs, starts, *, explore=True):
        return {"action": np.zeros(len(obs), np.int64)}


def actor_with(policy, extras=(COMM,), num_steps=4):
    world = maze()
    spec = SegmentSpec(num_steps, 6, world.spec.obs, world.spec.action.field, extras, 3)
    context = make_context("actor-0", spec=spec)
    context.weights.publish(POLICY, weights_of(0))
    return Actor(0, world, policy, FreeCollectPolicy(), context), context


def test_who_hears_whom_reaches_the_policy_and_the_segment_with_one_row_more():
    policy = Listener()
    actor, context = actor_with(policy)
    told = []
    for _ in range(3):
        assert actor.step()
        segment = context.channel.poll()
        assert segment["comm_mask"].shape == (5, 6, 3)
        np.testing.assert_array_equal(segment["comm_mask"][:4], policy.heard[-4:])
        np.testing.assert_array_equal(segment["comm_mask"][4], get_comm_mask(actor.env))
        told.append(segment["comm_mask"].copy())
        context.channel.release(segment)
    np.testing.assert_array_equal(told[0][4], told[1][0])
    assert all(mask[:, range(6), [0, 1, 2, 0, 1, 2]].all() for mask in told), "everyone hears itself"


def test_a_policy_that_does_not_listen_is_not_told_and_the_column_is_there_if_declared():
    actor, context = actor_with(Deaf())
    actor.step()
    np.testing.assert_array_equal(context.channel.poll()["comm_mask"][4], get_comm_mask(actor.env))
    actor, context = actor_with(Deaf(), extras=())
    actor.step()
    assert "comm_mask" not in context.channel.poll().columns


def test_an_actor_counts_steps_of_environments_and_reports_returns_by_agent():
    actor, context = actor_with(Deaf(), num_steps=5)
    actor.step()
    assert actor.env_steps == 10
    actor.close()
    report = ActorReport.read(context.board.read(ACTORS, 0)[-1][1])
    assert [length for _, length in report.episodes] == [5, 5]
    assert list(report.agent_returns) == ["agent_0", "agent_1", "agent_2"]
    mean = sum(total for total, _ in report.episodes) / 2
    assert sum(report.agent_returns.values()) == pytest.approx(mean)


def test_where_a_world_does_not_say_everyone_hears_everyone():
    class Silent:
        spec = EnvSpec("silent", FieldSpec("obs", (1,), "float32"), ActionSpec("discrete", (2,)), num_agents=2)
        num_envs = 3

    np.testing.assert_array_equal(get_comm_mask(Silent()), np.ones((6, 2), bool))


def team_segment(channel, valid, cut, sequence=0):
    """One row of `valid` and `cut` per step, of 2 environments with 2 agents."""
    segment = channel.blank(0)
    for column in segment.columns.values():
        column[...] = 0
    segment["valid"][...], segment["terminated"][...] = valid, cut
    segment.header = SegmentHeader("run", 0, 0, sequence, 0)
    channel.offer(segment)
    return segment


VALID = np.array([[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
CUT = np.array([[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]], bool)
TEAM = SegmentSpec(3, 4, FieldSpec("obs", (1,), "float32"), FieldSpec("action", (), "int64"), (), 2)


def test_counts_of_a_segment_by_hand():
    """Environment 0: agent 1 leaves at step 0, agent 0 at step 1, which ends the episode; agent 1 of the next one leaves at
    step 2. Environment 1: agent 0 alone, ended at step 1; then agent 1 alone, still there."""
    segment = Segment.blank(TEAM)
    segment["valid"][...], segment["terminated"][...] = VALID, CUT
    assert (segment.num_valid, segment.env_steps) == (8, 6)
    np.testing.assert_array_equal(segment.ended, [[False, False], [True, True], [False, False]])
    segment["valid"][1, :2] = segment["terminated"][1, :2] = False
    assert segment.env_steps == 5
    np.testing.assert_array_equal(segment.ended, [[False, False], [False, True], [False, False]])


def test_a_learner_counts_environments_and_agents_apart():
    context = make_context("learner", spec=TEAM)
    saved = []
    learner = Learner(
        ScriptedAgent(),
        ScriptedMemory(),
        RoundBatchPolicy(context.channel, 1),
        RunLimits(),
        lambda *parts: saved.append(parts),
        context,
    )
    team_segment(context.channel, VALID, CUT)
    assert learner.step()
    assert (learner.env_steps, learner.agent_steps, learner.episodes) == (6, 8, 2)
    learner.checkpoint()
    weights, state, counters = saved[-1]
    other = Learner(
        ScriptedAgent(), ScriptedMemory(), RoundBatchPolicy(context.channel, 1), RunLimits(), lambda *_: None, context
    )
    other.restore(weights, state, counters)
    assert (other.env_steps, other.agent_steps, other.episodes) == (6, 8, 2)


def test_an_evaluation_counts_an_environments_episode_once():
    judge = Evaluator(maze(), Deaf(), 0)
    evaluation = judge.evaluate(5, lambda: False)
    assert evaluation.lengths == [5] * 5
    assert evaluation.agents == ("agent_0", "agent_1", "agent_2")
    assert len(evaluation.returns_by_agent) == 5
    np.testing.assert_allclose([share.sum() for share in evaluation.returns_by_agent], evaluation.returns)
    assert sum(evaluation.agent_returns.values()) == pytest.approx(evaluation.mean)


def test_means_leave_out_who_was_not_there():
    returns = np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan]])
    assert mean_returns_by_agent(("a", "b", "c"), returns) == {"a": 2.0, "b": 5.0}
    assert mean_returns_by_agent(("a", "b", "c"), np.zeros((0, 3))) == {}
