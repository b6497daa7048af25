"""MainLoop: a world, a memory and an agent become a plan; the plan is launched, watched and brought down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ForwardRef

import numpy as np

from steppe.core import factory, seeding
from steppe.core.checked import checked
from steppe.core.config import Resolved, RunConfig, resolve
from steppe.core.durable import noticing_full_disk, read_json, write_json
from steppe.core.errors import ConfigError, DamagedFile, DiskFull, RunNotFound, UsageError
from steppe.core.links import COMMANDS, EVENTS
from steppe.core.reports import EventReport
from steppe.loops.agent import DistributedAgent
from steppe.loops.composing import compose, episodic
from steppe.loops.environment import DistributedEnvironment
from steppe.loops.result import RunResult
from steppe.loops.starting import adopt_weights, keep_start
from steppe.loops.supervise import Interrupts, Observer, Outcome, Supervisor
from steppe.records.checkpoints import Checkpoint, Checkpoints
from steppe.records.directory import RunDirectory, runs_root
from steppe.records.profile import write_profile
from steppe.records.store import PENDING
from steppe.records.view import RunView
from steppe.runtimes import launcher, mpi, processes, ray
from steppe.runtimes.plan import Plan, make_plan
from steppe.runtimes.turns import Handle

if TYPE_CHECKING:
    from steppe.replay.pool import ReplayBufferPool
    from steppe.runtimes.wiring import Parts
else:  # its compiled parts take as long to import as all the rest, and a loop without a pool does not need them here
    ReplayBufferPool = ForwardRef("steppe.replay.pool.ReplayBufferPool")

Callback = Callable[[RunView], object]
LOOP = "loop.json"
MENDABLE = ("role_died", "out_of_memory")  # what another try may not meet again


@checked
def train(
    env: str | Callable[..., Any], *, algo: str | type = "ppo", callbacks: Sequence[Callback] = (), **settings: Any
) -> RunResult:
    """Train an agent and return what came of it.

    `settings` are the configuration's keys: `steps=200_000, actors=2, mode="async"`, the algorithm's hyperparameters
    (`learning_rate=3e-4`), or dotted ones in a dictionary (`**{"flow.max_lag": 4}`). A callback is called about five
    times a second with the run's RunView; one that returns True ends the run, one that returns a dictionary of numbers adds
    them to the run's curves.
    """
    factory.stop_if_loading_main()
    mpi.join(settings.get("runtime"))
    given = {name: _by_name(value) for name, value in settings.items()}
    layer = {"env": factory.reference(env), "algo": factory.reference(algo), **given}
    result = run_experiment(resolve(("call", layer)), observers=callbacks)
    result.raise_for_fault()
    return result


def _by_name(value: Any) -> Any:
    """A setting with its callables named, alone or in a list."""
    if isinstance(value, list | tuple):
        return [_by_name(item) for item in value]
    return factory.reference(value) if callable(value) else value


def run_experiment(resolved: Resolved, *, observers: Sequence[Observer] = ()) -> RunResult:
    """Run a resolved configuration to its end."""
    mpi.join(resolved.config.runtime)
    if resolved.auto:
        from steppe.loops.calibrating import calibrated  # imports torch, which this process does not need otherwise

        resolved = calibrated(resolved)
    return MainLoop.of(resolved).run(observers)


@checked
class MainLoop:
    """Runs an experiment composed of parts. `run` goes by the configuration; `run_training` counts episodes.

    On `inline` (the default here) the agent and the pool that were given are the ones that work, in place. On other
    runtimes they describe what each process builds, and the agent goes on from the final weights. Every run begins with
    what the agent knows; counters and schedules begin anew. `config` has further settings by (dotted) name.
    """

    def __init__(
        self,
        environment: DistributedEnvironment,
        replay_buffer: ReplayBufferPool | None,
        agent: DistributedAgent,
        parameter_server: object | None = None,
        config: RunConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self.environment, self.replay_buffer, self.agent = environment, replay_buffer, agent
        if parameter_server is not None:
            raise ConfigError("this version keeps the weights in the loop itself: leave parameter_server out")
        resolved = compose(environment, replay_buffer, agent, config)
        self.config, self.sources = resolved.config, resolved.sources
        environment.settle(self.config.environment)
        steps = self.config.steps if "steps" in self.config.model_fields_set else None
        agent.settle(self.config.agent, self.config.seed, steps)
        agent.bind(environment)
        self.episode = 0  # training episodes so far, over all runs
        self._supervisor: Supervisor | None = None
        self._running = False
        self._directory: RunDirectory | None = None
        self._owed_updates = 0.0
        self._init_from = self.config.init_from  # until the first run has begun with it
        self._commands_after = 0  # commands up to this one were for an earlier life of the run

    @classmethod
    def of(cls, resolved: Resolved) -> MainLoop:
        """The loop that a resolved configuration describes, parts and all."""
        config = resolved.config
        environment = DistributedEnvironment(
            config.env, config.actors, device=config.flow.actor_device, config=config.environment, seed=config.seed
        )
        loop = cls(environment, None, DistributedAgent.of(config), config=config)
        loop.sources = resolved.sources
        return loop

    def run(self, observers: Sequence[Observer] = ()) -> RunResult:
        """Run to the end that the configuration sets, and write everything down."""
        return self._run(self.config, observers)

    def plan(self) -> Plan:
        """The topology of the run, with everything a user can get wrong checked and nothing written."""
        return self._plan(self.config)

    def run_training(
        self,
        total_episodes: int = 1000,
        max_steps_per_episode: int = 1000,
        evaluation_frequency: int = 100,
        checkpoint_frequency: int = 500,
        *,
        callbacks: Sequence[Callback] = (),
    ) -> dict[str, Any]:
        """Train for this many episodes in total over all workers, and return the run's summary.

        Frequencies are in training episodes. Longer episodes are truncated. Raises what made a run fail.
        """
        given = (total_episodes, max_steps_per_episode, evaluation_frequency, checkpoint_frequency)
        result = self._run(episodic(self.config, self.environment.spec, *given), callbacks)
        result.raise_for_fault()
        return {**result.summary, "message": result.message, "path": str(result.path)}

    def run_single_episode(self) -> dict[str, Any]:
        """Play one episode with the parts, remember it, learn what is due, and return its return, length and losses."""
        self._require_here("an episode of one's own")
        self.agent.require_steps()
        steps = self.environment.generate_experiences(self.agent, 1)
        self.episode += 1
        if self.agent.config.memory == "rollout":
            metrics = self.agent.update_policy(steps)
        else:
            self.agent.observe(steps)
            metrics = self._learn_from_replay(steps)
        total = float(sum(float(step["reward"]) for step in steps))
        return {"episode": self.episode, "return": total, "length": len(steps), **metrics}

    def evaluate_policy(self, num_episodes: int = 10) -> dict[str, Any]:
        """Play whole episodes with the best actions of the agent as it is now."""
        self._require_here("an evaluation")
        return self.agent.evaluate_policy(num_episodes)

    def save_checkpoint(self, episode: int, path: str | Path | None = None) -> Path:
        """Write agent and pool into a directory, and return it. Runs keep checkpoints of their own besides."""
        self._require_here("a checkpoint")
        chosen = Path(path) if path is not None else self._default_checkpoint()
        chosen.mkdir(parents=True, exist_ok=True)
        if self.replay_buffer is not None and self.replay_buffer.get_total_experiences():
            self.replay_buffer.save_buffers(chosen / "replay")
        self.agent.save_checkpoint(chosen / "agent")
        write_json(chosen / LOOP, {"episode": episode, "owed_updates": self._owed_updates})
        return chosen

    def load_checkpoint(self, path: str | Path) -> int:
        """Go on from what `save_checkpoint` wrote; returns its episode."""
        self._require_here("a checkpoint")
        source = Path(path)
        if not (source / LOOP).exists():
            raise RunNotFound(f"{path} holds no checkpoint of a loop")
        found = read_json(source / LOOP)
        self.agent.load_checkpoint(source / "agent")
        if self.replay_buffer is not None and (source / "replay").exists():
            self.replay_buffer.load_buffers(source / "replay")
        self.episode, self._owed_updates = int(found["episode"]), float(found["owed_updates"])
        return self.episode

    def get_training_progress(self) -> dict[str, Any]:
        """How far the newest run is, as of its last look around (five a second). May be called from any thread."""
        view = self._supervisor.view if self._supervisor else None
        best, last = (view.best_evaluation, view.last_evaluation) if view else (None, None)
        return {
            "state": view.state if view else "PENDING",
            "run": str(self._directory.path) if self._directory else None,
            "episode": self.episode + (view.episodes if view and self._running else 0),
            "env_steps": view.env_steps if view else 0,
            "updates": view.updates if view else 0,
            "version": view.version if view else 0,
            "train_return_mean": view.train_return_mean if view else None,
            "eval_return_mean": last.return_mean if last else None,
            "best_return_mean": best.return_mean if best else None,
            "steps_per_s": view.steps_per_s if view else None,
        }

    def stop_training(self) -> None:
        """Ask the run under way to end with a checkpoint; from a callback or another thread."""
        self._require_running("stop").stop("stop_requested", "stopped by stop_training()")

    def pause_training(self) -> None:
        """Let actors and learner rest until `resume_training`; from a callback or another thread."""
        self._require_running("pause").pause()

    def resume_training(self) -> None:
        """Go on after `pause_training`."""
        self._require_running("resume").resume()

    def _run(self, config: RunConfig, observers: Sequence[Observer]) -> RunResult:
        factory.stop_if_loading_main()
        mpi.join(config.runtime)
        plan = self._plan(config.model_copy(update={"init_from": self._init_from}))
        about = adopt_weights(self._init_from, self.agent, plan) if self._init_from is not None else {}
        directory = RunDirectory.create(plan.config, self.sources, about)
        self._init_from = None
        return self._live(plan, directory, observers)

    def go_on(self, directory: RunDirectory, observers: Sequence[Observer] = ()) -> RunResult:
        """Run this loop's configuration in a directory that holds a run, from its newest whole checkpoint.

        One that was only created begins at its beginning.
        """
        plan = self._plan(self.config)
        if directory.store.status().state == PENDING:
            directory.settle(plan.config)
        else:
            plan = self._from_newest(plan, directory)
        return self._live(plan, directory, observers)

    def _live(self, plan: Plan, directory: RunDirectory, observers: Sequence[Observer]) -> RunResult:
        self._directory = directory
        self._running = True
        directory.reserve()
        try:
            with Interrupts() as interrupts:
                outcome, view = self._supervise(plan, directory, interrupts, observers)
                for _ in range(plan.config.restarts):
                    if outcome.fault is None or outcome.reason not in MENDABLE:
                        break
                    plan = self._from_newest(plan, directory)
                    outcome, view = self._supervise(plan, directory, interrupts, observers)
                interrupts.ignore()
                result = conclude(directory, outcome, view)
        finally:
            self._running = False
            directory.free_reserve()
            directory.release()
        self.episode += view.episodes
        if plan.config.runtime != "inline":
            self.agent.adopt_result(directory, plan)
        return result

    def _plan(self, config: RunConfig) -> Plan:
        if config.runtime == "processes":
            processes.warm_up(
                torch=not config.agent.in_table
            )  # imports it over there while this one looks at the world
        for device in (config.device, config.flow.actor_device):
            if device.startswith("cuda"):
                from steppe.agents.device import resolve_device

                resolve_device(device)
        limit = config.environment.time_limit or self.environment.spec.max_episode_steps
        plan = make_plan(config, replace(self.environment.spec, max_episode_steps=limit))
        if config.runtime in ("mpi", "ray"):
            (mpi if config.runtime == "mpi" else ray).require(plan)
        return plan

    def _supervise(
        self, plan: Plan, directory: RunDirectory, interrupts: Interrupts, observers: Sequence[Observer]
    ) -> tuple[Outcome, RunView]:
        with contextlib.suppress(DiskFull):
            directory.store.set_status("STARTING")
        try:
            handle = _launch(plan, directory, self.agent, self.replay_buffer)
            self._supervisor = Supervisor(
                handle, directory, plan.config, interrupts, commands_after=self._commands_after
            )
            return self._supervisor.run(observers), self._supervisor.view
        except KeyboardInterrupt:
            return Outcome("STOPPED", "interrupted", "stopped at once by a second signal"), RunView(directory)
        except BaseException as error:
            directory.free_reserve()
            with contextlib.suppress(DiskFull):
                directory.store.set_status("FAILED", "error", f"{type(error).__name__}: {error}")
            raise

    def _from_newest(self, plan: Plan, directory: RunDirectory) -> Plan:
        """The same plan from the newest whole checkpoint, or from the beginning where there is none; told in the log."""
        checkpoint, damaged = newest_whole(directory)
        number = checkpoint.number if checkpoint else None
        details = {"checkpoint": number, "damaged": damaged, **(checkpoint.counters if checkpoint else {})}
        event = EventReport(run=directory.id, kind="resume", role="supervisor", details=details)
        directory.board.post(EVENTS, event.record())
        earlier = directory.store.read(COMMANDS, self._commands_after)
        self._commands_after = earlier[-1][0] if earlier else self._commands_after
        return replace(plan, resume=number)

    def _learn_from_replay(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """Store one-step transitions, then as many updates as they pay for (see replay/memory.py)."""
        from steppe.replay import ReplayBufferPool as Pool

        settings = self.agent.config.model_dump()
        if self.replay_buffer is None:
            disk = runs_root() if settings["buffer_storage"] == "disk" else None
            self.replay_buffer = Pool(
                1, settings["buffer_size"], use_prioritized=settings["prioritized"], disk_path=disk
            )
        pool, batch_size = self.replay_buffer, settings["batch_size"]
        names = ("obs", "action", "reward", "next_obs", "terminated")
        block = {name: np.stack([step[name] for step in steps]) for name in names}
        block["discount"] = np.full(len(steps), settings["gamma"], np.float32)
        pool.add_experiences(block)
        if pool.get_total_experiences() < max(settings["learning_starts"], batch_size):
            return {"updates": 0}
        self._owed_updates += len(steps) * settings["samples_per_insert"] / batch_size
        metrics: dict[str, Any] = {"updates": int(self._owed_updates)}
        for _ in range(int(self._owed_updates)):
            batch = pool.sample_batch(batch_size)
            found = self.agent.learn_from_batch(batch)
            if pool.use_prioritized:
                pool.update_priorities(batch["indices"], found.pop("priorities"))
            metrics = {**found, "updates": metrics["updates"]}
        self._owed_updates %= 1.0
        return metrics

    def _default_checkpoint(self) -> Path:
        return (self._directory.path if self._directory else runs_root()) / "loop-checkpoint"

    def _require_here(self, what: str) -> None:
        if self._running and self.config.runtime != "inline":
            raise UsageError(
                f"{what} is not possible while the learner works in another process: wait for the run's end"
            )

    def _require_running(self, verb: str) -> Supervisor:
        if not self._running or self._supervisor is None:
            raise UsageError(f"there is no training under way to {verb}")
        return self._supervisor


def _launch(plan: Plan, directory: RunDirectory, agent: DistributedAgent, pool: ReplayBufferPool | None) -> Handle:
    if agent.built and plan.resume is None:
        keep_start(agent, directory)
    if plan.config.runtime == "inline":
        from steppe.runtimes import inline

        return inline.launch(plan, directory, _parts(plan, directory, agent, pool))
    return launcher(plan.config.runtime)(plan, directory)  # type: ignore[no-any-return]


def _parts(plan: Plan, directory: RunDirectory, agent: DistributedAgent, pool: ReplayBufferPool | None) -> Parts:
    """The caller's own agent and pool, to work in place."""
    from steppe.replay import make_memory
    from steppe.runtimes.wiring import Parts, begun

    fresh = not agent.built
    agent.settle(plan.config.agent, plan.config.seed, plan.config.steps)
    if fresh:
        begun(agent.agent, directory)
    if pool is None:
        return Parts(agent=agent.agent)
    memory = make_memory(
        plan.config.agent,
        plan.segment,
        stream=seeding.generator(plan.config.seed, "memory"),
        total_steps=plan.config.steps,
        num_actors=plan.config.actors,
        pool=pool,
        directory=directory.path,
    )
    return Parts(agent=agent.agent, memory=memory)


def newest_whole(directory: RunDirectory) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, if there is one, and what is wrong with those that are newer."""
    try:
        checkpoint = Checkpoints(directory.checkpoints, run=directory.key).latest()
    except DamagedFile as error:
        return None, [str(error)]
    return checkpoint, list(checkpoint.damaged) if checkpoint else []


def conclude(directory: RunDirectory, outcome: Outcome, view: RunView) -> RunResult:
    """Write a run's end down and return it."""
    directory.free_reserve()
    with contextlib.suppress(DiskFull):  # whoever reads an unsaid end finds the run LOST, and may resume it
        directory.store.set_status(outcome.state, outcome.reason, outcome.message)
    directory.board.flush()
    view.refresh()
    summary = view.summary() | {"state": outcome.state, "reason": outcome.reason}
    with contextlib.suppress(DiskFull), noticing_full_disk(directory.summary_path):
        directory.write_summary(summary | {"message": outcome.message})
        if view.config.flow.profile:
            write_profile(view)
    return RunResult(directory.path, summary, outcome.message, outcome.fault)
