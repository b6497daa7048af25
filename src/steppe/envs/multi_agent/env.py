"""Segment environments with several agents: agent a of environment n is row n · num_agents + a.

      step t        env 0            env 1
      row      0     1     2  |  3     4     5
      agent    a_0   a_1   a_2|  a_0   a_1   a_2
      valid    yes   yes   no |  yes   yes   yes      a_2 of env 0 is absent: its row has no data

When no agent is left, the episode is over and the environment is reset within the step. envs/factory.py builds the
environments, spec.py encodes their spaces, and aec.py converts turn-based environments.
"""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.env import ResumeKind
from steppe.core.contracts.errors import EnvironmentFault
from steppe.core.contracts.segment import Segment, find_episode_ends
from steppe.core.contracts.specs import EnvSpec
from steppe.core.system import seeding
from steppe.core.system.seeding import env_seeds
from steppe.envs.multi_agent.spec import MultiAgentCodec
from steppe.envs.snapshot.snapshots import EnvSnapshots, SegmentEnvState
from steppe.envs.vector.rendering import render_rgb
from steppe.envs.wrappers.rewards import EpisodeStatistics

AgentDict = dict[Any, Any]  # by agent


class ParallelEnvLike(Protocol):
    """Interface of PettingZoo's parallel environments; agents are identified by any hashable name."""

    possible_agents: list[Any]
    agents: list[Any]

    def observation_space(self, agent: Any) -> Any: ...
    def action_space(self, agent: Any) -> Any: ...
    def reset(self, seed: int | None = None, options: AgentDict | None = None) -> tuple[AgentDict, AgentDict]: ...
    def step(self, actions: AgentDict) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]: ...
    def close(self) -> None: ...


class MultiAgentSegmentEnv:
    """Base of multi-agent segment environments: episode statistics, masks and snapshots."""

    def __init__(
        self, num_envs: int, spec: EnvSpec, statistics: EpisodeStatistics, snapshots: EnvSnapshots, seeds: list[int]
    ) -> None:
        rows = num_envs * spec.num_agents
        self.spec = spec
        self.num_envs = num_envs
        self.seeds = seeds
        self.starts = np.ones(rows, np.bool_)
        self.present = np.zeros(rows, np.bool_)  # rows of the agents that act in the next step
        self.comm_mask = np.zeros((rows, spec.num_agents), np.bool_)
        self.masks = np.ones((rows, *spec.action.sizes), np.bool_) if spec.num_states is not None else None
        self._statistics, self._snapshots = statistics, snapshots
        self._seeded = False
        self._arrays: dict[str, np.ndarray | None] = {
            "starts": self.starts, "there": self.present, "comm_mask": self.comm_mask, "masks": self.masks,
        }  # fmt: skip

    def take_finished(self) -> list[tuple[float, int]]:
        """Return (return, length) of the episodes that ended since the last call; returns are sums over agents."""
        return self._statistics.take()

    def agent_returns(self) -> np.ndarray:
        """Return each agent's share of the returns that `take_finished` would give now; NaN for absent agents."""
        return self._statistics.shares()

    def unfinished(self) -> list[tuple[float, int]]:
        """Return (return, length) so far of the current episode in each environment."""
        return self._statistics.running()

    @property
    def resume_kind(self) -> ResumeKind:
        """How a run in this environment can be resumed; known after the first reset."""
        return self._snapshots.kind

    def snapshot(self) -> Tree | None:
        """Return everything the next steps depend on; None before the first reset, or if it cannot be read."""
        return self._state().take() if self._seeded else None

    def restore(self, state: Tree) -> None:
        """Restore the state of a snapshot; raises CannotResume."""
        self._state().give(state)

    def _state(self) -> SegmentEnvState:
        return SegmentEnvState(self, self._snapshots, self._statistics, self._arrays)  # type: ignore[arg-type]

    def _book(self, segment: Segment, t: int) -> None:
        """Update the episode statistics after the rows and rewards of a step were written."""
        statistics, valid = self._statistics, segment["valid"][t]
        if statistics.played is not None:
            statistics.played |= valid
        statistics.add_step(segment["reward"][t])
        over = find_episode_ends(valid, segment["terminated"][t] | segment["truncated"][t], self.spec.num_agents)
        if over.any():
            statistics.end(np.flatnonzero(over))


