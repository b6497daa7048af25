"""The contract of a world: B environments that step together and write straight into a segment."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from steppe.core.contracts.algorithm import Policy, Tree
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import EnvSpec

# What a snapshot can promise: the state itself; the actions to repeat, compared with what was seen last; or nothing,
# so that a resumed run begins new episodes.
ResumeKind = Literal["exact", "replay", "episode-boundary"]


class SegmentEnv(Protocol):
    """N copies of one environment, B rows. Resets happen inside; the caller only steps.

    `starts[b]` says whether the observation written last is the first of an episode. A world may reset within the step
    that ended an episode, or spend the next step on it; in the second case that row is written with `valid == False`.
    A world of numbered states also has `masks`, bool [B, actions]: which actions are allowed now.

    Agent a of environment n is row n · num_agents + a; with one agent, rows are environments. Where an agent is not there,
    its row has `valid == False` and an observation of 0, and `starts` when it comes. One that leaves before the others is cut
    in its own row; the environment's episode is over when all who were there have been cut (`Segment.ended`). A world of
    several agents also has `comm_mask`, bool [B, num_agents]: whom each hears now; and `agent_returns()`.

    Where a segment has them, a world of several agents also writes `final_comm_mask`, whom each heard when its episode was
    cut, and one whose spec has a `largest_lesson` writes `lesson`, what its episode is: [agents, cells along a side]. The
    latter has `assign(lessons)`, int64 [N, 2]: what the next episode of each environment is to be.
    """

    spec: EnvSpec
    num_envs: int  # N
    starts: np.ndarray  # bool [B]

    def reset(self, obs: np.ndarray, seeds: np.random.SeedSequence | None = None) -> None:
        """Begin new episodes everywhere and write the first observations into `obs` [B, …].

        With `seeds`, everything random from here on depends on them alone; without, it goes on from where it was.
        """

    def step(self, actions: np.ndarray, segment: Segment, t: int) -> None:
        """Act once everywhere.

        Writes reward, terminated, truncated, valid at row t, final_obs at row t where an episode was cut, and the
        observations to act on next at `obs[t + 1]`. Raises EnvironmentFault when an environment does.
        """

    def take_finished(self) -> list[tuple[float, int]]:
        """(return, length) of the episodes that ended since the last call, by step, then by environment.

        Returns are as the environment gave them, before clipping and scaling, and the sum of all agents'.
        """

    def unfinished(self) -> list[tuple[float, int]]:
        """(return, length) so far of the episode under way in each environment."""

    def render(self) -> np.ndarray | None:
        """The first environment as an RGB image [height, width, 3], where it can."""

    @property
    def resume_kind(self) -> ResumeKind:
        """How a run in this world can be resumed, known once it has been reset."""

    def snapshot(self) -> Tree | None:
        """Everything the next steps depend on, in memory of its own, or None when that cannot be had now."""

    def restore(self, state: Tree) -> None:
        """Go where a world of the same configuration was at its `snapshot()`; no matter how this one was seeded.

        Raises CannotResume when that is impossible; then the world must be `reset`.
        """

    def close(self) -> None:
        """Close every environment."""


def num_rows(env: SegmentEnv) -> int:
    """B: the agents of all environments."""
    return env.num_envs * env.spec.num_agents


def get_action_masks(env: SegmentEnv) -> np.ndarray | None:
    """Which actions a world allows now [B, actions]; None where it does not say."""
    return getattr(env, "masks", None)


def get_comm_mask(env: SegmentEnv) -> np.ndarray:
    """Whom each agent hears now [B, num_agents]; everyone, where the world does not say."""
    mask: np.ndarray | None = getattr(env, "comm_mask", None)
    return np.ones((num_rows(env), env.spec.num_agents), np.bool_) if mask is None else mask


def assign_curriculum_stages(env: SegmentEnv, policy: Policy) -> None:
    """Hand a policy's lessons to a world, where the one gives and the other takes them."""
    give, take = getattr(policy, "lessons", None), getattr(env, "assign", None)
    if give is None or take is None:
        return
    lessons = give(env.num_envs)
    if lessons is not None:
        take(lessons)


def get_agent_returns(env: SegmentEnv) -> np.ndarray | None:
    """Each agent's part of the returns that `take_finished` would give now [episodes, num_agents]; NaN for one who was not
    there. None where there is but one agent."""
    return env.agent_returns() if env.spec.num_agents > 1 else None  # type: ignore[attr-defined]
