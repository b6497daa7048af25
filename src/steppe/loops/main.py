"""MainLoop: a world, a memory and an agent become a plan; the plan is launched, watched and brought down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steppe.core import factory
from steppe.core.config import Resolved, RunConfig, resolve
from steppe.core.errors import ConfigError
from steppe.loops.agent import DistributedAgent
from steppe.loops.environment import DistributedEnvironment
from steppe.loops.result import RunResult
from steppe.loops.supervise import Interrupts, Observer, Outcome, Supervisor
from steppe.records.directory import RunDirectory
from steppe.records.view import RunView
from steppe.replay.pool import ReplayBufferPool
from steppe.runtimes import processes
from steppe.runtimes.plan import Plan, make_plan
from steppe.runtimes.turns import Handle

Callback = Callable[[RunView], object]


def train(
    env: str | Callable[..., Any], *, algo: str | type = "ppo", callbacks: Sequence[Callback] = (), **settings: Any
) -> RunResult:
    """Train an agent and return what came of it.

    `settings` are the configuration's keys: `steps=200_000, actors=2, mode="async"`, the algorithm's hyperparameters
    (`learning_rate=3e-4`), or dotted ones in a dictionary (`**{"flow.max_lag": 4}`). A callback is called about five
    times a second with the run's RunView; one that returns True ends the run.
    """
    factory.stop_if_loading_main()
    given = {name: factory.reference(value) if callable(value) else value for name, value in settings.items()}
    layer = {"env": factory.reference(env), "algo": factory.reference(algo), **given}
    result = run_experiment(resolve(("call", layer)), observers=callbacks)
    result.raise_for_fault()
    return result


def run_experiment(resolved: Resolved, *, observers: Sequence[Observer] = ()) -> RunResult:
    """Run a resolved configuration to its end."""
    return MainLoop.of(resolved).run(observers)


class MainLoop:
    """Runs an experiment composed of parts. `run` goes by the configuration; `run_training` counts episodes.

    On `inline` (the default here) the agent and the pool that were given are the ones that work, in place. On other
    runtimes they describe what each process builds, and the agent is given the final weights.
    """

    def __init__(
        self,
        environment: DistributedEnvironment,
        replay_buffer: ReplayBufferPool | None,
        agent: DistributedAgent,
        parameter_server: None = None,
        config: RunConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self.environment, self.replay_buffer, self.agent = environment, replay_buffer, agent
        if parameter_server is not None:
            raise ConfigError("this version keeps the weights in the loop itself: leave parameter_server out")
        self.config, self.sources = self._compose(config)
        self._supervisor: Supervisor | None = None
        self._result: RunResult | None = None

    @classmethod
    def of(cls, resolved: Resolved) -> MainLoop:
        """The loop that a resolved configuration describes, parts and all."""
        config = resolved.config
        environment = DistributedEnvironment(config.env, config.actors, config=config.environment)
        loop = cls(environment, None, DistributedAgent.of(config), config=config)
        loop.sources = resolved.sources
        return loop

    def run(self, observers: Sequence[Observer] = ()) -> RunResult:
        """Run to the end that the configuration sets, and write everything down."""
        factory.stop_if_loading_main()
        plan = self.plan()
        directory = RunDirectory.create(plan.config, self.sources)
        try:
            with Interrupts() as interrupts:
                outcome, view = self._supervise(plan, directory, interrupts, observers)
            self._result = conclude(directory, outcome, view)
        finally:
            directory.release()
        self.agent.adopt_result(directory, plan)
        return self._result

    def plan(self) -> Plan:
        """The topology of the run, with everything a user can get wrong checked and nothing written."""
        if self.config.runtime == "processes":
            processes.warm_up()  # imports torch over there while this process looks at the world
        if self.config.device.startswith("cuda"):
            from steppe.agents.device import resolve_device

            resolve_device(self.config.device)
        return make_plan(self.config, self.environment.spec)

    def _supervise(
        self, plan: Plan, directory: RunDirectory, interrupts: Interrupts, observers: Sequence[Observer]
    ) -> tuple[Outcome, RunView]:
        directory.store.set_status("STARTING")
        try:
            handle = self._launch(plan, directory)
            self._supervisor = Supervisor(handle, directory, plan.config, interrupts)
            return self._supervisor.run(observers), self._supervisor.view
        except KeyboardInterrupt:
            return Outcome("STOPPED", "interrupted", "stopped at once by a second signal"), RunView(directory)
        except BaseException as error:
            directory.store.set_status("FAILED", "error", f"{type(error).__name__}: {error}")
            raise

    def _launch(self, plan: Plan, directory: RunDirectory) -> Handle:
        if plan.config.runtime == "inline":
            from steppe.runtimes import inline

            return inline.launch(plan, directory)
        return processes.launch(plan, directory)

    def _compose(self, given: RunConfig | Mapping[str, Any] | None) -> tuple[RunConfig, dict[str, str]]:
        if isinstance(given, RunConfig):
            return given, {}
        raise NotImplementedError


def conclude(directory: RunDirectory, outcome: Outcome, view: RunView) -> RunResult:
    """Write a run's end down and return it."""
    directory.store.set_status(outcome.state, outcome.reason, outcome.message)
    view.refresh()
    summary = view.summary()
    directory.write_summary(summary | {"message": outcome.message})
    return RunResult(directory.path, summary, outcome.message, outcome.fault)
