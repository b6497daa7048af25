"""Build the memory that an agent's configuration asks for; raise ConfigError at once if the machine cannot hold it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.core.config.agent import AgentConfig
from steppe.core.contracts.algorithm import Memory
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.transport import RpcClient
from steppe.core.io.atomic_files import free_bytes
from steppe.replay.rollout import RolloutBuffer

if TYPE_CHECKING:
    from steppe.replay.pool import ReplayBufferPool
    from steppe.replay.remote.client import RemoteReplayPool
    from steppe.replay.remote.server import ReplayShard
    from steppe.replay.sequence_windows import Windowing

MAX_MEMORY_SHARE = 0.9  # largest fraction of the currently available memory (or disk space) that replay may use
TREE_BYTES = 5  # bytes of sum tree (leaves and nodes) per transition


def make_memory(
    agent: AgentConfig,
    spec: SegmentSpec,
    *,
    stream: np.random.Generator,
    total_steps: int | None,
    num_actors: int = 1,
    pool: ReplayBufferPool | None = None,
    directory: Path | None = None,
    num_buffers: int = 1,
    replay_clients: Sequence[RpcClient] = (),
) -> Memory:
    """Return a rollout buffer, or a replay memory configured by the agent's buffer_size, batch_size, … (see DQNConfig).

    Sequence replay also uses sequence_length, sequence_stride, burn_in and value_rescaling. If the caller passes a
    `pool`, it is used as is: its capacity, kind and alpha take precedence. `directory` is used if the configuration
    stores replay on disk. The capacity is split among `num_buffers`, or among the replay servers behind `replay_clients`, one
    RPC client each.
    """
    if agent.memory == "rollout":
        return RolloutBuffer(spec)
    if once := [column.name for column in spec.extras if column.once]:
        raise ConfigError(f"the column {once[0]!r} has one row per segment, which only memory = 'rollout' keeps")
    from steppe.replay.sequence_memory import SequenceMemory, SequenceSamplingConfig
    from steppe.replay.transition_memory import ReplayMemory, SamplingConfig  # imports numba: only if needed

    settings = dict(agent)
    select = partial(_select, settings)
    used: ReplayBufferPool | RemoteReplayPool
    if replay_clients:
        used = _remote_pool(agent, settings, replay_clients)
    else:
        disk = _storage_directory(str(settings.get("buffer_storage", "memory")), directory, pool)
        used = _pool(agent, settings, spec, num_actors, pool, disk, num_buffers)
    limits = select("batch_size", "learning_starts", "samples_per_insert", "beta")
    if agent.memory == "replay":
        draws = SamplingConfig(**limits, **select("n_step", "gamma"), total_steps=total_steps)
        return ReplayMemory(spec, used, draws, stream=stream)
    sequences = SequenceSamplingConfig(**limits, windowing=_windowing(settings), total_steps=total_steps)
    return SequenceMemory(spec, used, sequences, stream=stream)


def make_replay_shard(
    agent: AgentConfig, spec: SegmentSpec, num_shards: int, directory: Path | None = None
) -> ReplayShard:
    """Return one of the `num_shards` buffers of a remote replay memory; raise ConfigError if it does not fit here."""
    from steppe.replay.nstep import transition_fields
    from steppe.replay.remote.server import ReplayShard
    from steppe.replay.sequence_windows import SequenceReplay, step_fields
    from steppe.replay.transition_memory import ensure_columns

    settings = dict(agent)
    disk = _storage_directory(str(settings.get("buffer_storage", "memory")), directory, None)
    pool = _pool(agent, {**settings, "buffer_size": _capacity_per_buffer(settings, num_shards)}, spec, 1, None, disk, 1)
    sequences = agent.memory == "sequences"
    ensure_columns(pool, step_fields(spec) if sequences else transition_fields(spec), 1)
    return ReplayShard(pool, SequenceReplay(pool, _windowing(settings)) if sequences else None)


def _select(settings: dict[str, Any], *known: str) -> dict[str, Any]:
    return {name: settings[name] for name in known if name in settings}


def _windowing(settings: dict[str, Any]) -> Windowing:
    from steppe.replay.sequence_windows import Windowing

    renamed = {"sequence_length": "length", "sequence_stride": "stride", "value_rescaling": "rescaled"}
    shape = _select(settings, *renamed, "burn_in", "n_step", "gamma")
    return Windowing(**{renamed.get(name, name): value for name, value in shape.items()})


def _capacity_per_buffer(settings: dict[str, Any], num_buffers: int) -> int:
    """Return the capacity of each buffer: buffer_size / num_buffers, rounded up."""
    return -(-int(settings["buffer_size"]) // num_buffers)


def _alpha(agent: AgentConfig, settings: dict[str, Any]) -> float | None:
    """Return the priority exponent: None for uniform sampling of rows, 0 for uniform sampling of sequence starts."""
    if settings.get("prioritized", False):
        return float(settings.get("alpha", 0.6))
    return 0.0 if agent.memory == "sequences" else None


def _remote_pool(agent: AgentConfig, settings: dict[str, Any], replay_clients: Sequence[RpcClient]) -> RemoteReplayPool:
    from steppe.replay.remote.client import RemoteReplayPool

    return RemoteReplayPool(
        replay_clients, _capacity_per_buffer(settings, len(replay_clients)), alpha=_alpha(agent, settings)
    )


def _pool(
    agent: AgentConfig,
    settings: dict[str, Any],
    spec: SegmentSpec,
    num_actors: int,
    pool: ReplayBufferPool | None,
    disk: Path | None,
    num_buffers: int,
) -> ReplayBufferPool:
    """Return the caller's pool or a new one; raise ConfigError if the pool is unsuitable or does not fit."""
    from steppe.replay.pool import ReplayBufferPool

    missing = [name for name in ("buffer_size", "batch_size") if name not in settings]
    if missing:
        raise ConfigError(
            f"{type(agent).__name__} has memory = {agent.memory!r} but no field {missing[0]}: extend DQNConfig or add it"
        )
    prioritized = bool(settings.get("prioritized", False))
    if pool is not None and prioritized and not pool.use_prioritized:
        raise ConfigError("prioritized=true needs a pool made with use_prioritized=True")
    given_size = None if pool is None else pool.num_buffers * pool.buffer_capacity
    if pool is None or not pool.store.fields:
        _require_available(*_estimate_bytes(agent, settings, spec, num_actors, given_size), disk)
    if pool is not None and num_buffers > 1:
        raise ConfigError("the given pool decides the number of buffers: leave flow.replay_roles out")
    if pool is not None:
        return pool
    alpha = _alpha(agent, settings)
    share = _capacity_per_buffer(settings, num_buffers)
    tree = prioritized or agent.memory == "sequences"
    return ReplayBufferPool(num_buffers, share, use_prioritized=tree, alpha=alpha or 0.0, disk_path=disk)