class ParallelSegmentEnv(MultiAgentSegmentEnv):
    """N parallel environments stepped sequentially.

    Every episode gets its own seed, because PettingZoo does not define what a reset without one does.
    """

    def __init__(
        self,
        envs: list[Any],
        spec: EnvSpec,
        rules: MultiAgentCodec,
        statistics: EpisodeStatistics,
        seeds: list[int],
        limit: int | None,
    ) -> None:
        super().__init__(len(envs), spec, statistics, EnvSnapshots(envs), seeds)
        self.resets = np.zeros(len(envs), np.int64)
        self._envs: list[ParallelEnvLike] = envs
        self._rules, self._limit = rules, limit
        self._agent_index = {agent: index for index, agent in enumerate(envs[0].possible_agents)}
        self._wanted, self._current_stages = np.zeros((len(envs), 2), np.int64), np.zeros((len(envs), 2), np.int64)
        self._arrays |= {
            "resets": self.resets,
            "frames": rules.memory,
            "wanted": self._wanted,
            "taught": self._current_stages,
        }

    def reset(self, obs: np.ndarray, seeds: np.random.SeedSequence | None = None) -> None:
        """Start new episodes in all environments; with `seeds`, everything that follows depends on them."""
        if seeds is not None:
            self.seeds = env_seeds(seeds, self.num_envs)
            self.resets.fill(0)
        self._statistics.restart()
        self.starts.fill(False)
        self.present.fill(False)
        obs.fill(0)
        for index in range(self.num_envs):
            self._begin(index, obs)
        if not self._seeded:
            self._snapshots.settle()
        self._seeded = True

    def assign(self, stages: np.ndarray) -> None:
        """Set the curriculum stage of each environment's next episode [N, 2]: agents, and side length in cells."""
        self._wanted[...] = stages

    def step(self, actions: np.ndarray, segment: Segment, t: int) -> None:
        """Step every environment once; see the contract in core/contracts/env.py."""
        columns = segment.columns
        if "lesson" in columns:
            columns["lesson"][t] = np.repeat(self._current_stages, self.spec.num_agents, axis=0)
        columns["valid"][t] = self.present
        columns["terminated"][t] = columns["truncated"][t] = False
        columns["obs"][t + 1].fill(0)
        self._statistics.rewards.fill(0.0)
        self.starts.fill(False)
        choices = self._rules.choices(actions)
        for index, env in enumerate(self._envs):
            try:
                self._step(index, env, choices, segment, t)
            except Exception as error:
                last = self._last_actions(index, actions)
                raise self._fault(error, index, int(self._statistics.lengths[index]) + 1, last) from error
        self._book(segment, t)
        for index in range(self.num_envs):
            if not self.present[self._rows(index)].any():
                self._begin(index, columns["obs"][t + 1])

    def render(self) -> np.ndarray | None:
        """Return an RGB image of the first environment, or None if it was not built for rendering."""
        env: Any = self._envs[0]
        return render_rgb(env) if hasattr(env, "render_mode") else None

    def close(self) -> None:
        """Close every environment, even if closing one of them fails."""
        with ExitStack() as stack:
            for env in self._envs:
                stack.callback(env.close)

    def _rows(self, index: int) -> slice:
        return slice(index * self.spec.num_agents, (index + 1) * self.spec.num_agents)

    def _step(self, index: int, env: ParallelEnvLike, choices: list[Any], segment: Segment, t: int) -> None:
        """Step one environment, and write the rows of its agents."""
        base, columns = index * self.spec.num_agents, segment.columns
        listed = list(env.agents)  # a copy: some environments change this list in place
        acting = [agent for agent in listed if self.present[base + self._agent_index[agent]]]
        obs, rewards, terminated, truncated, infos = env.step(
            {agent: choices[base + self._agent_index[agent]] for agent in acting}
        )
        staying = set(env.agents)
        out_of_time = self._limit is not None and self._statistics.lengths[index] + 1 >= self._limit
        for agent in acting:
            row = base + self._agent_index[agent]
            self._statistics.rewards[row] = _require_entry(rewards, agent, "reward")
            died = bool(_require_entry(terminated, agent, "termination"))
            # An agent that disappears without an end counts as truncated.
            cut = bool(_require_entry(truncated, agent, "truncation")) or (
                not died and (out_of_time or agent not in staying)
            )
            seen = _require_entry(obs, agent, "observation")
            if died or cut:
                columns["terminated"][t, row], columns["truncated"][t, row] = died, cut
                self.present[row] = False
                self._rules.put(columns["final_obs"][t], row, seen)
            else:
                self._rules.put(columns["obs"][t + 1], row, seen)
        if "final_comm_mask" in columns:
            rows = slice(base, base + self.spec.num_agents)
            columns["final_comm_mask"][t, rows] = self._heard(base, segment["valid"][t, rows], infos)
        coming = [] if out_of_time else [agent for agent in env.agents if agent not in listed]
        self._add_agents(base, coming, obs, columns["obs"][t + 1])
        self._hear(base, infos)

    def _begin(self, index: int, obs: np.ndarray) -> None:
        """Start the next episode of one environment and write its first observations."""
        env, base = self._envs[index], index * self.spec.num_agents
        seed = seeding.integer_seed(self.seeds[index], int(self.resets[index]))
        try:
            self.resets[index] += 1
            seen, infos = env.reset(seed=seed, options=self._stage_options(index))
            if not env.agents:
                raise ValueError("reset() left nobody in `agents`")
            self._add_agents(base, list(env.agents), seen, obs)
            self._hear(base, infos)
        except Exception as error:
            raise self._fault(error, index, 0, None) from error

    def _add_agents(self, base: int, agents: list[Any], seen: AgentDict, obs: np.ndarray) -> None:
        for agent in agents:
            if agent not in self._agent_index:
                raise ValueError(f"{agent!r} is among `agents` and not among `possible_agents`")
            row = base + self._agent_index[agent]
            self._rules.put_first(obs, row, _require_entry(seen, agent, "observation"))
            self.present[row] = self.starts[row] = True

    def _hear(self, base: int, infos: AgentDict) -> None:
        """Write the communication and action masks from the agents' infos; without an entry, everything is allowed."""
        rows = slice(base, base + self.spec.num_agents)
        present = self.present[rows]
        self.comm_mask[rows] = self._heard(base, present, infos)
        if self.masks is not None:
            self.masks[rows] = True
        for agent, index in self._agent_index.items():
            info = infos.get(agent) if present[index] else None
            if not info:
                continue
            if self.masks is not None and "action_mask" in info:
                self.masks[base + index] = info["action_mask"]

    def _heard(self, base: int, present: np.ndarray, infos: AgentDict) -> np.ndarray:
        """Return the communication mask among the agents that are present [num_agents, num_agents]."""
        mask: np.ndarray = present & present[:, None]
        for agent, index in self._agent_index.items():
            info = infos.get(agent) if present[index] else None
            if info and "comm_mask" in info:
                mask[index] &= np.asarray(info["comm_mask"], np.bool_)
        return mask

    def _stage_options(self, index: int) -> dict[str, int] | None:
        """Return the `reset` options for the next curriculum stage of one environment; None if it has no curriculum."""
        largest = self.spec.largest_stage
        if largest is None:
            return None
        self._current_stages[index] = self._wanted[index] if self._wanted[index].any() else largest
        return dict(zip(("num_agents", "size"), self._current_stages[index].tolist(), strict=True))

    def _last_actions(self, index: int, actions: np.ndarray) -> dict[str, Any]:
        names, mine = self.spec.agents, actions[self._rows(index)]
        return {name: action.tolist() for name, action in zip(names, mine, strict=True)}

    def _fault(self, error: Exception, index: int, step: int, last: dict[str, Any] | None) -> EnvironmentFault:
        """Describe an exception of an environment; `step` counts from 1 within the episode, 0 means `reset` failed."""
        episode = int(self._statistics.episodes[index]) + 1
        seed = seeding.integer_seed(self.seeds[index], int(self.resets[index]) - 1)
        position = f"at step {step} of episode {episode}" if step else f"at the reset before episode {episode}"
        return EnvironmentFault(
            f"{self.spec.id} raised {type(error).__name__}: {error} ({position}, environment {index} of {self.num_envs}, "
            f"episode seeded with {seed}, last actions {last})",
            {
                "traceback": "".join(traceback.format_exception(error)),
                "env_id": self.spec.id,
                "env_index": index,
                "seed": seed,
                "episode": episode,
                "step": step,
                "last_action": last,
            },
        )


def _require_entry(by_agent: AgentDict, agent: Any, what: str) -> Any:
    """Return the entry of an agent that acted; ValueError if the environment returned none."""
    try:
        return by_agent[agent]
    except KeyError:
        raise ValueError(f"it gave no {what} for {agent!r}, which was among its agents") from None
