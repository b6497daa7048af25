"""The learner of a run whose workers push gradients: a parameter server applies them, and the agent loads the result.

With rounds, the pushes of all workers are applied together, in the order of the workers. Otherwise each push is applied
on arrival, or several together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steppe.core.config.run import RunConfig
from steppe.core.contracts.algorithm import AdamAgent, Agent, Learned, Progress, ScheduledAgent, Tree, trainable_entries
from steppe.core.contracts.errors import ConfigError, RunFailed, UsageError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import PushSpec, SegmentSpec
from steppe.core.contracts.weights import Weights
from steppe.params.aggregation import Aggregation
from steppe.params.optimizers import Optimizer
from steppe.params.rounds import Rounds
from steppe.params.server import ParameterServer
from steppe.roles.context import Context
from steppe.roles.learner import Learner, RunLimits, SaveCheckpoint
from steppe.roles.scheduling import BatchPolicy
from steppe.roles.tuning import SETTINGS

EMPTY_BATCH = Batch({})
NEVER = 2**62  # pushes: GradientMemory itself decides when to apply them
CONFIRM_S = 10.0  # how long to wait for a silent worker before hyperparameters count as applied


class GradientMemory:
    """A Memory that applies gradients on `add`; it is ready when the server has a newer version than the agent.

    `pushes_per_update` pushes are applied at a time, or all pushes of an `add` if None. `use_agent_learning_rate`: use the
    agent's learning rate, with its schedule, instead of the server's.
    """

    def __init__(
        self,
        agent: Agent,
        server: ParameterServer,
        num_workers: int,
        *,
        pushes_per_update: int | None = 1,
        use_agent_learning_rate: bool = False,
    ) -> None:
        self.agent, self.server, self.pushes_per_update = agent, server, pushes_per_update
        self.refused: Counter[str] = Counter()
        self._scheduled_agent = agent if use_agent_learning_rate and isinstance(agent, ScheduledAgent) else None
        self._entries = trainable_entries(agent)
        self._num_waiting = 0
        self._loaded_version = server.version
        self._base_version = server.version  # the server's version before this run
        for number in range(num_workers):
            server.register_worker(_worker_name(number))

    def add(self, segments: Sequence[Segment]) -> None:
        """Push in the given order, and apply `pushes_per_update` pushes at a time."""
        for push in segments:
            if push["counts"][0, 0, PushSpec.ROWS]:
                self._push(push)
        if self.pushes_per_update is None and self._num_waiting:
            self._apply()

    def wants_data(self) -> bool:
        return not self.ready()

    def ready(self) -> bool:
        return self.server.version > self._loaded_version

    def sample(self) -> Batch:
        """Return an empty batch: the pushes are already in the parameters."""
        return EMPTY_BATCH

    def learn(self, batch: Batch) -> Learned:
        """Load the newest parameters into the agent. The batch is empty: `add` has applied the gradients."""
        rate = self._rate() or self.server.optimizer.rates[0]
        return Learned(self._load(self.server.weights()), {"learning_rate": rate})

    def _load(self, newest: Weights) -> int:
        """Load these parameters into the agent; return by how many updates they are newer than the previous ones."""
        before, self._loaded_version = self._loaded_version, newest.version
        found, weights = newest.arrays(), self.agent.weights()
        for entry in self._entries:
            weights.arrays()[entry.name][...] = found[entry.name]
        updates = self._loaded_version - self._base_version
        self.agent.load(weights.stamped(version=weights.version, updates=updates, env_steps=weights.env_steps))
        return self._loaded_version - before

    def update(self, batch: Batch, learned: Learned) -> None:
        """Do nothing: gradients have no priorities to update."""

    def stats(self) -> dict[str, float]:
        """Return counts of accepted and refused pushes, and their mean age in updates."""
        return self._report_stats(self.server.get_server_stats())

    def _report_stats(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """Convert a server's statistics to those that a run reports; a client delivers the ages as strings."""
        ages = {int(age): count for age, count in stats.get("staleness", {}).items()}
        pushes = sum(ages.values())
        return {
            "pushes": float(stats["accepted_pushes"]),
            "refused": float(sum(self.refused.values())),
            "abandoned_rounds": float(stats["abandoned_rounds"]),
            "staleness": sum(age * count for age, count in ages.items()) / pushes if pushes else 0.0,
        }

    def state(self) -> Tree:
        return {
            "server": self.server.state(),
            "refused": dict(self.refused),
            "base": self._base_version,
            "waiting": self._num_waiting,
        }

    def live_state(self) -> Tree:
        return self.state()

    def restore(self, state: Tree) -> None:
        if state["server"] is None:
            raise ConfigError(
                "this run's parameters are kept by a parameter server of its caller: train again with a loop that has it"
            )
        self.server.restore(state["server"])
        self.refused = Counter(state["refused"])
        self._base_version, self._num_waiting, self._loaded_version = (
            int(state["base"]),
            int(state["waiting"]),
            self.server.version,
        )

    def _push(self, push: Segment) -> None:
        assert push.header is not None
        rows, _, _, updates = push["counts"][0, 0].tolist()
        weight = float(rows) if self.server.aggregation.uses_weights else 1.0
        before = self.server.version
        receipt = self.server.push_gradients(
            _worker_name(push.header.actor),
            self._by_parameter(push["gradient"][0, 0]),
            weight,
            version=self._base_version + updates,
        )
        if not receipt:
            self.refused[receipt.reason] += 1
        elif self.server.version == before:
            self._num_waiting += 1
            if self._num_waiting == self.pushes_per_update:
                self._apply()

    def _apply(self) -> None:
        self._num_waiting = 0
        try:
            self.server.update_parameters(self._rate())
        except (RunFailed, UsageError):  # not combinable, or the result is not finite; later pushes may be valid
            self.refused["not_applied"] += 1

    def _rate(self) -> float | None:
        return self._scheduled_agent.learning_rate or None if self._scheduled_agent is not None else None

    def _by_parameter(self, gradient: np.ndarray) -> dict[str, np.ndarray]:
        """Return views of a flat gradient by parameter name."""
        parts = ((entry, entry.offset // 4) for entry in self._entries)
        return {entry.name: gradient[first : first + entry.nbytes // 4].reshape(entry.shape) for entry, first in parts}


@dataclass(frozen=True)
class _PendingCommand:
    """A command whose values apply to gradients computed with weights `version` or newer."""

    command: Mapping[str, Any]
    live: Mapping[str, Any]
    version: int
    since_s: float


class GradientLearner(Learner):
    """A learner whose batches are the workers' gradients; counts, checkpoints and end are those of Learner."""

    memory: GradientMemory

    def __init__(
        self,
        store: GradientMemory,
        batch_policy: BatchPolicy,
        limits: RunLimits,
        save: SaveCheckpoint,
        context: Context,
        *,
        segment: SegmentSpec,
    ) -> None:
        super().__init__(store.agent, store, batch_policy, limits, save, context)
        self._update_source = store
        self._empty_segment = Segment.blank(segment)  # no valid row: it only advances the agent's schedules
        self._max_steps = segment.num_steps * segment.num_envs // segment.num_agents  # limit of one push
        self._settings_version = -1  # version of the newest published live hyperparameters
        self._commands_for_next_publication: list[Mapping[str, Any]] = []
        self._unconfirmed: list[_PendingCommand] = []
        self._version_by_worker: dict[int, int] = {}  # weights version of each worker's newest gradient

    def _require_valid(self, segment: Segment) -> None:
        """Validate the counts of a push; the parameter server validates its gradient."""
        counts = segment["counts"][0, 0]
        rows, steps, episodes, updates = counts.tolist()
        if min(rows, episodes, updates) < 0 or not 0 <= episodes <= steps <= self._max_steps:
            raise UsageError(
                f"a push counts {rows} rows, {steps} steps, {episodes} episodes and {updates} updates, where 0 to "
                f"{self._max_steps} steps with as many episodes or fewer are possible"
            )

    def _apply_command(self, command: Mapping[str, Any]) -> None:
        """Defer a command to the next publication: until then workers compute gradients with the old values."""
        self._commands_for_next_publication.append(command)

    def publish_initial(self) -> None:
        """Publish the initial weights, with hyperparameters that were set before."""
        self._poll_commands_if_due()
        super().publish_initial()

    def _publish(self, weights: Weights) -> None:
        """Publish weights, and before them the live hyperparameters for gradients, if those changed."""
        commands, self._commands_for_next_publication = self._commands_for_next_publication, []
        for command in commands:
            live = self.live_hyperparameters.live_values(command)
            refusal = self.live_hyperparameters.apply(live)
            if refusal is not None or not live:
                self.live_hyperparameters.post_result(self.context, command, live, self._counts(), refusal)
            else:
                self._unconfirmed.append(_PendingCommand(command, live, weights.version, self.context.clock()))
        if commands or self._settings_version < 0:
            self._settings_version += 1
            self.context.weights.publish(SETTINGS, self.live_hyperparameters.record(self._settings_version))
        super()._publish(weights)

    def _confirm(self) -> None:
        """Answer commands whose values are in an update, and in every worker's gradients from now on.

        After CONFIRM_S, silent workers are not waited for: they receive the values with their next weights.
        """
        newest, now = self._version_by_worker.values(), self.context.clock()
        for pending in list(self._unconfirmed):
            done = [version >= pending.version for version in newest]
            if all(done) or (any(done) and now - pending.since_s > CONFIRM_S):
                counts = self._counts() | {"version": pending.version}
                self.live_hyperparameters.post_result(self.context, pending.command, pending.live, counts)
                self._unconfirmed.remove(pending)

    def _observe(self, segment: Segment) -> None:
        _, steps, episodes, _ = segment["counts"][0, 0].tolist()
        if segment.header is not None:
            self._version_by_worker[segment.header.actor] = segment.header.version
        self.env_steps += steps
        self.episodes += episodes
        self._empty_segment.header = segment.header
        self.agent.observe(self._empty_segment, Progress(self.env_steps, self.limits.steps))

    def _has_experience(self, segments: Sequence[Segment]) -> bool:
        counts = (PushSpec.ROWS, PushSpec.STEPS)
        return self.limits.episodes is None or any(push["counts"][0, 0, counts].any() for push in segments)

    def _after_update(self, learned: Learned) -> None:
        self._confirm()

    def _dropped(self, *, final: bool) -> dict[str, int]:
        return super()._dropped(final=final) | dict(self.memory.refused)


def make_server(config: RunConfig, agent: Agent, parameters: Mapping[str, np.ndarray] | None = None) -> ParameterServer:
    """Build the configured parameter server, with the agent's learning rate by default, and with the agent's parameters
    unless `parameters` are given. These must include everything that the agent trains."""
    params = config.params
    eps = params.eps
    if eps is None and params.optimizer == "adam" and isinstance(agent, AdamAgent):
        eps = agent.adam_eps
    max_norm = config.agent.max_grad_norm if params.max_grad_norm is None else params.max_grad_norm
    rate = params.learning_rate or (agent.learning_rate if isinstance(agent, ScheduledAgent) else None)
    optimizer = Optimizer(params.optimizer, rate, params.beta1, params.beta2, eps, max_norm or None)
    names, arrays = [entry.name for entry in trainable_entries(agent)], agent.weights().arrays()
    missing = [name for name in names if parameters is not None and name not in parameters]
    if missing:
        raise ConfigError(
            f"the parameter server lacks {missing[0]!r}: initialize it with the agent's get_policy_parameters()"
        )
    return ParameterServer(
        {name: arrays[name] for name in names} if parameters is None else parameters,
        Aggregation(params.aggregation, params.byzantine, params.trim),
        update_frequency=NEVER,
        optimizer=optimizer,
        rounds=Rounds(damping=params.damping, max_staleness=params.max_staleness),
    )


def _worker_name(worker: int) -> str:
    return f"worker-{worker}"
