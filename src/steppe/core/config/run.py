"""RunConfig: the complete configuration of a run, as one frozen, validated, documented value.

Layers are merged in order (defaults < TOML file < STEPPE_* environment < flags) as flat dotted keys, and each value
remembers where it came from.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator

from steppe.core.config import references
from steppe.core.config.agent import AgentConfig
from steppe.core.config.algorithm_table import DEFAULT_ALGORITHM, config_class
from steppe.core.config.cluster import ClusterConfig
from steppe.core.config.fields import (
    Coefficient,
    Count,
    Duration,
    FrozenConfig,
    Positive,
    PositiveDuration,
    PositiveFloat,
    RoleCount,
)
from steppe.core.config.params import ParamsConfig
from steppe.core.config.renamed_keys import replace_renamed_keys
from steppe.core.config.runtime_table import RUNTIMES, capabilities_of, runtimes_with
from steppe.core.config.validation import read_toml, validate_config
from steppe.core.contracts.errors import ConfigError, did_you_mean

ENV_PREFIX = "STEPPE_"
DEFAULT_STEPS = 1_000_000
# Paths and secrets, which are not part of a run's configuration.
RESERVED_ENV_VARS = {
    *("STEPPE_RUNS", "STEPPE_HOME", "STEPPE_PARAMS_TOKEN"),
    *("STEPPE_KAFKA_PASSWORD", "STEPPE_KAFKA_KEY_PASSWORD", "STEPPE_KAFKA_HOME"),
}


def validate_device(value: str) -> str:
    """Return the name of a device if it is valid; algorithms/nn/device.py checks whether the machine has it."""
    kind, _, index = value.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        raise ValueError("must be auto, cpu, cuda or cuda:n")
    return value


class EnvConfig(FrozenConfig):
    """How the environment is created and wrapped."""

    kwargs: dict[str, Any] = Field({}, description="Keyword arguments for the environment's constructor.")
    frame_stack: Positive | None = Field(
        None, description="Stack this many newest observations. Default: 4 for Atari games, otherwise 1."
    )
    time_limit: Positive | None = Field(None, description="Truncate episodes after this many steps.")
    reward_clip: Annotated[float, Field(ge=0, le=1e12)] | None = Field(
        None, description="Clip rewards to ± this value; 0 disables it. Default: 1 for Atari games, otherwise 0."
    )
    reward_scale: PositiveFloat = Field(1.0, description="Multiply rewards by this value.")
    grayscale: bool | None = Field(
        None, description="Convert color images to grayscale. Default: true for Atari games, otherwise false."
    )
    resize: Annotated[int, Field(ge=0, le=65_536)] | None = Field(
        None,
        description="Resize images to a square of this many pixels; 0 disables it. Default: 84 for Atari games, otherwise 0.",
    )
    wrappers: tuple[str, ...] = Field((), description="`module:Class` Gymnasium wrappers, applied in order.")
    vector: Literal["auto", "native", "loop"] = Field(
        "auto", description="Vectorization: native (the environment's own vector version), loop (over copies), or auto."
    )
    observations: Literal["values", "index"] | None = Field(
        None,
        description="Discrete observations as one-hot vectors (values) or as one number (index). Default: what the algorithm needs.",
    )

    def resolve_defaults(self, env: str) -> Self:
        """Return this configuration with defaults resolved for an environment's id."""
        atari = env.rpartition(":")[2].startswith("ALE/")
        names = ("frame_stack", "reward_clip", "grayscale", "resize")
        choices = zip(names, (4, 1.0, True, 84) if atari else (1, 0.0, False, 0), strict=True)
        return self.model_copy(update={name: value for name, value in choices if getattr(self, name) is None})


