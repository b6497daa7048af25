"""What a MainLoop supplies to its runs (training/experiment.py, SuppliedParts)."""

from __future__ import annotations

from typing import Any

from steppe.compose.agent import DistributedAgent
from steppe.compose.environment import DistributedEnvironment
from steppe.compose.parameter_server import load_server_parameters
from steppe.core.contracts.algorithm import Agent
from steppe.core.contracts.specs import EnvSpec
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from steppe.roles.context import POLICY
from steppe.runtimes.plan import Plan


class LoopParts:
    """The environment, agent, replay pool and parameter server of a loop."""

    def __init__(
        self,
        environment: DistributedEnvironment,
        agent: DistributedAgent,
        pool: Any,
        server: Any,
        *,
        node_client: Any = None,
        may_host_learner: bool = True,
    ) -> None:
        self._environment, self._agent = environment, agent
        self.pool, self.server = pool, server
        self.may_host_learner = may_host_learner
        self._node_client = node_client

    @property
    def spec(self) -> EnvSpec:
        return self._environment.spec

    @property
    def has_weights(self) -> bool:
        return self._agent.built

    def prepare(self, plan: Plan) -> None:
        """Load the server's parameters, which the run starts with."""
        if self.server is not None:
            load_server_parameters(self.agent(plan), self.server.newer_than(POLICY, -1).arrays())

    def agent(self, plan: Plan) -> Agent:
        self._agent.settle(plan.config.agent, plan.config.seed, plan.config.steps)
        return self._agent.agent

    def node(self) -> Any:
        return self._node_client

    def follow_run(self, view: RunView, *, uses_pool: bool) -> None:
        self._environment.follow_run(view)
        self._agent.follow_run(view)
        if self.pool is not None:
            self.pool.follow_run(None if uses_pool else view)

    def adopt_result(self, directory: RunDirectory, plan: Plan) -> None:
        self._agent.adopt_result(directory, plan)
