"""Convert dictionaries of the public API to segments and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steppe.core.array_checks import as_column, require_segment, require_shape, require_values
from steppe.core.arrays import to_numpy
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import EnvSpec, FieldSpec, SegmentSpec

Columns = dict[str, np.ndarray]
_ROLLOUT_KEYS = ("valid", "final_obs")  # what distinguishes a [T, B] batch from flat transitions
REWARD, DISCOUNT = FieldSpec("reward", (), "float32"), FieldSpec("discount", (), "float32")
TERMINATED, TRUNCATED = FieldSpec("terminated", (), "bool"), FieldSpec("truncated", (), "bool")
VALID, LEARN = FieldSpec("valid", (), "bool"), FieldSpec("learn", (), "bool")
EPISODE = FieldSpec("episode", (), "int64")
WEIGHTS, INDICES = FieldSpec("weights", (), "float32"), FieldSpec("indices", (), "int64")


def stack_experiences(experiences: Sequence[Mapping[str, Any]]) -> Columns:
    """Stack experience dictionaries into one array per key."""
    if not experiences:
        raise UsageError("there are no experiences to learn from")
    keys = experiences[0].keys()
    different = next((number for number, experience in enumerate(experiences) if experience.keys() != keys), None)
    if different is not None:
        raise UsageError(
            f"experience {different} has the keys {', '.join(experiences[different])}, not {', '.join(keys)}"
        )
    return {key: _stacked(key, [experience[key] for experience in experiences]) for key in keys}


def _stacked(key: str, values: Sequence[Any]) -> np.ndarray:
    rows = [to_numpy(value, repr(key)) for value in values]
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise UsageError(f"{key!r} comes in different shapes: {', '.join(map(str, sorted(shapes)))}")
    return np.stack(rows)


def to_transition_batch(batch: Mapping[str, Any], spec: EnvSpec, gamma: float) -> Batch:
    """Build a batch for replay agents from flat transitions, one-step ones without `discount`. Values are validated."""
    obs, action = spec.fields
    reward = _checked_column(batch, REWARD)
    rows = len(reward)
    columns = {
        "obs": _checked_column(batch, obs, rows),
        "action": _checked_column(batch, action, rows),
        "reward": reward,
        "next_obs": _checked_column(batch, obs, rows, "next_obs"),
        "terminated": _column(batch, TERMINATED, rows),
        "discount": _checked_column(batch, DISCOUNT, rows) if "discount" in batch else np.full(rows, gamma, np.float32),
    }
    return Batch(columns, *_weights_and_indices(batch, rows))


def to_sequence_batch(batch: Mapping[str, Any], spec: EnvSpec, extras: tuple[FieldSpec, ...]) -> Batch:
    """Build a batch for recurrent agents from time windows [R, N, …] of replay/sequence_windows.py.

    Values are validated. With several agents each column has an agent axis after the first two, and `live` (default:
    all) marks the agents that are present. `hidden` has no time axis: it is the recurrent state at the first row of
    each window.
    """
    team = () if spec.num_agents == 1 else (spec.num_agents,)
    obs, action = spec.fields
    reward = as_column(_require_key(batch, "reward"), "reward", "float32")
    if reward.ndim != 2 + len(team) or not all(reward.shape[:2]):
        raise UsageError(f"windows have columns [R, N, …], R and N at least 1, but 'reward' has shape {reward.shape}")
    rows, count = reward.shape[:2]
    following = FieldSpec("following", (), "int64", below=(rows,))
    states = [field for field in extras if field.name == "hidden"]
    all_present = {"live": np.ones((rows, count, *team), bool)} if team and "live" not in batch else {}
    batch = {**batch, **all_present}
    expected = [
        (field, (rows, count, *team)) for field in (obs, action, REWARD, TERMINATED, *_comm_mask_fields(extras))
    ]
    expected += [(FieldSpec("live", (), "bool"), (rows, count, *team))] if team else []
    expected += [(field, (rows, count)) for field in (DISCOUNT, following, VALID, LEARN)]
    expected += [(field, (count, *team)) for field in states]
    columns: Columns = {}
    for field, leading in expected:
        column = as_column(_require_key(batch, field.name), field.name, field.dtype)
        require_shape(column, field.name, (*leading, *field.shape))
        require_values(column, field.name, field)
        columns[field.name] = column
    if not columns["learn"].any():
        raise UsageError("the windows have no row to learn from: 'learn' is False everywhere")
    return Batch(columns, *_weights_and_indices(batch, count))


def _comm_mask_fields(extras: tuple[FieldSpec, ...]) -> list[FieldSpec]:
    """Return the field of the communication mask, if the agent communicates."""
    return [field for field in extras if field.name == "comm_mask"]


def _weights_and_indices(batch: Mapping[str, Any], rows: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return importance weights and indices of a sampled batch, if it has them."""
    return (
        None if batch.get("weights") is None else _checked_column(batch, WEIGHTS, rows),
        None if batch.get("indices") is None else _column(batch, INDICES, rows),
    )


