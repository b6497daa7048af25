"""A parameter server in a loop: what it decides about a run, what the run begins with, and what comes back from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.core.errors import ConfigError
from steppe.loops.weights import with_arrays
from steppe.records.checkpoints import Checkpoints
from steppe.records.directory import RunDirectory

if TYPE_CHECKING:
    from steppe.core.agent import Agent
    from steppe.params.server import ParameterServer

LOOP = "loop"  # the worker that a loop itself is


def decided_by(server: ParameterServer, num_workers: int) -> dict[str, Any]:
    """The configuration keys that a server decides, for a run whose workers push gradients."""
    if server.optimizer.for_deltas:
        raise ConfigError(
            "this server takes what learners have learned, not gradients: use DistributedMainLoop, or another aggregation_method"
        )
    if server.rounds.quorum != 1 or server.rounds.deadline_s is not None:
        raise ConfigError(
            "quorum and deadline_s are for workers on a network: in a run a killed worker is started again, and a round waits"
        )
    if server.optimizer.halve_at:
        raise ConfigError("halve_at is for the server of a cluster: in a run the agent's own setting says it")
    if server.rounds.synchronous and server.update_frequency < num_workers:
        raise ConfigError(
            f"update_frequency={server.update_frequency} would end a round before all {num_workers} workers have pushed"
        )
    rates = dict(zip(("learning_rate", "beta1", "beta2", "eps"), server.optimizer.rates, strict=True))
    named = {"sgd": 1, "momentum": 2, "adam": 4}[server.optimizer.kind]
    decided = {
        "in_rounds": server.rounds.synchronous,
        "aggregation": server.aggregation.method,
        "byzantine": server.aggregation.byzantine,
        "trim": server.aggregation.trim,
        "update_every": num_workers if server.rounds.synchronous else server.update_frequency,
        "optimizer": server.optimizer.kind,
        "max_grad_norm": server.optimizer.max_norm or 0.0,
        "damping": server.rounds.damping,
        "max_staleness": server.rounds.max_staleness,
        **dict(list(rates.items())[:named]),
    }
    return {f"params.{name}": value for name, value in decided.items() if value is not None}


def adopt(agent: Agent, arrays: dict[str, np.ndarray]) -> None:
    """Give an agent a server's parameters; what the server does not have stays. ConfigError where one does not fit."""
    weights = agent.weights()
    agent.load(with_arrays(weights, {**weights.arrays(), **arrays}))


def bring_back(server: ParameterServer, directory: RunDirectory) -> None:
    """Let a server go on where the run's own ended, if that came so far as to write it down."""
    newest = Checkpoints(directory.checkpoints, run=directory.key).latest()
    if newest is not None:
        server.restore(newest.state["memory"]["server"])


def own_store(parameters: dict[str, np.ndarray]) -> ParameterServer:
    """The store of a loop that was given none: it takes over what the loop has learned, as one worker's deltas."""
    from steppe.params.server import ParameterServer

    server = ParameterServer(parameters, "federated", update_frequency=1)
    server.register_worker(LOOP)
    return server


def hand_in(server: ParameterServer, parameters: dict[str, np.ndarray]) -> None:
    """Bring an own store to these parameters, as its next version; nothing where they are the same."""
    known = server.get_parameters(LOOP)
    deltas = {name: value - known[name] for name, value in parameters.items() if value.dtype.kind == "f"}
    if any(delta.any() for delta in deltas.values()):
        server.push_gradients(LOOP, deltas)
