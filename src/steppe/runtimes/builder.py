"""All the wiring of a run in one place: from a plan's role and its context to the role itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from steppe.algorithms import make_agent
from steppe.core.algorithms import ClassicConfig
from steppe.core.config.tunables import live_fields
from steppe.core.contracts.algorithm import Agent, Memory, Tree
from steppe.core.contracts.env import World
from steppe.core.contracts.specs import PushSpec, SegmentSpec
from steppe.core.contracts.transport import Channel, Marked, Role, Shifted
from steppe.core.contracts.weights import Weights
from steppe.core.io.atomic_files import noticing_full_disk
from steppe.core.system import seeding
from steppe.envs import make_world
from steppe.envs.factory import make_env
from steppe.envs.lookup import find
from steppe.records.arrivals import ArrivalLog, Mark
from steppe.records.checkpoints import Checkpoint, Checkpoints
from steppe.records.faults import Faults
from steppe.records.run_directory import RunDirectory
from steppe.replay import make_memory
from steppe.roles.actor import Actor, env_seeds
from steppe.roles.archive import RunArchive
from steppe.roles.context import Context
from steppe.roles.evaluation import Judge
from steppe.roles.learner import Learner, Limits, Save
from steppe.roles.manager import Manager
from steppe.roles.quota import EpisodeQuota
from steppe.roles.recorded_schedule import Follower, Script, Scripted, ScriptedLearner
from steppe.roles.scheduling import Free, Gate, Intake, Lockstep, Rounds, Window
from steppe.roles.tuning import Tuning
from steppe.runtimes.plan import REPLAY, Plan, RoleSpec

if TYPE_CHECKING:
    from steppe.params.client import ParameterClient
    from steppe.roles.gradients.learner import Store
    from steppe.roles.tabular.rollouts import Crew


NEVER = 2**62  # versions


@dataclass(frozen=True)
class Parts:
    """Objects of the caller's that take the place of what the plan would build, where the roles share his process."""

    agent: Agent | None = None
    memory: Memory | None = None
    script: Script | None = None  # of the recorded run that this one repeats
    server: Any = None  # a ParameterServer, or a ParameterClient, that takes the workers' pushes
    node: ParameterClient | None = None  # by which a node speaks to its cluster's server


def build_role(
    plan: Plan, role: RoleSpec, directory: RunDirectory, context: Context, parts: Parts | None = None
) -> Role:
    """The role that a plan describes, ready to step."""
    parts = parts or Parts()
    if role.kind == "manager":
        return _manager(plan, directory, context)
    if plan.config.by_gradients:
        worker = role.kind == "worker"
        return _pusher(plan, role, directory, context) if worker else _store(plan, parts, directory, context)
    if role.kind == "worker":
        return _worker(plan, role, context)
    if plan.config.mode == "workers":
        return _keeper(plan, parts, directory, context)
    if role.kind == REPLAY:
        return _replay(plan, directory, context)
    if role.kind == "learner":
        return _learner(plan, parts, directory, context)
    return _actor(plan, role, parts.script, directory, context)


