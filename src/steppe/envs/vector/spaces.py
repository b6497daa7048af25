"""Encode observations of Gymnasium spaces as arrays, and decode arrays of actions.

Observations. An image (Box of uint8 from 0 to 255 with 2 or 3 axes) stays uint8 as (channels, height, width); of 3 axes
the shorter of first and last is the channel axis, the last if equal. Everything else becomes one float32 vector: Box
flattened, Discrete and MultiDiscrete one-hot, MultiBinary as 0 and 1, Dict (in the space's key order) and Tuple as the
concatenation of their parts, with images scaled to [0, 1]. Tabular agents observe Discrete as a state index from 0.
envs/factory.py builds environments, and loop.py steps them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.core.contracts.specs import ActionSpec, FieldSpec
from steppe.envs.wrappers.images import ImageEncoder, channels_last, is_image

Space = spaces.Space[Any]
PutRow = Callable[[np.ndarray, int, Any], Any]  # writes one raw observation into row `index` of an array [B, …]
Write = Callable[[np.ndarray, Any], None]  # writes one raw value into a flat float32 view


@dataclass(frozen=True)
class ObservationEncoder:
    """Writes a raw observation into a row; `raw_shape` is the shape of a Box, None if its parts are checked."""

    field: FieldSpec
    put: PutRow
    raw_shape: tuple[int, ...] | None = None

    def put_checked(self, target: np.ndarray, index: int, raw: Any) -> None:
        """Write like `put`, but raise ValueError for a wrong shape, which NumPy might silently broadcast."""
        if self.raw_shape is not None and np.shape(raw) != self.raw_shape:
            raise ValueError(f"the observation has shape {np.shape(raw)}, its space has {self.raw_shape}")
        self.put(target, index, raw)


@dataclass(frozen=True)
class ActionDecoder:
    """The action spec for the agent, and the conversion of its array [B, …] to the environments' actions."""

    spec: ActionSpec
    batch: Callable[[np.ndarray], np.ndarray]  # returns new memory: an environment may keep its action

    def each(self, actions: np.ndarray) -> Sequence[Any]:
        """Return a list with one action per environment."""
        return list(self.batch(actions))


def make_observation_encoder(
    space: Space, whose: str, *, grayscale: bool = False, resize: int | None = None
) -> ObservationEncoder:
    """Return the encoder for an observation space; raises WorldError for an unsupported space."""
    if is_image(space):
        image = ImageEncoder(channels_last(space.shape or ()), grayscale, resize)
        return ObservationEncoder(FieldSpec("obs", image.shape, "uint8"), image.put, space.shape)
    if grayscale or resize:
        option = "grayscale" if grayscale else "resize"
        raise ConfigError(f"environment.{option} is for images, but {whose} observes {space}")
    size, write = _flat(space, whose)
    field = FieldSpec("obs", (size,), "float32")
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        fast: PutRow = operator.setitem  # type: ignore[assignment]  # a C function: no Python frame on the hot path
        return ObservationEncoder(field, fast, space.shape)

    def put(target: np.ndarray, index: int, raw: Any) -> None:
        write(target[index], raw)

    return ObservationEncoder(field, put, space.shape if isinstance(space, spaces.Box) else None)


def make_planes_encoder(space: Space, whose: str) -> ObservationEncoder:
    """Return the encoder for declared planes, (channels, height, width) of small integers: an unchanged copy."""
    if not (isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3):
        raise WorldError(f"{whose} declares planes but observes {space}: make it a Box of uint8 with three axes")
    field = FieldSpec("obs", space.shape, "uint8", most=max(1, int(space.high.max())))
    fast: PutRow = operator.setitem  # type: ignore[assignment]
    return ObservationEncoder(field, fast, space.shape)


def make_state_index_encoder(space: Space, whose: str) -> tuple[ObservationEncoder, int]:
    """Return the encoder to state indices for tabular agents, and the number of states; WorldError unless Discrete."""
    if not isinstance(space, spaces.Discrete):
        raise WorldError(f"{whose} observes {space}, but a table needs numbered states{_numbering_hint(space)}")
    start, size = int(space.start), int(space.n)

    def put(target: np.ndarray, index: int, raw: Any) -> None:
        number = operator.index(raw) - start
        if not 0 <= number < size:
            raise ValueError(f"the observation {raw} is not in {space}")
        target[index] = number

    return ObservationEncoder(FieldSpec("obs", (), "int64"), put), size


def _numbering_hint(space: Space) -> str:
    if isinstance(space, spaces.Box):
        return (
            ': cut it into bins with -s environment.wrappers=["steppe.classic:DiscretizeWrapper"] (for bins of your own, a '
            "function that returns one), or use an algorithm with a network"
        )
    return ": FlattenMultiDiscreteWrapper numbers MultiDiscrete and Tuples of Discrete; wrap it into one of these"


