"""Build the roles of a run: all wiring from a plan's role and its context to the role object."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from steppe.algorithms import make_agent
from steppe.algorithms.tabular.config import ClassicConfig
from steppe.core.config.tunables import tunable_fields
from steppe.core.contracts.algorithm import Agent, Memory, Tree
from steppe.core.contracts.env import SegmentEnv
from steppe.core.contracts.specs import PushSpec, SegmentSpec
from steppe.core.contracts.transport import Channel, Checkpointable, Role, RoundOffset
from steppe.core.contracts.weights import Weights
from steppe.core.io.atomic_files import raising_disk_full
from steppe.core.system import seeding
from steppe.envs import make_segment_env
from steppe.envs.factory import make_env
from steppe.envs.lookup import find_env
from steppe.records.arrivals import ArrivalLog, LearnerMark
from steppe.records.checkpoints import Checkpoint, Checkpoints
from steppe.records.faults import Faults
from steppe.records.run_directory import RunDirectory
from steppe.replay import make_memory
from steppe.roles.actor import Actor, env_seeds
from steppe.roles.archive import RunArchive
from steppe.roles.context import Context
from steppe.roles.evaluation import Evaluator
from steppe.roles.learner import Learner, RunLimits, SaveCheckpoint
from steppe.roles.manager import Manager
from steppe.roles.quota import EpisodeQuota
from steppe.roles.recorded_schedule import RecordedBatchPolicy, RecordedCollectPolicy, RecordedLearner, RecordedSchedule
from steppe.roles.scheduling import (
    BatchPolicy,
    CollectPolicy,
    FreeCollectPolicy,
    LockstepCollectPolicy,
    RoundBatchPolicy,
    WindowBatchPolicy,
)
from steppe.roles.tuning import LiveHyperparameters
from steppe.runtimes.plan import REPLAY, Plan, RoleSpec

if TYPE_CHECKING:
    from steppe.params.client import ParameterClient
    from steppe.roles.gradients.learner import GradientMemory
    from steppe.roles.tabular.rollouts import TabularRollout


NO_MAX_LAG = 2**62  # versions


@dataclass(frozen=True)
class SuppliedComponents:
    """Objects of the caller that replace what the plan would build, for roles in the caller's process."""

    agent: Agent | None = None
    memory: Memory | None = None
    schedule: RecordedSchedule | None = None  # schedule of the recorded run that this run repeats
    server: Any = None  # a ParameterServer or ParameterClient that receives the workers' pushes
    node: ParameterClient | None = None  # a cluster node's client of its parameter server


def build_role(
    plan: Plan, role: RoleSpec, directory: RunDirectory, context: Context, parts: SuppliedComponents | None = None
) -> Role:
    """Build a role of the plan, ready to step."""
    parts = parts or SuppliedComponents()
    if role.kind == "manager":
        return _build_manager(plan, directory, context)
    if plan.config.by_gradients:
        worker = role.kind == "worker"
        return (
            _build_gradient_worker(plan, role, directory, context)
            if worker
            else _build_gradient_learner(plan, parts, directory, context)
        )
    if role.kind == "worker":
        return _build_tabular_worker(plan, role, context)
    if plan.config.mode == "workers":
        return _build_tabular_learner(plan, parts, directory, context)
    if role.kind == REPLAY:
        return _build_replay_server(plan, directory, context)
    if role.kind == "learner":
        return _build_learner(plan, parts, directory, context)
    return _build_actor(plan, role, parts.schedule, directory, context)


