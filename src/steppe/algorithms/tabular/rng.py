"""A stream of 64-bit random words for all choices of an algorithm, the same whether taken singly or in batches."""

from __future__ import annotations

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import DamagedFile

_BLOCK = 1024
_LARGEST = 2**64 - 1


class WordStream:
    """PCG64's words in order. `block[cursor[0]:]` are the next ones; compiled code consumes them from there."""

    def __init__(self, seed: int | np.random.SeedSequence | None) -> None:
        self._stream = np.random.Generator(np.random.PCG64(seed))
        self.block = np.empty(0, np.uint64)
        self.cursor = np.zeros(1, np.int64)

    def refill(self) -> None:
        """Start a new block when the old one has too few words left; the remaining words come first."""
        self.block, self.cursor[0] = self.take(_BLOCK), 0

    def take_one(self) -> int:
        """Return the next word."""
        position = self.cursor[0]
        if position >= len(self.block):
            self.refill()
            position = 0
        self.cursor[0] = position + 1
        return int(self.block[position])

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` words; read them before the next call."""
        begin = int(self.cursor[0])
        rest = self.block[begin : begin + count]
        self.cursor[0] = begin + len(rest)
        if len(rest) == count:
            return rest
        fresh = self._draw(count - len(rest))
        return np.concatenate([rest, fresh]) if len(rest) else fresh

    def state(self) -> Tree:
        """Return the position of the stream, as plain data."""
        state = self._stream.bit_generator.state
        numbers = {name: str(value) for name, value in state["state"].items()}  # 128 bits: too wide for msgpack
        left = [int(word) for word in self.block[int(self.cursor[0]) :]]
        return {"pcg64": numbers, "half": [state["has_uint32"], state["uinteger"]], "left": np.array(left, np.uint64)}

    def restore(self, state: Tree) -> None:
        """Restore the position that `state` returned."""
        try:
            numbers = {name: int(state["pcg64"][name]) for name in ("state", "inc")}
            has, half = (int(value) for value in state["half"])
            left = np.array(state["left"], np.uint64).reshape(-1)
            self._stream.bit_generator.state = {
                "bit_generator": "PCG64", "state": numbers, "has_uint32": has, "uinteger": half,
            }  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DamagedFile(f"this is not the state of a random stream: {type(error).__name__}: {error}") from None
        self.block, self.cursor[0] = left, 0

    def _draw(self, count: int) -> np.ndarray:
        return self._stream.integers(0, _LARGEST, count, np.uint64, endpoint=True)
