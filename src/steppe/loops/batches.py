"""Dictionaries at the surface, segments and batches beneath it: the conversion happens once, here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steppe.core.arrays import as_array
from steppe.core.errors import UsageError
from steppe.core.experience import Batch, Segment, SegmentHeader
from steppe.core.specs import EnvSpec, FieldSpec, SegmentSpec

Columns = dict[str, np.ndarray]
_OF_ROLLOUTS = ("valid", "final_obs")  # what tells a [T, B] batch from flat transitions


def columns_of(experiences: Sequence[Mapping[str, Any]]) -> Columns:
    """Experience dictionaries as one array per key."""
    if not experiences:
        raise UsageError("there are no experiences to learn from")
    keys = experiences[0].keys()
    odd = next((number for number, experience in enumerate(experiences) if experience.keys() != keys), None)
    if odd is not None:
        raise UsageError(f"experience {odd} has the keys {', '.join(experiences[odd])}, not {', '.join(keys)}")
    return {key: _stacked(key, [experience[key] for experience in experiences]) for key in keys}


def _stacked(key: str, values: Sequence[Any]) -> np.ndarray:
    rows = [as_array(value, repr(key)) for value in values]
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise UsageError(f"{key!r} comes in different shapes: {', '.join(map(str, sorted(shapes)))}")
    return np.stack(rows)


def transitions(batch: Mapping[str, Any], spec: EnvSpec, gamma: float) -> Batch:
    """A batch for replay agents from flat transitions; one-step ones where there is no `discount`."""
    reward = _column(batch, FieldSpec("reward", (), "float32"))
    rows = len(reward)
    columns = {
        "obs": _column(batch, spec.obs, rows),
        "action": _column(batch, spec.action.field, rows),
        "reward": reward,
        "next_obs": _column(batch, FieldSpec("next_obs", spec.obs.shape, spec.obs.dtype), rows),
        "terminated": _column(batch, FieldSpec("terminated", (), "bool"), rows),
        "discount": np.full(rows, gamma, np.float32),
    }
    if "discount" in batch:
        columns["discount"] = _column(batch, FieldSpec("discount", (), "float32"), rows)
    weights = batch.get("weights")
    indices = batch.get("indices")
    return Batch(
        columns,
        None if weights is None else as_array(weights, "'weights'").astype(np.float32, copy=False),
        None if indices is None else as_array(indices, "'indices'"),
    )


def segment_of(batch: Mapping[str, Any], spec: EnvSpec, extras: tuple[FieldSpec, ...]) -> Segment:
    """A segment from a [T, B] batch, or from flat transitions in the order in which they happened.

    Flat transitions become one column of environments. Where a row does not go on from the one before it (another episode
    that was left unfinished, another worker), the trajectory is cut there and goes on from its own `next_obs`.
    """
    if all(name in batch for name in _OF_ROLLOUTS):
        return _filled(batch, spec, extras)
    if any(field.once for field in extras):
        raise UsageError(
            "an agent with a memory learns from a rollout [T, B] and the state that it began with ('hidden' [1, B, …]), not "
            "from flat transitions"
        )
    reward = _column(batch, FieldSpec("reward", (), "float32"))
    rows = len(reward)
    obs = _column(batch, spec.obs, rows)
    next_obs = _column(batch, FieldSpec("next_obs", spec.obs.shape, spec.obs.dtype), rows)
    terminated = _column(batch, FieldSpec("terminated", (), "bool"), rows)
    ends = _column(batch, FieldSpec("truncated", (), "bool"), rows) if "truncated" in batch else np.zeros(rows, bool)
    flat = {
        "obs": np.concatenate([obs, next_obs[-1:]]),
        "final_obs": next_obs,
        "reward": reward,
        "terminated": terminated,
        "truncated": ends | (_seams(obs, next_obs, batch.get("episode")) & ~terminated),
        "valid": np.ones(rows, bool),
        "action": _column(batch, spec.action.field, rows),
        **{field.name: _column(batch, field, rows) for field in extras},
    }
    if "mask" in flat:  # what is allowed after the last row is not known, as after a truncated one
        flat["mask"] = np.concatenate([flat["mask"], np.ones_like(flat["mask"][:1])])
        flat["truncated"][-1] = not terminated[-1]
    return _filled({name: column[:, None] for name, column in flat.items()}, spec, extras)


def _seams(obs: np.ndarray, next_obs: np.ndarray, episode: np.ndarray | None) -> np.ndarray:
    """Where the next row does not begin with what this one ended with."""
    seams = np.zeros(len(obs), bool)
    seams[:-1] = (obs[1:] != next_obs[:-1]).any(axis=tuple(range(1, obs.ndim)))
    if episode is not None:
        seams[:-1] |= np.asarray(episode)[1:] != np.asarray(episode)[:-1]
    return seams


def _filled(batch: Mapping[str, Any], spec: EnvSpec, extras: tuple[FieldSpec, ...]) -> Segment:
    shape: tuple[int, ...] = _given(batch, "reward").shape if "reward" in batch else ()
    if len(shape) != 2:
        raise UsageError("a rollout has columns [T, B, …] with 'reward' among them")
    segment = Segment.blank(SegmentSpec(shape[0], shape[1], spec.obs, spec.action.field, extras))
    for field in segment.spec.fields:
        wanted = segment[field.name]
        given = _given(batch, field.name)
        if given.shape != wanted.shape:
            raise UsageError(f"{field.name!r} has shape {given.shape}, where {wanted.shape} is needed")
        wanted[...] = given
    segment.header = SegmentHeader("", 0, 0, 0, 0)
    return segment


def _column(batch: Mapping[str, Any], field: FieldSpec, rows: int | None = None) -> np.ndarray:
    given = _given(batch, field.name)
    wanted = (len(given) if rows is None and given.ndim else rows or 0, *field.shape)
    if not field.shape and given.shape == (*wanted, 1):  # (1,) is another way to write one number
        given = given.reshape(wanted)
    if given.shape != wanted:
        raise UsageError(f"{field.name!r} has shape {given.shape}, where {wanted} is needed")
    return given.astype(field.dtype)


def _given(batch: Mapping[str, Any], name: str) -> np.ndarray:
    if name not in batch:
        raise UsageError(
            f"the batch has no {name!r}, only {', '.join(batch)}: DistributedEnvironment.generate_experiences makes "
            "experiences with everything that its policy needs"
        )
    return as_array(batch[name], repr(name))