def channel_spec(plan: Plan, agent: Agent | None = None) -> SegmentSpec:
    """Return the layout of the channel's messages: a segment, or a gradient, whose size depends on the agent."""
    if not plan.config.by_gradients:
        return plan.segment
    agent = agent or _make_agent(plan, "cpu")
    return PushSpec.of(-(-agent.weights().layout.nbytes // 4))


def _make_agent(plan: Plan, device: str) -> Agent:
    config = plan.config
    seed = seeding.integer_seed(config.seed, "agent")
    return make_agent(config.algo, config.agent, plan.spec, seed=seed, device=device)


def _resolve_device(plan: Plan, device: str) -> str:
    """Resolve the agent's device, without importing torch for tabular agents."""
    if plan.config.agent.in_table:
        return device
    from steppe.algorithms.nn.device import resolve_device

    return resolve_device(device)


def _build_actor(
    plan: Plan, role: RoleSpec, schedule: RecordedSchedule | None, directory: RunDirectory, context: Context
) -> Actor:
    config = plan.config
    env, policy, collect_policy = _collecting_parts(plan, role, context.channel)
    if schedule is not None:
        collect_policy = follower = RecordedCollectPolicy(
            role.index, schedule, schedule.retaining_store(context.weights)
        )
        context = replace(context, weights=follower)
    save_fault = None if directory.temporary else Faults(directory).save
    actor = Actor(role.index, env, policy, collect_policy, context, epoch=context.epoch, save_fault=save_fault)
    actor.quota = _episode_quota(plan, role, env)
    return _resume_if_known(actor, config.seed)


def _collecting_parts(plan: Plan, role: RoleSpec, channel: Channel) -> tuple[SegmentEnv, Agent, CollectPolicy]:
    """Build what every collecting role has: environment, policy and collect policy."""
    config = plan.config
    env = make_segment_env(config.env, config.environment, plan.num_envs, env_seeds(config.seed, role.index))
    policy = _make_agent(plan, _resolve_device(plan, config.flow.actor_device))
    stream = seeding.generator(config.seed, "actor", role.index, "policy")
    policy.begin(plan.num_rows, stream, actor=role.index, num_actors=plan.num_writers)
    round_offset = (lambda: channel.round_offset) if isinstance(channel, RoundOffset) else (lambda: 0)
    return env, policy, LockstepCollectPolicy(plan.ahead, round_offset) if plan.lockstep else FreeCollectPolicy()


def _episode_quota(plan: Plan, role: RoleSpec, env: SegmentEnv) -> EpisodeQuota | None:
    """Return an actor's episode quota; None in mode async, where the learner counts, as it may drop segments."""
    total = plan.config.episodes
    if total is None or plan.config.mode == "async":
        return None
    return EpisodeQuota(total, role.index, plan.num_writers, env)


def _resume_if_known(actor: Actor, seed: int) -> Actor:
    """Resume the actor after the last segment that the channel has of its index, and post that to the event log."""
    last = actor.context.channel.recall(actor.index)
    if last is not None:
        seeds = env_seeds(seed, actor.index, after=last[0])
        actor.context.event("resume", sequence=last[0] + 1, how=actor.resume(*last, seeds))
    return actor


def _build_gradient_worker(plan: Plan, role: RoleSpec, directory: RunDirectory, context: Context) -> Actor:
    from steppe.roles.gradients.worker import GradientSource, GradientWorker

    config = plan.config
    env, agent, collect_policy = _collecting_parts(plan, role, context.channel)
    worker_share = {
        name: max(1, getattr(config.agent, name) // config.actors)
        for name in ("buffer_size", "learning_starts")
        if getattr(config.agent, name, 0)
    }
    memory = make_memory(
        config.agent.model_copy(update=worker_share),
        plan.segment,
        stream=seeding.generator(config.seed, "worker", role.index, context.epoch, "memory"),
        total_steps=config.steps,
    )
    gradient_source = GradientSource(
        agent,
        memory,
        plan.segment,
        config.steps,
        on_policy=config.agent.memory == "rollout",
        deltas=config.params.deltas,
    )
    save_fault = None if directory.temporary else Faults(directory).save
    worker = GradientWorker(role.index, env, gradient_source, collect_policy, context, save_fault=save_fault)
    worker.quota = _episode_quota(plan, role, env)
    return _resume_if_known(worker, config.seed)


def _build_gradient_learner(
    plan: Plan, parts: SuppliedComponents, directory: RunDirectory, context: Context
) -> Learner:
    from steppe.roles.gradients.learner import GradientLearner

    config = plan.config
    agent = parts.agent or load_start(_make_agent(plan, _resolve_device(plan, config.device)), directory)
    store = (
        _make_gradient_memory(plan, agent, directory)
        if parts.server is None
        else _make_server_gradient_memory(plan, agent, parts, context)
    )
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep, directory.key)
    save = _make_checkpoint_saver(checkpoints, directory, context, None)
    batch_policy = _make_batch_policy(plan, None, context, None)
    learner = GradientLearner(store, batch_policy, _make_run_limits(plan, None), save, context, segment=plan.segment)
    learner.live_hyperparameters = LiveHyperparameters(agent, tunable_fields(config))
    if plan.resume is not None:
        checkpoint = checkpoints.load(plan.resume)
        learner.restore(checkpoint.weights, checkpoint.state, checkpoint.counters)
    return learner


def _make_gradient_memory(plan: Plan, agent: Agent, directory: RunDirectory) -> GradientMemory:
    """Build the gradient memory of a run with its own parameter server."""
    from steppe.roles.gradients.learner import GradientMemory, make_server

    config, start = plan.config, Checkpoints(directory.start).latest()
    known = start.state.get("server") if start is not None else None
    server = make_server(config, agent, known["parameters"] if known is not None else None)
    if known is not None:
        server.restore(known)
    return GradientMemory(
        agent,
        server,
        config.actors,
        pushes_per_update=None if config.params.in_rounds else config.params.update_every or 1,
        use_agent_learning_rate=config.params.learning_rate is None,
    )


def _make_server_gradient_memory(
    plan: Plan, agent: Agent, parts: SuppliedComponents, context: Context
) -> GradientMemory:
    """Build the gradient memory of a run that uses the caller's parameter server."""
    from steppe.roles.gradients.external_server import ServerGradientMemory

    rounds = bool(plan.config.params.in_rounds)
    return ServerGradientMemory(
        agent, parts.server, plan.config.actors, in_rounds=rounds, ending=lambda: context.ending
    )


def _build_learner(plan: Plan, parts: SuppliedComponents, directory: RunDirectory, context: Context) -> Learner:
    config = plan.config
    agent = parts.agent or load_start(_make_agent(plan, _resolve_device(plan, config.device)), directory)
    memory = parts.memory or make_memory(
        config.agent,
        plan.segment,
        stream=seeding.generator(config.seed, "memory"),
        total_steps=config.steps,
        num_actors=plan.num_writers,
        directory=directory.path,
        num_buffers=config.flow.replay_roles or 1,
        replay_clients=context.replay_clients,
    )
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep, directory.key)
    checkpoint = checkpoints.load(plan.resume) if plan.resume is not None else None
    log = _open_arrival_log(plan, checkpoint, directory, context) if config.flow.record_arrivals else None
    if parts.schedule is not None:
        context = replace(context, weights=parts.schedule.retaining_store(context.weights))
    save = _make_checkpoint_saver(checkpoints, directory, context, log)
    batch_policy = _make_batch_policy(plan, parts.schedule, context, log)
    components = (agent, memory, batch_policy, _make_run_limits(plan, parts.schedule), save, context)
    learner = _build_cluster_learner(plan, parts.node, *components) if config.cluster.joined else Learner(*components)
    if parts.schedule is not None:
        learner = scripted = RecordedLearner(*components)
        scripted.changes = parts.schedule.changes
    learner.live_hyperparameters = LiveHyperparameters(agent, tunable_fields(config))
    if checkpoint is not None:
        learner.restore(checkpoint.weights, checkpoint.state, checkpoint.counters)
    return learner


def _build_replay_server(plan: Plan, directory: RunDirectory, context: Context) -> Role:
    from steppe.replay.factory import make_replay_shard
    from steppe.roles.replay_server import ReplayServer

    assert context.rpc_server is not None, "a replay role has an RPC server"
    num_shards = len(plan.replay)
    return ReplayServer(
        make_replay_shard(plan.config.agent, plan.segment, num_shards, directory.path), context.rpc_server, context
    )


def _build_cluster_learner(
    plan: Plan,
    client: ParameterClient | None,
    agent: Agent,
    memory: Memory,
    batch_policy: BatchPolicy,
    limits: RunLimits,
    save: SaveCheckpoint,
    context: Context,
) -> Learner:
    """Build a learner that is a cluster node, with the caller's client if there is one."""
    from steppe.roles.cluster.node import (  # network modules that only these runs need
        ClusterNode,
        NodeLearner,
        connect,
    )

    learner = NodeLearner(agent, memory, batch_policy, limits, save, context)
    cluster, external_client = plan.config.cluster, client is not None
    learner.node = ClusterNode(
        cluster, agent, client or connect(cluster), lambda: context.ending, external_client=external_client
    )
    return learner


def _build_tabular_worker(plan: Plan, role: RoleSpec, context: Context) -> Role:
    from steppe.roles.tabular.worker import TabularWorker  # compiled modules that only these runs need

    config, resumed_from = plan.config, 0 if plan.resume is None else plan.resume + 1
    names = ("worker", role.index, context.epoch, resumed_from)
    agent = _make_agent(plan, _resolve_device(plan, config.device))
    rollout = _make_tabular_rollout(plan, agent, names)
    chunk_steps = plan.segment.num_steps * (1 if isinstance(config.agent, ClassicConfig) else plan.num_envs)
    chunk_steps = max(chunk_steps, rollout.min_steps)
    worker = TabularWorker(role.index, rollout, chunk_steps, config.steps, context)
    worker.claim_chunks, worker.claims_episodes = config.flow.refresh_every, config.episodes is not None
    if plan.resume is not None:
        context.event("resume", how="episode-boundary")
    return worker


def _make_tabular_rollout(plan: Plan, agent: Any, names: tuple[str | int, ...]) -> TabularRollout:
    """Build a tabular worker's rollout: compiled if game and algorithm are, else the fastest possible one."""
    from steppe.roles.tabular.rollouts import (
        EpisodeTabularRollout,
        GameTabularRollout,
        VectorTabularRollout,
        make_game_trainer,
    )

    config, rows = plan.config, plan.segment.num_steps
    agent.begin(plan.num_rows, seeding.generator(config.seed, *names, "policy"))
    seeds = seeding.seed_sequence(config.seed, *names, "env")
    game = make_game_trainer(
        agent, config.env, config.environment, plan.num_envs, seeding.integer_seed(config.seed, *names, "games")
    )
    if game is not None:
        return GameTabularRollout(agent, game)
    if isinstance(config.agent, ClassicConfig):
        env = make_env(config.env, find_env(config.env), config.environment)
        return EpisodeTabularRollout(agent, env, seeding.integer_seed(config.seed, *names, "env"))
    return VectorTabularRollout(
        agent, make_segment_env(config.env, config.environment, plan.num_envs, seeds), rows, seeds
    )


def _build_tabular_learner(plan: Plan, parts: SuppliedComponents, directory: RunDirectory, context: Context) -> Role:
    from steppe.roles.tabular.learner import TabularLearner

    config = plan.config
    agent: Any = parts.agent or load_start(_make_agent(plan, _resolve_device(plan, config.device)), directory)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep, directory.key)
    save = _make_checkpoint_saver(checkpoints, directory, context, None)
    learner = TabularLearner(agent, config.actors, _make_run_limits(plan, None), save, context)
    if plan.resume is not None:
        checkpoint = checkpoints.load(plan.resume)
        learner.restore(checkpoint.weights, checkpoint.state, checkpoint.counters)
    return learner


