"""A Ray cluster, the run's own on this machine or an existing one: its nodes, and the placement of Ray actors."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steppe.core.config.run import RayConfig, RunConfig
from steppe.core.contracts.errors import UsageError
from steppe.runtimes.plan import WRITERS, Plan
from steppe.runtimes.ray.actor import RayWorkerActor
from steppe.transport.ray.links import import_ray

EXTRA_CALL_THREADS = 8  # threads of a Ray actor besides those that wait for segments
STORE_BYTES = 256 << 20  # of the object store, for weights, besides four times the segments in flight
RAY_SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,  # the run has no tasks: such workers would import Ray for nothing
    "gcs_rpc_server_reconnect_timeout_s": 5,  # a lost head does not come back
    "worker_niceness": 0,  # Ray's 15 would give every other process on the machine precedence
    "max_direct_call_object_size": 1 << 20,  # return segments up to this size inline, not through the object store
    "enable_metrics_collection": False,  # unused
    "task_events_report_interval_ms": 0,
}
HEAD_PROCESSES = ("gcs_server", "raylet")


class RayCluster:
    """The cluster this process is connected to. Released Ray actors keep their imports for the next run."""

    def __init__(self, plan: Plan, scratch: str | None = None) -> None:
        self._ray = import_ray()
        self._idle_actors: dict[str, tuple[Any, Any]] = {}  # worker slot → (options it was created with, Ray actor)
        self._joined = not self._ray.is_initialized()
        if self._joined:
            self._connect(plan, scratch)
        self._driver_node = self._ray.get_runtime_context().get_node_id()
        self._heads = dict(_head_process_handles()) if self._joined and plan.config.ray.address is None else {}

    def _connect(self, plan: Plan, scratch: str | None) -> None:
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        address = plan.config.ray.address
        if address is not None:
            try:
                self._ray.init(address=address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise UsageError(f"cannot join the Ray cluster at {address}: {error}") from error
            return
        self._ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(_num_cpus(plan))),
            object_store_memory=store_bytes(plan),
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=scratch,
            _system_config=RAY_SYSTEM_CONFIG,
            **quiet,
        )

    def require_resources(self, plan: Plan) -> None:
        """Raise unless the cluster's total resources suffice for the run."""
        config, nodes = plan.config.ray, self.nodes()
        available: Counter[str] = Counter()
        for node in nodes.values():
            available.update(node["Resources"])
        needs = {"CPU": _num_cpus(plan), "GPU": self.learner_gpus(plan.config) + config.actor_gpus * _num_actors(plan)}
        needs |= {name: amount * _num_actors(plan) for name, amount in config.actor_resources.items()}
        for name, amount in needs.items():
            if amount > available[name]:
                raise UsageError(
                    f"this run takes {amount:g} of Ray's {name}, but the cluster has {available[name]:g}: use fewer --actors, "
                    f"or set ray.actor_cpus, ray.actor_gpus or ray.actor_resources"
                )
        if config.actors_per_node is not None and config.actors_per_node * len(nodes) < _num_actors(plan):
            raise UsageError(
                f"with ray.actors_per_node={config.actors_per_node} the cluster's {len(nodes)} nodes have no room for "
                f"{_num_actors(plan)} actors"
            )
        smallest = min(node["Resources"].get("object_store_memory", 0.0) for node in nodes.values())
        if 2 * plan.channel_bytes > smallest:
            raise UsageError(
                f"segments under way take {plan.channel_bytes >> 20} MiB, too much for an object store of "
                f"{int(smallest) >> 20} MiB: use fewer actors, envs or steps in a segment, or a larger object store"
            )

    def learner_gpus(self, config: RunConfig) -> float:
        """Return the configured number; by default 1 if the cluster has a GPU and the learner may use it, else 0."""
        if config.ray.learner_gpus is not None:
            return config.ray.learner_gpus
        wanted = config.device != "cpu" and self._ray.cluster_resources().get("GPU", 0.0) >= 1
        return 1.0 if wanted else 0.0

    def nodes(self) -> dict[str, Any]:
        """Return the live nodes by id."""
        return {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}

    def acquire_actor(self, plan: Plan, worker_slot: str, taken: Mapping[str, int]) -> Any:
        """Return a Ray actor for a worker slot: its released one, or a new one on a node by the plan's placement rules.

        `taken` counts this run's actors by node.
        """
        options, rules = self._options(plan, worker_slot), plan.config.ray
        known, ray_actor = self._idle_actors.pop(worker_slot, (None, None))
        if known == (options, rules):
            return ray_actor
        if ray_actor is not None:
            self._ray.kill(ray_actor)
        return (
            self._ray.remote(RayWorkerActor)
            .options(**options, **self._scheduling_options(plan, worker_slot, taken))
            .remote()
        )

    def release_actor(self, plan: Plan, worker_slot: str, ray_actor: Any) -> None:
        """Keep a Ray actor, with its imports, for another run."""
        self._idle_actors[worker_slot] = ((self._options(plan, worker_slot), plan.config.ray), ray_actor)

    def ended_head_process(self) -> str | None:
        """Return which process of the run's own cluster head has ended, or None."""
        ended, _, _ = select.select(list(self._heads), [], [], 0.0)
        return self._heads[ended[0]] if ended else None

    def processes(self) -> dict[str, dict[str, Any]]:
        """Return all processes of the run's own cluster, for cleanup: some outlive a killed head by a minute."""
        host = socket.gethostname()
        return (
            {f"cluster-{pid}": {"pid": pid, "host": host} for pid in _descendants(os.getpid())} if self._heads else {}
        )

    def close(self) -> None:
        """Kill idle Ray actors, and disconnect if this object connected: only the run's own cluster shuts down."""
        for _, ray_actor in self._idle_actors.values():
            self._ray.kill(ray_actor)
        self._idle_actors.clear()
        for handle in self._heads:
            os.close(handle)
        self._heads = {}
        if self._joined:
            self._ray.shutdown()

    def _options(self, plan: Plan, worker_slot: str) -> dict[str, Any]:
        config = plan.config.ray
        more: dict[str, Any] = {"num_cpus": 0}
        if worker_slot == "learner":
            more = {"num_cpus": config.learner_cpus, "num_gpus": self.learner_gpus(plan.config)}
        elif worker_slot.startswith(WRITERS):
            more = {"num_cpus": config.actor_cpus, "num_gpus": config.actor_gpus, "resources": config.actor_resources}
        callers = _num_actors(plan) if worker_slot == "learner" and plan.uses_table else 0
        return {
            "max_concurrency": max(4, plan.slots_per_actor) + EXTRA_CALL_THREADS + callers,
            "max_restarts": 0,
            **more,
        }

    def _scheduling_options(self, plan: Plan, worker_slot: str, taken: Mapping[str, int]) -> dict[str, Any]:
        """Return scheduling options: learner and manager on the driver's node, where the run directory is; replay on
        the nodes in turn, the driver's last; actors by the configured placement."""
        config = plan.config.ray
        if worker_slot in plan.replay:  # needs no resources, so it always fits
            others = sorted(self.nodes(), key=lambda node: (node == self._driver_node, node))
            return self._on_node(others[plan.replay.index(worker_slot) % len(others)], soft=False)
        if not worker_slot.startswith(WRITERS):
            if worker_slot == "learner" and self.learner_gpus(plan.config) > 0:
                return {}
            takes_nothing = (
                worker_slot == "manager" or not config.learner_cpus
            )  # always fits: Ray would place it anywhere
            return self._on_node(self._driver_node, soft=not takes_nothing)
        if config.actors_per_node is None:
            return {"scheduling_strategy": "SPREAD" if config.placement == "spread" else "DEFAULT"}
        return self._on_node(self._choose_node(config, taken), soft=False)

    def _choose_node(self, config: RayConfig, taken: Mapping[str, int]) -> str:
        limit = config.actors_per_node or 0
        candidates = sorted(self.nodes(), key=lambda node: (node != self._driver_node, node))
        free = [node for node in candidates if taken.get(node, 0) < limit]
        if not free:
            raise UsageError(f"no node of the cluster has room for another actor (ray.actors_per_node={limit})")
        return min(free, key=lambda node: taken.get(node, 0)) if config.placement == "spread" else free[0]

    def _on_node(self, node: str, *, soft: bool) -> dict[str, Any]:
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=soft)
        return {"scheduling_strategy": strategy}


def store_bytes(plan: Plan) -> int:
    """Return the size of the object store of the run's own cluster."""
    configured_mb = plan.config.ray.object_store_mb
    in_flight_bytes = plan.channel_bytes + 2 * plan.segment.nbytes * len(plan.replay)  # sent to replay, as transitions
    return configured_mb << 20 if configured_mb is not None else 4 * in_flight_bytes + STORE_BYTES


def _num_actors(plan: Plan) -> int:
    """Return the number of actors with their own worker slot."""
    return sum(worker_slot.startswith(WRITERS) for worker_slot in plan.worker_slots())


def _num_cpus(plan: Plan) -> float:
    return plan.config.ray.learner_cpus + plan.config.ray.actor_cpus * _num_actors(plan)


def _head_process_handles() -> Iterator[tuple[int, str]]:
    """Yield (pidfd, name) of the head processes of the cluster that this process started."""
    if not hasattr(os, "pidfd_open"):
        return
    for pid in _children(os.getpid()):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name in HEAD_PROCESSES:
                yield os.pidfd_open(pid), name


def _children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            yield from map(int, path.read_text().split())


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)
