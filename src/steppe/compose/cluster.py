"""DistributedMainLoop: one of several machines that train the same policy.

Each node has its own actors and learner; a parameter server, Ray or MPI connects them. The server is built from the
same description.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ForwardRef

import numpy as np

from steppe.compose.agent import DistributedAgent
from steppe.compose.environment import DistributedEnvironment
from steppe.compose.main_loop import MainLoop
from steppe.core.config.cluster import ClusterConfig, read_cluster
from steppe.core.config.run import ResolvedConfig, RunConfig, flatten, unflatten
from steppe.core.contracts.algorithm import trainable_entries
from steppe.core.contracts.errors import ConfigError, Unreachable
from steppe.core.contracts.transport import EVENTS
from steppe.core.system.typecheck import typechecked
from steppe.params.client import ParameterClient
from steppe.params.from_cluster import AdamSettings, build_parameter_server
from steppe.params.rpc.protocol import TOKEN_VARIABLE, Tls
from steppe.params.server import ParameterServer
from steppe.records.run_directory import RunDirectory

if TYPE_CHECKING:
    from steppe.replay.pool import ReplayBufferPool
    from steppe.roles.cluster.node import ClusterNode
else:
    ReplayBufferPool = ForwardRef("steppe.replay.pool.ReplayBufferPool")
    ClusterNode = ForwardRef("steppe.roles.cluster.node.ClusterNode")


@typechecked
class DistributedMainLoop(MainLoop):
    """A MainLoop that is the node `node_id` of a cluster.

    `cluster_config` has the keys of ClusterConfig (docs/cluster.md). `param_server`: None for a remote one, a
    ParameterServer that this node serves to the others at the cluster's address from the first run on, or a
    ParameterClient of that address.
    """

    in_parallel = False  # a node is one process by default

    def __init__(
        self,
        environment: DistributedEnvironment,
        replay_buffer: ReplayBufferPool | None,
        agent: DistributedAgent,
        param_server: ParameterServer | ParameterClient | None,
        node_id: str = "node-0",
        cluster_config: Mapping[str, Any] | ClusterConfig | None = None,
        *,
        config: RunConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if cluster_config is None:
            raise ConfigError("cluster_config is required: at least {'parameter_server': 'host:port'}")
        self.cluster = _node_config(cluster_config, node_id)
        if isinstance(param_server, ParameterClient) and param_server.url != self.cluster.url:
            raise ConfigError(
                f"param_server is a client of {param_server.url}, the cluster's server is at {self.cluster.url}"
            )
        if param_server is not None and self.cluster.backend != "grpc":
            raise ConfigError(
                f"backend {self.cluster.backend!r} has a parameter server of its own: leave param_server None, or use 'grpc'"
            )
        seeded = agent.seed is not None or environment.seed is not None
        settings = _with_cluster(config, self.cluster, seeded=seeded)
        super().__init__(environment, replay_buffer, agent, config=settings)
        self.param_server = param_server
        self._node: ClusterNode | None = None
        self._hosting, self._serves_cluster = contextlib.ExitStack(), False

    @property
    def rank(self) -> int | None:
        """The index of this node in the cluster's list; None if the cluster does not list its nodes."""
        return self.cluster.rank

    def run_distributed_training(self, total_episodes: int = 1000) -> dict[str, Any]:
        """Train for that many episodes on this node, synchronizing with the others; return both summaries."""
        from steppe.roles.cluster.node import CLUSTER_END

        self._serve()
        self._leave()
        summary = self.run_training(total_episodes)
        events = [record for _, record in RunDirectory.open(summary["path"]).store.read(EVENTS)]
        ends = [record["details"] for record in events if record["kind"] == CLUSTER_END]
        details = {"node_id": self.cluster.node_id, "rank": self.rank, **(ends[-1] if ends else {})}
        return {**summary, "cluster": details}

    def synchronize_with_cluster(self) -> int:
        """Load the cluster's parameters between runs, and return their version.

        From the second call on, push first what the agent has learned since the last call.
        """
        from steppe.roles.cluster.node import ClusterNode as Node

        self._require_here("synchronizing by hand")
        self._serve()
        if self._node is None:
            given = self._node_client()
            self._node = Node(
                self.cluster, self.agent.agent, given or self._connect(), external_client=given is not None
            )
            self._node.join()
        else:
            self._node.synchronize()
        return self._node.version

    def close(self) -> None:
        """Leave the cluster; if this node serves the parameter server, wait until all others have left and stop it."""
        self._leave()
        self._hosting.close()
        self._serves_cluster = False
        if isinstance(self.param_server, ParameterServer) and self.param_server.is_serving:
            with self._connect() as client:
                _wait_for_other_nodes(self.cluster, client)
            self.param_server.stop_server()

    def _leave(self) -> None:
        if self._node is not None:
            self._node.close()
            self._node = None

    def _serve(self) -> None:
        if isinstance(self.param_server, ParameterServer) and not self.param_server.is_serving:
            serve_cluster(self.param_server, self.cluster)
        if not self._serves_cluster:
            self._hosting.enter_context(hosted_cluster_server(self.cluster, self))
            self._serves_cluster = True

    def _node_client(self) -> ParameterClient | None:
        return self.param_server if isinstance(self.param_server, ParameterClient) else None

    def _connect(self) -> ParameterClient:
        from steppe.roles.cluster.node import connect

        return connect(self.cluster)


