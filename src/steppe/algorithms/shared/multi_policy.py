"""Several policies in one agent: each group of agents has its own agent, which sees only the group's rows.

      rows of a segment      n · num_agents + a, for every environment n
      group "wolves"         those with a in (0, 1, 2)    → an agent whose spec has three agents
      group "sheep"          those with a in (3,)         → another agent

The groups' weights are concatenated in one buffer (`wolves.policy.0.weight`, …), trainable ones first, so runs,
checkpoints and transports need not know about groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steppe.core.config.agent import AgentConfig
from steppe.core.config.algorithm_table import agent_class
from steppe.core.config.tunables import validate_changes
from steppe.core.contracts.algorithm import Agent, Learned, Progress, Tree, Tunable
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import AgentSpec, EnvSpec, SegmentSpec
from steppe.core.contracts.weights import Weights
from steppe.core.system import seeding

_NARROWED = ("obs", "final_obs", "action")


@dataclass(frozen=True)
class PolicyGroup:
    """Agents that share a policy, by index, with their spec and their agent."""

    name: str
    members: tuple[int, ...]
    spec: EnvSpec
    agent: Agent
    num_trainable: int  # elements of its gradient

    def entries(self) -> tuple[list[str], list[str]]:
        """Return the names of its weights: trainable ones, and the rest."""
        entries = self.agent.weights().layout.entries
        trained = [entry.name for entry in entries if entry.offset < 4 * self.num_trainable]
        return trained, [entry.name for entry in entries[len(trained) :]]

    def rows(self, num_rows: int, num_agents: int) -> np.ndarray:
        """Return which of `num_rows` rows belong to this group."""
        return np.flatnonzero(np.isin(np.arange(num_rows) % num_agents, self.members))

    def part(self, name: str, column: np.ndarray) -> np.ndarray:
        """Return a column [T, group's rows, …] cut down to what this group's agents use."""
        if name not in _NARROWED:
            return column
        shape = self.spec.action.field.shape if name == "action" else self.spec.obs.shape
        return narrow_column(column, 2, shape)


class MultiPolicyAgent:
    """Routes rows to the groups' agents, and merges their results."""

    def __init__(self, algo: str, config: AgentConfig, spec: EnvSpec, *, seed: int, device: str = "cpu") -> None:
        config.require(spec, algo)
        self.spec, self.config = spec, config
        self.version = 0
        alone = config.model_copy(update={"policies": "shared"})
        self.groups = [
            _make_group(name, members, algo, alone, spec, seed=seed, device=device)
            for name, members in config.groups(spec).items()
        ]
        self._rows: list[np.ndarray] = []
        self.begin(spec.num_agents, seeding.generator(seed, "act"))

    def begin(self, num_envs: int, stream: np.random.Generator, *, actor: int = 0, num_actors: int = 1) -> None:
        """Prepare every group; all draw from the same stream, in the order of the groups."""
        self._rows = [group.rows(num_envs, self.spec.num_agents) for group in self.groups]
        for group, rows in zip(self.groups, self._rows, strict=True):
            group.agent.begin(len(rows), stream, actor=actor, num_actors=num_actors)

    def act(self, obs: np.ndarray, starts: np.ndarray, *, explore: bool = True) -> Mapping[str, np.ndarray]:
        """Return every group's actions and columns, each in its own rows."""
        merged: dict[str, np.ndarray] = {}
        if sum(map(len, self._rows)) != len(obs):
            self._rows = [group.rows(len(obs), self.spec.num_agents) for group in self.groups]
        for group, rows in zip(self.groups, self._rows, strict=True):
            if not len(rows):
                continue
            seen = np.ascontiguousarray(narrow_column(obs[rows], 1, group.spec.obs.shape))
            for name, values in group.agent.act(seen, starts[rows], explore=explore).items():
                if name == "action":
                    _scatter_action(merged, self.spec, len(obs), rows, values)
                else:
                    merged.setdefault(name, np.zeros((len(obs), *values.shape[1:]), values.dtype))[rows] = values
        return merged

    def acting_state(self) -> Tree:
        return {group.name: group.agent.acting_state() for group in self.groups}

    def restore_acting(self, state: Tree) -> None:
        for group in self.groups:
            group.agent.restore_acting(state[group.name])

    def load(self, weights: Weights) -> None:
        """Load every group's part; the layout must be this agent's."""
        weights.require(self.weights().layout, "these policies")
        arrays = weights.arrays()
        for group in self.groups:
            names = (name for part in group.entries() for name in part)
            mine = Weights.from_arrays({name: arrays[f"{group.name}.{name}"] for name in names})
            group.agent.load(_stamped(mine, weights))
        self.version = weights.version

    def weights(self) -> Weights:
        """Return all groups' weights, in a new buffer."""
        parts = [group.agent.weights() for group in self.groups]
        known = [part.arrays() for part in parts]
        names = [group.entries() for group in self.groups]
        arrays = {
            f"{group.name}.{name}": known[index][name]
            for which in (0, 1)
            for index, group in enumerate(self.groups)
            for name in names[index][which]
        }
        updates, env_steps = sum(part.updates for part in parts), max(part.env_steps for part in parts)
        return Weights.from_arrays(arrays).stamped(version=self.version, updates=updates, env_steps=env_steps)

    def observe(self, segment: Segment, progress: Progress) -> None:
        """Pass every group its rows."""
        for group in self.groups:
            group.agent.observe(self._segment(group, segment), progress)

    def retune(self, values: Mapping[str, Any]) -> None:
        """Change hyperparameters in every group; ConfigError, and no change, if a group cannot take them."""
        alone = {"policies": "shared"}
        for group in self.groups:
            if not isinstance(group.agent, Tunable):
                raise ConfigError(f"the policy {group.name!r} takes over no hyperparameters while it learns")
        changes = validate_changes(self.config.model_copy(update=alone), values)
        before = {name: getattr(self.config, name) for name in changes}
        try:
            self._retune(changes)
        except ConfigError:
            self._retune(before)
            raise
        self.config = self.config.model_copy(update=changes)

    def _retune(self, values: Mapping[str, Any]) -> None:
        for group in self.groups:
            assert isinstance(group.agent, Tunable)
            group.agent.retune(values)

    def learn(self, batch: Batch) -> Learned:
        """Let every group learn from its rows; statistics are prefixed with the group's name."""
        updates = 0
        stats: dict[str, float] = {}
        for group in self.groups:
            learned = group.agent.learn(self._batch(group, batch))
            updates += learned.updates
            stats |= {f"{group.name}/{name}": value for name, value in learned.stats.items()}
        return Learned(updates, stats)

    def gradients(self, batch: Batch) -> np.ndarray:
        """Return the concatenated gradients of all groups."""
        return np.concatenate([group.agent.gradients(self._batch(group, batch)) for group in self.groups])

    def apply(self, gradient: np.ndarray) -> None:
        """Take one optimizer step in every group; ConfigError, and no step, if the length is wrong."""
        sizes = [group.num_trainable for group in self.groups]
        if gradient.shape != (sum(sizes),):
            raise ConfigError(f"the gradient has shape {gradient.shape}, not {(sum(sizes),)}")
        for group, part in zip(self.groups, np.split(gradient, np.cumsum(sizes)[:-1]), strict=True):
            group.agent.apply(part)

    def state(self) -> Tree:
        return {"version": self.version} | {f"group.{group.name}": group.agent.state() for group in self.groups}

    def restore(self, state: Tree) -> None:
        self.version = int(state["version"])
        for group in self.groups:
            group.agent.restore(state[f"group.{group.name}"])

    def _columns(self, group: PolicyGroup, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        count = columns["valid"].shape[1]
        if count % self.spec.num_agents:
            raise ConfigError(
                f"{count} rows are not those of whole environments with {self.spec.num_agents} agents each"
            )
        rows = group.rows(count, self.spec.num_agents)
        return {name: group.part(name, column[:, rows]) for name, column in columns.items()}

    def _batch(self, group: PolicyGroup, batch: Batch) -> Batch:
        return Batch(self._columns(group, batch.columns), versions=batch.versions)

    def _segment(self, group: PolicyGroup, segment: Segment) -> Segment:
        spec, count = segment.spec, len(group.members)
        rows = spec.num_envs // self.spec.num_agents * count
        mine = SegmentSpec(spec.num_steps, rows, group.spec.obs, group.spec.action.field, spec.extras, count)
        return Segment(mine, self._columns(group, segment.columns), segment.header)


def _make_group(
    name: str, members: tuple[int, ...], algo: str, config: AgentConfig, spec: EnvSpec, *, seed: int, device: str
) -> PolicyGroup:
    own = spec.members[members[0]] if spec.members else AgentSpec(spec.obs, spec.action)
    names = tuple(spec.agents[index] for index in members)
    mine = replace(spec, obs=own.obs, action=own.action, num_agents=len(members), agents=names, members=())
    made: Any = agent_class(algo)(config, mine, seed=seeding.integer_seed(seed, "policy", name), device=device)
    if not hasattr(made, "flat"):
        raise ConfigError(f"{algo} cannot be one of several policies: its weights are not kept by a FlatModule")
    return PolicyGroup(name, members, mine, made, len(made.flat.gradient))


def narrow_column(column: np.ndarray, lead: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the part of a column [lead axes, …] that an agent with this shape uses; columns fit the widest agent."""
    if column.shape[lead:] == shape or not shape:
        return column
    size = int(np.prod(shape))
    flat = column.reshape(*column.shape[:lead], -1)[..., :size]
    return flat.reshape(*column.shape[:lead], *shape)


def _scatter_action(
    merged: dict[str, np.ndarray], spec: EnvSpec, num_rows: int, rows: np.ndarray, values: np.ndarray
) -> None:
    field = spec.action.field
    wide = merged.setdefault("action", np.zeros((num_rows, *field.shape), field.dtype))
    if values.shape[1:] == field.shape:
        wide[rows] = values
    else:
        flat = values.reshape(len(values), -1)
        wide[rows, : flat.shape[1]] = flat


def _stamped(part: Weights, whole: Weights) -> Weights:
    return part.stamped(
        version=whole.version,
        updates=whole.updates,
        env_steps=whole.env_steps,
        episodes=whole.episodes,
        train_s=whole.train_s,
    )
