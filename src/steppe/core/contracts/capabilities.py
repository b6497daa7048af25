"""What a runtime can do: each runtime declares it once, and other code asks for an ability instead of a name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a runtime. The defaults fit a runtime with processes of its own and no optional ability."""

    one_process: bool = False
    """All roles take turns in the caller's process; otherwise other processes must find environment and agent by name."""
    hosts_learner: bool = False
    """The learner can run in the caller's process, with the caller's own agent, replay buffer and parameter server:
    `launch` takes them as a third argument."""
    fork_server: bool = False
    """Its processes are forked from a server, which is started while the run is still being planned."""
    scales_actors: bool = False
    """The number of actors can change during a run of mode async."""
    replay_roles: bool = False
    """Replay can be in roles of its own."""
    workers: bool = True
    """It runs mode workers."""
    workers_share_learner_slot: bool = False
    """Tabular workers: the first worker, the learner and the manager share a worker slot."""
    live_tuning: bool = False
    """The learner reads commands that change hyperparameters, and reports which values it applied."""
    needs_brokers: bool = False
    """Roles communicate through Kafka brokers, through which a service publishes its commands as well."""
    joins_ranks: bool = False
    """An MPI launcher may have started this program several times: `join` makes all ranks but the first serve it."""
    config_section: str | None = None
    """The section of the configuration that is for this runtime only."""
    modules: tuple[str, ...] = ()
    """Modules of an extra that must be installed."""
    programs: tuple[str, ...] = ()
    """Programs that must be in this Python's directory or on PATH."""
