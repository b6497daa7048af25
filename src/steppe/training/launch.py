"""Start a run from a plan, with the caller's parts where the learner is in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from steppe.core.config.runtime_table import capabilities_of
from steppe.core.contracts.algorithm import Agent
from steppe.core.system import seeding
from steppe.records.run_directory import RunDirectory
from steppe.runtimes import find_launcher
from steppe.runtimes.handle import Handle
from steppe.runtimes.plan import Plan

if (
    TYPE_CHECKING
):  # type only: importing compiled modules takes as long as all other imports, and most loops do not need them
    from steppe.runtimes.builder import SuppliedComponents


class LearnerParts(Protocol):
    """Parts of the caller that the learner uses in this process."""

    pool: Any  # a ReplayBufferPool, or None
    server: Any  # a ParameterServer or ParameterClient that the workers push to, or None

    @property
    def has_weights(self) -> bool:
        """Whether the agent has weights already, which the run starts with."""

    def agent(self, plan: Plan) -> Agent:
        """Return the agent with the plan's settings; built if it was not."""

    def node(self) -> Any:
        """Return the client through which a cluster node's learner reaches its parameter server, or None."""


def launch(plan: Plan, directory: RunDirectory, parts: LearnerParts | None, *, hosted: bool) -> Handle:
    """Start the run.

    `hosted`: the actors are processes, and the learner is in this process with the caller's own parts.
    """
    start: Callable[..., Handle] = find_launcher(plan.config.runtime)
    if parts is None or not (hosted or capabilities_of(plan.config.runtime).one_process):
        return start(plan, directory)
    return start(plan, directory, _supplied_components(plan, directory, parts))


def _supplied_components(plan: Plan, directory: RunDirectory, parts: LearnerParts) -> SuppliedComponents:
    """Return the caller's own agent, pool and parameter server, which the run uses in place."""
    from steppe.replay import make_memory
    from steppe.runtimes.builder import SuppliedComponents, load_start

    fresh = not parts.has_weights
    agent = parts.agent(plan)
    if fresh:
        load_start(agent, directory)
    if parts.pool is None or plan.config.by_gradients:
        return SuppliedComponents(agent=agent, server=parts.server, node=parts.node())
    memory = make_memory(
        plan.config.agent,
        plan.segment,
        stream=seeding.generator(plan.config.seed, "memory"),
        total_steps=plan.config.steps,
        num_actors=plan.config.actors,
        pool=parts.pool,
        directory=directory.path,
    )
    return SuppliedComponents(agent=agent, memory=memory, node=parts.node())
