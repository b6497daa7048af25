"""A loaded policy for multi-agent environments: maps observations by agent to actions by agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from steppe.core.config.run import RunConfig
from steppe.core.contracts.algorithm import Agent, CommunicatingPolicy
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.weights import Weights
from steppe.core.system import seeding
from steppe.core.system.typecheck import typechecked
from steppe.envs.multi_agent.aec import Turns
from steppe.envs.multi_agent.spec import make_multi_agent_codec, make_multi_agent_spec

ByAgent = Mapping[Any, Any]


@contextmanager
def require_observation(whose: str) -> Iterator[None]:
    """Turn what NumPy and Gymnasium raise for an observation outside its space into a UsageError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"this is no observation of {whose}: {error}") from None


def require_finite(seen: np.ndarray) -> None:
    """Raise UsageError for observations with NaN or infinite values."""
    if seen.dtype.kind == "f" and not np.isfinite(seen).all():
        raise UsageError("an observation has values that are not finite")


class LoadedMultiAgentPolicy:
    """Policy of a finished run for the agents of one environment.

    If the run stacked frames or its agent is recurrent, call `reset` before the first observations of each episode.
    `agent` chooses the actions, with the run's weights; `spec` describes its observations.
    """

    def __init__(self, config: RunConfig, weights: Weights, env: Any, seed: int) -> None:
        from steppe.algorithms import make_agent

        self.weights = weights
        environment = config.environment.resolve_defaults(config.env)
        self._codec, num_states = make_multi_agent_codec(env, config.env, environment, 1)
        self.spec = make_multi_agent_spec(config.env, env, self._codec, num_states, limit=environment.time_limit)
        self._index = {agent: index for index, agent in enumerate(env.possible_agents)}
        self._in_turns = {agent for agent in self._index if isinstance(env, Turns) and not env.is_turn_hidden(agent)}
        agent = config.agent.resolve_defaults(self.spec, config.actors, config.envs)[0]
        self.agent: Agent = make_agent(config.algo, agent, self.spec, seed=seeding.integer_seed(config.seed, "agent"))
        self.agent.load(weights)
        self.agent.begin(self.spec.num_agents, seeding.generator(seed, "loaded"))
        self._starts = np.ones(self.spec.num_agents, np.bool_)

    @typechecked
    def act(self, observations: ByAgent, *, explore: bool = False, infos: ByAgent | None = None) -> dict[Any, Any]:
        """Return an action for each agent in `observations`: the greedy one, or a sample if `explore`.

        In turn-based environments pass only the agent whose turn it is. `infos` holds the communication masks
        (`comm_mask`) for agents that communicate.
        """
        present = np.zeros(self.spec.num_agents, np.bool_)
        encoded = np.zeros((self.spec.num_agents, *self.spec.obs.shape), self.spec.obs.dtype)
        for agent, raw in observations.items():
            if agent not in self._index:
                raise UsageError(
                    f"{agent!r} is none of the agents of {self.spec.id}: {', '.join(self.spec.agents[:8])}"
                )
            index = self._index[agent]
            put = self._codec.put_first if self._starts[index] else self._codec.put
            with require_observation(self.spec.id), np.errstate(all="ignore"):
                put(encoded, index, (raw, [True]) if agent in self._in_turns else raw)
            present[index] = True
        require_finite(encoded)
        act: Callable[..., Mapping[str, np.ndarray]] = self.agent.act
        communicates = isinstance(self.agent, CommunicatingPolicy) and self.agent.communicates
        options = {"comm_mask": self._receive_mask(present, infos or {})} if communicates else {}
        choices = self._codec.choices(act(encoded, self._starts, explore=explore, **options)["action"])
        self._starts = ~present
        return {agent: choices[self._index[agent]] for agent in observations}

    def reset(self) -> None:
        """Mark the next observations as the first of an episode."""
        self._starts = np.ones(self.spec.num_agents, np.bool_)

    def _receive_mask(self, present: np.ndarray, infos: ByAgent) -> np.ndarray:
        mask: np.ndarray = present & present[:, None]
        for agent, info in infos.items():
            if "comm_mask" in info and present[self._index[agent]]:
                mask[self._index[agent]] &= np.asarray(info["comm_mask"], np.bool_)
        return mask
