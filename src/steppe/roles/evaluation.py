"""Evaluate a policy over complete episodes, equally many per environment, so that short episodes are not favoured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from steppe.core.contracts.algorithm import Policy
from steppe.core.contracts.env import SegmentEnv, get_agent_returns, num_rows
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.system import seeding
from steppe.roles.bound_policy import BoundPolicy


@dataclass
class Evaluation:
    """Returns and lengths of episodes, and frames of the first environment's first episode if recorded.

    With several `agents`, `returns_by_agent` holds each agent's return per episode, NaN if the agent was absent.
    """

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)  # False: ended by a time limit or `max_steps`
    frames: list[np.ndarray] = field(default_factory=list)
    agents: tuple[str, ...] = ()
    returns_by_agent: list[np.ndarray] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def terminated_share(self) -> float:
        return float(np.mean(self.terminated)) if self.terminated else 0.0

    @property
    def std(self) -> float:
        return float(np.std(self.returns))

    @property
    def agent_returns(self) -> dict[str, float]:
        """Mean return by agent; empty if there is only one."""
        return mean_returns_by_agent(self.agents, np.array(self.returns_by_agent)) if self.returns_by_agent else {}


class Evaluator:
    """Evaluate successive weights of a policy in an environment, each with new episodes.

    The randomness of an evaluation depends only on `seed` and the policy's version, not on earlier evaluations.
    """

    def __init__(self, env: SegmentEnv, policy: Policy, seed: int, *, max_steps: int = 100_000) -> None:
        self.env, self.policy, self.seed, self.max_steps = env, policy, seed, max_steps
        self._bound_policy = BoundPolicy(policy, env)
        env_spec = env.spec
        spec = SegmentSpec(1, num_rows(env), env_spec.obs, env_spec.action.field, num_agents=env_spec.num_agents)
        self._row = Segment.blank(spec)

    def evaluate(
        self, episodes: int, stopping: Callable[[], bool], *, explore: bool = False, record: bool = False
    ) -> Evaluation | None:
        """Play `episodes` complete episodes; return None if `stopping()` becomes true meanwhile."""
        result = Evaluation(agents=self.env.spec.agents)
        quota = np.full(self.env.num_envs, episodes // self.env.num_envs)
        quota[: episodes % self.env.num_envs] += 1
        self._begin()
        self.env.take_finished()
        recording = record
        for _ in range(self.max_steps):
            if stopping():
                return None
            if recording and (frame := self.env.render()) is not None:
                result.frames.append(frame)
            ended = self._step(explore=explore)
            terminated = self._row["terminated"][0].reshape(self.env.num_envs, -1).any(axis=1)
            recording = recording and 0 not in ended
            returns_by_agent = get_agent_returns(self.env) if len(ended) else None
            for number, (index, (total, length)) in enumerate(zip(ended, self.env.take_finished(), strict=True)):
                if quota[index] > 0:
                    quota[index] -= 1
                    result.returns.append(total)
                    result.lengths.append(length)
                    result.terminated.append(bool(terminated[index]))
                    result.returns_by_agent += [returns_by_agent[number]] if returns_by_agent is not None else []
            if not quota.any():
                break
        else:
            self._count_unfinished(result, quota)
        return result

    def _begin(self) -> None:
        names = ("judge", self.policy.version)
        self.policy.begin(num_rows(self.env), seeding.generator(self.seed, *names, "policy"))
        self.env.reset(self._row["obs"][0], seeding.seed_sequence(self.seed, *names, "env"))

    def _step(self, *, explore: bool) -> np.ndarray:
        obs = self._row["obs"]
        action = self._bound_policy.act(obs[0], explore=explore)["action"]
        self.env.step(action, self._row, 0)
        obs[0] = obs[1]
        return np.flatnonzero(self._row.ended[0])

    def _count_unfinished(self, result: Evaluation, quota: np.ndarray) -> None:
        """Count episodes that did not end within `max_steps` with their return so far."""
        for remaining, (total, length) in zip(quota, self.env.unfinished(), strict=True):
            if remaining and length:  # an episode without a step has no return
                result.returns.append(total)
                result.lengths.append(length)
                result.terminated.append(False)


def mean_returns_by_agent(names: tuple[str, ...], returns: np.ndarray) -> dict[str, float]:
    """Return the mean return by agent over episodes [episodes, num_agents], ignoring NaN (agent absent)."""
    present = ~np.isnan(returns)
    sums = np.where(present, returns, 0.0).sum(axis=0)
    return {name: float(sums[a] / present[:, a].sum()) for a, name in enumerate(names) if present[:, a].any()}
