"""Connect a parameter server to a loop: the settings that it decides, and the run's initial parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.compose.named_weights import with_arrays
from steppe.core.contracts.errors import ConfigError

if TYPE_CHECKING:  # compiled modules, which only loops with a server need
    from steppe.core.contracts.algorithm import Agent
    from steppe.params.client import ParameterClient
    from steppe.params.server import ParameterServer

LOOP_WORKER_ID = "loop"  # the id of the loop itself as a worker


def server_settings(server: ParameterServer | ParameterClient, num_workers: int) -> dict[str, Any]:
    """Return the configuration keys that a server decides, for a run whose workers push to it."""
    from steppe.params.server import ParameterServer

    if not isinstance(server, ParameterServer):
        stats = server.get_server_stats()
        decided = {"in_rounds": stats["synchronous"], "deltas": stats["takes"] != "gradients"}
    elif server.optimizer.for_deltas:
        decided = {"in_rounds": server.rounds.synchronous, "deltas": True}
    else:
        decided = _gradient_settings(server, num_workers)
    if isinstance(server, ParameterServer) and server.rounds.quorum > num_workers and not server.is_serving:
        raise ConfigError(
            f"a round of this parameter server needs {server.rounds.quorum} workers, and there are {num_workers}: use more "
            "workers, or lower min_workers_for_update (quorum)"
        )
    return {f"params.{name}": value for name, value in decided.items() if value is not None}


def _gradient_settings(server: ParameterServer, num_workers: int) -> dict[str, Any]:
    """Return how a server of gradients aggregates and applies them."""
    if server.rounds.synchronous and server.update_frequency < num_workers:
        raise ConfigError(
            f"update_frequency={server.update_frequency} would end a round before all {num_workers} workers have pushed"
        )
    rates = dict(zip(("learning_rate", "beta1", "beta2", "eps"), server.optimizer.rates, strict=True))
    named = {"sgd": 1, "momentum": 2, "adam": 4}[server.optimizer.kind]
    return {
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


def load_server_parameters(agent: Agent, arrays: dict[str, np.ndarray]) -> None:
    """Load a server's parameters into an agent; those that it lacks stay. Raises ConfigError on a mismatch."""
    weights = agent.weights()
    agent.load(with_arrays(weights, {**weights.arrays(), **arrays}))


def make_own_server(parameters: dict[str, np.ndarray]) -> ParameterServer:
    """Create the store of a loop that was given no server: it receives what the loop learns, as one worker's deltas."""
    from steppe.params.server import ParameterServer

    server = ParameterServer(parameters, "federated", update_frequency=1)
    server.register_worker(LOOP_WORKER_ID)
    return server


def push_difference(server: ParameterServer, parameters: dict[str, np.ndarray]) -> None:
    """Update the loop's own store to these parameters, as its next version; do nothing if they are equal."""
    known = server.get_parameters(LOOP_WORKER_ID)
    deltas = {name: value - known[name] for name, value in parameters.items() if value.dtype.kind == "f"}
    if any(delta.any() for delta in deltas.values()):
        server.push_gradients(LOOP_WORKER_ID, deltas)