def estimate_replay_bytes(agent: AgentConfig, spec: SegmentSpec, num_actors: int) -> tuple[int, int, int]:
    """Return the replay's capacity in transitions (or steps), the bytes of each, and the total bytes.

    The total includes the rows of n-step windows that are still open.
    """
    return _estimate_bytes(agent, dict(agent), spec, num_actors)


def require_replay_memory(agent: AgentConfig, spec: SegmentSpec, num_actors: int) -> None:
    """Raise ConfigError unless the agent's replay fits into the available memory; replay on disk is not checked."""
    settings = dict(agent)
    if settings.get("buffer_size") is not None and settings.get("buffer_storage", "memory") == "memory":
        _require_available(*estimate_replay_bytes(agent, spec, num_actors), None)


def _estimate_bytes(
    agent: AgentConfig, settings: dict[str, Any], spec: SegmentSpec, num_actors: int, size: int | None = None
) -> tuple[int, int, int]:
    from steppe.replay.nstep import transition_fields
    from steppe.replay.sequence_windows import step_fields
    from steppe.replay.store.columns import bytes_per_row

    size = int(settings["buffer_size"]) if size is None else size
    sequences = agent.memory == "sequences"
    fields = step_fields(spec) if sequences else transition_fields(spec)
    tree = bool(settings.get("prioritized", False)) or sequences
    row_bytes = bytes_per_row(fields, interleaved=tree) + TREE_BYTES * tree
    open_rows = num_actors * spec.num_envs * int(settings.get("n_step", 1))
    return size, row_bytes, (size + open_rows) * row_bytes


def available_bytes() -> int:
    """Return the bytes that new allocations may use: the machine's, or what a container's limit leaves."""
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES")
    found = pages * os.sysconf("SC_PAGE_SIZE")
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) * 1024  # includes reclaimable caches, unlike free pages
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        found = min(found, max(0, int(limit) - int(used)))
    return found


def _storage_directory(storage: str, directory: Path | None, pool: ReplayBufferPool | None) -> Path | None:
    """Return the directory for columns on disk, or None for memory."""
    if pool is not None:
        if storage == "disk" and pool.store.disk is None:
            raise ConfigError(
                "buffer_storage=disk needs a pool made with disk_path=…, which decides where experience lies"
            )
        return pool.store.disk
    if storage == "disk" and directory is None:
        raise ConfigError("buffer_storage=disk is for runs, which have a directory: use buffer_storage=memory here")
    return directory if storage == "disk" else None


def _require_available(size: int, row_bytes: int, need: int, disk: Path | None) -> None:
    available, what = (available_bytes(), "memory") if disk is None else (free_bytes(disk), "disk")
    if available is not None and need > MAX_MEMORY_SHARE * available:
        max_transitions = int(MAX_MEMORY_SHARE * available / row_bytes)
        hint = ", or set buffer_storage=disk" if disk is None else ""
        raise ConfigError(
            f"a replay of {size:,} transitions (buffer_size) needs {need / 2**30:.1f} GiB ({row_bytes:,} bytes each), but {available / 2**30:.1f} GiB "
            f"of {what} are available: at most about {max_transitions:,} transitions fit{hint}"
        )


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
