"""Restore a tree of reader.py into a new environment of the same configuration, after its first reset.

Objects are filled in place and never created, so a tree cannot introduce a class that the environment does not use.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from steppe.core.config.references import current_module
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import CannotResume, EnvironmentFault
from steppe.envs.snapshot.reader import PLAIN, TAG, TableDigests, class_name, class_names, get_class_info, spaces_in

_SOURCES = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


class SnapshotWriter:
    """Restores a tree; objects are numbered in the same order as by SnapshotReader.

    Nothing is written before `finish`, so a tree that does not fit leaves the environment as it was.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._writes: list[Callable[[], None]] = []

    def fill(self, live: Any, tree: Tree) -> None:
        """Prepare to set the attributes of `live` from `tree`; raises CannotResume if they do not fit."""
        if tree.get(TAG) == "same":
            if self.made[tree["as"]] is not live:
                raise CannotResume(f"a {class_name(type(live))} is shared otherwise than in the snapshot")
            return
        if (
            tree.get(TAG) != "object"
            or tree["class"] not in class_names(type(live))
            or not get_class_info(type(live)).plain
        ):
            raise CannotResume(f"the snapshot holds a {tree.get('class')} where there is a {class_name(type(live))}")
        self.made.append(live)
        own = self.value(tree["own"]) if "own" in tree else None
        _check_skipped(live, tree)
        self._prepare_attributes(live, tree)
        if "own" in tree:
            self._writes.append(partial(_restore_own, live, own))

    def finish(self) -> None:
        """Perform the prepared writes, inner objects before those that contain them."""
        for write in self._writes:
            write()
        self._writes.clear()

    def value(self, tree: Any) -> Any:
        """Return a new value of exactly the type that was read."""
        kind = type(tree)
        if kind in PLAIN:
            return tree
        if kind is np.ndarray:
            return self.keep(tree.copy())
        if kind is list:
            made = self.keep([])
            made.extend(self.items(tree))
            return made
        if TAG in tree:
            return _BUILDERS[tree[TAG]](self, tree)
        named = self.keep({})
        named.update((name, self.value(item)) for name, item in tree.items())
        return named

    def keep(self, value: Any) -> Any:
        """Assign the next number to a value and return it."""
        self.made.append(value)
        return value

    def items(self, trees: list[Any]) -> list[Any]:
        """Return the values of a container."""
        return trees if PLAIN.issuperset(map(type, trees)) else [self.value(item) for item in trees]

    def _prepare_attributes(self, live: Any, tree: Tree) -> None:
        attributes = vars(live)
        values = {name: self._attribute(attributes.get(name), item) for name, item in tree["values"].items()}
        gone: set[str] = set()
        if "own" not in tree and not tree.get("partial"):
            gone = attributes.keys() - values.keys() - tree["left"].keys() - set(get_class_info(type(live)).tables)
        self._writes.append(partial(_write, attributes, values, gone))

    def _attribute(self, live: Any, tree: Any) -> Any:
        tag = tree.get(TAG) if type(tree) is dict else None
        if tag == "object":
            self.fill(live, tree)
            return live
        if tag == "space":
            self._space(live, tree)
            return live
        return self.value(tree)

    def _space(self, live: Any, tree: Tree) -> None:
        parts = list(spaces_in(live)) if isinstance(live, gym.Space) else []
        if len(parts) != len(tree["streams"]):
            raise CannotResume(f"the snapshot belongs to another space than {live}")
        self.keep(live)
        for part, stream in zip(parts, tree["streams"], strict=True):
            self._writes.append(partial(setattr, part, "_np_random", self.value(stream)))


def _write(attributes: dict[str, Any], values: dict[str, Any], gone: set[str]) -> None:
    attributes.update(values)
    for name in gone:
        del attributes[name]