def link_spec(plan: Plan, agent: Agent | None = None) -> SegmentSpec:
    """The memory of what goes through the channel: a segment, or a gradient, for which there must be an agent."""
    if not plan.config.by_gradients:
        return plan.segment
    made = agent or _agent(plan, "cpu")
    return PushSpec.of(-(-made.weights().layout.nbytes // 4))


def _agent(plan: Plan, device: str) -> Agent:
    config = plan.config
    seed = seeding.integer(config.seed, "agent")
    return make_agent(config.algo, config.agent, plan.spec, seed=seed, device=device)


def _device(plan: Plan, device: str) -> str:
    """Where an agent computes; a table needs no torch to say so."""
    if plan.config.agent.in_table:
        return device
    from steppe.algorithms.nn.device import resolve_device

    return resolve_device(device)


def _actor(plan: Plan, role: RoleSpec, script: Script | None, directory: RunDirectory, context: Context) -> Actor:
    config = plan.config
    world, policy, gate = _acting(plan, role, context.channel)
    if script is not None:
        gate = follower = Follower(role.index, script, script.shelf_over(context.weights))
        context = replace(context, weights=follower)
    keep = None if directory.passing else Faults(directory).save
    actor = Actor(role.index, world, policy, gate, context, epoch=context.epoch, keep_fault=keep)
    actor.quota = _quota(plan, role, world)
    return _going_on(actor, config.seed)


def _acting(plan: Plan, role: RoleSpec, channel: Channel) -> tuple[World, Agent, Gate]:
    """What every role that collects has: its world, its policy, and when it may."""
    config = plan.config
    world = make_world(config.env, config.environment, plan.num_envs, env_seeds(config.seed, role.index))
    policy = _agent(plan, _device(plan, config.flow.actor_device))
    stream = seeding.generator(config.seed, "actor", role.index, "policy")
    policy.begin(plan.num_rows, stream, actor=role.index, num_actors=plan.num_writers)
    shift = (lambda: channel.shift) if isinstance(channel, Shifted) else (lambda: 0)
    return world, policy, Lockstep(plan.ahead, shift) if plan.lockstep else Free()


def _quota(plan: Plan, role: RoleSpec, world: World) -> EpisodeQuota | None:
    """An actor's share of the run's episodes. In mode async segments may be dropped, so the learner alone counts there."""
    total = plan.config.episodes
    if total is None or plan.config.mode == "async":
        return None
    return EpisodeQuota(total, role.index, plan.num_writers, world)


def _going_on(actor: Actor, seed: int) -> Actor:
    """The actor where the channel knows that it, or another in its place, was; told in the event log."""
    last = actor.context.channel.recall(actor.index)
    if last is not None:
        again = env_seeds(seed, actor.index, after=last[0])
        actor.context.event("resume", sequence=last[0] + 1, how=actor.resume(*last, again))
    return actor


def _pusher(plan: Plan, role: RoleSpec, directory: RunDirectory, context: Context) -> Actor:
    from steppe.roles.gradients.worker import GradientWorker, Making

    config = plan.config
    world, agent, gate = _acting(plan, role, context.channel)
    share = {
        name: max(1, getattr(config.agent, name) // config.actors)
        for name in ("buffer_size", "learning_starts")
        if getattr(config.agent, name, 0)
    }
    memory = make_memory(
        config.agent.model_copy(update=share),
        plan.segment,
        stream=seeding.generator(config.seed, "worker", role.index, context.epoch, "memory"),
        total_steps=config.steps,
    )
    making = Making(
        agent, memory, plan.segment, config.steps, forgets=config.agent.memory == "rollout", deltas=config.params.deltas
    )
    keep = None if directory.passing else Faults(directory).save
    worker = GradientWorker(role.index, world, making, gate, context, keep_fault=keep)
    worker.quota = _quota(plan, role, world)
    return _going_on(worker, config.seed)


def _store(plan: Plan, parts: Parts, directory: RunDirectory, context: Context) -> Learner:
    from steppe.roles.gradients.learner import GradientLearner

    config = plan.config
    agent = parts.agent or begun(_agent(plan, _device(plan, config.device)), directory)
    store = _own_store(plan, agent, directory) if parts.server is None else _served_store(plan, agent, parts, context)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep, directory.key)
    save = _saver(checkpoints, directory, context, None)
    intake = _intake(plan, None, context, None)
    learner = GradientLearner(store, intake, _limits(plan, None), save, context, segment=plan.segment)
    learner.tuning = Tuning(agent, live_fields(config))
    if plan.resume is not None:
        checkpoint = checkpoints.at(plan.resume)
        learner.restore(checkpoint.weights, checkpoint.state, checkpoint.counters)
    return learner


def _own_store(plan: Plan, agent: Agent, directory: RunDirectory) -> Store:
    """The store of a run whose server is its own."""
    from steppe.roles.gradients.learner import Store, make_server

    config, start = plan.config, Checkpoints(directory.start).latest()
    known = start.state.get("server") if start is not None else None
    server = make_server(config, agent, known["parameters"] if known is not None else None)
    if known is not None:
        server.restore(known)
    return Store(
        agent,
        server,
        config.actors,
        together=None if config.params.in_rounds else config.params.update_every or 1,
        follow_rate=config.params.learning_rate is None,
    )


def _served_store(plan: Plan, agent: Agent, parts: Parts, context: Context) -> Store:
    """The store of a run whose server is the caller's."""
    from steppe.roles.gradients.external_server import ServedStore

    rounds = bool(plan.config.params.in_rounds)
    return ServedStore(agent, parts.server, plan.config.actors, in_rounds=rounds, ending=lambda: context.ending)


def _learner(plan: Plan, parts: Parts, directory: RunDirectory, context: Context) -> Learner:
    config = plan.config
    agent = parts.agent or begun(_agent(plan, _device(plan, config.device)), directory)
    memory = parts.memory or make_memory(
        config.agent,
        plan.segment,
        stream=seeding.generator(config.seed, "memory"),
        total_steps=config.steps,
        num_actors=plan.num_writers,
        directory=directory.path,
        num_buffers=config.flow.replay_roles or 1,
        shelves=context.shelves,
    )
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep, directory.key)
    checkpoint = checkpoints.at(plan.resume) if plan.resume is not None else None
    log = _arrival_log(plan, checkpoint, directory, context) if config.flow.record_arrivals else None
    if parts.script is not None:
        context = replace(context, weights=parts.script.shelf_over(context.weights))
    save = _saver(checkpoints, directory, context, log)
    intake = _intake(plan, parts.script, context, log)
    made = (agent, memory, intake, _limits(plan, parts.script), save, context)
    learner = _node(plan, parts.node, *made) if config.cluster.joined else Learner(*made)
    if parts.script is not None:
        learner = scripted = ScriptedLearner(*made)
        scripted.changes = parts.script.changes
    learner.tuning = Tuning(agent, live_fields(config))
    if checkpoint is not None:
        learner.restore(checkpoint.weights, checkpoint.state, checkpoint.counters)
    return learner


def _replay(plan: Plan, directory: RunDirectory, context: Context) -> Role:
    from steppe.replay.factory import make_shelf
    from steppe.roles.replay_server import Replay

    assert context.desk is not None, "a replay role has a desk"
    num_shelves = len(plan.replay)
    return Replay(make_shelf(plan.config.agent, plan.segment, num_shelves, directory.path), context.desk, context)


def _node(
    plan: Plan,
    client: ParameterClient | None,
    agent: Agent,
    memory: Memory,
    intake: Intake,
    limits: Limits,
    save: Save,
    context: Context,
) -> Learner:
    """A learner that is one of a cluster's, by the caller's client where there is one."""
    from steppe.roles.cluster.node import Node, NodeLearner, connect  # the network's parts, which only these runs need

    learner = NodeLearner(agent, memory, intake, limits, save, context)
    cluster, lent = plan.config.cluster, client is not None
    learner.node = Node(cluster, agent, client or connect(cluster), lambda: context.ending, lent=lent)
    return learner


def _worker(plan: Plan, role: RoleSpec, context: Context) -> Role:
    from steppe.roles.tabular.worker import Worker  # compiled parts, which only these runs need

    config, life = plan.config, 0 if plan.resume is None else plan.resume + 1
    names = ("worker", role.index, context.epoch, life)
    agent = _agent(plan, _device(plan, config.device))
    crew = _crew(plan, agent, names)
    chunk_steps = plan.segment.num_steps * (1 if isinstance(config.agent, ClassicConfig) else plan.num_envs)
    chunk_steps = max(chunk_steps, crew.least_steps)
    worker = Worker(role.index, crew, chunk_steps, config.steps, context)
    worker.claim_chunks, worker.claims_episodes = config.flow.refresh_every, config.episodes is not None
    if plan.resume is not None:
        context.event("resume", how="episode-boundary")
    return worker


def _crew(plan: Plan, agent: Any, names: tuple[str | int, ...]) -> Crew:
    """Environments and agent together: compiled where the game and the algorithm are, else in the fastest way there is."""
    from steppe.roles.tabular.rollouts import EpisodeCrew, GameCrew, WorldCrew, game_of

    config, rows = plan.config, plan.segment.num_steps
    agent.begin(plan.num_rows, seeding.generator(config.seed, *names, "policy"))
    seeds = seeding.sequence(config.seed, *names, "env")
    game = game_of(agent, config.env, config.environment, plan.num_envs, seeding.integer(config.seed, *names, "games"))
    if game is not None:
        return GameCrew(agent, game)
    if isinstance(config.agent, ClassicConfig):
        env = make_env(config.env, find(config.env), config.environment)
        return EpisodeCrew(agent, env, seeding.integer(config.seed, *names, "env"))
    return WorldCrew(agent, make_world(config.env, config.environment, plan.num_envs, seeds), rows, seeds)


def _keeper(plan: Plan, parts: Parts, directory: RunDirectory, context: Context) -> Role:
    from steppe.roles.tabular.learner import Keeper

    config = plan.config
    agent: Any = parts.agent or begun(_agent(plan, _device(plan, config.device)), directory)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep, directory.key)
    save = _saver(checkpoints, directory, context, None)
    keeper = Keeper(agent, config.actors, _limits(plan, None), save, context)
    if plan.resume is not None:
        checkpoint = checkpoints.at(plan.resume)
        keeper.restore(checkpoint.weights, checkpoint.state, checkpoint.counters)
    return keeper


