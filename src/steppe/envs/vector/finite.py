"""Reject NaN and infinity in observations and rewards: one pass over the numbers, no copies if all are finite."""

from __future__ import annotations

import numpy as np

from steppe.core.array_checks import is_finite
from steppe.core.contracts.errors import NotFinite
from steppe.core.contracts.segment import Segment


def require_finite(segment: Segment, upto: int, where: str) -> None:
    """Check the rows written by the first `upto` steps; raise NotFinite naming field, step, environment and value."""
    _require(segment["reward"][:upto], "reward", where)
    obs = segment["obs"]
    if obs.dtype.kind != "f":
        return
    _require(obs[: upto + 1], "obs", where)
    last = segment["final_obs"][:upto]
    if not is_finite(last):
        cut = segment["terminated"][:upto] | segment["truncated"][:upto]
        _require(np.where(cut.reshape(*cut.shape, *(1,) * (last.ndim - 2)), last, 0.0), "final_obs", where)


def _require(column: np.ndarray, name: str, where: str) -> None:
    if is_finite(column):
        return
    t, env, *component = (int(axis[0]) for axis in np.nonzero(~np.isfinite(column)))
    suffix = f", component {component[0] if len(component) == 1 else tuple(component)}" if component else ""
    value = column[(t, env, *component)]
    raise NotFinite(f"{where}: {name} is {value} at step {t} of the segment in environment {env}{suffix}")
