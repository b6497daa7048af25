"""DistributedAgent: an algorithm with its settings; the agent itself is built when it meets a world."""

from __future__ import annotations

from steppe.core.algorithms import AgentConfig
from steppe.core.config import RunConfig
from steppe.records.directory import RunDirectory
from steppe.runtimes.plan import Plan


class DistributedAgent:
    """What learns. Building it imports torch; describing it does not."""

    def __init__(self, algo: str, config: AgentConfig, device: str) -> None:
        self.algo, self.config, self.device = algo, config, device

    @classmethod
    def of(cls, config: RunConfig) -> DistributedAgent:
        return cls(config.algo, config.agent, config.device)

    def adopt_result(self, directory: RunDirectory, plan: Plan) -> None:
        """Take the weights that a run ended with."""