class FlowConfig(FrozenConfig):
    """How experience and weights are exchanged."""

    ahead: Literal[0, 1] | None = Field(
        None,
        description="Sync: rounds that actors may collect ahead of the learner. 1 overlaps collecting with "
        "learning, on data one version old; 0 is strictly on-policy. Default: 1 in sync, otherwise 0.",
    )
    window_s: Duration = Field(
        0.02, description="Async: seconds that the learner collects finished segments for one batch."
    )
    max_lag: Count = Field(
        8, description="Async: segments that are older than this many versions are dropped and counted."
    )
    slots_per_actor: Positive | None = Field(
        None, description="Maximum unprocessed segments of one actor. Default: 2 for a single async actor, otherwise 1."
    )
    max_actors: Positive | None = Field(
        None,
        description="Async on processes or kafka: maximum number of actors, so that actors can be added during the run. "
        "Default: `actors`.",
    )
    replay_roles: RoleCount = Field(
        0,
        description="Number of replay roles with one buffer each: processes, or Ray actors on several nodes "
        "(on inline, all buffers are in one process). 0: one buffer in the learner's process.",
    )
    publish_every: Positive | None = Field(
        None,
        description="Async replay: maximum updates between two publications of weights. Default: the algorithm's own number.",
    )
    refresh_every: Positive = Field(
        1, description="Workers on mpi: merges between two updates of a worker's table with the others' changes."
    )
    max_restarts: Count = Field(
        10,
        description="Maximum restarts of an actor, a worker or the manager that was killed or hangs, before the run fails.",
    )
    hang_s: PositiveDuration = Field(
        120.0, description="Seconds after which an actor or manager that does not finish a step counts as hanging."
    )
    record_arrivals: bool = Field(False, description="Async: record the order of learned segments, for `steppe rerun`.")
    trace_spans: Annotated[int, Field(ge=0, le=10**8)] = Field(
        0, description="Number of time spans per role that are written to the event log, for timelines."
    )
    profile: bool = Field(
        False, description="Profile each role and write flame graphs and a table to the run's directory."
    )
    threads: Positive = Field(
        1, description="torch threads of each role; another number gives bitwise different results."
    )
    actor_device: str = Field("cpu", description="Device on which actors compute actions: cpu, cuda, cuda:n or auto.")

    @field_validator("actor_device")
    @classmethod
    def _device(cls, value: str) -> str:
        return validate_device(value)


class EvalConfig(FrozenConfig):
    """How the manager evaluates the newest weights."""

    every_steps: Positive = Field(20_000, description="Environment steps between evaluations.")
    every_episodes: Positive | None = Field(
        None, description="Training episodes between evaluations, in addition to every_steps."
    )
    episodes: Positive = Field(20, description="Episodes per evaluation, also of the final one.")
    max_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Maximum share of the time for evaluations; if training is fast, they are less frequent than "
        "every_steps. Default: 0.1, or 0.5 with a target_return.",
    )
    explore: bool = Field(False, description="Sample actions instead of taking the best one.")
    max_episode_steps: Positive = Field(100_000, description="Maximum steps of an evaluation episode.")
    record: bool = Field(False, description="Record a GIF of one episode of each evaluation.")


class CheckpointConfig(FrozenConfig):
    """When checkpoints are written."""

    every_s: PositiveDuration = Field(30.0, description="Seconds between checkpoints.")
    every_episodes: Positive | None = Field(
        None, description="Training episodes between checkpoints, in addition to every_s."
    )
    keep: Positive = Field(3, description="Number of newest checkpoints to keep, in addition to the best.")
    full_disk: Literal["go-on", "stop"] = Field(
        "go-on",
        description="If the disk is full: go-on keeps the previous checkpoint and tries again; stop ends the run.",
    )