def _make_batch_policy(
    plan: Plan, schedule: RecordedSchedule | None, context: Context, log: ArrivalLog | None
) -> BatchPolicy:
    config, flow = plan.config, plan.config.flow
    if schedule is not None:
        return RecordedBatchPolicy(context.channel, schedule)
    if plan.lockstep:
        return RoundBatchPolicy(context.channel, config.actors)
    if config.by_gradients:  # each push on arrival; the parameter server limits the staleness
        return WindowBatchPolicy(context.channel, config.actors, 0.0, NO_MAX_LAG, context.clock)
    window = WindowBatchPolicy(context.channel, config.actors, flow.window_s, flow.max_lag, context.clock)
    if log is not None:
        window.record = log.take
    return window


def _make_run_limits(plan: Plan, schedule: RecordedSchedule | None) -> RunLimits:
    config = plan.config
    return RunLimits(
        steps=config.steps,
        episodes=config.episodes,
        publish_every=None if plan.lockstep else config.flow.publish_every or config.agent.publish_every,
        ahead=plan.ahead,
        checkpoint_every_s=config.checkpoint.every_s,
        checkpoint_every_episodes=config.checkpoint.every_episodes,
        stop_on_full_disk=config.checkpoint.full_disk == "stop",
        ended=schedule.ended if schedule else None,
    )


