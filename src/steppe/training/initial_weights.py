"""Initial weights of a run: the agent's own, those of another run, or those in the run's directory."""

from __future__ import annotations

from typing import Any

from steppe.core.contracts.errors import ConfigError, DamagedFile
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.records.selectors import open_run, select_weights
from steppe.runtimes.handle import temporary_torch_settings
from steppe.runtimes.plan import Plan
from steppe.training.composition.agent import DistributedAgent


def init_from_run(run: str, agent: DistributedAgent, plan: Plan) -> dict[str, Any]:
    """Load the weights of another run without its counters and optimizer; return the entry for run.json.

    Raises ConfigError, naming the differences, if they do not fit.
    """
    source, selector = open_run(run)
    try:
        weights = select_weights(source, selector)
    except DamagedFile as error:
        raise ConfigError(f"init_from={run!r}: {error}") from None
    agent.settle(plan.config.agent, plan.config.seed, plan.config.steps)
    with temporary_torch_settings(plan.config.flow.threads, plan.config.agent):
        made = agent.agent
        weights.require(made.weights().layout, f"{plan.config.algo} for {plan.spec.id} (init_from={run!r})")
        made.load(weights.stamped(version=0, updates=0, env_steps=0))
    origin = {"run": source.id, "path": str(source.path.resolve())}
    return {"init_from": {**origin, "version": weights.version, "weights_sha256": weights.sha256()}}


def save_start(agent: DistributedAgent, directory: RunDirectory, server: Any = None) -> None:
    """Save the run's initial state, for other processes and for reruns."""
    made = agent.agent
    kept = {} if not hasattr(server, "state") or server.is_private else {"server": server.state()}
    state = {"agent": made.state(), **kept}
    Checkpoints(directory.start, 1).save(made.weights(), state, {})
