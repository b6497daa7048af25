"""Contract of a segment environment: N environments that step together and write directly into a segment."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import EnvSpec

# What a snapshot restores: the exact state; the actions to replay, with the last observation compared; or nothing,
# so that a resumed run starts new episodes.
ResumeKind = Literal["exact", "replay", "episode-boundary"]


class SegmentEnv(Protocol):
    """N copies of one environment, B rows. Resets happen inside; the caller only steps.

    `starts[b]` is True if the last observation written is the first of an episode. An environment may reset within the
    step that ended an episode, or use the next step for it; in the second case that row has `valid == False`.
    What only some environments have is in the protocols below.

    Agent a of environment n is row n · num_agents + a; with one agent, rows are environments. The row of an absent
    agent has `valid == False` and an observation of 0; `starts` is set when the agent enters. An agent that leaves
    before the others is cut in its own row; the episode of the environment ends when all agents that were present have
    been cut (`Segment.ended`).

    Where a segment has these columns, a multi-agent environment also writes `final_comm_mask`, the communication mask
    when the episode was cut; and a CurriculumEnv writes `lesson`, the curriculum stage of the episode.
    """

    spec: EnvSpec
    num_envs: int  # N
    starts: np.ndarray  # bool [B]

    def reset(self, obs: np.ndarray, seeds: np.random.SeedSequence | None = None) -> None:
        """Start new episodes in all environments and write the first observations into `obs` [B, …].

        With `seeds`, all later randomness depends on them alone; without, the random generators continue.
        """

    def step(self, actions: np.ndarray, segment: Segment, t: int) -> None:
        """Step all environments once.

        Writes reward, terminated, truncated, valid at row t, final_obs at row t where an episode was cut, and the
        observations to act on next at `obs[t + 1]`. Raises EnvironmentFault when an environment raises.
        """

    def take_finished(self) -> list[tuple[float, int]]:
        """Return (return, length) of the episodes that ended since the last call, by step, then by environment.

        Returns are those of the environment, before clipping and scaling, summed over all agents.
        """

    def unfinished(self) -> list[tuple[float, int]]:
        """Return (return, length) so far of the episode in progress in each environment."""

    def render(self) -> np.ndarray | None:
        """Return the first environment as an RGB image [height, width, 3], or None if it cannot be rendered."""

    @property
    def resume_kind(self) -> ResumeKind:
        """How a run in this environment can be resumed; known after the first reset."""

    def snapshot(self) -> Tree | None:
        """Return a copy of everything the next steps depend on, or None when no snapshot can be taken now."""

    def restore(self, state: Tree) -> None:
        """Restore a `snapshot()` of an environment of the same configuration, regardless of how this one was seeded.

        Raises CannotResume when that is impossible; then the environment must be `reset`.
        """

    def close(self) -> None:
        """Close every environment."""


@runtime_checkable
class MaskedEnv(Protocol):
    """An environment that can restrict the actions."""

    masks: np.ndarray | None  # bool [B, actions], the actions allowed now; None: all


@runtime_checkable
class MultiAgentEnv(Protocol):
    """An environment with several agents."""

    def agent_returns(self) -> np.ndarray:
        """Return each agent's part of the returns that `take_finished` would return now [episodes, num_agents].

        NaN for an agent that was absent.
        """


@runtime_checkable
class CommunicatingEnv(Protocol):
    """An environment that determines which agents can communicate."""

    comm_mask: np.ndarray  # bool [B, num_agents], the agents that each agent receives messages from now


@runtime_checkable
class CurriculumEnv(Protocol):
    """An environment whose episodes differ in difficulty."""

    def assign(self, stages: np.ndarray, /) -> None:
        """Set the curriculum stage of the next episode of each environment, int64 [N, 2]."""


@runtime_checkable
class RetiringEnv(Protocol):
    """An environment that need not step all of its copies."""

    def retire(self, indices: list[int]) -> None:
        """Do not step these copies from now on, and step all others."""


def num_rows(env: SegmentEnv) -> int:
    """Return B, the number of agents in all environments."""
    return env.num_envs * env.spec.num_agents


def get_action_masks(env: SegmentEnv) -> np.ndarray | None:
    """Return the actions allowed now [B, actions], or None if the environment has no masks."""
    return env.masks if isinstance(env, MaskedEnv) else None


def get_comm_mask(env: SegmentEnv) -> np.ndarray:
    """Return which agents each agent receives messages from now [B, num_agents]; all, if there is no mask."""
    if isinstance(env, CommunicatingEnv):
        return env.comm_mask
    return np.ones((num_rows(env), env.spec.num_agents), np.bool_)


def get_agent_returns(env: SegmentEnv) -> np.ndarray | None:
    """Return `MultiAgentEnv.agent_returns`, or None if there is only one agent."""
    if env.spec.num_agents == 1:
        return None
    assert isinstance(env, MultiAgentEnv)
    return env.agent_returns()
