"""Train with the parts themselves, in this process and one episode at a time: play, store, learn.

A loop over built-in parts uses this for single episodes. A loop over a user's own parts, which no other process could
build, uses it for everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from steppe.compose.agent import DistributedAgent
from steppe.compose.batches import stack_experiences
from steppe.compose.parameter_server import LOOP_WORKER_ID
from steppe.compose.settings import DEFAULT_ARGUMENTS
from steppe.core.contracts.components import AgentComponent, EnvironmentComponent, ParameterSource, ReplayComponent
from steppe.core.contracts.errors import ConfigError
from steppe.records.run_directory import runs_root

Steps = list[dict[str, Any]]


@dataclass(frozen=True)
class UpdateSchedule:
    """Updates per environment step from a replay buffer, and the number of experiences to start at."""

    batch_size: int
    updates_per_step: float
    starts: int

    @classmethod
    def of(cls, agent: AgentComponent) -> UpdateSchedule:
        """Use a built-in agent's settings; for other agents, the defaults of DistributedAgent."""
        if not isinstance(agent, DistributedAgent):
            size = int(DEFAULT_ARGUMENTS["batch_size"])
            return cls(size, 1.0 / DEFAULT_ARGUMENTS["update_frequency"], size)
        settings = agent.config.model_dump()
        size = settings["batch_size"]
        return cls(size, settings["samples_per_insert"] / size, max(settings["learning_starts"], size))


