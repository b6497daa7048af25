"""`--actors auto`, `--envs auto`: measure for a few seconds and choose numbers for this machine and this run.

Choose the smallest number of environments whose throughput is near the best, and as many actors as keep the learner
busy and have cores. The choice becomes part of the run's configuration: resuming or repeating the run does not measure
again.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from dataclasses import dataclass, replace

import numpy as np

from steppe.algorithms import make_agent
from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import ResolvedConfig, RunConfig
from steppe.core.contracts.algorithm import Agent, Progress
from steppe.core.contracts.env import SegmentEnv
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import EnvSpec
from steppe.core.system import seeding
from steppe.envs.factory import make_segment_env, probe
from steppe.replay.factory import make_memory
from steppe.roles.bound_policy import BoundPolicy
from steppe.runtimes.handle import temporary_torch_settings
from steppe.runtimes.plan import segment_spec

TRIAL_S = 0.15  # for collecting, and again for learning, with each number of environments
NUM_TRIALS = 3  # collecting trials within that time: other load on the machine slows some of them down
MAX_LEARNING_S = 20 * TRIAL_S  # upper limit for learning, however slow it is
NEAR_BEST_SHARE = 0.9  # of the best throughput is good enough
MAX_ACTORS = 64
VECTOR_ENV_COUNTS, LOOP_ENV_COUNTS = (16, 32, 64, 128, 256, 512), (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class StepCost:
    """Cost of one environment step for an actor and for the learner, in seconds, with `envs` environments per actor."""

    envs: int
    collect_s: float
    learn_s: float
    busy: float  # fraction of the collecting time on the CPU; the rest is spent waiting for the environment

    def steps_per_s(self, actors: int, *, overlap: bool) -> float:
        """Return the throughput of a run, assuming enough cores."""
        collect_s = self.collect_s / actors
        return 1.0 / (max(collect_s, self.learn_s) if overlap else collect_s + self.learn_s)


def resolve_auto_settings(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration with chosen numbers in place of `auto`."""
    if not resolved.auto:
        return resolved
    config = resolved.config
    spec = probe(config.env, config.environment)
    config.agent.require(spec, config.algo)
    if config.mode == "workers":
        return _autotune_workers(resolved, spec)
    overlap = config.mode != "single"
    with temporary_torch_settings(config.flow.threads, config.agent):
        cost = (
            _find_best_envs(config, spec, overlap=overlap)
            if "envs" in resolved.auto
            else _measure_step_cost(config, spec, config.envs)
        )
    chosen = {"envs": cost.envs} if "envs" in resolved.auto else {}
    if "actors" in resolved.auto:
        chosen["actors"] = choose_actors(cost, usable_cores()) if overlap else 1
    sources = resolved.sources | dict.fromkeys(chosen, "calibration")
    return replace(resolved, config=config.model_copy(update=chosen), sources=sources, auto=())


def _autotune_workers(resolved: ResolvedConfig, spec: EnvSpec) -> ResolvedConfig:
    """Choose one worker per core, as a worker keeps a core busy, and the default number of environments for each."""
    config = resolved.config
    actors = usable_cores() if "actors" in resolved.auto else config.actors
    chosen: dict[str, int] = {"actors": actors} if "actors" in resolved.auto else {}
    if "envs" in resolved.auto:
        chosen["envs"] = config.agent.resolve_defaults(spec, actors, None)[1]
    sources = resolved.sources | dict.fromkeys(chosen, "calibration")
    return replace(resolved, config=config.model_copy(update=chosen), sources=sources, auto=())


def choose_envs(costs: list[StepCost], *, overlap: bool) -> StepCost:
    """Return the fewest environments with a throughput near the best: fewer steps then pass between two updates."""
    best = max(cost.steps_per_s(1, overlap=overlap) for cost in costs)
    return next(cost for cost in costs if cost.steps_per_s(1, overlap=overlap) >= NEAR_BEST_SHARE * best)


def choose_actors(cost: StepCost, cores: int) -> int:
    """Return as many actors as keep the learner busy.

    Actors that compute need a core each, besides the learner's core if it has work to do.
    """
    enough = math.ceil(cost.collect_s / max(cost.learn_s, 1e-9) * NEAR_BEST_SHARE)
    learner_core = 1 if cost.learn_s > 0.25 * cost.collect_s else 0
    limit = MAX_ACTORS if cost.busy < 0.5 else cores - learner_core
    return max(1, min(enough, limit))


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find_best_envs(config: RunConfig, spec: EnvSpec, *, overlap: bool) -> StepCost:
    """Measure increasing numbers of environments until two in a row bring no improvement."""
    costs: list[StepCost] = []
    for envs in VECTOR_ENV_COUNTS if spec.native_vector else LOOP_ENV_COUNTS:
        costs.append(_measure_step_cost(config, spec, envs))
        rates = [cost.steps_per_s(1, overlap=overlap) for cost in costs]
        if len(rates) > 2 and max(rates[-2:]) < max(rates[:-2]) * 1.02:
            break
    return choose_envs(costs, overlap=overlap)