def make_action_decoder(space: Space, whose: str) -> ActionDecoder:
    """Return the decoder for an action space; raises WorldError for an unsupported space."""
    if isinstance(space, spaces.Discrete):
        return ActionDecoder(
            ActionSpec("discrete", (int(space.n),)), _make_discrete_decoder(space.start, (), space.dtype)
        )
    if isinstance(space, spaces.MultiDiscrete):
        sizes = tuple(int(n) for n in space.nvec.ravel())
        return ActionDecoder(
            ActionSpec("multi_discrete", sizes), _make_discrete_decoder(space.start, space.nvec.shape, space.dtype)
        )
    if isinstance(space, spaces.MultiBinary):
        sizes = (2,) * math.prod(space.shape)
        return ActionDecoder(ActionSpec("multi_discrete", sizes), _make_discrete_decoder(0, space.shape, space.dtype))
    if isinstance(space, spaces.Box):
        low, high = (tuple(float(x) for x in bound.ravel()) for bound in (space.low, space.high))
        return ActionDecoder(ActionSpec("box", space.shape, low, high), _make_box_decoder(space))
    raise _unsupported("takes", space, whose, "Discrete, MultiDiscrete, MultiBinary and Box")


def _make_discrete_decoder(start: Any, shape: tuple[int, ...], dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return a decoder from choices that start at 0 to a space with an offset (`start`) and several axes."""
    offset = np.asarray(start, dtype)

    def batch(actions: np.ndarray) -> np.ndarray:
        shifted: np.ndarray = actions.reshape(len(actions), *shape).astype(dtype) + offset
        return shifted

    return batch


def _make_box_decoder(space: spaces.Box) -> Callable[[np.ndarray], np.ndarray]:
    """Return a decoder that clips real numbers to the bounds, in the space's own precision."""
    whole = np.issubdtype(space.dtype, np.integer)

    def batch(actions: np.ndarray) -> np.ndarray:
        rounded = np.rint(actions) if whole else actions.astype(space.dtype)
        within: np.ndarray = np.minimum(np.maximum(rounded, space.low), space.high).astype(space.dtype, copy=False)
        return within

    return batch


def _flat(space: Space, whose: str) -> tuple[int, Write]:
    """Return the length of the vector that `space` is flattened to, and the function that writes it."""
    if isinstance(space, spaces.Box):
        return math.prod(space.shape), _box(space.shape, scale=is_image(space))
    if isinstance(space, spaces.MultiBinary):
        return math.prod(space.shape), _box(space.shape, scale=False)
    if isinstance(space, spaces.Discrete):
        return int(space.n), _one_hot(space)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum()), _one_hots(space)
    if isinstance(space, spaces.Dict):
        return _joined(list(space.spaces), list(space.spaces.values()), whose)
    if isinstance(space, spaces.Tuple):
        return _joined(list(range(len(space.spaces))), list(space.spaces), whose)
    raise _unsupported("observes", space, whose, "Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple")


def _box(shape: tuple[int, ...], *, scale: bool) -> Write:
    if scale:

        def write_image(row: np.ndarray, raw: Any) -> None:
            np.divide(raw, np.float32(255), out=row.reshape(shape))

        return write_image

    def write(row: np.ndarray, raw: Any) -> None:
        row.reshape(shape)[...] = raw

    return write


def _one_hot(space: spaces.Discrete[Any]) -> Write:
    start, size = int(space.start), int(space.n)

    def write(row: np.ndarray, raw: Any) -> None:
        choice = int(raw) - start
        if not 0 <= choice < size:
            raise ValueError(f"the observation {raw} is not in {space}")
        row.fill(0.0)
        row[choice] = 1.0

    return write


def _one_hots(space: spaces.MultiDiscrete[Any]) -> Write:
    sizes, start = space.nvec.ravel(), space.start.ravel()
    begins = np.cumsum(sizes) - sizes

    def write(row: np.ndarray, raw: Any) -> None:
        choices = np.asarray(raw).ravel() - start
        if len(choices) != len(sizes) or (choices < 0).any() or (choices >= sizes).any():
            raise ValueError(f"the observation {raw} is not in {space}")
        row.fill(0.0)
        row[begins + choices] = 1.0

    return write


def _joined(keys: list[Any], parts: list[Space], whose: str) -> tuple[int, Write]:
    writers: list[tuple[Any, slice, Write]] = []
    end = 0
    for key, part in zip(keys, parts, strict=True):
        size, write_part = _flat(part, whose)
        writers.append((key, slice(end, end + size), write_part))
        end += size

    def write(row: np.ndarray, raw: Any) -> None:
        for key, where, write_part in writers:
            write_part(row[where], raw[key])

    return end, write


def _unsupported(verb: str, space: Space, whose: str, known: str) -> WorldError:
    return WorldError(f"{whose} {verb} {space}, a {type(space).__name__} space: Steppe knows {known}; wrap it into one")
