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
RUN_TABLE = "run"  # the table of a cluster's file that says what is trained
_NAME = Annotated[str, Field(min_length=1, max_length=128)]
AggregationMethod = Literal["federated", "average", "sum", "weighted", "median", "trimmed_mean", "krum", "multi_krum"]


class TlsConfig(FrozenConfig):
    """PEM files. The server has a certificate and its key, the nodes have who signed it."""

    ca: Path | None = Field(
        None, description="Who signed the server's certificate; the system's authorities if absent."
    )
    certificate: Path | None = Field(None, description="The server's certificate chain, on its machine.")
    key: Path | None = Field(None, description="The server's key, on its machine.")


class ServerConfig(FrozenConfig):
    """How `steppe params serve` keeps the parameters."""

    listen: str | None = Field(None, description="Address to listen on; the host of parameter_server if absent.")
    checkpoint: Path | None = Field(None, description="Where the state is kept; begins anew after a restart if absent.")
    save_every: Positive = Field(1, description="Versions between checkpoints.")
    tokens: Path | None = Field(
        None, description='A TOML file with one `node = "token"` line each; one token for all nodes if absent.'
    )


class PrivacyConfig(FrozenConfig):
    """What is promised to each node about its deltas (docs/parameter-server.md)."""

    ledger: Path = Field(description="Where every release is written down, on the server's machine.")
    epsilon: PositiveFloat = Field(description="The budget for all releases together.")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(1e-5, description="The chance that the promise does not hold.")
    noise: PositiveFloat = Field(1.0, description="The noise multiplier z; `steppe params privacy` plans it.")
    clip_norm: PositiveFloat = Field(1.0, description="The longest delta that counts in full.")
    expected_nodes: Positive | None = Field(None, description="What sums are divided by; all nodes if absent.")
    sampling_rate: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="The share of nodes drawn each round.")


class ClusterConfig(FrozenConfig):
    """Which machines there are, where they meet, and what they exchange how often."""

    backend: Literal["grpc", "ray", "mpi"] = Field(
        "grpc",
        description="What joins the machines: a parameter server on the network, one in a Ray cluster, or one in the first "
        "rank of an MPI world. In the last two the first node brings it up.",
    )
    parameter_server: str | None = Field(
        None, description="Where the nodes meet: host:port, of a Ray cluster's head for ray (or auto); not for mpi."
    )
    name: _NAME = Field("steppe", description="Of this cluster among others on the same Ray cluster.")
    nodes: tuple[_NAME, ...] = Field((), description="The nodes' names, in the order of their ranks; anyone if absent.")
    node_id: _NAME | None = Field(None, description="Which of them this is.")
    exchange: Literal["deltas", "gradients"] = Field(
        "deltas",
        description="deltas: every node trains on its own and what it changed is combined every sync_every learning "
        "steps. gradients: every optimizer step is one of all nodes together, as of one learner with their joint batch.",
    )
    aggregation: AggregationMethod | None = Field(
        None, description="How updates become one; federated for deltas and weighted, by rows, for gradients if absent."
    )
    byzantine: RoleCount | None = Field(
        None, description="Nodes that may send anything, for krum, multi_krum and trimmed_mean."
    )
    trim: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.1, description="Share that trimmed_mean cuts off at each end."
    )
    optimizer: Literal["fedavg", "fedadam", "fedyogi"] | None = Field(
        None, description="What the server does with combined deltas; fedavg if absent."
    )
    learning_rate: PositiveFloat | None = Field(None, description="Its step size; the optimizer's usual one if absent.")
    sync_every: Positive | None = Field(
        None, description="Learning steps (rollouts, or draws from replay) between exchanges of deltas; 10 if absent."
    )
    quorum: Positive = Field(
        1, description="A round ends at its deadline if so many nodes took part, else without result."
    )
    deadline_s: PositiveDuration = Field(60.0, description="How long a round waits for nodes that do not come.")
    retry_s: Duration = Field(
        30.0, description="How long a node tries to reach the server before it goes on alone until the next exchange."
    )
    timeout_s: PositiveDuration = Field(30.0, description="How long one call may take.")
    tls: TlsConfig | None = Field(None, description="PEM files; needed unless the server is on this machine.")
    server: ServerConfig = Field(ServerConfig(), description="How the server keeps the parameters.")
    privacy: PrivacyConfig | None = Field(None, description="Promise (epsilon, delta) to each node.")

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
            raise ConfigError(f"cluster.parameter_server={AUTO!r} is for backend 'ray': say host:port")
        if self.name != "steppe":
            raise ConfigError("cluster.name is for backend 'ray': leave it out")

    def _require_hosted(self) -> None:
        """The first node has the server, and whoever may join Ray or the world is trusted."""
        if self.backend == "ray" and self.parameter_server is None:
            object.__setattr__(self, "parameter_server", AUTO)
        server, usual = self.server, ServerConfig()
        for key, wrong, instead in (
            ("nodes", not self.nodes, "is required: the first one brings the server up"),
            ("parameter_server", self.backend == "mpi" and self.parameter_server is not None, "has no meaning there"),
            ("name", self.backend == "mpi" and self.name != "steppe", "has no meaning there"),
            ("tls", self.tls is not None, "has no meaning there"),
            ("privacy", self.privacy is not None, "cannot be promised: nobody is asked for a token"),
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
        """Whether there is a cluster at all."""
        return self.parameter_server is not None or self.backend == "mpi"

    @property
    def hosts(self) -> bool:
        """Whether this node brings up the server."""
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
        """Return what a client of the server must know."""
        if self.backend != "grpc":
            return f"{self.backend}://{self.parameter_server or 'world'}/{self.name}"
        return f"{'grpc' if self.tls is None else 'grpcs'}://{':'.join(map(str, self.address))}"

    @property
    def seed_offset(self) -> int:
        """What this node's seed is beyond the run's, so that no two see the same: its rank, or by its name."""
        return self.rank if self.rank is not None else zlib.crc32((self.node_id or "").encode())

    @property
    def rank(self) -> int | None:
        """This node's index in the list of nodes, from 0; None if there is no list."""
        return self.nodes.index(self.node_id) if self.node_id in self.nodes else None


def read_cluster(given: Mapping[str, Any] | ClusterConfig, whose: str = "cluster_config") -> ClusterConfig:
    """A cluster from plain values; ConfigError for an unknown key, with the nearest known one, and for a wrong value."""
    if isinstance(given, ClusterConfig):
        return given
    _require_known(given, ClusterConfig, "", whose)
    found: ClusterConfig = validate_config(ClusterConfig, given, "cluster.")
    return found


def read_cluster_file(path: Path) -> tuple[ClusterConfig, dict[str, Any]]:
    """The cluster of a TOML file, and what its table [run] says; files that it names are looked for beside it."""
    tree = read_toml(path)
    run = tree.pop(RUN_TABLE, {})
    if not isinstance(run, dict):
        raise ConfigError(f"{path}: [{RUN_TABLE}] is a table of the run's keys, not {run!r}")
    cluster = read_cluster(_resolve_paths(tree, path.resolve().parent), str(path))
    return cluster, run


def _resolve_paths(tree: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The same with every file name made absolute."""
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
