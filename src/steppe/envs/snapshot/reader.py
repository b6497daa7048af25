"""Read an environment into a tree that core/io/codec.py can pack: its attributes, its wrappers' and random streams.

Types are kept exactly, because a float32 restored as a Python float gives different results. Mutable objects are
numbered in the order of reading, so objects shared by two attributes are still shared after restoring. Objects that
cannot be read raise Unreadable. Objects without state (functions, classes, registrations, windows) are not read: the
new environment keeps its own, and the tree lists their names. State outside the objects (globals, class attributes,
files) is not saved. writer.py restores the tree.
"""

from __future__ import annotations

import dis
import hashlib
import logging
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.machinery import ExtensionFileLoader
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv
from numpy.lib.array_utils import byte_bounds

from steppe.core.config.moved_modules import FORMER
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import EnvironmentFault

TAG = "~"
SCALARS = [np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
SCALARS += [np.float16, np.float32, np.float64, np.complex64, np.complex128]
PLAIN = frozenset([type(None), bool, int, float, str, bytes, *SCALARS])
STREAMS = ("_np_random", "observation_space", "action_space", "env")  # read besides an environment's own snapshot()
_NUMBERS = frozenset(np.dtype(kind).name for kind in SCALARS)
_SKIPPED_TYPES = (type, ModuleType, Registration, logging.Logger, np.ufunc, np.dtype)
_SETTINGS = (*PLAIN, *_SKIPPED_TYPES, gym.Space, FunctionType, np.ndarray)
_ENVS = (gym.Env, VectorEnv)
_FLAT_SPACES = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
# Tables that these classes never change after construction: only a digest is saved, to compare the new ones with.
_TABLES = {
    "gymnasium.envs.toy_text.taxi.TaxiEnv": ("P", "desc", "initial_state_distrib", "locs", "locs_colors"),
    "gymnasium.envs.toy_text.frozen_lake.FrozenLakeEnv": ("P", "desc", "initial_state_distrib"),
    "gymnasium.envs.toy_text.cliffwalking.CliffWalkingEnv": ("P", "_cliff", "initial_state_distrib"),
}
_CLASS_INFO: dict[type, ClassInfo] = {}


class Unreadable(Exception):
    """An object that a snapshot cannot hold; the message says which and where."""


class TableDigests:
    """Cached digests of tables, recomputed only if an attribute refers to another object."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[Any], str]] = {}

    def of(self, obj: Any, names: tuple[str, ...]) -> str:
        values = [vars(obj).get(name) for name in names]
        held, digest = self._known.get(id(obj), ([], ""))
        if len(held) != len(values) or any(one is not other for one, other in zip(held, values, strict=True)):
            # repr is fast for tables of thousands of tuples, and includes types; only arrays would be abbreviated.
            contents = [(v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values]
            digest = hashlib.sha256(repr(contents).encode()).hexdigest()
            self._known[id(obj)] = (values, digest)
        return digest


class SnapshotReader:
    """Reads objects that may share parts; with `partial`, unreadable attributes of environments are skipped."""

    def __init__(self, digests: TableDigests | None = None, *, partial: bool = False) -> None:
        self._digests = digests or TableDigests()
        self._partial = partial
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # keeps objects alive, so that no id is reused
        self._memory: dict[int, list[tuple[int, int]]] = {}  # by owner: byte ranges of the arrays read
        self._claims: list[int] = []

    def object(self, obj: Any, *, partial: bool = False) -> Tree:
        """Return a plain Python object as a tree of its attributes, or of its own `snapshot()` if it has that method.

        Raises Unreadable.
        """
        kind = get_class_info(type(obj))
        if not kind.plain:
            raise Unreadable(f"a {kind.name}")
        if kind.compiled and not (partial or kind.own):
            raise Unreadable(f"a {kind.name}, which works with {kind.compiled}, a compiled module")
        seen = self.seen(obj)
        if seen is not None:
            return seen
        tree: Tree = {TAG: "object", "class": kind.name}
        attributes = vars(obj)
        if kind.own:
            tree["own"] = self._own(obj)
            attributes = {name: attributes[name] for name in STREAMS if name in attributes}
        if kind.tables:
            tree["digest"] = self._digests.of(obj, kind.tables)
        if partial:
            tree["partial"] = True
        tree["values"], tree["left"] = self._attributes(obj, attributes, kind.tables, partial=partial)
        return tree

    def value(self, value: Any) -> Any:
        """Return the tree of a value that is not an object with attributes; raises Unreadable."""
        kind = type(value)
        if kind in PLAIN:
            return value
        read = _READERS.get(kind)
        if read is not None:
            return read(self, value)
        if issubclass(kind, Enum):
            return _enum(value)
        seen = self._numbers.get(id(value))
        if seen is not None:
            return {TAG: "same", "as": seen}
        raise Unreadable(f"a {class_name(kind)}")

    def seen(self, value: Any) -> Tree | None:
        """Return a reference if `value` was read before; otherwise assign the next number and return None."""
        number = self._numbers.get(id(value))
        if number is not None:
            return {TAG: "same", "as": number}
        self._numbers[id(value)] = len(self._held)
        self._held.append(value)
        return None

    def claim(self, array: np.ndarray) -> None:
        """Record an array's memory; raise Unreadable if it overlaps another's: restoring would separate the two."""
        owner: Any = array
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        mine = (0, 2**64) if owner is array else byte_bounds(array)
        taken = self._memory.setdefault(id(owner), [])
        if any(mine[0] < end and begin < mine[1] for begin, end in taken):
            raise Unreadable("an array that shares its memory with another")
        taken.append(mine)
        self._claims.append(id(owner))

    def _attributes(
        self, obj: Any, attributes: dict[str, Any], tables: tuple[str, ...], *, partial: bool
    ) -> tuple[Tree, dict[str, str]]:
        values: Tree = {}
        left: dict[str, str] = {}
        settings = isinstance(obj, RecordConstructorArgs)
        for name, value in attributes.items():
            kind = type(value)
            if kind in PLAIN:
                values[name] = value
            elif (settings and name == "_saved_kwargs") or self._is_skipped(value, kind):
                left[name] = class_name(kind)
            elif name not in tables:
                self._into(values, left if partial else None, obj, name, value)
        return values, left

    def _into(self, values: Tree, left: dict[str, str] | None, obj: Any, name: str, value: Any) -> None:
        """Read one attribute; if unreadable, list it in `left` if given and it is no inner environment, else raise."""
        met, claimed = len(self._held), len(self._claims)
        try:
            values[name] = self._attribute(value)
        except Unreadable as reason:
            if left is None or isinstance(value, _ENVS):
                raise Unreadable(f"{type(obj).__qualname__}.{name} holds {reason}") from None
            self._forget(met, claimed)
            left[name] = class_name(type(value))

    def _attribute(self, value: Any) -> Any:
        kind = type(value)
        if kind in _READERS or issubclass(kind, Enum):
            return self.value(value)
        if isinstance(value, gym.Space):
            return self._space(value)
        return self.object(value, partial=self._partial and isinstance(value, _ENVS))

    def _forget(self, met: int, claimed: int) -> None:
        for value in self._held[met:]:
            del self._numbers[id(value)]
        for owner in self._claims[claimed:]:
            self._memory[owner].pop()
        del self._held[met:], self._claims[claimed:]

    def _is_skipped(self, value: Any, kind: type) -> bool:
        if kind is FunctionType:
            return self._is_stateless(value)
        if kind is MethodType:
            return isinstance(value.__self__, type) or self._stays(value.__self__)
        if kind is BuiltinFunctionType:
            return value.__self__ is None or isinstance(value.__self__, ModuleType)
        if kind is dict:
            return bool(value) and all(isinstance(part, gym.Space) and _unused(part) for part in value.values())
        return isinstance(value, _SKIPPED_TYPES) or kind.__module__.partition(".")[0] == "pygame"

    def _is_stateless(self, function: FunctionType) -> bool:
        """Return whether a function keeps no state between calls; arrays in its closure are assumed to be constants."""
        for cell in function.__closure__ or ():
            value = cell.cell_contents
            if not isinstance(value, _SETTINGS) and not self._stays(value):
                return False
        return not _assigns_nonlocal(function.__code__)

    def _stays(self, value: Any) -> bool:
        """Return whether `value` is an object read before: it is restored in place, so references stay valid."""
        return id(value) in self._numbers and get_class_info(type(value)).plain

    def _space(self, space: gym.Space[Any]) -> Tree:
        return self.seen(space) or {TAG: "space", "streams": [self.value(part._np_random) for part in spaces_in(space)]}

    def _own(self, obj: Any) -> Any:
        try:
            state = obj.snapshot()
        except Exception as error:
            whose = f"{class_name(type(obj))}.snapshot()"
            details: dict[str, object] = {"traceback": "".join(traceback.format_exception(error))}
            raise EnvironmentFault(f"{whose} raised {type(error).__name__}: {error}", details) from error
        if state is None:
            raise Unreadable(f"a {class_name(type(obj))} whose snapshot() declined")
        return self.value(state)


def spaces_in(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    """Yield a space and the spaces it is composed of, each with its own random stream."""
    yield space
    if type(space) in _FLAT_SPACES:
        return
    for held in vars(space).values():
        parts = held.values() if isinstance(held, dict) else held if isinstance(held, tuple | list) else [held]
        for part in parts:
            if isinstance(part, gym.Space):
                yield from spaces_in(part)


def _unused(space: gym.Space[Any]) -> bool:
    """Return whether a space was never sampled and therefore has no state."""
    return all(part._np_random is None for part in spaces_in(space))


class _Plain:
    """Reference for the memory layout of an ordinary class."""


@dataclass(frozen=True)
class ClassInfo:
    """Properties of a class that the reader needs, computed once."""

    name: str
    plain: bool  # instances keep all state in `__dict__`: no slots, no base written in C
    own: bool  # has its own `snapshot()` and `restore(state)`, which users may write for their environments
    compiled: str | None  # a compiled module it uses, which may hold state behind a mere handle
    tables: tuple[str, ...]  # attributes that are only compared, by digest


def get_class_info(kind: type) -> ClassInfo:
    """Return the cached properties of a class."""
    if kind not in _CLASS_INFO:
        layouts = [(k.__basicsize__, k.__itemsize__, k.__dictoffset__, k.__weakrefoffset__) for k in (kind, _Plain)]
        own = callable(getattr(kind, "snapshot", None)) and callable(getattr(kind, "restore", None))
        name = class_name(kind)
        _CLASS_INFO[kind] = ClassInfo(
            name, layouts[0] == layouts[1], own, _find_compiled_module(kind), _TABLES.get(name, ())
        )
    return _CLASS_INFO[kind]


def class_name(kind: type) -> str:
    """Return `module.Class`."""
    return f"{kind.__module__}.{kind.__qualname__}"


def class_names(kind: type) -> set[str]:
    """Return `module.Class` with the present and the former name of its module."""
    return {class_name(kind), f"{FORMER.get(kind.__module__, kind.__module__)}.{kind.__qualname__}"}


def _find_compiled_module(kind: type) -> str | None:
    """Return the first compiled module among the globals of the modules that define a class and its bases, or None."""
    for base in kind.__mro__:
        for held in vars(sys.modules.get(base.__module__, object)).values():
            spec = held.__spec__ if isinstance(held, ModuleType) else None
            if isinstance(getattr(spec, "loader", None), ExtensionFileLoader) and not _harmless(held.__name__):
                return str(held.__name__)
    return None


def _harmless(module: str) -> bool:
    return module.partition(".")[0] in {*sys.stdlib_module_names, "numpy"}


@cache
def _assigns_nonlocal(code: CodeType) -> bool:
    """Return whether code assigns to a variable of the enclosing function (`nonlocal`)."""
    return any(line.opname == "STORE_DEREF" and line.argval in code.co_freevars for line in dis.get_instructions(code))


def _list(reading: SnapshotReader, value: list[Any]) -> Any:
    return reading.seen(value) or _items(reading, value)


def _items(reading: SnapshotReader, values: Any) -> list[Any]:
    return list(values) if PLAIN.issuperset(map(type, values)) else [reading.value(item) for item in values]


def _tuple(reading: SnapshotReader, value: tuple[Any, ...]) -> Any:
    return {TAG: "tuple", "items": _items(reading, value)}


def _deque(reading: SnapshotReader, value: deque[Any]) -> Any:
    return reading.seen(value) or {TAG: "deque", "most": value.maxlen, "items": _items(reading, value)}


def _dict(reading: SnapshotReader, value: dict[Any, Any]) -> Any:
    seen = reading.seen(value)
    if seen is not None:
        return seen
    if TAG not in value and all(type(key) is str for key in value):
        return {key: reading.value(item) for key, item in value.items()}
    return {TAG: "dict", "items": [[reading.value(key), reading.value(item)] for key, item in value.items()]}


def _set(reading: SnapshotReader, value: set[Any] | frozenset[Any]) -> Any:
    seen = reading.seen(value)
    if seen is not None:
        return seen
    # Iteration order depends on a set's history: only a set that keeps its order when rebuilt can be restored.
    if list(type(value)(list(value))) != list(value):
        raise Unreadable(f"a {type(value).__name__} whose order depends on how it was filled")
    return {TAG: type(value).__name__, "items": _items(reading, value)}


def _array(reading: SnapshotReader, value: np.ndarray) -> Any:
    seen = reading.seen(value)
    if seen is not None:
        return seen
    reading.claim(value)
    dtype = value.dtype
    if dtype.kind in "SU":
        return {TAG: "text", "dtype": dtype.str, "shape": list(value.shape), "bytes": value.tobytes()}
    if dtype.name not in _NUMBERS or not dtype.isnative:
        raise Unreadable(f"an array of {dtype}")
    if value.flags.c_contiguous:
        return value.copy()
    # Keep the memory order of the axes: it decides in which order NumPy sums.
    axes = sorted(range(value.ndim), key=lambda axis: -abs(value.strides[axis]))
    return {TAG: "axes", "axes": axes, "array": value.transpose(axes).copy()}


def _generator(reading: SnapshotReader, value: np.random.Generator) -> Any:
    seen = reading.seen(value)
    if seen is not None:
        return seen
    source = value.bit_generator
    origin = source.seed_seq
    if type(origin) is not np.random.SeedSequence:
        raise Unreadable(f"a random stream seeded by a {class_name(type(origin))}")
    seeds = [origin.entropy, list(origin.spawn_key), origin.pool_size, origin.n_children_spawned]
    return {TAG: "generator", "state": source.state, "seeds": [reading.value(part) for part in seeds]}


def _random_state(reading: SnapshotReader, value: np.random.RandomState) -> Any:
    return reading.seen(value) or {TAG: "RandomState", "state": value.get_state(legacy=False)}


def _python_random(reading: SnapshotReader, value: random.Random) -> Any:
    seen = reading.seen(value)
    if seen is not None:
        return seen
    version, words, gauss = value.getstate()
    return {TAG: "Random", "version": version, "words": np.array(words, np.uint64), "gauss": gauss}


def _text(reading: SnapshotReader, value: np.str_) -> Any:
    return {TAG: "str_", "text": str(value)}


def _enum(value: Enum) -> Any:
    name = value.name
    if "<locals>" in type(value).__qualname__:
        raise Unreadable(f"a {class_name(type(value))}, which another process cannot find")
    if name is None or type(value).__members__.get(name) is not value:
        raise Unreadable(f"a combined {class_name(type(value))}")
    return {TAG: "enum", "module": type(value).__module__, "class": type(value).__qualname__, "name": name}


_READERS: dict[type, Callable[[SnapshotReader, Any], Any]] = {
    list: _list,
    tuple: _tuple,
    deque: _deque,
    dict: _dict,
    set: _set,
    frozenset: _set,
    np.ndarray: _array,
    np.str_: _text,
    np.random.Generator: _generator,
    np.random.RandomState: _random_state,
    random.Random: _python_random,
}
