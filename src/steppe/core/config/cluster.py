"""ClusterConfig: several machines, each with actors and a learner of its own, joined by a parameter server, by Ray or by MPI.
One frozen, documented value, from a dictionary or a TOML file; the run that the machines share is a RunConfig beside it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from steppe.core.config.fields import Duration, FrozenConfig, Positive, PositiveDuration, PositiveFloat, RoleCount
from steppe.core.config.validation import read_toml, validate_config
from steppe.core.contracts.errors import ConfigError, did_you_mean

AUTO = "auto"  # the Ray cluster that this machine is part of
RUN_TABLE = "run"  # the table with the run's settings in a cluster's file
_NAME = Annotated[str, Field(min_length=1, max_length=128)]
AggregationMethod = Literal["federated", "average", "sum", "weighted", "median", "trimmed_mean", "krum", "multi_krum"]


class TlsConfig(FrozenConfig):
    """PEM files: the server has a certificate and its key, the nodes the certificate authority."""

    ca: Path | None = Field(
        None, description="Certificate authority of the server's certificate. Default: the system's."
    )
    certificate: Path | None = Field(None, description="Certificate chain of the server, on its machine.")
    key: Path | None = Field(None, description="Private key of the server, on its machine.")


class ServerConfig(FrozenConfig):
    """How `steppe params serve` serves and stores the parameters."""

    listen: str | None = Field(None, description="Address to listen on. Default: the host of parameter_server.")
    checkpoint: Path | None = Field(
        None, description="Checkpoint file of the state. Default: none, so that a restarted server starts anew."
    )
    save_every: Positive = Field(1, description="Versions between checkpoints.")
    tokens: Path | None = Field(
        None, description='TOML file with a line `node = "token"` for each node. Default: one token for all nodes.'
    )


class PrivacyConfig(FrozenConfig):
    """Differential privacy of each node's deltas (docs/parameter-server.md)."""

    ledger: Path = Field(description="File that records every release, on the server's machine.")
    epsilon: PositiveFloat = Field(description="Epsilon: the privacy budget of all releases together.")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="Delta: the probability with which the guarantee may fail."
    )
    noise: PositiveFloat = Field(1.0, description="Noise multiplier z; `steppe params privacy` computes it.")
    clip_norm: PositiveFloat = Field(1.0, description="Maximum norm of a delta; larger ones are scaled down to it.")
    expected_nodes: Positive | None = Field(None, description="Number by which sums are divided. Default: all nodes.")
    sampling_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Fraction of nodes that are sampled in each round."
    )