def _check_skipped(live: Any, tree: Tree) -> None:
    """Raise CannotResume unless `live` has every attribute that was not read: of the same class, tables also equal."""
    if "digest" in tree and tree["digest"] != TableDigests().of(live, get_class_info(type(live)).tables):
        raise CannotResume(f"this {class_name(type(live))} was made with other tables than the one in the snapshot")
    if tree.get("partial"):
        return
    for name, kind in tree["left"].items():
        if name not in vars(live) or kind not in class_names(type(vars(live)[name])):
            raise CannotResume(f"{type(live).__qualname__}.{name} should be a {kind}, which a snapshot cannot hold")


def _restore_own(live: Any, state: Any) -> None:
    try:
        live.restore(state)
    except CannotResume:
        raise
    except Exception as error:
        whose = f"{class_name(type(live))}.restore()"
        details: dict[str, object] = {"traceback": "".join(traceback.format_exception(error))}
        raise EnvironmentFault(f"{whose} raised {type(error).__name__}: {error}", details) from error


def _same(building: SnapshotWriter, tree: Tree) -> Any:
    return building.made[tree["as"]]


def _tuple(building: SnapshotWriter, tree: Tree) -> Any:
    return tuple(building.items(tree["items"]))


def _deque(building: SnapshotWriter, tree: Tree) -> Any:
    made = building.keep(deque(maxlen=tree["most"]))
    made.extend(building.items(tree["items"]))
    return made


def _dict(building: SnapshotWriter, tree: Tree) -> Any:
    made = building.keep({})
    made.update((building.value(key), building.value(item)) for key, item in tree["items"])
    return made


def _set(building: SnapshotWriter, tree: Tree) -> Any:
    made: set[Any] = building.keep(set())
    made.update(building.items(tree["items"]))
    return made


def _frozenset(building: SnapshotWriter, tree: Tree) -> Any:
    index = len(building.made)
    building.keep(None)
    building.made[index] = frozenset(building.items(tree["items"]))
    return building.made[index]


def _text(building: SnapshotWriter, tree: Tree) -> Any:
    dtype = np.dtype(tree["dtype"])
    if dtype.kind not in "SU":
        raise CannotResume(f"an array of text cannot have the dtype {dtype}")
    return building.keep(np.ndarray(tree["shape"], dtype, tree["bytes"]).copy())


def _axes(building: SnapshotWriter, tree: Tree) -> Any:
    return building.keep(tree["array"].copy().transpose(np.argsort(tree["axes"])))


def _generator(building: SnapshotWriter, tree: Tree) -> Any:
    index = len(building.made)
    building.keep(None)
    entropy, spawn_key, pool_size, spawned = (building.value(part) for part in tree["seeds"])
    seeds = np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned)
    source = _SOURCES[tree["state"]["bit_generator"]](seeds)
    source.state = tree["state"]
    building.made[index] = np.random.Generator(source)
    return building.made[index]


def _random_state(building: SnapshotWriter, tree: Tree) -> Any:
    made = building.keep(np.random.RandomState(0))
    made.set_state(tree["state"])
    return made


def _python_random(building: SnapshotWriter, tree: Tree) -> Any:
    made = building.keep(random.Random(0))
    made.setstate((tree["version"], tuple(tree["words"].tolist()), tree["gauss"]))
    return made


def _str(building: SnapshotWriter, tree: Tree) -> Any:
    return np.str_(tree["text"])


def _enum(building: SnapshotWriter, tree: Tree) -> Any:
    kind: Any = sys.modules.get(current_module(tree["module"]))
    for name in tree["class"].split("."):
        kind = vars(kind).get(name) if isinstance(kind, type | type(sys)) else None
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise CannotResume(f"there is no enumeration {tree['class']} in {tree['module']}")
    return kind[tree["name"]]


_BUILDERS: dict[str, Callable[[SnapshotWriter, Tree], Any]] = {
    "same": _same,
    "tuple": _tuple,
    "deque": _deque,
    "dict": _dict,
    "set": _set,
    "frozenset": _frozenset,
    "text": _text,
    "axes": _axes,
    "generator": _generator,
    "RandomState": _random_state,
    "Random": _python_random,
    "str_": _str,
    "enum": _enum,
}
