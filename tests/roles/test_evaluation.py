"""The evaluator: whole episodes, an equal share from each environment, randomness from seed and version only."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from steppe.core.config.run import EnvConfig
from steppe.core.system.seeding import seed_sequence
from steppe.envs import make_segment_env
from steppe.roles.evaluation import Evaluation, Evaluator
from tests.support.role_fakes import ScriptedPolicy, ScriptedWorld, weights_of

pytestmark = pytest.mark.unit


def never():
    return False


def total(length):
    return length * (length + 1) / 2


class TestShares:
    def test_short_episodes_are_not_favoured(self):
        """The first six to end would nearly all have length 2; each environment must contribute two."""
        result = Evaluator(ScriptedWorld((2, 5, 9)), ScriptedPolicy(), 0).evaluate(6, never)
        assert sorted(result.lengths) == [2, 2, 5, 5, 9, 9]
        assert sorted(result.returns) == sorted(map(total, result.lengths))

    def test_the_remainder_goes_to_the_first_environments(self):
        result = Evaluator(ScriptedWorld((2, 3, 4)), ScriptedPolicy(), 0).evaluate(5, never)
        assert sorted(result.lengths) == [2, 2, 3, 3, 4]

    def test_fewer_episodes_than_environments_are_possible(self):
        assert Evaluator(ScriptedWorld((6, 3, 2)), ScriptedPolicy(), 0).evaluate(1, never).lengths == [6]

    @pytest.mark.parametrize("next_step", [False, True])
    def test_reset_steps_belong_to_no_episode(self, next_step):
        result = Evaluator(ScriptedWorld((3, 4), next_step=next_step), ScriptedPolicy(), 0).evaluate(6, never)
        assert sorted(result.lengths) == [3, 3, 3, 4, 4, 4]
        assert sorted(result.returns) == [6.0, 6.0, 6.0, 10.0, 10.0, 10.0]

    def test_each_evaluation_counts_its_own_episodes(self):
        judge = Evaluator(ScriptedWorld((2, 50)), ScriptedPolicy(), 0)
        assert judge.evaluate(2, never).lengths == [2, 50]
        assert judge.evaluate(2, never).lengths == [2, 50]


class TestEpisodesWithoutEnd:
    def test_unfinished_episodes_count_with_their_return_so_far(self):
        result = Evaluator(ScriptedWorld((3, 10**9)), ScriptedPolicy(), 0, max_steps=7).evaluate(2, never)
        assert (result.returns, result.lengths) == ([total(3), total(7)], [3, 7])

    def test_an_episode_that_has_not_started_does_not_count(self):
        """After 6 steps the first environment has ended twice and would be at step 0 of its third."""
        result = Evaluator(ScriptedWorld((3, 10**9)), ScriptedPolicy(), 0, max_steps=6).evaluate(6, never)
        assert result.lengths == [3, 3, 6]

    def test_a_stopped_evaluation_has_no_result(self):
        calls = iter([False, False, True])
        world = ScriptedWorld((100, 100))
        assert Evaluator(world, ScriptedPolicy(), 0).evaluate(2, lambda: next(calls)) is None
        assert len(world.actions) == 2


class TestRandomness:
    def test_randomness_depends_on_seed_and_version(self):
        world, policy = ScriptedWorld((2, 2)), ScriptedPolicy()
        judge = Evaluator(world, policy, 5)
        for version in (3, 3, 4):
            policy.load(weights_of(version))
            judge.evaluate(2, never)
        states = [tuple(seeds.generate_state(4)) for seeds in world.seeds]
        assert states[0] == states[1] != states[2]
        assert policy.begun[0] == policy.begun[1] != policy.begun[2]

    def test_another_seed_gives_other_episodes(self):
        worlds = [ScriptedWorld((2, 2)) for _ in range(2)]
        for seed, world in enumerate(worlds):
            Evaluator(world, ScriptedPolicy(), seed).evaluate(2, never)
        one, other = (tuple(world.seeds[0].generate_state(4)) for world in worlds)
        assert one != other

    @pytest.mark.parametrize("vector", ["native", "loop"])
    def test_earlier_evaluations_change_nothing(self, vector):
        """With real environments, whose episodes depend on earlier random numbers unless they are seeded again."""

        def judged(versions):
            world = make_segment_env("CartPole-v1", EnvConfig(vector=vector), 3, seed_sequence(0, "any"))
            policy = _Wobble()
            judge = Evaluator(world, policy, 1)
            for policy.version in versions:
                result = judge.evaluate(5, never)
            world.close()
            return result

        assert judged([7]).returns == judged([1, 2, 7]).returns
        assert judged([7]).returns != judged([8]).returns

    def test_the_explore_flag_is_passed_on(self):
        policy = ScriptedPolicy()
        judge = Evaluator(ScriptedWorld((2, 2)), policy, 0)
        judge.evaluate(2, never)
        judge.evaluate(2, never, explore=True)
        assert policy.explored == [False, False, True, True]


class _Wobble:
    """Random pushes from the given random stream."""

    version = 0

    def begin(self, num_envs, stream, *, actor=0, num_actors=1):
        self.stream = stream

    def act(self, obs, starts, *, explore=True):
        return {"action": self.stream.integers(2, size=len(obs))}


class TestReturns:
    def test_returns_equal_those_of_plain_environments(self):
        """The same seeds and actions in bare Gymnasium environments give the same returns."""
        world = make_segment_env("CartPole-v1", EnvConfig(vector="loop"), 4, seed_sequence(0, "any"))
        judge = Evaluator(world, _Leaning(), 2)
        result = judge.evaluate(4, never)
        seeds = world.seeds
        world.close()
        expected = []
        for seed in seeds:
            env = gym.make("CartPole-v1")
            obs, _ = env.reset(seed=seed)
            length, over = 0, False
            while not over:
                obs, _, terminated, truncated, _ = env.step(int(obs[2] > 0))
                length, over = length + 1, terminated or truncated
            expected.append(float(length))
            env.close()
        assert sorted(result.returns) == sorted(expected)

    def test_mean_and_deviation(self):
        evaluation = Evaluation(returns=[1.0, 3.0, 8.0], lengths=[1, 1, 1])
        assert evaluation.mean == 4.0
        assert evaluation.std == pytest.approx(((9 + 1 + 16) / 3) ** 0.5)

    def test_frames_are_from_the_first_episode_of_the_first_environment(self):
        world = ScriptedWorld((3, 2))
        result = Evaluator(world, ScriptedPolicy(), 0).evaluate(4, never, record=True)
        assert [int(frame[0, 0, 0]) for frame in result.frames] == [0, 1, 2]
        assert Evaluator(world, ScriptedPolicy(), 0).evaluate(4, never).frames == []


class _Leaning(_Wobble):
    def act(self, obs, starts, *, explore=True):
        return {"action": np.asarray(obs[:, 2] > 0, np.int64)}