def _intake(plan: Plan, script: Script | None, context: Context, log: ArrivalLog | None) -> Intake:
    config, flow = plan.config, plan.config.flow
    if script is not None:
        return Scripted(context.channel, script)
    if plan.lockstep:
        return Rounds(context.channel, config.actors)
    if config.by_gradients:  # each as it comes; how old one may be is for the store to say
        return Window(context.channel, config.actors, 0.0, NEVER, context.clock)
    window = Window(context.channel, config.actors, flow.window_s, flow.max_lag, context.clock)
    if log is not None:
        window.record = log.take
    return window


def _limits(plan: Plan, script: Script | None) -> Limits:
    config = plan.config
    return Limits(
        steps=config.steps,
        episodes=config.episodes,
        publish_every=None if plan.lockstep else config.flow.publish_every or config.agent.publish_every,
        ahead=plan.ahead,
        checkpoint_every_s=config.checkpoint.every_s,
        checkpoint_every_episodes=config.checkpoint.every_episodes,
        stop_on_full_disk=config.checkpoint.full_disk == "stop",
        ended=script.ended if script else None,
    )


def _saver(checkpoints: Checkpoints, directory: RunDirectory, context: Context, log: ArrivalLog | None) -> Save:
    def save(weights: Weights, state: Tree, counters: dict[str, int | float]) -> None:
        started = time.perf_counter()
        if isinstance(context.channel, Marked):
            state = {**state, "channel": context.channel.mark()}
        with noticing_full_disk(directory.checkpoints):
            if log is not None:
                mark = Mark(weights.env_steps, weights.updates, weights.version, weights.sha256())
                counters = {**counters, "arrivals_bytes": log.mark(mark)}
            path = checkpoints.save(weights, state, counters)
        found = [file.stat() for file in path.rglob("*") if file.is_file()]
        fresh = sum(file.st_size for file in found if file.st_nlink == 1)  # the rest is the checkpoint before's too
        cost: dict[str, float] = {"size_bytes": sum(file.st_size for file in found), "new_bytes": fresh}
        cost["write_s"] = time.perf_counter() - started
        context.event("checkpoint", path=str(path.relative_to(directory.path)), **counters, **cost)

    return save


