"""Nodes that learn parts of batches together, and one learner that has the joint ones: the same experience, agents and
settings for every way of meeting. Run by itself it is a rank of an MPI world (`mpi`), or two nodes in a Ray cluster of its own,
which it keeps for others until its standard input ends (`ray DIRECTORY`)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from steppe.algorithms import make_agent
from steppe.algorithms.a2c.config import A2CConfig
from steppe.algorithms.dhc.config import DHCConfig
from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.ppo.config import PPOConfig
from steppe.algorithms.r2d2.config import R2D2Config
from steppe.core.config.agent import AgentConfig
from steppe.core.config.cluster import ClusterConfig, read_cluster
from steppe.core.contracts.algorithm import Progress, trainable_entries
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec
from steppe.params.from_cluster import AdamSettings
from steppe.roles.cluster.node import ClusterNode, connect, start_cluster_server
from steppe.testing.agent import invented_draw, invented_segment, invented_windows

STEPS, AGENTS = 4, 3
SPEC = EnvSpec("invented", FieldSpec("obs", (3,), "float32"), ActionSpec("discrete", (4,)))
BOX = EnvSpec("box", FieldSpec("obs", (3,), "float32"), ActionSpec("box", (2,), (-1.0, -2.0), (1.0, 2.0)))
PLANES = EnvSpec(
    "planes", FieldSpec("obs", (2, 5, 5), "uint8"), ActionSpec("discrete", (5,)), num_agents=AGENTS, agents=("a", "b", "c")
)  # fmt: skip
COMMON: dict[str, Any] = {"learning_rate": 0.01, "max_grad_norm": 0.1}
WHOLE: dict[str, Any] = {**COMMON, "hidden": (16,), "epochs": 2, "minibatch_size": 2**20}
SCALED = {"normalize_obs": False, "normalize_reward": False}  # running statistics are each node's
CASES: dict[str, tuple[str, AgentConfig, EnvSpec]] = {
    "a2c": ("a2c", A2CConfig(hidden=(16,), **COMMON), SPEC),
    "dqn": ("dqn", DQNConfig(hidden=(16,), **COMMON), SPEC),
    "ppo": ("ppo", PPOConfig(**WHOLE), SPEC),
    "ppo-box": ("ppo", PPOConfig(**WHOLE, **SCALED), BOX),
    "ppo-recurrent": ("ppo", PPOConfig(**WHOLE, recurrent=True, cell_size=8), SPEC),
    "ppo-unscaled": ("ppo", PPOConfig(**WHOLE, normalize_advantage=False), SPEC),
    "r2d2": ("r2d2", R2D2Config(hidden=(8,), cell_size=8, sequence_length=5, burn_in=3, **COMMON), SPEC),
    "dhc": (
        "dhc",
        DHCConfig(channels=8, sequence_length=4, burn_in=2, lesson_agents=(), halve_at=(2, 3), **COMMON),
        PLANES,
    ),
}
# All that nodes say to a server: steps; what they count before one; steps that the server makes smaller.
CARRIED = ("dqn", "ppo", "dhc")


def fitted(case: str) -> AgentConfig:
    _, config, spec = CASES[case]
    return config.resolve_defaults(spec, 1, 4)[0]


def made(case: str) -> Any:
    """A learner at its beginning. Not to be called by two threads at a time: torch has one stream of random numbers."""
    agent = make_agent(CASES[case][0], fitted(case), CASES[case][2], seed=2)
    agent.begin(4, np.random.default_rng(0))
    return agent


def batches(case: str) -> list[Batch]:
    """Joint ones; of rollouts some rows are no experience, and rewards are such that gradients are clipped."""
    config, spec, stream = fitted(case), CASES[case][2], np.random.default_rng(3)
    if case == "dhc":
        return [talking(stream) for _ in range(STEPS)]
    if config.memory == "sequences":
        return [invented_windows(config, spec, stream) for _ in range(STEPS)]
    if config.memory == "replay":
        return [invented_draw(spec, stream) for _ in range(STEPS)]
    actor, found = made(case), []
    for _ in range(STEPS):
        columns = invented_segment(actor, config, spec, stream).columns
        columns["valid"][:, 0] &= stream.random(len(columns["valid"])) < 0.7
        columns["reward"][:, -1] += 3.0  # the parts' advantages are not alike
        found.append(Batch(columns))
    return found


def talking(stream: np.random.Generator, windows: int = 8) -> Batch:
    """Sequences of agents who hear some of the others, as replay gives them; some agents are absent."""
    lead, learned, after = 2, 4, 2
    rows = lead + learned + after
    t = np.arange(rows)[:, None]
    live = np.broadcast_to(stream.random((1, windows, AGENTS)) < 0.8, (rows, windows, AGENTS)).copy()
    live[..., 0] = True
    heard = stream.random((rows, windows, AGENTS, AGENTS)) < 0.5
    heard |= np.eye(AGENTS, dtype=bool)
    heard &= live[..., None] & live[..., None, :]
    shape = (rows, windows, AGENTS)
    columns = {
        "obs": stream.integers(0, 2, (*shape, 2, 5, 5)).astype(np.uint8),
        "action": stream.integers(0, 5, shape),
        "reward": stream.standard_normal(shape).astype(np.float32) * 3.0,
        "terminated": stream.random(shape) < 0.2,
        "discount": np.full((rows, windows), 0.98, np.float32),
        "following": np.broadcast_to(np.minimum(t + 2, rows - 1), (rows, windows)).copy(),
        "valid": np.ones((rows, windows), bool),
        "learn": np.broadcast_to((t >= lead) & (t < lead + learned), (rows, windows)).copy(),
        "live": live,
        "comm_mask": heard,
        "hidden": (0.3 * stream.standard_normal((windows, AGENTS, 16))).astype(np.float16),
    }
    return Batch(columns, weights=stream.random(windows).astype(np.float32))


def part(batch: Batch, memory: str, index: int) -> Batch:
    """What node `index` of two has: three quarters of the environments, transitions or sequences, or the rest."""

    def axis(name: str) -> int:
        return 0 if memory == "replay" or (memory == "sequences" and name == "hidden") else 1

    count = batch["reward"].shape[axis("reward")]
    mine = np.arange(count)[slice(0, 3 * count // 4) if index == 0 else slice(3 * count // 4, count)]
    columns = {name: column.take(mine, axis(name)) for name, column in batch.columns.items()}
    return Batch(columns, weights=None if batch.weights is None else batch.weights[mine])


def params_of(agent: Any) -> dict[str, np.ndarray]:
    arrays = agent.weights().arrays()
    return {entry.name: arrays[entry.name] for entry in trainable_entries(agent)}


def flat(agent: Any) -> np.ndarray:
    return np.concatenate([array.ravel() for array in params_of(agent).values()])


def begun(case: str) -> tuple[dict[str, np.ndarray], AdamSettings]:
    """What a cluster's server begins with."""
    agent = made(case)
    return params_of(agent), AdamSettings(agent.learning_rate, agent.adam_eps, COMMON["max_grad_norm"], halved_at(case))


