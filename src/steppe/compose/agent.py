"""DistributedAgent: an algorithm with its settings; the agent itself is built once it is bound to an environment.

Its methods take and return dictionaries, and convert them to batches and flat weights (batches.py, named_weights.py).
Building the agent imports torch; describing it does not, so the process that supervises a run never needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from steppe.compose.batches import stack_experiences, to_segment, to_sequence_batch, to_transition_batch
from steppe.compose.collector import PolicySnapshot
from steppe.compose.environment import DistributedEnvironment
from steppe.compose.named_weights import flat_gradient, named_gradient, with_arrays
from steppe.compose.settings import algorithm_name, choose_device, resolve_agent_config
from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import RunConfig
from steppe.core.contracts.algorithm import Agent, Learned, Progress
from steppe.core.contracts.errors import ConfigError, RunNotFound, UsageError
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import EnvSpec, SegmentSpec
from steppe.core.system import seeding
from steppe.core.system.typecheck import typechecked
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.handle import temporary_torch_settings
from steppe.runtimes.plan import Plan
from steppe.training.initial_weights import load_result

_COUNTERS = ("env_steps", "paid_steps", "shuffles")
THREADS = 1  # as in a run (flow.threads): more would change results bitwise
_NO_RUNS = {"updates": 0, "env_steps": 0, "episodes": 0}


@dataclass
class _LearningStats:
    """What the agent learned from since it was made, or since the last reset."""

    batches: int = 0
    updates: int = 0
    experiences: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def add(self, learned: Learned, experiences: int) -> None:
        self.batches += 1
        self.updates += learned.updates
        self.experiences += experiences
        self.last = dict(learned.stats)
        for name, value in learned.stats.items():
            self.sums[name] = self.sums.get(name, 0.0) + value


@typechecked
class DistributedAgent:
    """An agent that acts and learns: an algorithm by name, `module:Class`, class, or an existing agent.

    The numbers have the same meaning as in Q-learning: `update_frequency` environment steps per update of `batch_size`
    transitions, `target_update_frequency` environment steps between copies into the target network. For `ppo`
    `batch_size` is the minibatch, and the last two have no effect. `config` has further settings of the algorithm by
    name, or all of them as an AgentConfig. Call `bind` with an environment before using the agent alone; a MainLoop
    does that.
    """

    def __init__(
        self,
        algorithm: str | type | Agent,
        learning_rate: float = 0.001,
        batch_size: int = 32,
        update_frequency: int = 4,
        target_update_frequency: int = 100,
        use_gpu: bool = False,
        device: str | None = None,
        *,
        config: AgentConfig | Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        arguments = {
            "learning_rate": learning_rate,
            "batch_size": batch_size,
            "update_frequency": update_frequency,
            "target_update_frequency": target_update_frequency,
        }
        self.algo = algorithm_name(algorithm)
        self.config, decided = resolve_agent_config(algorithm, arguments, config)
        self.device, self.seed = choose_device(device, use_gpu=use_gpu), seed
        self.decided = {f"agent.{name}": value for name, value in decided.items()} | {"algo": self.algo}
        self.decided |= {"device": self.device} | ({} if seed is None else {"seed": seed})
        self._agent: Agent | None = algorithm if isinstance(algorithm, Agent) else None
        self._environment: DistributedEnvironment | EnvSpec | None = None
        self._source: RunDirectory | None = None  # a run whose weights are loaded at the next use
        self._env_steps, self._credited_steps, self._num_shuffles = 0, 0.0, 0
        self._total_steps: int | None = None
        self._stats = _LearningStats()
        self._run: Any = None  # the view of a loop's newest run
        self._runs = dict(_NO_RUNS)  # of the runs before it, since the last reset

    @classmethod
    def of(cls, config: RunConfig) -> DistributedAgent:
        """Return the agent of a run's configuration, exactly."""
        agent = cls(config.algo, config=config.agent, seed=config.seed)
        agent.device = agent.decided["device"] = config.device  # the GPU is checked when the agent is built
        return agent

    def bind(self, environment_or_spec: DistributedEnvironment | EnvSpec) -> Self:
        """Bind the agent to an environment. It is built at its first use; then the environment cannot change any more.

        If the environment's configuration leaves `observations` open, it is set to what the agent takes: state indices
        for tables.
        """
        if isinstance(environment_or_spec, DistributedEnvironment):
            environment = environment_or_spec.config
            if environment.observations is None and self.config.observations != "values":
                environment_or_spec.settle(environment.model_copy(update={"observations": self.config.observations}))
        if self._environment is not None and self.built and _spec(environment_or_spec) != self.spec:
            raise UsageError(
                f"this agent was built for {self.spec.id}: make another DistributedAgent for another environment"
            )
        self._environment = environment_or_spec
        return self

    def settle(self, config: AgentConfig, seed: int, total_steps: int | None = None) -> None:
        """Apply the settings that a run's configuration adds; an agent that is already built keeps its own.

        `total_steps` is the length that schedules use.
        """
        self._total_steps = total_steps
        if not self.built:
            self.config, self.seed = config, seed

    @property
    def built(self) -> bool:
        """Whether there are weights already, or a run to load them from."""
        return self._agent is not None or self._source is not None

    @property
    def spec(self) -> EnvSpec:
        """The spec of the environment that the agent is bound to."""
        if self._environment is None:
            raise UsageError(
                "this agent is not bound to an environment yet: call bind(environment) first, or give it to a MainLoop"
            )
        return _spec(self._environment)

    @property
    def agent(self) -> Agent:
        """The agent itself, in this process; built if necessary, with the weights of the last run if there was one."""
        if self._agent is None:
            from steppe.algorithms import make_agent

            spec, environment = self.spec, self._environment
            workers = (
                (environment.num_workers, environment.envs_per_worker)
                if isinstance(environment, DistributedEnvironment)
                else (1, None)
            )
            self.config, _ = self.config.resolve_defaults(spec, *workers)
            seed, device = seeding.integer_seed(self.seed or 0, "agent"), self.device
            if not self.config.in_table:
                from steppe.algorithms import resolve_device

                device = resolve_device(device)
            self._agent = make_agent(self.algo, self.config, spec, seed=seed, device=device)
        if self._source is not None:
            source, self._source = self._source, None
            load_result(self._agent, source)
        return self._agent

    def recipe(self, environment: DistributedEnvironment) -> PolicySnapshot:
        """Return what workers in that environment need to act; bind the agent to it if it is unbound."""
        if self._environment is None:
            self.bind(environment)
        weights = self.agent.weights()  # first: building the agent resolves the defaults of its configuration
        return PolicySnapshot(self.algo, self.config, weights)

    def learn_from_batch(self, batch: Mapping[str, Any] | Batch) -> dict[str, Any]:
        """Learn from one batch and return its statistics.

        Replay agents take flat transitions (obs, action, reward, next_obs, terminated), and return `priorities` if the
        batch has `indices`. On-policy agents take a rollout [T, B], or flat transitions in order with logp and value.
        Agents that learn from sequences take time windows as `GlobalBuffer.get_batch` samples them.
        """
        arguments = _columns(batch)
        with temporary_torch_settings(THREADS, self.config):
            if self.config.memory == "rollout":
                return self._learn_rollout(arguments)
            checked_batch = self._replay_batch(arguments)  # first: a batch that is refused must change nothing
            in_windows = self.config.memory == "sequences"
            rows = int(np.count_nonzero(checked_batch["learn"])) if in_windows else len(checked_batch["reward"])
            sampled_rows = rows if in_windows else self._batch_size()
            self._advance_steps(sampled_rows / float(getattr(self.config, "samples_per_insert", 1.0)))
            return self._learn(checked_batch, rows)

    def update_policy(self, experiences: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Learn from experiences in chronological order, as `generate_experiences` returns them.

        A replay agent uses each once, in shuffled minibatches of its batch size.
        """
        self.require_steps()
        columns = stack_experiences(experiences)
        with temporary_torch_settings(THREADS, self.config):
            if self.config.memory == "rollout":
                return self._learn_rollout(columns)
            self._observe(to_segment(columns, self.spec, self.config.columns(self.spec)))
            rows = len(experiences)
            order = seeding.generator(self.seed or 0, "update_policy", self._num_shuffles).permutation(rows)
            self._num_shuffles += 1
            metrics: dict[str, Any] = {}
            for part in np.array_split(order, -(-rows // self._batch_size())):
                metrics = self._learn(self._transitions({name: column[part] for name, column in columns.items()}))
            return metrics

    def get_policy_parameters(self) -> dict[str, np.ndarray]:
        """Return copies of the weights by name."""
        return {name: array.copy() for name, array in self.agent.weights().arrays().items()}

    def set_policy_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Load weights by name: all of them, in the shapes of `get_policy_parameters`."""
        self.agent.load(with_arrays(self.agent.weights(), parameters))

    def compute_gradients(self, batch: Mapping[str, Any] | Batch) -> dict[str, np.ndarray]:
        """Return the gradient of the loss on a batch by parameter, unclipped; the weights do not change."""
        agent, arguments = self.agent, _columns(batch)
        with temporary_torch_settings(THREADS, self.config):
            gradient = agent.gradients(
                self._rollout(arguments) if self.config.memory == "rollout" else self._replay_batch(arguments)
            )
        return named_gradient(agent.weights(), gradient)

    def apply_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Take one optimizer step with gradients by parameter."""
        agent = self.agent
        with temporary_torch_settings(THREADS, self.config):
            agent.apply(flat_gradient(agent.weights(), gradients))
        self._stats.updates += 1

    def evaluate_policy(self, num_episodes: int = 10, *, seed: int = 0, explore: bool = False) -> dict[str, Any]:
        """Play whole episodes in fresh environments with a copy of the policy: learning is not affected."""
        from steppe.training.evaluate import evaluate_weights, evaluation_summary

        if num_episodes < 1:
            raise ConfigError(f"num_episodes={num_episodes}: must be at least 1")
        weights, environment = self.agent.weights(), self._environment
        if not isinstance(environment, DistributedEnvironment):
            raise UsageError(
                "only an agent that is bound to a DistributedEnvironment can be evaluated: bind(environment)"
            )
        settings: dict[str, Any] = {
            "env": environment.env,
            "algo": self.algo,
            "environment": environment.config,
            "agent": self.config,
        }
        config = RunConfig(**settings, mode="sync", seed=seed)
        evaluation = evaluate_weights(config, self.spec, weights, episodes=num_episodes, explore=explore)
        return evaluation_summary(evaluation)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write weights, optimizer and everything else that the next update depends on into the directory `path`."""
        agent = self.agent
        state = {"agent": agent.state(), "algo": self.algo, "spec": asdict(self.spec)}
        counters = {"env_steps": self._env_steps, "paid_steps": self._credited_steps, "shuffles": self._num_shuffles}
        Checkpoints(Path(path), 1).save(agent.weights(), state, counters)

    def load_checkpoint(self, path: str | Path) -> None:
        """Continue exactly from what `save_checkpoint` wrote; an unbound agent is bound to the checkpoint's spec."""
        found = Checkpoints(Path(path), 1).latest()
        if found is None:
            raise RunNotFound(f"{path} holds no checkpoint of an agent")
        if found.state.get("algo") != self.algo:
            raise UsageError(f"{path} is a checkpoint of {found.state.get('algo')!r}, but this agent is {self.algo!r}")
        if self._environment is None:
            self.bind(EnvSpec.from_record(found.state["spec"]))
        self.agent.load(found.weights)
        self.agent.restore(found.state["agent"])
        counters = found.counters
        self._env_steps, self._credited_steps, self._num_shuffles = (counters[name] for name in _COUNTERS)

    def follow_run(self, run: Any) -> None:
        """Include a loop's run in the statistics from now on, during the run and afterwards."""
        self._runs = self._counted_runs()
        self._run = run

    def _counted_runs(self) -> dict[str, int]:
        if self._run is None:
            return dict(self._runs)
        return {name: count + getattr(self._run, name) for name, count in self._runs.items()}

    def get_training_stats(self) -> dict[str, Any]:
        """Return counts, means over batches since the last reset, and the newest values.

        `updates` and `env_steps` include those of loops' runs, running or ended; their curves are in the runs' own
        records. `episodes` are those of the runs alone.
        """
        stats, runs = self._stats, self._counted_runs()
        return {
            "algorithm": self.algo,
            "batches": stats.batches,
            "updates": stats.updates + runs["updates"],
            "experiences": stats.experiences,
            "env_steps": max(self._env_steps, runs["env_steps"]),
            "episodes": runs["episodes"],
            "means": {name: total / stats.batches for name, total in stats.sums.items()} if stats.batches else {},
            "last": dict(stats.last),
        }

    def reset_training_stats(self) -> None:
        """Reset the statistics; what was learned stays."""
        self._stats, self._run, self._runs = _LearningStats(), None, dict(_NO_RUNS)

    def adopt_result(self, directory: RunDirectory, plan: Plan) -> None:
        """Continue from the end of a run; its weights are loaded when they are first needed."""
        self.config = plan.config.agent
        if directory.result.exists() or Checkpoints(directory.checkpoints, run=directory.key).latest(check_rows=False):
            self._source = directory

    def observe(self, experiences: Sequence[Mapping[str, Any]]) -> None:
        """Update running statistics, exploration and target network for new experiences, without learning from them."""
        self.require_steps()
        with temporary_torch_settings(THREADS, self.config):
            self._observe(to_segment(stack_experiences(experiences), self.spec, self.config.columns(self.spec)))
        self._credited_steps += len(experiences)

    def require_steps(self) -> None:
        """Raise UsageError unless this agent can learn from steps as `generate_experiences` returns them."""
        if self.config.memory == "sequences":
            raise UsageError(
                f"{self.algo} learns from sequences with stored state, not from single steps: use MainLoop.run_training, "
                "steppe.train, or learn_from_batch with what GlobalBuffer.get_batch draws"
            )
        if any(column.once for column in self.config.columns(self.spec)):
            raise UsageError(
                f"{self.algo} with a memory learns from rollouts [T, B] and the state that each began with, not from single "
                "steps: use MainLoop.run_training, steppe.train, or learn_from_batch with a column 'hidden' [1, B, …]"
            )

    def _learn_rollout(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        segment = to_segment(batch, self.spec, self.config.columns(self.spec))
        self._observe(segment)
        return self._learn(Batch(segment.columns), segment.num_valid)

    def _learn(self, batch: Batch, experiences: int | None = None) -> dict[str, Any]:
        learned = self.agent.learn(batch)
        self._stats.add(learned, len(batch["reward"]) if experiences is None else experiences)
        metrics: dict[str, Any] = {**learned.stats, "updates": learned.updates}
        return metrics if batch.indices is None else metrics | {"priorities": learned.priorities}

    def _observe(self, segment: Segment) -> None:
        """Count the steps on top of those that the weights already have."""
        self._env_steps = max(self._env_steps, self.agent.weights().env_steps) + segment.num_valid
        self.agent.observe(segment, Progress(self._env_steps, self._total_steps))

    def _advance_steps(self, steps: float) -> None:
        """Count the environment steps that a sampled batch stands for, so that exploration and target network follow.

        Steps that `observe` already counted are not counted twice.
        """
        uncredited = steps - self._credited_steps
        self._credited_steps = max(0.0, -uncredited)
        if uncredited <= 0:
            return
        self._env_steps += max(1, round(uncredited))
        agents = self.spec.num_agents
        extras = self.config.columns(self.spec)
        spec = SegmentSpec(1, agents, self.spec.obs, self.spec.action.field, extras, num_agents=agents)
        empty_segment = Segment.blank(spec)  # no valid row
        empty_segment.header = SegmentHeader("", 0, 0, 0, 0)
        self.agent.observe(empty_segment, Progress(self._env_steps, self._total_steps))

    def _rollout(self, batch: Mapping[str, Any]) -> Batch:
        segment = to_segment(batch, self.spec, self.config.columns(self.spec))
        if not segment.num_valid:
            raise UsageError("the rollout has no valid row: there is no gradient to compute")
        return Batch(segment.columns)

    def _replay_batch(self, batch: Mapping[str, Any]) -> Batch:
        """Validate a batch from replay: time windows, or flat transitions."""
        if self.config.memory == "sequences":
            return to_sequence_batch(batch, self.spec, self.config.columns(self.spec))
        return self._transitions(batch)

    def _transitions(self, batch: Mapping[str, Any]) -> Batch:
        return to_transition_batch(batch, self.spec, self.config.gamma)

    def _batch_size(self) -> int:
        return int(getattr(self.config, "batch_size", 32))


def _columns(batch: Mapping[str, Any] | Batch) -> Mapping[str, Any]:
    """Return a batch as a dictionary; a sampled Batch adds weights and indices."""
    if isinstance(batch, Batch):
        return {**batch.columns, "weights": batch.weights, "indices": batch.indices}
    return batch


def _spec(environment: DistributedEnvironment | EnvSpec) -> EnvSpec:
    return environment if isinstance(environment, EnvSpec) else environment.spec
