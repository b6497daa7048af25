"""Plan: a run's roles, their worker slots and how they are linked. Plain data, made without torch."""

from __future__ import annotations

from dataclasses import dataclass

from steppe.algorithms.tabular.config import ClassicConfig
from steppe.core.config import references
from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import RunConfig
from steppe.core.config.runtime_table import capabilities_of
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec, SegmentSpec

REPLAY = "replay"
WRITERS = ("actor", "worker")  # the kinds of role that a run may have many of, each in its own worker slot


@dataclass(frozen=True)
class RoleSpec:
    """One role and the name of its worker slot: the roles of one slot share a process and are stepped in turn."""

    kind: str  # actor | worker | replay | learner | manager
    index: int
    worker_slot: str

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
    ahead: int = 0  # rounds that actors collect ahead of the learner
    resume: int | None = None  # number of the checkpoint to resume from

    @property
    def num_envs(self) -> int:
        """Environments per actor."""
        return self.segment.num_envs // self.segment.num_agents

    @property
    def num_rows(self) -> int:
        """Rows per actor: environments times agents, for which a policy acts at once."""
        return self.segment.num_envs

    @property
    def channel_bytes(self) -> int:
        """Bytes of the channel's segments; 0 for gradients, whose size is unknown before there is an agent."""
        return 0 if self.config.by_gradients else self.segment.nbytes * self.slots_per_actor * self.num_writers

    @property
    def num_writers(self) -> int:
        """Number of actors that send segments, or workers that push gradients; 0 if workers share a table."""
        return len(self.writers)

    @property
    def writers(self) -> tuple[RoleSpec, ...]:
        """The roles that write to the channel, by index."""
        kind = "worker" if self.config.by_gradients else "actor"
        return tuple(role for role in self.roles if role.kind == kind)

    @property
    def readers(self) -> tuple[str, ...]:
        """The names of the roles that a publication wakes."""
        return tuple(role.name for role in self.writers)

    @property
    def uses_table(self) -> bool:
        """Whether workers share a table."""
        return self.config.mode == "workers" and not self.config.by_gradients

    @property
    def can_host_learner(self) -> bool:
        """Whether the learner can run in the caller's process while actors are elsewhere: it is alone in its slot, and
        there is neither a shared table nor a replay role."""
        alone = len(self.worker_slots()["learner"]) == 1
        capabilities = capabilities_of(self.config.runtime)
        elsewhere = capabilities.hosts_learner and not capabilities.one_process
        return elsewhere and alone and not self.uses_table and not self.replay

    @property
    def replay(self) -> tuple[str, ...]:
        """The names of the replay roles; empty if the learner holds its replay itself."""
        return tuple(role.name for role in self.roles if role.kind == REPLAY)

    def worker_slots(self) -> dict[str, tuple[RoleSpec, ...]]:
        """Return the roles by worker slot, in order."""
        names = dict.fromkeys(role.worker_slot for role in self.roles)
        return {name: tuple(role for role in self.roles if role.worker_slot == name) for name in names}


def make_plan(config: RunConfig, spec: EnvSpec) -> Plan:
    """Resolve the configuration's defaults for the environment, check their compatibility, and define the roles."""
    config.agent.require(spec, config.algo)
    agent, num_envs = config.agent.resolve_defaults(spec, config.actors, config.envs)
    environment = config.environment.resolve_defaults(config.env)
    config = config.model_copy(update={"agent": agent, "envs": num_envs, "environment": environment})
    if not capabilities_of(config.runtime).one_process:
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
    """Return the layout of a segment, for an agent configuration with resolved defaults."""
    assert agent.segment_steps is not None, "the agent's configuration is resolved for an environment first"
    rows, columns = num_envs * spec.num_agents, agent.columns(spec)
    return SegmentSpec(agent.segment_steps, rows, *spec.fields, columns, spec.num_agents)


def _roles(config: RunConfig) -> tuple[RoleSpec, ...]:
    if config.mode == "workers" and not config.by_gradients:
        return _workers(config)
    together, kind = config.mode == "single", "worker" if config.by_gradients else "actor"
    indices = range(config.flow.max_actors or config.actors)
    actors = tuple(RoleSpec(kind, index, "learner" if together else f"{kind}-{index}") for index in indices)
    num_replay = 0 if capabilities_of(config.runtime).one_process else config.flow.replay_roles
    replay = tuple(RoleSpec(REPLAY, index, f"{REPLAY}-{index}") for index in range(num_replay))
    return (*actors, *replay, RoleSpec("learner", 0, "learner"), RoleSpec("manager", 0, "manager"))


def _workers(config: RunConfig) -> tuple[RoleSpec, ...]:
    """Return the workers, the learner that owns their table, and the manager. On some runtimes the first worker,
    the learner and the manager share a worker slot."""
    shared = capabilities_of(config.runtime).workers_share_learner_slot
    workers = tuple(
        RoleSpec("worker", index, "learner" if shared and index == 0 else f"worker-{index}")
        for index in range(config.actors)
    )
    return (*workers, RoleSpec("learner", 0, "learner"), RoleSpec("manager", 0, "learner" if shared else "manager"))


def _require_table_memory(agent: AgentConfig, spec: EnvSpec) -> None:
    """Raise, before anything is allocated, if the table does not fit into memory."""
    from steppe.algorithms.tabular.memory_limits import require_memory

    assert spec.num_states is not None, "agents with tables require numbered states"
    require_memory(spec.num_states, spec.action.sizes[0], 4)


def _require_portable(config: RunConfig, agent: AgentConfig) -> None:
    references.require_portable(config.env, "the environment")
    references.require_portable(config.algo, "the algorithm")
    if isinstance(agent, ClassicConfig):
        references.require_portable(agent.learner, "the learner")
    references.require_portable(agent.network, "the network")
    for wrapper in config.environment.wrappers:
        references.require_portable(wrapper, "a wrapper")
