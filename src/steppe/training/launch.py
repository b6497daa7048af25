"""Start a run from a plan and the caller's parts.

If the learner is in this process, it uses the caller's parts directly; otherwise the initial state is written to the
run's directory for the other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from steppe.compose.agent import DistributedAgent
from steppe.core.config.runtime_table import capabilities_of
from steppe.core.system import seeding
from steppe.records.run_directory import RunDirectory
from steppe.runtimes import find_launcher
from steppe.runtimes.handle import Handle
from steppe.runtimes.plan import Plan
from steppe.training.initial_weights import save_start

if (
    TYPE_CHECKING
):  # type only: importing compiled modules takes as long as all other imports, and most loops do not need them
    from steppe.params.client import ParameterClient
    from steppe.params.server import ParameterServer
    from steppe.replay.pool import ReplayBufferPool
    from steppe.runtimes.builder import SuppliedComponents


def launch(
    plan: Plan,
    directory: RunDirectory,
    agent: DistributedAgent,
    pool: ReplayBufferPool | None,
    server: ParameterServer | ParameterClient | None,
    *,
    hosted: bool,
    node: ParameterClient | None = None,
) -> Handle:
    """Start the run.

    `hosted`: the actors are processes, and the learner is in this process with the caller's own parts. `node` is the
    client through which a cluster node's learner reaches its parameter server, if the learner is in this process.
    """
    if agent.built and plan.resume is None:
        save_start(agent, directory, server)
    start: Callable[..., Handle] = find_launcher(plan.config.runtime)
    if not (hosted or capabilities_of(plan.config.runtime).one_process):
        return start(plan, directory)
    return start(plan, directory, replace(_supplied_components(plan, directory, agent, pool, server), node=node))


def _supplied_components(
    plan: Plan,
    directory: RunDirectory,
    agent: DistributedAgent,
    pool: ReplayBufferPool | None,
    server: ParameterServer | ParameterClient | None,
) -> SuppliedComponents:
    """Return the caller's own agent, pool and parameter server, which the run uses in place."""
    from steppe.replay import make_memory
    from steppe.runtimes.builder import SuppliedComponents, load_start

    fresh = not agent.built
    agent.settle(plan.config.agent, plan.config.seed, plan.config.steps)
    if fresh:
        load_start(agent.agent, directory)
    if pool is None or plan.config.by_gradients:
        return SuppliedComponents(agent=agent.agent, server=server)
    memory = make_memory(
        plan.config.agent,
        plan.segment,
        stream=seeding.generator(plan.config.seed, "memory"),
        total_steps=plan.config.steps,
        num_actors=plan.config.actors,
        pool=pool,
        directory=directory.path,
    )
    return SuppliedComponents(agent=agent.agent, memory=memory)