class RayConfig(FrozenConfig):
    """Where the roles run on a Ray cluster."""

    address: str | None = Field(
        None, description="Address of a running cluster, host:port or auto. Default: start a local cluster."
    )
    placement: Literal["pack", "spread"] = Field(
        "pack", description="Place actors on few nodes (pack) or on as many as possible (spread)."
    )
    actors_per_node: Positive | None = Field(None, description="Maximum actors per node.")
    actor_cpus: Coefficient = Field(1.0, description="Ray CPUs per actor.")
    actor_gpus: Coefficient = Field(0.0, description="Ray GPUs per actor.")
    actor_resources: dict[str, PositiveFloat] = Field(
        {}, description="Custom Ray resources per actor, by name, to place actors on certain nodes."
    )
    learner_cpus: Coefficient = Field(1.0, description="Ray CPUs of the learner.")
    learner_gpus: Coefficient | None = Field(
        None,
        description="Ray GPUs of the learner. Default: 1 if the cluster has one and device allows it, otherwise 0.",
    )
    object_store_mb: Annotated[int, Field(ge=80, le=10**9)] | None = Field(
        None,
        description="Size of the local cluster's object store. Default: four times the segments and weights in transit.",
    )

    @field_validator("address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and value != "auto" and not re.fullmatch(r"[\w.\-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", value):
            raise ValueError("must be host:port of a Ray cluster's head, or auto (start steppe on one of its nodes)")
        return value


class KafkaConfig(FrozenConfig):
    """Connection to Apache Kafka. Passwords come only from environment variables (docs/kafka.md)."""

    address: str | None = Field(None, description="Address of the brokers: host:port, several separated by commas.")
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,80}$")] = Field(
        "", description="Prefix of all topic names, if several groups share a cluster."
    )
    compression: Literal["lz4", "zstd", "none"] = Field("lz4", description="Compression of segments and weights.")
    linger_ms: Annotated[float, Field(ge=0, le=1000)] = Field(
        0.0, description="Milliseconds that a message may wait to be sent in a batch."
    )
    partitions: Annotated[int, Field(ge=1, le=1024)] = Field(
        16, description="Partitions of the topic experiences, if Steppe creates it; each actor uses one of them."
    )
    replicas: Annotated[int, Field(ge=1, le=16)] = Field(
        1, description="Replication factor of topics that Steppe creates."
    )
    retention_hours: PositiveFloat = Field(24.0, description="Retention time of segments, if Steppe creates the topic.")
    retention_mb: Positive = Field(1024, description="Retention size of each partition of experiences.")
    max_message_mb: Annotated[int, Field(ge=1, le=1024)] = Field(
        16, description="Maximum message size of topics that Steppe creates; larger segments are refused."
    )
    claim_mb: PositiveFloat = Field(
        4.0,
        description="Weights larger than this are passed as a file in kafka.claims, and only the checksum goes through Kafka.",
    )
    claims: Path | None = Field(
        None,
        description="Shared directory for weights larger than claim_mb. Default: in the run's directory.",
    )
    replan_s: Duration = Field(
        60.0,
        description="Seconds that a round of mode sync waits for an actor without a heartbeat before the others continue without "
        "it until it is back; 0 waits without limit.",
    )
    wait_s: PositiveDuration = Field(
        120.0,
        description="Seconds that a role waits for unreachable brokers or missing topics before it fails.",
    )
    security: Literal["plaintext", "tls", "sasl", "sasl-tls"] = Field(
        "plaintext", description="Authentication and encryption: none (plaintext), TLS, SASL/SCRAM, or both."
    )
    username: str | None = Field(None, description="User name for sasl; the password is in STEPPE_KAFKA_PASSWORD.")
    mechanism: Literal["SCRAM-SHA-256", "SCRAM-SHA-512"] = Field("SCRAM-SHA-512", description="Mechanism for sasl.")
    ca: Path | None = Field(None, description="For tls: CA certificates for the brokers. Default: the system's.")
    certificate: Path | None = Field(None, description="For tls: the client certificate, if the brokers require one.")
    key: Path | None = Field(
        None,
        description="For tls: the private key of the certificate; STEPPE_KAFKA_KEY_PASSWORD decrypts it if it is encrypted.",
    )

    @field_validator("address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        one = r"(?:[\w.\-]+|\[[0-9a-fA-F:]+\]):\d+"
        if value is not None and not re.fullmatch(rf"{one}(?:,{one})*", value):
            raise ValueError("must be host:port of a Kafka broker, or several with commas between them")
        return value

    def model_post_init(self, _: Any) -> None:
        if self.security.startswith("sasl") != (self.username is not None):
            raise ConfigError("kafka.username goes with kafka.security=sasl or sasl-tls: give both, or neither")
        for name in ("ca", "certificate", "key"):
            if getattr(self, name) is not None and not self.security.endswith("tls"):
                raise ConfigError(f"kafka.{name} is for kafka.security=tls or sasl-tls: leave it out")


class RunConfig(FrozenConfig):
    """One experiment: environment, algorithm, runtime and duration."""

    env: str = Field(
        description="Gymnasium or PettingZoo id, `module:Id`, or `module:function` that returns an environment."
    )
    algo: str = Field(DEFAULT_ALGORITHM, description="Algorithm by name, or `module:Class` of your own.")
    runtime: str = Field(
        "processes",
        description=f"Where the roles run: {', '.join(RUNTIMES)}, or `module:function` of your own.",
    )
    mode: Literal["single", "sync", "async", "workers"] | None = Field(
        None, description="How actors and learner are synchronized. Default: the algorithm's usual mode, mostly sync."
    )
    actors: Annotated[int, Field(gt=0, le=100_000)] = Field(
        1, description="Number of actors or workers; auto chooses by a short measurement."
    )
    envs: Annotated[int, Field(gt=0, le=10**7)] | None = Field(
        None,
        description="Environments per actor; auto chooses by a short measurement. Default: depends on algorithm and environment.",
    )
    steps: Positive | None = Field(
        None,
        description="Total environment steps over all actors. Default: 1,000,000, unless episodes are given.",
    )
    episodes: Positive | None = Field(None, description="Stop after this many training episodes.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="Seed of all random numbers.")
    target_return: Annotated[float, Field(ge=-1e12, le=1e12)] | None = Field(
        None, description="End the run with success when an evaluation's mean return reaches this value."
    )
    restarts: Count = Field(0, description="Maximum automatic resumes after the learner has died.")
    init_from: str | None = Field(
        None,
        description="Start with the weights of another run, given by name or directory; the optimizer starts fresh.",
    )
    device: str = Field("auto", description="Device of the learner: auto, cpu, cuda or cuda:n.")
    name: str | None = Field(None, description="Name of the run.")
    run_dir: Path | None = Field(None, description="Directory of this run. Default: runs/NAME.")
    environment: EnvConfig = Field(EnvConfig(), description="How the environment is created and wrapped.")
    agent: SerializeAsAny[AgentConfig] = Field(
        default_factory=lambda: config_class(DEFAULT_ALGORITHM)(), description="The algorithm's hyperparameters."
    )
    flow: FlowConfig = Field(FlowConfig(), description="How experience and weights are exchanged.")
    evaluation: EvalConfig = Field(EvalConfig(), description="How weights are evaluated.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="When checkpoints are written.")
    params: ParamsConfig = Field(ParamsConfig(), description="How workers' gradients are applied, in mode workers.")
    ray: RayConfig = Field(RayConfig(), description="Placement of roles, on runtime ray.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="Other machines that train together with this one.")
    kafka: KafkaConfig = Field(KafkaConfig(), description="Connection to the brokers, on runtime kafka.")

    @field_validator("runtime")
    @classmethod
    def _runtime(cls, value: str) -> str:
        if value not in RUNTIMES and not references.is_reference(value):
            raise ValueError(
                f"there is no such runtime; there are: {', '.join(RUNTIMES)}.{did_you_mean(value, RUNTIMES)}"
            )
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        return validate_device(value)

    def model_post_init(self, _: Any) -> None:
        mode = self.mode or self.agent.usual_mode
        object.__setattr__(self, "mode", mode)
        if self.environment.observations is None:
            environment_config = self.environment.model_copy(update={"observations": self.agent.observations})
            object.__setattr__(self, "environment", environment_config)
        if mode == "workers":
            self._require_workers()
        elif self.flow.refresh_every != 1:
            raise ConfigError(f"flow.refresh_every is for mode 'workers', not {mode!r}: leave it out")
        if self.by_gradients:
            params, agent = self.params.settled(self.agent, self.actors)
            object.__setattr__(self, "params", params)
            object.__setattr__(self, "agent", agent)
        elif self.params != ParamsConfig():
            key = next(name for name, value in ParamsConfig() if getattr(self.params, name) != value)
            raise ConfigError(
                f"params.{key} is for workers whose gradients are applied together, not here: leave it out"
            )
        if self.agent.in_table:
            self._require_no_torch_options()
        if self.flow.ahead is None:
            ahead = 1 if mode == "sync" else 0
            object.__setattr__(self, "flow", self.flow.model_copy(update={"ahead": ahead}))
        if self.steps is None and self.episodes is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)
        if mode == "single" and self.actors != 1:
            raise ConfigError(f"mode 'single' has one actor, not {self.actors}: use --mode sync or --mode async")
        if self.flow.ahead and mode != "sync":
            raise ConfigError(f"flow.ahead=1 is for mode 'sync', not {mode!r}: leave it out, or use --mode sync")
        if self.flow.record_arrivals and mode != "async":
            raise ConfigError(
                f"record_arrivals is for mode 'async', not {mode!r}: the same seed repeats a {mode} run without a log"
            )
        if self.flow.replay_roles:
            self._require_replay_roles(self.flow.replay_roles)
        if self.cluster.joined:
            self._require_node()
        elif self.cluster != ClusterConfig():
            raise ConfigError("cluster.parameter_server is required: host:port where the nodes meet")
        if self.flow.max_actors is not None:
            self._require_max_actors(self.flow.max_actors)
        for runtime in runtimes_with("config_section"):
            self._require_own_section(runtime)

    def _require_own_section(self, runtime: str) -> None:
        """Raise if the section of this runtime has settings, and the run is on a runtime without that section."""
        name = capabilities_of(runtime).config_section or ""
        section = getattr(self, name)
        plain = type(section)()
        changed = [key for key in type(section).model_fields if getattr(section, key) != getattr(plain, key)]
        if changed and capabilities_of(self.runtime).config_section != name:
            raise ConfigError(
                f"{name}.{changed[0]} is for runtime {runtime!r}, not {self.runtime!r}: leave it out, or use "
                f"--runtime {runtime}"
            )

    def _require_node(self) -> None:
        """Raise unless this run can be a node of a cluster."""
        if self.cluster.node_id is None:
            raise ConfigError("cluster.node_id is required: which of the cluster's nodes this is")
        if self.agent.in_table or self.mode == "workers":
            raise ConfigError(
                f"a node of a cluster has one learner with a network: not {self.algo} in mode {self.mode!r}"
            )
        if self.cluster.backend == "mpi" and not capabilities_of(self.runtime).one_process:
            raise ConfigError(f"a node of an MPI world is one process: use --runtime inline, not {self.runtime!r}")
        if self.cluster.exchange == "gradients" and getattr(self.agent, "anneal", False):
            raise ConfigError(
                "anneal=true does not go with cluster.exchange='gradients', whose step size is the server's"
            )
        if self.cluster.exchange == "gradients" and getattr(self.agent, "target_kl", None) is not None:
            raise ConfigError("target_kl does not go with cluster.exchange='gradients': every node takes as many steps")

    def _require_replay_roles(self, roles: int) -> None:
        """Raise unless replay roles are possible."""
        if self.agent.memory == "rollout" or self.mode == "workers":
            raise ConfigError(
                f"flow.replay_roles is for agents that learn from replay, not {self.algo} in mode {self.mode!r}: leave it out"
            )
        if not capabilities_of(self.runtime).replay_roles:
            able = [name for name in runtimes_with("replay_roles") if not capabilities_of(name).one_process]
            raise ConfigError(
                f"flow.replay_roles is for runtimes {' and '.join(able)}, not {self.runtime!r}: leave it out, and replay is "
                "in the learner's process"
            )
        if getattr(self.agent, "buffer_size", roles) < roles:
            raise ConfigError(f"flow.replay_roles={roles} is more than buffer_size: lower it")

    def _require_max_actors(self, max_actors: int) -> None:
        if self.mode != "async" or not capabilities_of(self.runtime).scales_actors:
            able = " or ".join(map(repr, runtimes_with("scales_actors")))
            raise ConfigError(f"flow.max_actors is for mode 'async' on runtime {able}: leave it out")
        if max_actors < self.actors:
            raise ConfigError(f"flow.max_actors={max_actors} is less than actors={self.actors}")

    def _require_no_torch_options(self) -> None:
        """Raise if an option of torch is set for an agent without torch."""
        for key, device in (("device", self.device), ("flow.actor_device", self.flow.actor_device)):
            if device.startswith("cuda"):
                raise ConfigError(f"{key}={device!r}: {self.algo} learns in a table, on the CPU; leave {key} out")
        if self.flow.threads != 1:
            raise ConfigError(f"flow.threads is for torch, which {self.algo} does not use: leave it out")

    @property
    def by_gradients(self) -> bool:
        """Whether workers push gradients; agents with tables share the table instead."""
        return self.mode == "workers" and not self.agent.in_table

    def _require_workers(self) -> None:
        """Raise unless this run can use mode workers; options of segments and tables are refused."""
        if not capabilities_of(self.runtime).workers:
            able = " or ".join(f"--runtime {name}" for name in runtimes_with("workers"))
            raise ConfigError(f"mode 'workers' is not for runtime {self.runtime!r}: use {able}")
        plain = FlowConfig()
        only_tables = () if self.agent.in_table else ("refresh_every",)
        for name in ("window_s", "max_lag", "slots_per_actor", "publish_every", *only_tables):
            if getattr(self.flow, name) != getattr(plain, name):
                raise ConfigError(f"flow.{name} means nothing in mode 'workers' with {self.algo}: leave it out")


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration, and the source of each value by dotted key."""

    config: RunConfig
    sources: dict[str, str]
    auto: tuple[str, ...] = ()  # numbers that are chosen by a measurement before the run


SECTIONS: dict[str, type[FrozenConfig]] = {
    "environment": EnvConfig,
    "flow": FlowConfig,
    "evaluation": EvalConfig,
    "checkpoint": CheckpointConfig,
    "params": ParamsConfig,
    "ray": RayConfig,
    "cluster": ClusterConfig,
    "kafka": KafkaConfig,
}


def resolve_config(*layers: tuple[str, Mapping[str, Any]]) -> ResolvedConfig:
    """Merge (source, flat dotted keys) layers, in which later ones override earlier ones, and validate the result.

    A key without a section is a top-level field, or else a hyperparameter of the algorithm.
    """
    merged: dict[str, tuple[Any, str]] = {}
    algo = next((str(layer["algo"]) for _, layer in reversed(layers) if "algo" in layer), DEFAULT_ALGORITHM)
    agent_class = config_class(algo)
    for source, layer in layers:
        for key, value in replace_renamed_keys(layer, agent_class.renamed).items():
            merged[_full_key(key, agent_class, source)] = (value, source)
    auto = tuple(key for key in ("actors", "envs") if key in merged and merged[key][0] == "auto")
    tree: dict[str, Any] = {"agent": {}}
    for key, (value, _) in merged.items():
        if key in auto:
            continue
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    tree["agent"] = validate_config(agent_class, tree["agent"], "agent.")
    for section, kind in SECTIONS.items():
        tree[section] = validate_config(kind, tree.get(section, {}), f"{section}.")
    config = validate_config(RunConfig, tree, "")
    sources = {key: merged[key][1] if key in merged else "default" for key in flatten(config)}
    return ResolvedConfig(config, sources | dict.fromkeys(auto, "auto"), auto)


def flatten(config: RunConfig) -> dict[str, Any]:
    """Dotted key to plain value, in the order of the fields."""
    flat: dict[str, Any] = {}
    for key, value in config.model_dump(mode="json").items():
        if key == "agent" or key in SECTIONS:
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of flat keys from `flatten`; absent values stay absent.

    Records without `flow.ahead` are from versions that always collected strictly on-policy, so it is 0.
    """
    stored = {key: value for key, value in {"flow.ahead": 0, **flat}.items() if value is not None}
    renamed = config_class(stored.get("algo", DEFAULT_ALGORITHM)).renamed
    return resolve_config(("record", replace_renamed_keys(stored, renamed, recorded=True))).config


def from_toml(path: Path) -> dict[str, Any]:
    """Flat dotted keys of a TOML file with optional tables [agent], [environment], [flow], [evaluation], [checkpoint],
    [params], [ray], [cluster], [kafka]."""
    return flat_keys(read_toml(path))


def flat_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flat dotted keys of a tree with the sections as tables."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and (key in SECTIONS or key == "agent")
        flat.update({f"{key}.{name}": inner for name, inner in value.items()} if nested else {key: value})
    return flat


def from_environ(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Flat dotted keys of STEPPE_* variables: STEPPE_SEED, STEPPE_AGENT__LEARNING_RATE (two underscores for the dot)."""
    return {
        name.removeprefix(ENV_PREFIX).lower().replace("__", "."): parse_value(text)
        for name, text in environ.items()
        if name.startswith(ENV_PREFIX) and name not in RESERVED_ENV_VARS
    }


def from_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Flat dotted keys of `key=value` words."""
    flat = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"-s takes key=value, not {pair!r}")
        flat[key.strip()] = parse_value(text.strip())
    return flat


def parse_value(text: str) -> Any:
    """A TOML value where the text is one (3e-4, true, [64, 64], {size = 4}), or JSON ({"size": 4}), otherwise the text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text) if text.startswith(("{", "[")) else text
    except json.JSONDecodeError:
        return text


def _full_key(key: str, agent_class: type[AgentConfig], source: str) -> str:
    section, _, name = key.rpartition(".")
    homes: dict[str, type[FrozenConfig]] = {"": RunConfig, "agent": agent_class, **SECTIONS}
    if section in homes and name in homes[section].model_fields and name not in (*SECTIONS, "agent"):
        return key
    if not section and name in agent_class.model_fields:
        return f"agent.{name}"
    known = [name for name in RunConfig.model_fields if name not in (*SECTIONS, "agent")]
    known += list(agent_class.model_fields)
    known += [f"{home}.{field}" for home, kind in SECTIONS.items() for field in kind.model_fields]
    variable = ENV_PREFIX + key.upper().replace(".", "__")
    where = {"flag": "", "call": "", "environment": f" in the variable {variable}"}.get(source, f" in {source}")
    raise ConfigError(f"unknown key {key!r}{where}.{did_you_mean(key, known)}")
