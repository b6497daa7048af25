"""Where experience lies: columns preallocated from field specs, written as rings, drawn from uniformly or by priority.

Every buffer, the pool and the learner's replay memory are views on a Store, so there is one way to write and one to draw.
A store has `num_parts` rings over one set of columns: row `part * capacity + position` is called a slot, and a draw from
all parts is one draw over all their rows, whatever their fill. Dictionaries, files and limits are for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from steppe.core.agent import Tree
from steppe.core.errors import ConfigError, UsageError
from steppe.core.specs import FieldSpec
from steppe.replay.sumtree import SumTree

Block = Mapping[str, np.ndarray]  # columns of several rows
SMALLEST = float(np.finfo(np.float32).tiny)  # a positive priority never becomes a leaf of 0


class Store:
    """`num_parts` rings of `capacity` rows each; with `alpha`, rows are drawn in proportion to priority ** alpha."""

    def __init__(self, capacity: int, num_parts: int = 1, *, alpha: float | None = None) -> None:
        if capacity < 1 or num_parts < 1:
            raise UsageError(f"a buffer needs room for at least one experience, not {capacity} × {num_parts}")
        self.capacity = capacity
        self.num_parts = num_parts
        self.alpha = alpha
        self.tree = None if alpha is None else SumTree(capacity, num_parts)
        self.fields: tuple[FieldSpec, ...] = ()
        self.columns: dict[str, np.ndarray] = {}
        self.clear()

    def __len__(self) -> int:
        return self._filled

    def clear(self, part: int | None = None) -> None:
        """Forget every row, or those of one part; the columns stay."""
        if part is None:
            self.size = np.zeros(self.num_parts, np.int64)
            self.cursor = np.zeros(self.num_parts, np.int64)  # where the next row goes
            self.added = np.zeros(self.num_parts, np.int64)  # rows ever written
            self.max_priority = 1.0
        else:
            self.size[part] = self.cursor[part] = self.added[part] = 0
        self._filled = int(self.size.sum())  # a learner asks several times per update
        for cleared in range(self.num_parts) if part is None else (part,):
            if self.tree is not None:
                self.tree.fill(cleared, 0, np.zeros(self.capacity, np.float32))

    def allocate(self, fields: Sequence[FieldSpec]) -> None:
        """Make the columns; pages are touched only as rows are written."""
        rows = self.capacity * self.num_parts
        try:
            self.columns = {f.name: np.zeros((rows, *f.shape), f.dtype) for f in fields}
        except (MemoryError, ValueError):  # ValueError: more bytes than an address can say
            need = rows * sum(f.nbytes for f in fields)
            raise ConfigError(
                f"{rows:,} experiences need {need:,} bytes, which cannot be had: lower the size"
            ) from None
        self.fields = tuple(fields)

    def write(self, part: int, block: Block, priorities: np.ndarray | None = None) -> None:
        """Append rows to one part, over its oldest ones where it is full.

        Without priorities, rows enter with the largest one seen so far, so that each is learned from soon.
        """
        count = len(next(iter(block.values())))
        leaves = None if self.tree is None else self._leaves(priorities, count)
        for slots, rows in self._spans(part, count):
            for name, column in self.columns.items():
                column[slots] = block[name][rows]
            if self.tree is not None and leaves is not None:
                self.tree.fill(part, slots.start - part * self.capacity, leaves[rows])
        self.cursor[part] = (self.cursor[part] + count) % self.capacity
        self.size[part] = min(self.capacity, self.size[part] + count)
        self.added[part] += count
        self._filled = int(self.size.sum())

    def draw(self, stream: np.random.Generator, count: int, part: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Slots of `count` independent draws (a row may come twice) and their leaves (ones where there is no alpha).

        The store, or that part of it, must not be empty.
        """
        first, last = (0, self.num_parts) if part is None else (part, part + 1)
        if self.tree is not None:
            if not self.tree.totals[first:last].any():
                raise UsageError("every priority is 0, so nothing can be drawn: give some experience a positive one")
            return self.tree.descend(stream.random(count), first, last)
        if last - first == 1:
            start = first * self.capacity
            return stream.integers(start, start + int(self.size[first]), count), np.ones(count, np.float32)
        bounds = np.cumsum(self.size)
        slots = stream.integers(0, bounds[-1], count)
        parts = np.searchsorted(bounds, slots, side="right")
        slots += parts * self.capacity - (bounds - self.size)[parts]
        return slots, np.ones(count, np.float32)

    def gather(self, slots: np.ndarray, out: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """The rows at `slots`, in new arrays or in `out`."""
        # mode="clip" because "raise" makes NumPy copy `out` first; slots come from `draw`, so none is out of range.
        return {
            name: np.take(column, slots, axis=0, out=None if out is None else out[name], mode="clip")
            for name, column in self.columns.items()
        }

    def prioritize(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Give the rows at `slots` new priorities: finite and not negative; 0 means never drawn."""
        if self.tree is None:
            raise UsageError("this buffer draws uniformly and has no priorities: make a prioritized one")
        slots = np.asarray(slots, np.int64)
        parts, positions = np.divmod(slots, self.capacity)
        known = (slots >= 0) & (parts < self.num_parts)
        if slots.ndim != 1 or not known.all() or not (positions < self.size[parts]).all():
            raise UsageError("priorities were given for indices that hold no experience")
        self.tree.assign(slots, self._leaves(priorities, len(slots)))

    def ordered(self, part: int) -> np.ndarray:
        """The slots of one part, oldest first."""
        size, cursor = int(self.size[part]), int(self.cursor[part])
        oldest = cursor if size == self.capacity else 0
        return part * self.capacity + (oldest + np.arange(size)) % self.capacity

    def replace(self, part: int, block: Block, leaves: np.ndarray | None) -> None:
        """Make `block` (at most `capacity` rows, oldest first) the whole content of one part; rows ever written stay counted."""
        added = int(self.added[part])
        self.clear(part)
        if len(next(iter(block.values()))):
            self.write(part, block)
        self.added[part] = added
        if self.tree is not None and leaves is not None:
            self.tree.fill(part, 0, leaves)

    def state(self) -> Tree:
        """Copies of the rows that are filled, and all it takes to go on from them."""
        slots = np.concatenate([part * self.capacity + np.arange(self.size[part]) for part in range(self.num_parts)])
        tree: Tree = {
            "columns": self.gather(slots),
            "size": self.size.copy(),
            "cursor": self.cursor.copy(),
            "added": self.added.copy(),
            "max_priority": self.max_priority,
        }
        if self.tree is not None:
            tree["leaves"] = self.tree.leaves[slots // self.capacity, slots % self.capacity]
        return tree

    def restore(self, state: Tree) -> None:
        """Take over what `state` returned; the columns must be those of this store, if it has any yet."""
        columns: dict[str, np.ndarray] = state["columns"]
        fields = tuple(FieldSpec(name, rows.shape[1:], rows.dtype.name) for name, rows in columns.items())
        if not self.fields:
            self.allocate(fields)
        if {f.name: f for f in fields} != {f.name: f for f in self.fields}:
            raise UsageError(f"the saved columns {_names(fields)} are not those of this buffer, {_names(self.fields)}")
        if len(state["size"]) != self.num_parts or max(state["size"]) > self.capacity:
            raise UsageError("the saved buffers do not fit: use the same number of buffers and the same capacity")
        if (self.tree is not None) != ("leaves" in state):
            raise UsageError("a prioritized buffer and a uniform one cannot take over each other's content")
        end = np.cumsum(state["size"])
        for part, (low, high) in enumerate(zip(end - state["size"], end, strict=True)):
            leaves = state["leaves"][low:high] if self.tree is not None else None
            self.replace(part, {name: rows[low:high] for name, rows in columns.items()}, leaves)
        self.cursor = np.array(state["cursor"], np.int64)
        self.added = np.array(state["added"], np.int64)
        self.max_priority = float(state["max_priority"])

    def _spans(self, part: int, count: int) -> Iterator[tuple[slice, slice]]:
        """Where the newest rows of a block of `count` go: one stretch of slots, or two around the end of the ring."""
        row = max(0, count - self.capacity)
        position = (int(self.cursor[part]) + row) % self.capacity
        while row < count:
            length = min(count - row, self.capacity - position)
            start = part * self.capacity + position
            yield slice(start, start + length), slice(row, row + length)
            row, position = row + length, 0

    def _leaves(self, priorities: np.ndarray | None, count: int) -> np.ndarray:
        if priorities is None:
            priorities = np.full(count, self.max_priority)
        priorities = np.asarray(priorities, np.float64)
        if priorities.shape != (count,):
            raise UsageError(f"{count} experiences need {count} priorities, not an array of shape {priorities.shape}")
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise UsageError("a priority must be a finite number that is not negative")
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        assert self.alpha is not None
        leaves = np.clip(priorities**self.alpha, SMALLEST, float(np.finfo(np.float32).max))
        leaves[priorities == 0] = 0
        return leaves.astype(np.float32)


def importance(leaves: np.ndarray, beta: float) -> np.ndarray:
    """(N · P) ** -beta over its maximum in the batch (Schaul et al. 2016, 3.4); N and the total cancel out."""
    weights: np.ndarray = (leaves.min() / leaves.astype(np.float64)) ** beta
    return weights.astype(np.float32)


def _names(fields: Sequence[FieldSpec]) -> str:
    return ", ".join(f"{f.name} {f.dtype}{list(f.shape)}" for f in fields) or "none"
