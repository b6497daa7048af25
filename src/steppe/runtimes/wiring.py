"""All the wiring of a run in one place: from a plan's role and its context to the role itself."""

from __future__ import annotations

from dataclasses import dataclass

from steppe.agents import make_agent
from steppe.agents.device import resolve_device
from steppe.core import seeding
from steppe.core.agent import Agent, Memory, Tree
from steppe.core.links import Role
from steppe.core.weights import Weights
from steppe.envs import make_world
from steppe.records.checkpoints import Checkpoints
from steppe.records.directory import RunDirectory
from steppe.replay import make_memory
from steppe.roles.actor import Actor
from steppe.roles.archive import RunArchive
from steppe.roles.context import Context
from steppe.roles.evaluation import Judge
from steppe.roles.gates import Free, Lockstep, Rounds, Window
from steppe.roles.learner import Learner, Limits
from steppe.roles.manager import Manager
from steppe.runtimes.plan import Plan, RoleSpec


@dataclass(frozen=True)
class Parts:
    """Objects of the caller's that take the place of what the plan would build, where the roles share his process."""

    agent: Agent | None = None
    memory: Memory | None = None


def build_role(
    plan: Plan, role: RoleSpec, directory: RunDirectory, context: Context, parts: Parts | None = None
) -> Role:
    """The role that a plan describes, ready to step."""
    if role.kind == "learner":
        return _learner(plan, parts or Parts(), directory, context)
    return _actor(plan, role, context) if role.kind == "actor" else _manager(plan, directory, context)


def _agent(plan: Plan, device: str) -> Agent:
    config = plan.config
    seed = seeding.integer(config.seed, "agent")
    return make_agent(config.algo, config.agent, plan.spec, seed=seed, device=device)


def _actor(plan: Plan, role: RoleSpec, context: Context) -> Actor:
    config = plan.config
    seeds = seeding.sequence(config.seed, "actor", role.index, "env")
    world = make_world(config.env, config.environment, plan.num_envs, seeds)
    policy = _agent(plan, resolve_device(config.flow.actor_device))
    stream = seeding.generator(config.seed, "actor", role.index, "policy")
    policy.begin(plan.num_envs, stream, actor=role.index, num_actors=config.actors)
    actor = Actor(role.index, world, policy, Lockstep() if plan.lockstep else Free(), context, epoch=context.epoch)
    last = context.channel.recall(role.index)
    if last is not None:
        again = seeding.sequence(config.seed, "actor", role.index, "env", "again", last[0])
        context.event("resume", sequence=last[0] + 1, how=actor.resume(*last, again))
    return actor


def _learner(plan: Plan, parts: Parts, directory: RunDirectory, context: Context) -> Learner:
    config = plan.config
    agent = parts.agent or _begun(_agent(plan, resolve_device(config.device)), directory)
    memory = parts.memory or make_memory(
        config.agent,
        plan.segment,
        stream=seeding.generator(config.seed, "memory"),
        total_steps=config.steps,
        num_actors=config.actors,
    )
    flow = config.flow
    if plan.lockstep:
        intake: Rounds | Window = Rounds(context.channel, config.actors)
    else:
        intake = Window(context.channel, config.actors, flow.window_s, flow.max_lag, context.clock)
    limits = Limits(
        steps=config.steps,
        episodes=config.episodes,
        publish_every=None if plan.lockstep else flow.publish_every,
        checkpoint_every_s=config.checkpoint.every_s,
        checkpoint_every_episodes=config.checkpoint.every_episodes,
    )
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)

    def save(weights: Weights, state: Tree, counters: dict[str, int | float]) -> None:
        path = checkpoints.save(weights, state, counters)
        context.event("checkpoint", path=str(path.relative_to(directory.path)), **counters)

    learner = Learner(agent, memory, intake, limits, save, context)
    if plan.resume is not None:
        checkpoint = checkpoints.at(plan.resume)
        learner.restore(checkpoint.weights, checkpoint.state, checkpoint.counters)
    return learner


def _begun(agent: Agent, directory: RunDirectory) -> Agent:
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
    )
    return Judge(world, policy, seed, max_steps=config.evaluation.max_episode_steps)