class ClusterConfig(FrozenConfig):
    """The machines of a cluster, how they are connected, and what they exchange."""

    backend: Literal["grpc", "ray", "mpi"] = Field(
        "grpc",
        description="How the machines are connected: by a parameter server on the network (grpc), in a Ray cluster, or in the first "
        "rank of an MPI world. With ray and mpi the first node starts it.",
    )
    parameter_server: str | None = Field(
        None,
        description="Address of the parameter server, host:port; for ray that of the cluster's head, or auto; not for mpi.",
    )
    name: _NAME = Field("steppe", description="Name of this cluster, to distinguish several on one Ray cluster.")
    nodes: tuple[_NAME, ...] = Field(
        (), description="Names of the nodes, in the order of their ranks. Default: any node may join."
    )
    node_id: _NAME | None = Field(None, description="Name of this node.")
    exchange: Literal["deltas", "gradients"] = Field(
        "deltas",
        description="deltas: every node trains on its own, and the changes of the weights are combined every sync_every learning "
        "steps. gradients: every optimizer step uses the gradients of all nodes, like one learner with their joint batch.",
    )
    aggregation: AggregationMethod | None = Field(
        None, description="How updates are combined. Default: federated for deltas; weighted, by rows, for gradients."
    )
    byzantine: RoleCount | None = Field(
        None,
        description="Maximum number of nodes that may send arbitrary values, for krum, multi_krum and trimmed_mean.",
    )
    trim: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.1, description="Fraction that trimmed_mean removes at each end."
    )
    optimizer: Literal["fedavg", "fedadam", "fedyogi"] | None = Field(
        None, description="Optimizer that applies combined deltas on the server. Default: fedavg."
    )
    learning_rate: PositiveFloat | None = Field(
        None, description="Step size of the optimizer. Default: the optimizer's usual one."
    )
    sync_every: Positive | None = Field(
        None, description="Learning steps (rollouts, or batches from replay) between exchanges of deltas. Default: 10."
    )
    quorum: Positive = Field(1, description="Minimum number of nodes for a round to have a result at its deadline.")
    deadline_s: PositiveDuration = Field(60.0, description="Seconds that a round waits for missing nodes.")
    retry_s: Duration = Field(
        30.0,
        description="Seconds that a node tries to reach the server before it continues alone until the next exchange.",
    )
    timeout_s: PositiveDuration = Field(30.0, description="Timeout of one call, in seconds.")
    tls: TlsConfig | None = Field(None, description="PEM files; required unless the server is on this machine.")
    server: ServerConfig = Field(ServerConfig(), description="How the server serves and stores the parameters.")
    privacy: PrivacyConfig | None = Field(None, description="(epsilon, delta) differential privacy for each node.")

    @field_validator("parameter_server")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and value != AUTO:
            host, _, port = value.rpartition(":")
            if not host or "/" in value or not port.isascii() or not port.isdigit() or int(port) > 65535:
                raise ValueError("must be host:port")
        return value

    def model_post_init(self, _: Any) -> None:
        if len(set(self.nodes)) < len(self.nodes):
            twice = next(name for name in self.nodes if self.nodes.count(name) > 1)
            raise ConfigError(f"cluster: there are two nodes {twice!r}: names are unique")
        if self.node_id is not None and self.nodes and self.node_id not in self.nodes:
            near = did_you_mean(self.node_id, self.nodes)
            raise ConfigError(f"there is no node {self.node_id!r} in this cluster of {', '.join(self.nodes)}.{near}")
        if self.aggregation is None:
            usual = "federated" if self.exchange == "deltas" else "weighted"
            object.__setattr__(self, "aggregation", usual)
        if self.sync_every is None:
            object.__setattr__(self, "sync_every", 10 if self.exchange == "deltas" else 1)
        if self.exchange == "gradients":
            self._require_gradients()
        if self.backend == "grpc":
            self._require_grpc()
        else:
            self._require_hosted()

    def _require_grpc(self) -> None:
        if self.parameter_server == AUTO:
            raise ConfigError(f"cluster.parameter_server={AUTO!r} is for backend 'ray': give host:port")
        if self.name != "steppe":
            raise ConfigError("cluster.name is for backend 'ray': leave it out")

    def _require_hosted(self) -> None:
        """The first node has the server, and everyone who may join Ray or the MPI world is trusted."""
        if self.backend == "ray" and self.parameter_server is None:
            object.__setattr__(self, "parameter_server", AUTO)
        server, usual = self.server, ServerConfig()
        for key, wrong, instead in (
            ("nodes", not self.nodes, "is required: the first one starts the server"),
            ("parameter_server", self.backend == "mpi" and self.parameter_server is not None, "has no meaning there"),
            ("name", self.backend == "mpi" and self.name != "steppe", "has no meaning there"),
            ("tls", self.tls is not None, "has no meaning there"),
            ("privacy", self.privacy is not None, "is not possible: nodes are not authenticated"),
            ("server.listen", server.listen != usual.listen, "has no meaning there"),
            ("server.tokens", server.tokens != usual.tokens, "has no meaning there"),
        ):
            if wrong:
                raise ConfigError(f"cluster.{key} with backend {self.backend!r} {instead}")

    def _require_gradients(self) -> None:
        for key, wrong in (
            ("optimizer", self.optimizer is not None),
            ("learning_rate", self.learning_rate is not None),
            ("privacy", self.privacy is not None),
            ("sync_every", self.sync_every != 1),
            ("aggregation", self.aggregation == "federated"),
        ):
            if wrong:
                raise ConfigError(f"cluster.{key} is for exchange='deltas': with gradients leave it out")

    @property
    def joined(self) -> bool:
        """Whether this run is part of a cluster."""
        return self.parameter_server is not None or self.backend == "mpi"

    @property
    def hosts(self) -> bool:
        """Whether this node starts the server."""
        return self.backend != "grpc" and self.rank == 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port where the nodes meet."""
        if self.parameter_server is None:
            raise ConfigError("cluster.parameter_server is required: host:port where the nodes meet")
        host, _, port = self.parameter_server.rpartition(":")
        return host, int(port)

    @property
    def url(self) -> str:
        """Return the URL by which clients reach the server."""
        if self.backend != "grpc":
            return f"{self.backend}://{self.parameter_server or 'world'}/{self.name}"
        return f"{'grpc' if self.tls is None else 'grpcs'}://{':'.join(map(str, self.address))}"

    @property
    def seed_offset(self) -> int:
        """Return the offset of this node's seed, by its rank or its name, so that nodes have different data."""
        return self.rank if self.rank is not None else zlib.crc32((self.node_id or "").encode())

    @property
    def rank(self) -> int | None:
        """This node's index in the list of nodes, from 0; None if there is no list."""
        return self.nodes.index(self.node_id) if self.node_id in self.nodes else None


def read_cluster(given: Mapping[str, Any] | ClusterConfig, whose: str = "cluster_config") -> ClusterConfig:
    """Return a cluster from plain values; ConfigError for an unknown key, with the nearest known one, and for a wrong value."""
    if isinstance(given, ClusterConfig):
        return given
    _require_known(given, ClusterConfig, "", whose)
    found: ClusterConfig = validate_config(ClusterConfig, given, "cluster.")
    return found


def read_cluster_file(path: Path) -> tuple[ClusterConfig, dict[str, Any]]:
    """The cluster of a TOML file, and what its table [run] says; relative file names are relative to the file."""
    tree = read_toml(path)
    run = tree.pop(RUN_TABLE, {})
    if not isinstance(run, dict):
        raise ConfigError(f"{path}: [{RUN_TABLE}] is a table of the run's keys, not {run!r}")
    cluster = read_cluster(_resolve_paths(tree, path.resolve().parent), str(path))
    return cluster, run


def _resolve_paths(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the tables with absolute file names."""
    files = {"tls": ("ca", "certificate", "key"), "server": ("checkpoint", "tokens"), "privacy": ("ledger",)}
    for table, keys in files.items():
        inner = tree[table] if isinstance(tree.get(table), dict) else {}
        for key in keys:
            if isinstance(inner.get(key), str):
                inner[key] = str(directory / inner[key])
    return tree


def _require_known(given: Mapping[str, Any], kind: type[FrozenConfig], prefix: str, whose: str) -> None:
    for key, value in given.items():
        if key not in kind.model_fields:
            names = [*kind.model_fields, *([RUN_TABLE] if not prefix and whose != "cluster_config" else [])]
            raise ConfigError(f"unknown key {prefix + str(key)!r} in {whose}.{did_you_mean(str(key), names)}")
        annotation = kind.model_fields[key].annotation
        inner = next((part for part in (annotation, *get_args(annotation)) if _is_table(part)), None)
        if inner is not None and isinstance(value, Mapping):
            _require_known(value, inner, f"{prefix}{key}.", whose)


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, FrozenConfig)
