"""Ensembles: joint decisions, disagreement, the best member, and what each member learns from."""

from __future__ import annotations

import numpy as np
import pytest

from steppe import DistributedAgent, DistributedEnvironment, EnvSpec, FieldSpec, MultiAgentLearner
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.specs import ActionSpec

pytestmark = pytest.mark.integration

IDENTITY = "steppe/Identity-v0"


class Fixed(DistributedAgent):
    """A member that always returns the same action."""

    spec = agent = None  # built only when requested

    def __init__(self, spec: EnvSpec, action, score: float = 0.0) -> None:
        self.spec, self.action, self.score = spec, np.asarray(action), score
        self.agent = self
        self.seen: list = []
        self.config = DistributedAgent("ppo").config

    def act(self, obs, starts, *, explore=True):
        assert not explore
        shape = (len(obs), *self.action.shape)
        return {"action": np.broadcast_to(self.action, shape).astype(self.spec.action.field.dtype)}

    def update_policy(self, experiences):
        self.seen.append(experiences)
        return {"policy_loss": self.score, "entropy": self.score}

    def evaluate_policy(self, num_episodes=10):
        return {"return_mean": self.score}


def learner(actions, kind="discrete", scores=None, **more):
    action = ActionSpec("discrete", (4,)) if kind == "discrete" else ActionSpec("box", (2,), (-1.0,) * 2, (1.0,) * 2)
    spec = EnvSpec("invented", FieldSpec("obs", (3,), "float32"), action)
    scores = scores or [0.0] * len(actions)
    members = {f"m{n}": Fixed(spec, a, s) for n, (a, s) in enumerate(zip(actions, scores, strict=True))}
    return MultiAgentLearner(members, **more)


def test_the_majority_decides_and_disagreement_is_measured():
    obs = np.zeros((5, 3), np.float32)
    many = learner([2, 1, 2, 2, 0])
    assert many.ensemble_predict(obs).tolist() == [2] * 5
    assert many.ensemble_predict(obs[0]) == 2
    assert many.disagreement(obs) == pytest.approx(0.4)
    assert learner([3, 1, 1, 3]).ensemble_predict(obs[0]) == 1, "of equal numbers the lowest"
    assert learner([1, 1]).disagreement(obs) == 0.0


def test_continuous_actions_are_averaged():
    two = learner([(0.0, 1.0), (1.0, -1.0)], "box")
    np.testing.assert_allclose(two.ensemble_predict(np.zeros(3, np.float32)), [0.5, 0.0])
    assert two.disagreement(np.zeros((2, 3), np.float32)) == pytest.approx((0.5 + 1.0) / 2)


def test_the_best_member_is_chosen_by_evaluation_or_training_return():
    three = learner([0, 1, 2], scores=[1.0, 5.0, 3.0])
    assert three.get_best_agent()[0] == "m1"
    with pytest.raises(UsageError, match="no member was trained yet"):
        three.get_best_agent("entropy")
    three.train_agents({name: steps(1) for name in three.agents})
    assert three.get_best_agent("entropy")[0] == "m1"
    assert three.get_best_agent("policy_loss")[0] == "m0", "of losses the smallest"
    with pytest.raises(ConfigError, match="Did you mean 'entropy'"):
        three.get_best_agent("entropi")


def steps(episodes: int, length: int = 4) -> list[dict]:
    return [
        {
            "obs": np.full(3, episode, np.float32), "reward": float(t), "episode": episode,
            "terminated": t == length - 1, "truncated": False,
        }
        for episode in range(episodes)
        for t in range(length)
    ]  # fmt: skip


def test_members_learn_from_bootstrap_samples_of_episodes():
    three = learner([0, 1, 1])
    told = three.train_agents({name: steps(50) for name in three.agents})
    assert [metrics["disagreement"] for metrics in told.values()] == pytest.approx([1 / 3] * 3)
    drawn = []
    for member in three.agents.values():
        (seen,) = member.seen
        origins = [int(step["obs"][0]) for step in seen[::4]]
        assert len(seen) == 200
        assert [step["reward"] for step in seen] == [0.0, 1.0, 2.0, 3.0] * 50, "episodes stay whole and in order"
        assert [step["episode"] for step in seen] == sorted(step["episode"] for step in seen)
        assert 20 < len(set(origins)) < 45, "about 1 − 1/e of the episodes, some of them several times"
        drawn.append(tuple(origins))
    assert len(set(drawn)) == 3, "every member has a draw of its own"
    again = learner([0, 1, 1])
    again.train_agents({name: steps(50) for name in again.agents})
    assert [tuple(int(s["obs"][0]) for s in m.seen[0][::4]) for m in again.agents.values()] == drawn
    plain = learner([0], bootstrap=False)
    given = steps(3)
    plain.train_agents({"m0": given})
    assert plain.agents["m0"].seen[0] is given


def test_real_members_of_several_algorithms_learn_together():
    with DistributedEnvironment(IDENTITY, 1, envs_per_worker=4, runtime="inline", seed=0) as environment:
        ours = MultiAgentLearner(
            {
                "ppo": DistributedAgent("ppo", 0.01, seed=0, config={"gamma": 0.5}),
                "a2c": DistributedAgent("a2c", 0.01, seed=1, config={"gamma": 0.5}),
                "dqn": DistributedAgent("dqn", 0.01, seed=2, config={"gamma": 0.5}),
            }
        ).bind(environment)
        for _ in range(8):
            told = ours.train_agents(
                {name: environment.generate_experiences(agent, 8) for name, agent in ours.agents.items()}
            )
        assert all(0.0 <= metrics["disagreement"] <= 1.0 for metrics in told.values())
        name, best = ours.get_best_agent()
        assert best is ours.agents[name]
        obs = np.eye(environment.spec.obs.shape[0], dtype=np.float32)
        votes = [
            agent.agent.act(obs, np.ones(len(obs), bool), explore=False)["action"] for agent in ours.agents.values()
        ]
        expected = [np.bincount(column).argmax() for column in np.stack(votes).T]
        assert ours.ensemble_predict(obs).tolist() == expected
    with pytest.raises(UsageError, match="a state has shape"):
        ours.ensemble_predict(np.zeros(2, np.float32))
    with pytest.raises(ConfigError, match="Did you mean 'dqn'"):
        ours.train_agents({"dqm": []})
    with pytest.raises(UsageError, match="no experiences for 'dqn'"):
        ours.train_agents({"dqn": []})
    with pytest.raises(ConfigError, match="at least one member"):
        MultiAgentLearner({})