def make_cluster_server(cluster: ClusterConfig, resolved: ResolvedConfig) -> ParameterServer:
    """Build the server of a cluster that trains what a configuration describes, from its checkpoint if there is one."""
    return build_parameter_server(cluster, *_initial_parameters(MainLoop.of(resolved)))


@contextlib.contextmanager
def hosted_cluster_server(cluster: ClusterConfig, loop: MainLoop) -> Iterator[None]:
    """Run the cluster's server if this node hosts it; on exit, wait until all other nodes have left."""
    from steppe.roles.cluster.node import connect, start_cluster_server

    if not cluster.hosts:
        yield
        return
    host = start_cluster_server(cluster, *_initial_parameters(loop))
    try:
        yield
        with connect(cluster) as client:
            _wait_for_other_nodes(cluster, client)
    finally:
        host.close()


def _wait_for_other_nodes(cluster: ClusterConfig, client: ParameterClient) -> None:
    from steppe.roles.cluster.node import DEADLINE_GRACE_S, wait_for_other_nodes

    with contextlib.suppress(Unreachable):
        wait_for_other_nodes(client, cluster.deadline_s + DEADLINE_GRACE_S)


def _initial_parameters(loop: MainLoop) -> tuple[dict[str, np.ndarray], AdamSettings]:
    """Return the initial values of the parameters that a loop's agent trains, and its optimizer settings."""
    plan = loop.plan()
    loop.agent.settle(plan.config.agent, plan.config.seed, plan.config.steps)
    agent: Any = loop.agent.agent
    arrays = agent.weights().arrays()
    halve_at = tuple(getattr(plan.config.agent, "halve_at", ()))
    step = AdamSettings(agent.learning_rate, agent.adam_eps, plan.config.agent.max_grad_norm, halve_at)
    return {entry.name: arrays[entry.name] for entry in trainable_entries(agent)}, step


def serve_cluster(server: ParameterServer, cluster: ClusterConfig) -> int:
    """Serve at a cluster's address, with the tokens of its file or of the environment; return the port."""
    host, port = cluster.address
    files = cluster.tls
    if server.is_private and cluster.server.tokens is None:
        raise ConfigError(
            'a private server has to know who pushes: name a file with one line `node = "token"` for each node in '
            "cluster_config as server.tokens"
        )
    tls = None
    if files is not None:
        if files.certificate is None or files.key is None:
            raise ConfigError("cluster.tls needs certificate and key where the server is")
        tls = Tls(files.certificate, files.key)
    return server.start_server(cluster.server.listen or host, port, token=_tokens(cluster), tls=tls)


def _node_config(given: Mapping[str, Any] | ClusterConfig, node_id: str) -> ClusterConfig:
    values = given.model_dump(exclude_none=True) if isinstance(given, ClusterConfig) else dict(given)
    if values.setdefault("node_id", node_id) != node_id:
        raise ConfigError(
            f"node_id is {node_id!r}, but {values['node_id']!r} in cluster_config: set it in one place only"
        )
    cluster = read_cluster(values)
    if cluster.backend == "grpc":
        cluster.address  # noqa: B018 - raises if it is missing
    return cluster


def _with_cluster(
    config: RunConfig | Mapping[str, Any] | None, cluster: ClusterConfig, *, seeded: bool
) -> RunConfig | dict[str, Any]:
    """Return a run's settings with the cluster's added, and a seed of this node's own unless one was given.

    `seeded`: agent or environment has a seed.
    """
    values = {f"cluster.{key}": value for key, value in cluster.model_dump(mode="json", exclude_none=True).items()}
    if isinstance(config, RunConfig):
        return unflatten({**flatten(config), **values})
    own = {} if seeded else {"seed": cluster.seed_offset}
    return {**own, **(config or {}), **values}


def _tokens(cluster: ClusterConfig) -> str | dict[str, str] | None:
    from steppe.roles.cluster.node import read_tokens

    path = cluster.server.tokens
    return os.environ.get(TOKEN_VARIABLE) or None if path is None else read_tokens(path)
