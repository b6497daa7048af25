"""Initial weights of a run: the caller's, those of another run, or those in the run's directory."""

from __future__ import annotations

from typing import Any

from steppe.core.contracts.algorithm import Agent
from steppe.core.contracts.errors import ConfigError, DamagedFile
from steppe.core.system import seeding
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.handle import temporary_torch_settings
from steppe.runtimes.plan import Plan
from steppe.training.evaluate import result_weights


def build_agent(plan: Plan) -> Agent:
    """Build the agent of a plan in this process, with initial weights from the run's seed."""
    from steppe.algorithms import make_agent

    config, device = plan.config, plan.config.device
    if not config.agent.in_table:
        from steppe.algorithms import resolve_device

        device = resolve_device(device)
    with temporary_torch_settings(config.flow.threads, config.agent):
        seed = seeding.integer_seed(config.seed, "agent")
        return make_agent(config.algo, config.agent, plan.spec, seed=seed, device=device)


def load_weights_of(run: str, agent: Agent, plan: Plan) -> dict[str, Any]:
    """Load the weights of another run without its counters and optimizer; return the entry for run.json.

    Raises ConfigError, naming the differences, if they do not fit.
    """
    source = RunDirectory.open(run)
    try:
        weights = result_weights(source)
    except DamagedFile as error:
        raise ConfigError(f"init_from={run!r}: {error}") from None
    with temporary_torch_settings(plan.config.flow.threads, plan.config.agent):
        weights.require(agent.weights().layout, f"{plan.config.algo} for {plan.spec.id} (init_from={run!r})")
        agent.load(weights.stamped(version=0, updates=0, env_steps=0))
    origin = {"run": source.id, "path": str(source.path.resolve())}
    return {"init_from": {**origin, "version": weights.version, "weights_sha256": weights.sha256()}}


def save_start(agent: Agent, directory: RunDirectory, server: Any = None) -> None:
    """Save the run's initial state, for other processes and for reruns."""
    server_state = {} if not hasattr(server, "state") or server.is_private else {"server": server.state()}
    state = {"agent": agent.state(), **server_state}
    Checkpoints(directory.start, 1).save(agent.weights(), state, {})


def load_result(agent: Agent, run: RunDirectory) -> None:
    """Load a run's final weights into an agent, with the newest checkpoint's full state if it has the same weights."""
    weights = result_weights(run)
    newest = Checkpoints(run.checkpoints, run=run.key).latest(check_rows=False)
    agent.load(weights)
    if newest is not None and newest.weights.sha256() == weights.sha256():
        agent.restore(newest.state["agent"])