def to_segment(batch: Mapping[str, Any], spec: EnvSpec, extras: tuple[FieldSpec, ...]) -> Segment:
    """Build a segment from a [T, B] batch, or from flat transitions in chronological order.

    Flat transitions become the column of one environment. Where a row does not continue the one before it (an episode
    that was left unfinished, another worker), the trajectory is truncated and bootstraps from its own `next_obs`.
    """
    if all(name in batch for name in _ROLLOUT_KEYS):
        return _segment_from_columns(batch, spec, extras)
    if any(field.once for field in extras):
        raise UsageError(
            "an agent with a memory learns from a rollout [T, B] and the state that it began with ('hidden' [1, B, …]), not "
            "from flat transitions"
        )
    reward = _column(batch, REWARD)
    rows = len(reward)
    obs = _column(batch, spec.obs, rows)
    next_obs = _column(batch, spec.obs, rows, "next_obs")
    terminated = _column(batch, TERMINATED, rows)
    ends = _column(batch, TRUNCATED, rows) if "truncated" in batch else np.zeros(rows, bool)
    episode = _column(batch, EPISODE, rows) if batch.get("episode") is not None else None
    flat = {
        "obs": np.concatenate([obs, next_obs[-1:]]),
        "final_obs": next_obs,
        "reward": reward,
        "terminated": terminated,
        "truncated": ends | (_find_discontinuities(obs, next_obs, episode) & ~terminated),
        "valid": np.ones(rows, bool),
        "action": _column(batch, spec.action.field, rows),
        **{field.name: _column(batch, field, rows) for field in extras},
    }
    if "mask" in flat:  # the action mask after the last row is unknown, as after a truncated one
        flat["mask"] = np.concatenate([flat["mask"], np.ones_like(flat["mask"][:1])])
        flat["truncated"][-1] = not terminated[-1]
    return _segment_from_columns({name: column[:, None] for name, column in flat.items()}, spec, extras)


def _find_discontinuities(obs: np.ndarray, next_obs: np.ndarray, episode: np.ndarray | None) -> np.ndarray:
    """Mark the rows whose successor does not start with their `next_obs`."""
    breaks = np.zeros(len(obs), bool)
    breaks[:-1] = (obs[1:] != next_obs[:-1]).any(axis=tuple(range(1, obs.ndim)))
    if episode is not None:
        breaks[:-1] |= episode[1:] != episode[:-1]
    return breaks


def _segment_from_columns(batch: Mapping[str, Any], spec: EnvSpec, extras: tuple[FieldSpec, ...]) -> Segment:
    """Build a segment from [T, B, …] columns. Values are validated."""
    shape = as_column(_require_key(batch, "reward"), "reward", "float32").shape
    if len(shape) != 2 or not all(shape):
        raise UsageError(f"a rollout has columns [T, B, …], T and B at least 1, but 'reward' has shape {shape}")
    segment = Segment.blank(SegmentSpec(shape[0], shape[1], *spec.fields, extras))
    for field in segment.spec.fields:
        expected = segment[field.name]
        given = as_column(_require_key(batch, field.name), field.name, expected.dtype)
        require_shape(given, field.name, expected.shape)
        expected[...] = given
    require_segment(segment)
    segment.header = SegmentHeader("", 0, 0, 0, 0)
    return segment


def _checked_column(
    batch: Mapping[str, Any], field: FieldSpec, rows: int | None = None, name: str | None = None
) -> np.ndarray:
    """Return a column of flat transitions, with its values validated."""
    column = _column(batch, field, rows, name)
    require_values(column, name or field.name, field)
    return column


def _column(batch: Mapping[str, Any], field: FieldSpec, rows: int | None = None, name: str | None = None) -> np.ndarray:
    """Return a column of flat transitions by its key (default: the field's name); requires at least one row."""
    name = name or field.name
    given = as_column(_require_key(batch, name), name, field.dtype)
    expected = len(given) if rows is None and given.ndim else rows or 0
    if not field.shape and given.shape == (expected, 1):  # accept scalars of shape (1,)
        given = given.reshape(expected)
    require_shape(given, name, (expected, *field.shape))
    if not expected:
        raise UsageError(f"{name!r} has no rows to learn from")
    return given


def _require_key(batch: Mapping[str, Any], name: str) -> Any:
    if name not in batch:
        raise UsageError(
            f"the batch has no {name!r}, only {', '.join(batch)}: DistributedEnvironment.generate_experiences makes "
            "experiences with everything that its policy needs"
        )
    return batch[name]