def _arrival_log(plan: Plan, start: Checkpoint | None, directory: RunDirectory, context: Context) -> ArrivalLog:
    """The log from where the run begins or goes on: what was taken in after the checkpoint will be taken in anew."""
    counters = start.counters if start is not None else {"arrivals_bytes": 0, "env_steps": 0, "updates": 0}
    length = int(counters.get("arrivals_bytes", -1))
    log = ArrivalLog(directory.arrivals, length, lambda words: context.event("note", message=words))
    log.begin(plan.config.steps, int(counters["env_steps"]), int(counters["updates"]))
    return log


def begun(agent: Agent, directory: RunDirectory) -> Agent:
    """The agent as the run's directory says it begins: fresh, or with what another run or the caller taught it."""
    start = Checkpoints(directory.start).latest()
    if start is not None:
        agent.load(start.weights)
        agent.restore(start.state["agent"])
    return agent


def _manager(plan: Plan, directory: RunDirectory, context: Context) -> Manager:
    policy = _agent(plan, "cpu")
    archive = RunArchive(directory, plan.config.checkpoint.keep)
    judge = plan.config.evaluation
    return Manager(policy, lambda: make_judge(plan, policy), judge, plan.config.target_return, archive, context)


def make_judge(plan: Plan, policy: Agent, *, seed: int | None = None, render: bool = False) -> Judge:
    """A judge for a policy: as many environments as episodes, up to 32."""
    config = plan.config
    seed = config.seed if seed is None else seed
    record = render or config.evaluation.record
    world = make_world(
        config.env,
        config.environment,
        min(32, config.evaluation.episodes),
        seeding.sequence(seed, "judge", "env"),
        render=record,
        whole_games=True,
    )
    return Judge(world, policy, seed, max_steps=config.evaluation.max_episode_steps)