class ManualTrainer:
    """Trains with the parts. With a server, updates are pushed there, and the agent loads the returned parameters."""

    def __init__(
        self,
        environment: EnvironmentComponent,
        replay_buffer: ReplayComponent | None,
        agent: AgentComponent,
        server: ParameterSource | None = None,
    ) -> None:
        self.environment, self.replay_buffer, self.agent, self.server = environment, replay_buffer, agent, server
        self.pending_updates = 0.0
        self._push_kind, self._weighted = "gradients", False
        if server is not None:
            server.register_worker(LOOP_WORKER_ID)
            self._push_kind, self._weighted = _push_requirements(server)

    def episode(self, max_steps: int = 1000) -> dict[str, Any]:
        """Play one episode, store it and run the updates that are due; return its return, length and losses."""
        if isinstance(self.agent, DistributedAgent):
            self.agent.require_steps()
        steps: Steps = list(self.environment.generate_experiences(self.agent, 1, max_steps))
        metrics = self._learn(steps)
        total = float(sum(float(step["reward"]) for step in steps))
        return {"return": total, "length": len(steps), **metrics}

    def _learn(self, steps: Steps) -> dict[str, Any]:
        builtin_agent = self.agent if isinstance(self.agent, DistributedAgent) else None
        if builtin_agent is not None and builtin_agent.config.memory != "rollout":
            builtin_agent.observe(steps)
            return self._learn_from_replay(steps)
        if self.replay_buffer is not None:
            return self._learn_from_replay(steps)
        if self.server is None:
            return self.agent.update_policy(steps)
        if builtin_agent is not None and self._push_kind == "gradients":
            builtin_agent.observe(steps)
        return self._push(stack_experiences(steps), len(steps))

    def _learn_from_replay(self, steps: Steps) -> dict[str, Any]:
        """Store one-step transitions, then run the updates that they allow (see replay/transition_memory.py)."""
        pool, schedule = self._pool(), UpdateSchedule.of(self.agent)
        pool.add_experiences(self._to_pool_format(steps))
        if pool.get_total_experiences() < schedule.starts:
            return {"updates": 0}
        self.pending_updates += len(steps) * schedule.updates_per_step
        due, metrics = int(self.pending_updates), {}
        for _ in range(due):
            batch = pool.sample_batch(schedule.batch_size)
            metrics = (
                self.agent.learn_from_batch(batch) if self.server is None else self._push(batch, schedule.batch_size)
            )
            priorities = metrics.pop("priorities", None)
            if priorities is not None:
                pool.update_priorities(batch["indices"], priorities)  # type: ignore[attr-defined]
        self.pending_updates %= 1.0
        return {**metrics, "updates": due}

    def _push(self, batch: Mapping[str, np.ndarray], rows: int) -> dict[str, Any]:
        """Push one update to the server, and load the parameters that it has then."""
        assert self.server is not None
        metrics, update = self._update(batch)
        receipt = self.server.push_gradients(LOOP_WORKER_ID, update, float(rows) if self._weighted else 1.0)
        newest = {**self.agent.get_policy_parameters(), **self.server.get_parameters(LOOP_WORKER_ID)}
        self.agent.set_policy_parameters(newest)
        refused = receipt is not None and not receipt
        return {**metrics, "updates": 0 if refused else 1, **({"refused": receipt.reason} if refused else {})}

    def _update(self, batch: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return metrics and the update that the server takes: gradients, new parameters, or their differences."""
        if self._push_kind == "gradients":
            return {}, self.agent.compute_gradients(batch)
        before = self.agent.get_policy_parameters()
        metrics = self.agent.learn_from_batch(batch)
        after = self.agent.get_policy_parameters()
        if self._push_kind == "parameters":
            return metrics, after
        return metrics, {name: after[name] - before[name] for name in after if after[name].dtype.kind == "f"}

    def _pool(self) -> ReplayComponent:
        if self.replay_buffer is None:
            from steppe.replay import ReplayBufferPool

            assert isinstance(self.agent, DistributedAgent), "only a built-in agent gets a pool of its own"
            settings = self.agent.config.model_dump()
            disk = runs_root() if settings["buffer_storage"] == "disk" else None
            self.replay_buffer = ReplayBufferPool(
                1, settings["buffer_size"], use_prioritized=settings["prioritized"], disk_path=disk
            )
        return self.replay_buffer

    def _to_pool_format(self, steps: Steps) -> Any:
        """Return the steps as the agent expects them back: one-step transitions for a built-in agent."""
        if not isinstance(self.agent, DistributedAgent):
            return steps
        names, gamma = ("obs", "action", "reward", "next_obs", "terminated"), np.float32(self.agent.config.gamma)
        return [{**{name: step[name] for name in names}, "discount": gamma} for step in steps]


def _push_requirements(server: Any) -> tuple[str, bool]:
    """Return what a server takes, and whether it weights pushes; a user's own server takes plain gradients."""
    description = server.description() if hasattr(server, "description") else {}
    description = server.about(LOOP_WORKER_ID) if hasattr(server, "about") else description
    return server.get_server_stats().get("takes", "gradients"), bool(description.get("uses_weights", False))


class ManualRun:
    """A manual training of whole episodes. `stop`, `pause` and `resume` may be called from another thread."""

    def __init__(self, trainer: ManualTrainer) -> None:
        self.trainer = trainer
        self.progress: dict[str, Any] = {
            "state": "PENDING", "run": None, "episode": 0, "env_steps": 0, "updates": 0,
            "train_return_mean": None, "eval_return_mean": None, "best_return_mean": None,
        }  # fmt: skip
        self._unpaused, self._stopping = threading.Event(), threading.Event()
        self._unpaused.set()

    def run(
        self,
        frequencies: tuple[int, int, int, int],
        episode: Callable[[int], dict[str, Any]],
        save: Callable[[], object],
        on_progress: Callable[[dict[str, Any]], bool],
    ) -> dict[str, Any]:
        """Call `episode` repeatedly; `frequencies` are those of run_training, and `on_progress` returns True to stop."""
        total, max_steps, evaluate_every, save_every = frequencies
        if min(frequencies) < 1:
            raise ConfigError(f"episodes, steps and frequencies are at least 1, not {min(frequencies)}")
        self._stopping.clear()
        progress = self.progress
        returns: list[float] = []
        progress["state"] = "RUNNING"
        try:
            for done in range(1, total + 1):
                self._wait_while_paused()
                if self._stopping.is_set():
                    break
                result = episode(max_steps)
                returns = [*returns, result["return"]][-100:]
                progress["env_steps"] += result["length"]
                progress["updates"] += int(result.get("updates", 1))
                progress["train_return_mean"] = float(np.mean(returns))
                if done % evaluate_every == 0 or done == total:
                    self._evaluate()
                if done % save_every == 0 or done == total:
                    save()
                if on_progress(dict(progress)):
                    self.stop()
        except BaseException:
            progress["state"] = "FAILED"
            raise
        progress["state"] = "STOPPED" if self._stopping.is_set() else "SUCCEEDED"
        reason = "stop_requested" if self._stopping.is_set() else "episodes_done"
        return {**progress, "reason": reason}

    def stop(self) -> None:
        """Stop after the current episode."""
        self._stopping.set()
        self._unpaused.set()

    def pause(self) -> None:
        """Pause after the current episode."""
        self._unpaused.clear()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._unpaused.set()

    def _wait_while_paused(self) -> None:
        if not self._unpaused.is_set():
            self.progress["state"] = "PAUSED"
            self._unpaused.wait()
            self.progress["state"] = "RUNNING"

    def _evaluate(self) -> None:
        result = float(self.trainer.agent.evaluate_policy()["return_mean"])
        best = self.progress["best_return_mean"]
        self.progress["eval_return_mean"] = result
        self.progress["best_return_mean"] = result if best is None else max(best, result)