def _measure_step_cost(config: RunConfig, spec: EnvSpec, num_envs: int | None) -> StepCost:
    agent_config, envs = config.agent.resolve_defaults(spec, 1, num_envs)
    agent = make_agent(config.algo, agent_config, spec, seed=config.seed)
    segment = Segment.blank(segment_spec(agent_config, spec, envs))
    collect_s, busy = _measure_collecting(config, agent, segment)
    return StepCost(envs, collect_s, _measure_learning(agent, agent_config, segment), busy)


def _measure_collecting(config: RunConfig, agent: Agent, segment: Segment) -> tuple[float, float]:
    """Return (seconds per environment step, fraction of them on the CPU); fills the segment with observed steps."""
    seeds = seeding.seed_sequence(config.seed, "calibration")
    num_envs = segment.spec.num_envs // segment.spec.num_agents
    env = make_segment_env(config.env, config.environment, num_envs, seeds)
    try:
        env.reset(segment["obs"][0])
        agent.begin(segment.spec.num_envs, seeding.generator(config.seed, "calibration", "act"))
        _fill(agent, env, segment, 0.0)  # warm-up: compiles kernels
        trials = [_timed_fill(agent, env, segment, TRIAL_S / NUM_TRIALS) for _ in range(NUM_TRIALS)]
        while not segment.env_steps:  # only resets, e.g. between episodes of equal length: nothing to learn from
            _fill(agent, env, segment, 0.0)
    finally:
        env.close()
    num_filled = min(trials[-1][0], segment.spec.num_steps)
    steps, wall_s, cpu_s = min(trials, key=lambda trial: trial[1] / trial[0])
    for column in segment.columns.values():  # fill rows that there was no time for with copies of observed ones
        column[num_filled:] = column[np.arange(len(column) - num_filled) % num_filled]
    return wall_s / (steps * num_envs), cpu_s / wall_s


def _timed_fill(agent: Agent, env: SegmentEnv, segment: Segment, seconds: float) -> tuple[int, float, float]:
    """Return (vector steps, wall seconds, CPU seconds)."""
    started_s, cpu_started_s = time.perf_counter(), time.thread_time()
    steps = _fill(agent, env, segment, seconds)
    return steps, time.perf_counter() - started_s, time.thread_time() - cpu_started_s


def _fill(agent: Agent, env: SegmentEnv, segment: Segment, seconds: float) -> int:
    """Act for that many seconds, at least one step, overwriting the segment cyclically; return the vector steps."""
    bound_policy = BoundPolicy(agent, env)
    until_s, steps, last = time.perf_counter() + seconds, 0, segment.spec.num_steps
    while not steps or time.perf_counter() < until_s:
        t = steps % last
        if steps and t == 0:
            segment["obs"][0] = segment["obs"][last]
        segment.write(t, bound_policy.act(segment["obs"][t]))
        env.step(segment["action"][t], segment, t)
        steps += 1
    segment["obs"][0] = segment["obs"][(steps - 1) % last + 1]
    return steps


def _measure_learning(agent: Agent, config: AgentConfig, segment: Segment) -> float:
    """Return the seconds of learning per environment step."""
    window = sum(getattr(config, name, 0) for name in ("burn_in", "sequence_length", "n_step"))
    small_settings = {
        "learning_starts": 0,
        "buffer_size": max(4096, getattr(config, "batch_size", 1), 8 * window),
        "buffer_storage": "memory",
    }
    config = config.model_copy(update={key: value for key, value in small_settings.items() if hasattr(config, key)})
    memory = make_memory(config, segment.spec, stream=np.random.default_rng(0), total_steps=None)
    until_s, spent_s, steps = time.perf_counter() + MAX_LEARNING_S, 0.0, 0.0
    for number in itertools.count():
        segment.header = SegmentHeader("calibration", 0, 0, number, 0)
        agent.observe(segment, Progress(segment.env_steps * (number + 1), 10**9))
        memory.add([segment])
        while memory.ready() and time.perf_counter() < until_s:
            started_s = time.perf_counter()
            batch = memory.sample()
            memory.update(batch, agent.learn(batch))
            if number:  # the first round compiles kernels
                spent_s += time.perf_counter() - started_s
                steps += _env_steps_per_batch(config, segment)
        if spent_s > TRIAL_S or time.perf_counter() > until_s:
            break
    return spent_s / steps if steps else MAX_LEARNING_S / segment.env_steps


def _env_steps_per_batch(config: AgentConfig, segment: Segment) -> float:
    """Return the environment steps per batch: a whole rollout's, or the sampled steps divided by samples_per_insert."""
    if config.memory == "rollout":
        return float(segment.env_steps)
    sampled_steps = getattr(config, "batch_size", 1) * getattr(config, "sequence_length", 1)  # steps of single agents
    return sampled_steps / float(getattr(config, "samples_per_insert", 1.0)) * segment.env_steps / segment.num_valid
