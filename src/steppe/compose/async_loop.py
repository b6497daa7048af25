"""AsyncMainLoop: workers that act and push gradients to a parameter server (A3C), composed of MainLoop's parts.

AsyncAgent: an agent that trains that way in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from steppe.compose.agent import DistributedAgent
from steppe.compose.config_merge import PARAMETER_SERVER_SETTINGS
from steppe.compose.environment import DistributedEnvironment
from steppe.compose.main_loop import MainLoop
from steppe.compose.parameter_server import server_settings
from steppe.core.config.fields import MAX_SETTING
from steppe.core.config.run import RunConfig
from steppe.core.contracts.algorithm import Agent
from steppe.core.contracts.components import ParameterSource, ReplayComponent
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.system.typecheck import typechecked
from steppe.training.train import Callback


@typechecked
class AsyncMainLoop(MainLoop):
    """A MainLoop with `num_workers` workers, each with its own environments and agent.

    `num_workers` replaces the environment's number. The server decides how gradients become parameters: one at a time,
    several together, or in rounds, with its aggregation and its optimizer; None: the run's own store, with the agent's
    optimizer. Workers are processes if those can import environment and agent by name, and take turns in this process
    otherwise. A replay agent's buffer is divided among them.
    """

    def __init__(
        self,
        environment: DistributedEnvironment,
        replay_buffer: ReplayComponent | None,
        agent: DistributedAgent,
        param_server: ParameterSource | None,
        num_workers: int = 8,
        *,
        config: RunConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers={num_workers}: there must be at least one")
        self.num_workers = num_workers
        super().__init__(environment, replay_buffer, agent, param_server, config)
        if self._manual_run is not None:
            raise ConfigError(
                "AsyncMainLoop builds its parts again in every worker, so they must be built-in: use MainLoop for your own"
            )

    def run_async_training(self, total_steps: int = 1_000_000, *, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
        """Train for that many environment steps over all workers; return the summary. Raises a failed run's fault."""
        if total_steps < 1:
            raise ConfigError(f"total_steps={total_steps}: must be at least 1")
        result = self._run(self.config.model_copy(update={"steps": total_steps, "episodes": None}), callbacks)
        result.raise_for_fault()
        return {**result.summary, "message": result.message, "path": str(result.path)}

    def _decided_settings(self, environment: DistributedEnvironment) -> dict[str, Mapping[str, Any]]:
        runtime = {} if "runtime" in environment.decided else {"runtime": self._runtime(environment)}
        found: dict[str, Mapping[str, Any]] = {
            "loop": PARAMETER_SERVER_SETTINGS | {"actors": self.num_workers},
            "defaults": runtime,
        }
        return (
            found
            if self._server is None
            else found | {"server": server_settings(self._given_server(), self.num_workers)}
        )


@typechecked
class AsyncAgent(DistributedAgent):
    """A DistributedAgent that `num_workers` processes train in the background, in the environment that it is bound to.

    `settings` are DistributedAgent's. The agent in this process does not change during training; it loads what was
    learned when the training is stopped.
    """

    def __init__(self, algorithm: str | type | Agent, num_workers: int = 4, **settings: Any) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers={num_workers}: there must be at least one")
        super().__init__(algorithm, **settings)
        self.num_workers = num_workers
        self._loop: AsyncMainLoop | None = None
        self._thread: threading.Thread | None = None
        self._started, self._stopping = threading.Event(), threading.Event()
        self._outcome: dict[str, Any] | BaseException = {}

    def start_async_training(self) -> None:
        """Start the training and return at once; every start creates a new run."""
        if self._thread is not None:
            raise UsageError("this agent is being trained already: stop_async_training first")
        if not isinstance(self._environment, DistributedEnvironment):
            raise UsageError("training needs a DistributedEnvironment to act in: bind(environment) first")
        config = {"runtime": "processes"} if self._environment.runtime is None else {}
        self._loop = AsyncMainLoop(self._environment, None, self, None, self.num_workers, config=config)
        self._started.clear()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._train, args=(self._loop,), name="steppe-async-agent")
        self._thread.start()

    def stop_async_training(self) -> dict[str, Any]:
        """Stop the training, load what was learned, and return the run's summary. Raises the fault of a failed run."""
        if self._thread is None:
            raise UsageError("this agent is not being trained: start_async_training first")
        self._stopping.set()
        self._thread.join()
        self._thread = None
        outcome = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def get_training_stats(self) -> dict[str, Any]:
        """Return DistributedAgent's statistics, the progress of the background training, and whether it is running.

        A run that failed is not running.
        """
        progress = self._loop.get_training_progress() if self._loop is not None else None
        training = self._thread is not None and self._thread.is_alive()
        return {**super().get_training_stats(), "training": training, "progress": progress}

    def _train(self, loop: AsyncMainLoop) -> None:
        try:
            self._outcome = loop.run_async_training(MAX_SETTING, callbacks=[lambda view: self._stopping.is_set()])
        except BaseException as error:  # noqa: BLE001 - raised where the training is stopped
            self._outcome = error