def _make_checkpoint_saver(
    checkpoints: Checkpoints, directory: RunDirectory, context: Context, log: ArrivalLog | None
) -> SaveCheckpoint:
    def save(weights: Weights, state: Tree, counters: dict[str, int | float]) -> None:
        started = time.perf_counter()
        if isinstance(context.channel, Checkpointable):
            state = {**state, "channel": context.channel.mark()}
        with raising_disk_full(directory.checkpoints):
            if log is not None:
                mark = LearnerMark(weights.env_steps, weights.updates, weights.version, weights.sha256())
                counters = {**counters, "arrivals_bytes": log.mark(mark)}
            path = checkpoints.save(weights, state, counters)
        found = [file.stat() for file in path.rglob("*") if file.is_file()]
        fresh = sum(file.st_size for file in found if file.st_nlink == 1)  # others are shared with an older checkpoint
        cost: dict[str, float] = {"size_bytes": sum(file.st_size for file in found), "new_bytes": fresh}
        cost["write_s"] = time.perf_counter() - started
        context.event("checkpoint", path=str(path.relative_to(directory.path)), **counters, **cost)

    return save


def _open_arrival_log(plan: Plan, start: Checkpoint | None, directory: RunDirectory, context: Context) -> ArrivalLog:
    """Open the arrival log, truncated to the checkpoint if the run resumes: later arrivals will be received again."""
    counters = start.counters if start is not None else {"arrivals_bytes": 0, "env_steps": 0, "updates": 0}
    length = int(counters.get("arrivals_bytes", -1))
    log = ArrivalLog(directory.arrivals, length, lambda text: context.event("note", message=text))
    log.begin(plan.config.steps, int(counters["env_steps"]), int(counters["updates"]))
    return log


def load_start(agent: Agent, directory: RunDirectory) -> Agent:
    """Load the run's initial weights and state into the agent, if another run or the caller supplied them."""
    start = Checkpoints(directory.start).latest()
    if start is not None:
        agent.load(start.weights)
        agent.restore(start.state["agent"])
    return agent


def _build_manager(plan: Plan, directory: RunDirectory, context: Context) -> Manager:
    policy = _make_agent(plan, "cpu")
    archive = RunArchive(directory, plan.config.checkpoint.keep)
    evaluation = plan.config.evaluation
    return Manager(
        policy, lambda: make_evaluator(plan, policy), evaluation, plan.config.target_return, archive, context
    )


def make_evaluator(plan: Plan, policy: Agent, *, seed: int | None = None, render: bool = False) -> Evaluator:
    """Build an evaluator for a policy, with as many environments as episodes, up to 32."""
    config = plan.config
    seed = config.seed if seed is None else seed
    record = render or config.evaluation.record
    env = make_segment_env(
        config.env,
        config.environment,
        min(32, config.evaluation.episodes),
        seeding.seed_sequence(seed, "judge", "env"),
        render=record,
        whole_games=True,
    )
    return Evaluator(env, policy, seed, max_steps=config.evaluation.max_episode_steps)
