"""Plan: which roles there are, where they live and how they are linked. Plain data, made without torch."""

from __future__ import annotations

from dataclasses import dataclass

from steppe.core.algorithms import AgentConfig, ClassicConfig
from steppe.core.config import references
from steppe.core.config.run import RunConfig
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec, SegmentSpec

REPLAY = "replay"
WRITERS = ("actor", "worker")  # the kinds of role that a place of its own may have many of


@dataclass(frozen=True)
class RoleSpec:
    """One role, and the name of the place it shares with others: one place is one process, taking turns."""

    kind: str  # actor | worker | replay | learner | manager
    index: int
    place: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}" if self.kind in (*WRITERS, REPLAY) else self.kind


@dataclass(frozen=True)
class Plan:
    """A run's topology. `lockstep` and `ahead` are what differs between the modes: see roles/scheduling.py."""

    config: RunConfig
    spec: EnvSpec
    segment: SegmentSpec
    roles: tuple[RoleSpec, ...]
    lockstep: bool
    slots_per_actor: int
    ahead: int = 0  # rounds that actors collect before the learner has caught up
    resume: int | None = None  # number of the checkpoint to go on from

    @property
    def num_envs(self) -> int:
        """Environments per actor."""
        return self.segment.num_envs // self.segment.num_agents

    @property
    def num_rows(self) -> int:
        """Their agents: what a policy acts for at once."""
        return self.segment.num_envs

    @property
    def channel_bytes(self) -> int:
        """As far as is known before there is an agent: how large gradients are, it will say."""
        return 0 if self.config.by_gradients else self.segment.nbytes * self.slots_per_actor * self.num_writers

    @property
    def num_writers(self) -> int:
        """The actors that send segments, or workers that push gradients; those that share a table send nothing."""
        return len(self.writers)

    @property
    def writers(self) -> tuple[RoleSpec, ...]:
        """The roles that write into the channel, in the order of their numbers."""
        kind = "worker" if self.config.by_gradients else "actor"
        return tuple(role for role in self.roles if role.kind == kind)

    @property
    def readers(self) -> tuple[str, ...]:
        """The roles that a publication wakes."""
        return tuple(role.name for role in self.writers)

    @property
    def uses_table(self) -> bool:
        """Whether workers share a table."""
        return self.config.mode == "workers" and not self.config.by_gradients

    @property
    def can_host_learner(self) -> bool:
        """Whether the learner can be in the caller's process: alone at its place, without a table or replay roles."""
        alone = len(self.places()["learner"]) == 1
        return self.config.runtime == "processes" and alone and not self.uses_table and not self.replay

    @property
    def replay(self) -> tuple[str, ...]:
        """The roles that hold the learner's replay; none where it holds that itself."""
        return tuple(role.name for role in self.roles if role.kind == REPLAY)

    def places(self) -> dict[str, tuple[RoleSpec, ...]]:
        """The roles by place, in order."""
        names = dict.fromkeys(role.place for role in self.roles)
        return {name: tuple(role for role in self.roles if role.place == name) for name in names}


def make_plan(config: RunConfig, spec: EnvSpec) -> Plan:
    """Fit the configuration to the world, check that they go together, and lay out the roles."""
    config.agent.require(spec, config.algo)
    agent, num_envs = config.agent.resolve_defaults(spec, config.actors, config.envs)
    environment = config.environment.resolve_defaults(config.env)
    config = config.model_copy(update={"agent": agent, "envs": num_envs, "environment": environment})
    if config.runtime != "inline":
        _require_portable(config, agent)
    if config.mode == "workers" and spec.agents:
        raise ConfigError(f"mode 'workers' is not for PettingZoo environments, and {spec.id} is one: use --mode sync")
    lockstep = bool(config.params.in_rounds) if config.by_gradients else config.mode != "async"
    lone_async = config.actors == 1 and not lockstep
    if agent.in_table:
        _require_table_memory(agent, spec)
    return Plan(
        config=config,
        spec=spec,
        segment=segment_spec(agent, spec, num_envs),
        roles=_roles(config),
        lockstep=lockstep,
        slots_per_actor=config.flow.slots_per_actor or (2 if lone_async else 1),
        ahead=config.flow.ahead or 0,
    )


def segment_spec(agent: AgentConfig, spec: EnvSpec, num_envs: int) -> SegmentSpec:
    """The memory of one segment for a fitted agent in a world."""
    assert agent.segment_steps is not None, "an agent's configuration is fitted to a world first"
    rows, columns = num_envs * spec.num_agents, agent.columns(spec)
    return SegmentSpec(agent.segment_steps, rows, *spec.fields, columns, spec.num_agents)


def _roles(config: RunConfig) -> tuple[RoleSpec, ...]:
    if config.mode == "workers" and not config.by_gradients:
        return _workers(config)
    together, kind = config.mode == "single", "worker" if config.by_gradients else "actor"
    seats = range(config.flow.max_actors or config.actors)
    actors = tuple(RoleSpec(kind, index, "learner" if together else f"{kind}-{index}") for index in seats)
    shelves = range(config.flow.replay_roles if config.runtime != "inline" else 0)
    replay = tuple(RoleSpec(REPLAY, index, f"{REPLAY}-{index}") for index in shelves)
    return (*actors, *replay, RoleSpec("learner", 0, "learner"), RoleSpec("manager", 0, "manager"))


def _workers(config: RunConfig) -> tuple[RoleSpec, ...]:
    """Workers, and in the learner's place the keeper of their table. On mpi a rank is a worker: the first one is besides
    what the others have places of their own for."""
    on_mpi = config.runtime == "mpi"
    workers = tuple(
        RoleSpec("worker", index, "learner" if on_mpi and index == 0 else f"worker-{index}")
        for index in range(config.actors)
    )
    return (*workers, RoleSpec("learner", 0, "learner"), RoleSpec("manager", 0, "learner" if on_mpi else "manager"))


def _require_table_memory(agent: AgentConfig, spec: EnvSpec) -> None:
    """Raise, before anything is made, where the machine could not hold the table."""
    from steppe.algorithms.tabular.memory_limits import require_memory

    assert spec.num_states is not None, "agents with tables ask for numbered states"
    require_memory(spec.num_states, spec.action.sizes[0], 4)


def _require_portable(config: RunConfig, agent: AgentConfig) -> None:
    references.require_portable(config.env, "the environment")
    references.require_portable(config.algo, "the algorithm")
    if isinstance(agent, ClassicConfig):
        references.require_portable(agent.learner, "the learner")
    references.require_portable(agent.network, "the network")
    for wrapper in config.environment.wrappers:
        references.require_portable(wrapper, "a wrapper")