def halved_at(case: str) -> tuple[int, ...]:
    return getattr(fitted(case), "halve_at", ())


def alone(case: str) -> Any:
    """One learner after the joint batches."""
    agent = made(case)
    for batch in batches(case):
        watched(agent, case)
        agent.learn(batch)
    return agent


def watched(agent: Any, case: str) -> None:
    if fitted(case).memory in ("replay", "sequences") and case != "dhc":
        segment = invented_segment(agent, fitted(case), CASES[case][2], np.random.default_rng(1))
        agent.observe(segment, Progress(agent.updates, 100))


def member(case: str, index: int, cluster: ClusterConfig) -> Callable[[], Any]:
    """To be called: a node's learner after its parts of them."""
    agent, parts = made(case), [part(batch, fitted(case).memory, index) for batch in batches(case)]
    return lambda: taken_part(case, agent, parts, cluster)


def taken_part(case: str, agent: Any, parts: list[Batch], cluster: ClusterConfig) -> Any:
    node = ClusterNode(cluster, agent, connect(cluster))
    node.join()
    try:
        for mine in parts:
            watched(agent, case)
            agent.learn(mine)
        assert node.counts["missed"] == 0
        assert node.counts["exchanges"] == agent.updates
    finally:
        node.leave()
        node.client.close()
    return agent


def agree(case: str, found: Any, known: Any) -> None:
    """To the rounding of sums in another order, after Adam has made steps of equal size of small gradients and large ones."""
    moved = float(np.abs(flat(known) - flat(made(case))).max())
    assert moved > 0.01, "something was learned"
    np.testing.assert_allclose(flat(found), flat(known), rtol=1e-3, atol=2e-5)
    assert found.updates == known.updates >= STEPS


def cluster_of(index: int, **more: Any) -> ClusterConfig:
    nodes = {"nodes": ["one", "two"], "node_id": ("one", "two")[index]}
    return read_cluster({"exchange": "gradients", "quorum": 2, **nodes, **more})


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each of them returned; what one raised is raised."""
    results: list[Any] = [None] * len(works)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def in_mpi() -> None:
    """One case after the other, as one of two ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    for case in CARRIED:
        cluster = cluster_of(rank, backend="mpi")
        host = start_cluster_server(cluster, *begun(case)) if rank == 0 else None
        world.Barrier()
        agree(case, member(case, rank, cluster)(), alone(case))
        world.Barrier()
        if host is not None:
            host.close()
            print(case, flush=True)


def in_ray(directory: str) -> None:
    """One case after the other by two nodes of one program; the server is an actor of a Ray cluster of this program's own. Then
    the cluster's address, for other programs."""
    import ray

    from steppe.runtimes.ray.placement import RAY_SYSTEM_CONFIG

    about = ray.init(
        address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False,
        _node_ip_address="127.0.0.1", _temp_dir=directory, _system_config=RAY_SYSTEM_CONFIG, log_to_driver=False,
    )  # fmt: skip
    for case in CARRIED:
        clusters = [cluster_of(index, backend="ray", name=case) for index in range(2)]
        host = start_cluster_server(clusters[0], *begun(case))
        known = alone(case)
        for found in in_threads(*(member(case, index, clusters[index]) for index in range(2))):
            agree(case, found, known)
        host.close()
        print(case, flush=True)
    print(about.address_info["gcs_address"], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    in_mpi() if sys.argv[1] == "mpi" else in_ray(sys.argv[2])
