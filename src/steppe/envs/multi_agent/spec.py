"""Encode several agents' spaces as rows: one codec if the agents are alike, else rows padded to the widest agent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.core.contracts.specs import ActionSpec, AgentSpec, EnvSpec, FieldSpec
from steppe.envs.vector.spaces import (
    ActionDecoder,
    ObservationEncoder,
    PutRow,
    make_action_decoder,
    make_observation_encoder,
    make_planes_encoder,
    make_state_index_encoder,
)
from steppe.envs.wrappers.frame_stack import FrameStack


class MultiAgentCodec:
    """Encodes raw observations as rows, and decodes rows to actions; `memory` holds the stacked frames, if any."""

    def __init__(
        self, observations: list[ObservationEncoder], actions: list[ActionDecoder], num_envs: int, frames: int
    ) -> None:
        self.observations, self.actions = observations, actions
        self.heterogeneous = (
            len({(seen.field, done.spec) for seen, done in zip(observations, actions, strict=True)}) > 1
        )
        self.memory: np.ndarray | None = None
        self.obs, self.action = observations[0].field, actions[0].spec
        if self.heterogeneous:
            self.obs, self.action = _merge_obs_specs(observations), _merge_action_specs(actions)
        alike = all(rule is observations[0] for rule in observations)
        self.put: PutRow = observations[0].put if alike else self._put_own
        self.put_first: PutRow = observations[0].put_checked if alike else self._put_own
        if frames > 1:
            if not alike:
                raise ConfigError("environment.frame_stack is for agents that observe alike: leave it out")
            stack = FrameStack(num_envs * len(observations), observations[0], frames)
            self.obs, self.memory, self.put, self.put_first = stack.field, stack.memory, stack.put, stack.restart

    @property
    def members(self) -> tuple[AgentSpec, ...]:
        """The spec of each agent if they differ, else empty."""
        if not self.heterogeneous:
            return ()
        pairs = zip(self.observations, self.actions, strict=True)
        return tuple(AgentSpec(seen.field, done.spec) for seen, done in pairs)

    def choices(self, actions: np.ndarray) -> list[Any]:
        """Return one action per row, decoded for its agent's action space."""
        if all(rule is self.actions[0] for rule in self.actions):
            return list(self.actions[0].each(actions))
        count = len(self.actions)
        found: list[Any] = [None] * len(actions)
        for index, rule in enumerate(self.actions):
            found[index::count] = rule.each(_narrow(actions[index::count], rule.spec))
        return found

    def _put_own(self, target: np.ndarray, row: int, raw: Any) -> None:
        """Write an observation with its agent's encoder; pad the rest of the row with 0."""
        rule = self.observations[row % len(self.observations)]
        if rule.field.shape == target.shape[1:]:
            rule.put_checked(target, row, raw)
            return
        size = rule.field.shape[0]
        rule.put_checked(target[:, :size], row, raw)
        target[row, size:] = 0


def make_multi_agent_codec(
    env: Any, whose: str, config: EnvConfig, num_envs: int
) -> tuple[MultiAgentCodec, int | None]:
    """Return the codec of an environment, and the number of states if observations are state indices, else None."""
    observations: list[ObservationEncoder] = []
    actions: list[ActionDecoder] = []
    known: list[
        tuple[tuple[Any, Any], ObservationEncoder, ActionDecoder]
    ] = []  # agents with equal spaces share encoder and decoder
    num_states: set[int] = set()
    for agent in env.possible_agents:
        spaces_of = _spaces_of(env, agent, whose)
        found = next((entry for entry in known if entry[0] == spaces_of), None)
        if found is None:
            rule, states = _observation(env, spaces_of[0], f"{agent} of {whose}", config)
            num_states |= {states} if states is not None else set()
            found = (spaces_of, rule, make_action_decoder(spaces_of[1], f"{agent} of {whose}"))
            known.append(found)
        observations.append(found[1])
        actions.append(found[2])
    if len(num_states) > 1:
        raise WorldError(
            f"the agents of {whose} have {sorted(num_states)} states: one table is for agents that are alike"
        )
    return MultiAgentCodec(observations, actions, num_envs, config.frame_stack or 1), next(iter(num_states), None)


def make_multi_agent_spec(
    whose: str, env: Any, rules: MultiAgentCodec, num_states: int | None, *, limit: int | None, native: bool = False
) -> EnvSpec:
    """Return the spec of a segment environment made of this environment."""
    names = tuple(str(agent) for agent in env.possible_agents)
    return EnvSpec(
        whose,
        rules.obs,
        rules.action,
        native,
        limit,
        num_states,
        num_agents=len(names),
        agents=names,
        members=rules.members,
        largest_stage=getattr(env, "largest_stage", None),
    )


def _spaces_of(env: Any, agent: Any, whose: str) -> tuple[Any, Any]:
    found = []
    for name in ("observation_space", "action_space"):
        try:
            space = getattr(env, name)(agent)
        except Exception as error:
            raise WorldError(f"{whose}: {name}({agent!r}) raised {type(error).__name__}: {error}") from error
        if not isinstance(space, spaces.Space):
            raise WorldError(f"{whose}: {name}({agent!r}) is a {type(space).__name__}, not a gymnasium space")
        found.append(space)
    return found[0], found[1]


def _observation(env: Any, space: Any, whose: str, config: EnvConfig) -> tuple[ObservationEncoder, int | None]:
    if config.observations == "index":
        return make_state_index_encoder(space, whose)
    if getattr(env, "metadata", {}).get("planes"):
        return make_planes_encoder(space, whose), None
    return make_observation_encoder(space, whose, grayscale=bool(config.grayscale), resize=config.resize or None), None


def _merge_obs_specs(rules: list[ObservationEncoder]) -> FieldSpec:
    fields = [rule.field for rule in rules]
    if len({field.shape for field in fields}) == 1:
        return fields[0]
    if any(len(field.shape) != 1 for field in fields):
        raise WorldError(f"agents with images that differ in size cannot share rows: {fields[0].shape}, …; wrap them")
    return FieldSpec("obs", (max(field.shape[0] for field in fields),), "float32")


def _merge_action_specs(rules: list[ActionDecoder]) -> ActionSpec:
    specs = [rule.spec for rule in rules]
    kinds = {spec.kind for spec in specs}
    if len(kinds) > 1:
        raise WorldError(
            f"agents that choose in different ways ({', '.join(sorted(kinds))}) cannot share rows; wrap them"
        )
    if len(set(specs)) == 1:
        return specs[0]
    kind = specs[0].kind
    if kind == "box":
        width = max(math.prod(spec.sizes) for spec in specs)
        return ActionSpec("box", (width,), (-math.inf,) * width, (math.inf,) * width)
    width = max(len(spec.sizes) for spec in specs)
    padded = [spec.sizes + (1,) * (width - len(spec.sizes)) for spec in specs]
    return ActionSpec(kind, tuple(max(sizes) for sizes in zip(*padded, strict=True)))


def _narrow(actions: np.ndarray, spec: ActionSpec) -> np.ndarray:
    """Return the part of padded actions [N, …] that belongs to an agent with this spec."""
    shape = spec.field.shape
    return actions if not shape else actions.reshape(len(actions), -1)[:, : math.prod(shape)].reshape(-1, *shape)
