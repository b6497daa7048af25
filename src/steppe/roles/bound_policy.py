"""A policy together with the environment that it acts in, and their optional inputs besides observations and actions.

Which of it the two support is found out once, when they are bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from steppe.core.contracts.algorithm import CommunicatingPolicy, CurriculumPolicy, Policy
from steppe.core.contracts.env import CommunicatingEnv, CurriculumEnv, MaskedEnv, SegmentEnv, num_rows


class BoundPolicy:
    """Passes masks from the environment to the policy, and curriculum stages from the policy to the environment."""

    def __init__(self, policy: Policy, env: SegmentEnv) -> None:
        self.policy, self.env = policy, env
        self._masked_env = env if isinstance(env, MaskedEnv) else None
        self._communicating_env = env if isinstance(env, CommunicatingEnv) else None
        self._communicates = isinstance(policy, CommunicatingPolicy) and policy.communicates
        self._curriculum_policy = policy if isinstance(policy, CurriculumPolicy) else None
        self._curriculum_env = env if isinstance(env, CurriculumEnv) else None

    def act(self, obs: np.ndarray, *, explore: bool = True) -> Mapping[str, np.ndarray]:
        """Return the policy's actions and recorded columns for these observations [B, …]."""
        inputs: dict[str, np.ndarray] = {}
        if (masks := self.action_masks) is not None:  # policies with index observations accept masks
            inputs["masks"] = masks
        if self._communicates:
            inputs["comm_mask"] = self.comm_mask
        act: Callable[..., Mapping[str, np.ndarray]] = self.policy.act
        return act(obs, self.env.starts, explore=explore, **inputs)

    @property
    def action_masks(self) -> np.ndarray | None:
        """The actions allowed now [B, actions], or None if the environment has no masks."""
        return None if self._masked_env is None else self._masked_env.masks

    @property
    def comm_mask(self) -> np.ndarray:
        """The agents that each agent receives messages from now [B, num_agents]; all, if there is no mask."""
        if self._communicating_env is not None:
            return self._communicating_env.comm_mask
        return np.ones((num_rows(self.env), self.env.spec.num_agents), np.bool_)

    def assign_curriculum_stages(self) -> None:
        """Set the stages of the environments' next episodes, if policy and environment have a curriculum."""
        if self._curriculum_policy is None or self._curriculum_env is None:
            return
        stages = self._curriculum_policy.curriculum_stages(self.env.num_envs)
        if stages is not None:
            self._curriculum_env.assign(stages)
