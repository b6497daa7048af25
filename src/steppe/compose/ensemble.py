"""MultiAgentLearner: an ensemble of agents on one task. Each learns from its own bootstrap sample; they act by voting.

Their disagreement estimates the uncertainty of a decision: it falls where they have seen enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steppe.compose.agent import DistributedAgent
from steppe.compose.environment import DistributedEnvironment
from steppe.core.contracts.errors import ConfigError, UsageError, did_you_mean
from steppe.core.system import seeding
from steppe.core.system.typecheck import typechecked

Steps = Sequence[Mapping[str, Any]]
REWARD = "reward"


@typechecked
class MultiAgentLearner:
    """Members by name, of any algorithms, bound to one environment (call `bind` if they are not).

    With `bootstrap`, each learns from a sample with replacement of the experiences that it is given: of whole episodes
    if the order matters, of steps for replay agents. The same seed gives the same samples.
    """

    def __init__(self, agents: dict[str, DistributedAgent], *, bootstrap: bool = True, seed: int = 0) -> None:
        if not agents:
            raise ConfigError("an ensemble has at least one member")
        self.agents, self.bootstrap, self.seed = dict(agents), bootstrap, seed
        self._rounds = 0
        self._metrics: dict[str, dict[str, Any]] = {}

    def bind(self, environment: DistributedEnvironment) -> MultiAgentLearner:
        """Bind all members to the environment."""
        for agent in self.agents.values():
            agent.bind(environment)
        return self

    def train_agents(self, experiences: Mapping[str, Steps]) -> dict[str, dict[str, Any]]:
        """Train members on experiences by name; return each one's metrics and the disagreement of all."""
        for name in experiences:
            self._require(name)
        for name, steps in experiences.items():
            if not steps:
                raise UsageError(f"there are no experiences for {name!r} to learn from")
            sample = self._draw(name, steps) if self.bootstrap else steps
            self._metrics[name] = dict(self.agents[name].update_policy(sample))
        self._rounds += 1
        observations = [np.asarray(step["obs"]) for steps in experiences.values() for step in steps]
        disagreement = self.disagreement(np.stack(observations)) if observations else 0.0
        return {name: {**self._metrics[name], "disagreement": disagreement} for name in experiences}

    def get_best_agent(self, metric: str = REWARD) -> tuple[str, DistributedAgent]:
        """Return the member with the best mean return over ten episodes, or with the best value of another metric.

        Other metrics are those of its last training: the largest is best, the smallest of a loss or an error.
        """
        if metric == REWARD:
            scores = {name: float(agent.evaluate_policy(10)["return_mean"]) for name, agent in self.agents.items()}
        else:
            scores = {name: self._metric_value(metrics, metric) for name, metrics in self._metrics.items()}
            if not scores:
                raise UsageError(f"no member was trained yet, so none has a {metric!r}: call train_agents first")
            if metric.endswith(("loss", "error")):
                scores = {name: -value for name, value in scores.items()}
        best = max(scores, key=lambda name: scores[name])
        return best, self.agents[best]

    def ensemble_predict(self, state: np.ndarray) -> Any:
        """Return the joint choice without exploration: the mean of continuous actions, the majority of others.

        A tie goes to the lowest action. `state` is one observation, or several along a first axis.
        """
        rows, single = self._rows(state)
        action = _combine_votes(self._votes(rows), continuous=self._continuous)
        return action[0] if single else action

    def disagreement(self, state: np.ndarray) -> float:
        """Return how far apart the members' choices are, averaged over `state`.

        For discrete actions that is the share of votes against the majority, else the standard deviation of the
        actions.
        """
        votes = self._votes(self._rows(state)[0])
        if self._continuous:
            return float(votes.std(axis=0).mean())
        chosen = _combine_votes(votes, continuous=False)
        return float((votes != chosen).mean())

    @property
    def _continuous(self) -> bool:
        return next(iter(self.agents.values())).spec.action.kind == "box"

    def _votes(self, rows: np.ndarray) -> np.ndarray:
        """Return the members' actions [members, N, …]."""
        starts = np.ones(len(rows), bool)
        return np.stack([agent.agent.act(rows, starts, explore=False)["action"] for agent in self.agents.values()])

    def _rows(self, state: np.ndarray) -> tuple[np.ndarray, bool]:
        field = next(iter(self.agents.values())).spec.obs
        rows = np.asarray(state, field.dtype)
        if rows.shape == field.shape:
            return rows[None], True
        if rows.shape[1:] != field.shape or rows.ndim != len(field.shape) + 1:
            raise UsageError(f"a state has shape {field.shape}, or several (N, …) of it, not {rows.shape}")
        return rows, False

    def _draw(self, name: str, steps: Steps) -> Steps:
        """Return a bootstrap sample of the same size: of episodes for on-policy agents, of steps for others."""
        stream = seeding.generator(self.seed, "bootstrap", name, self._rounds)
        if self.agents[name].config.memory != "rollout":
            return [steps[row] for row in stream.integers(len(steps), size=len(steps))]
        episodes = _episodes(steps)
        sample = [episodes[row] for row in stream.integers(len(episodes), size=len(episodes))]
        return [{**step, "episode": number} for number, episode in enumerate(sample) for step in episode]

    def _require(self, name: str) -> None:
        if name not in self.agents:
            raise ConfigError(f"there is no member {name!r}.{did_you_mean(name, self.agents)}")

    def _metric_value(self, metrics: Mapping[str, Any], metric: str) -> float:
        if metric not in metrics:
            raise ConfigError(
                f"training reported no {metric!r}: {', '.join(metrics)}, or {REWARD}.{did_you_mean(metric, metrics)}"
            )
        return float(metrics[metric])


def _combine_votes(votes: np.ndarray, *, continuous: bool) -> np.ndarray:
    if continuous:
        chosen: np.ndarray = votes.mean(axis=0, dtype=np.float64)
    else:
        chosen = np.stack([(votes == choice).sum(axis=0) for choice in range(int(votes.max()) + 1)]).argmax(axis=0)
    return chosen.astype(votes.dtype)


def _episodes(steps: Steps) -> list[list[Mapping[str, Any]]]:
    """Split ordered steps into episodes, where one ended or another starts."""
    found: list[list[Mapping[str, Any]]] = [[]]
    for step in steps:
        last = found[-1][-1] if found[-1] else None
        if last is not None and (last["terminated"] or last["truncated"] or last.get("episode") != step.get("episode")):
            found.append([])
        found[-1].append(step)
    return found
