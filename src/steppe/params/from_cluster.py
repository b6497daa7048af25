"""Build the parameter server that a cluster configuration describes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from steppe.core.config.cluster import ClusterConfig
from steppe.core.contracts.errors import ConfigError
from steppe.params.aggregation import Aggregation
from steppe.params.federated import NO_PUSH_LIMIT, FederatedParameterServer
from steppe.params.optimizers import Optimizer
from steppe.params.privacy import PrivacyPlan
from steppe.params.rounds import Rounds
from steppe.params.server import ParameterServer


class AdamSettings(msgspec.Struct, frozen=True):
    """The agent's own Adam settings.

    Learning rate, epsilon, gradient norm to clip at, and the updates after which the learning rate is halved.
    """

    learning_rate: float
    eps: float
    max_norm: float | None
    halve_at: tuple[int, ...] = ()


def build_parameter_server(
    cluster: ClusterConfig, params: Mapping[str, np.ndarray], step: AdamSettings
) -> ParameterServer:
    """Return a server with these parameters, or with those of its checkpoint if there is one."""
    server = (
        _federated_server(cluster, params) if cluster.exchange == "deltas" else _gradient_server(cluster, params, step)
    )
    path = cluster.server.checkpoint
    if path is not None and (path.exists() or path.with_name(f"{path.name}.previous").exists()):
        server.load_checkpoint(path)
    return server


def _federated_server(cluster: ClusterConfig, params: Mapping[str, np.ndarray]) -> FederatedParameterServer:
    private, optimizer = cluster.privacy, cluster.optimizer or "fedavg"
    plan = None
    if private is not None:
        expected = private.expected_nodes or len(cluster.nodes)
        if not expected:
            raise ConfigError("privacy.expected_nodes is required where the cluster does not list its nodes")
        about = (private.ledger, private.epsilon, expected, private.delta, private.clip_norm, private.sampling_rate)
        plan = PrivacyPlan(*about)
    return FederatedParameterServer(
        params,
        cluster.quorum,
        private is not None,
        1.0 if private is None else private.noise,
        aggregation_method=Aggregation(cluster.aggregation or "federated", cluster.byzantine, cluster.trim),
        save_frequency=cluster.server.save_every,
        checkpoint_path=cluster.server.checkpoint,
        optimizer=Optimizer(optimizer, cluster.learning_rate),
        deadline_s=cluster.deadline_s,
        privacy=plan,
    )


def _gradient_server(cluster: ClusterConfig, params: Mapping[str, np.ndarray], step: AdamSettings) -> ParameterServer:
    """Return a server that applies gradients with the agent's own optimizer settings."""
    return ParameterServer(
        params,
        Aggregation(cluster.aggregation or "weighted", cluster.byzantine, cluster.trim),
        NO_PUSH_LIMIT,
        cluster.server.save_every,
        cluster.server.checkpoint,
        optimizer=Optimizer("adam", step.learning_rate, eps=step.eps, max_norm=step.max_norm, halve_at=step.halve_at),
        rounds=Rounds(synchronous=True, quorum=cluster.quorum, deadline_s=cluster.deadline_s),
    )
