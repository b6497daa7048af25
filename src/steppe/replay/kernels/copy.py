"""Compiled copies by address: one call copies rows of many columns, of any dtype, into one block of memory.

Addresses come from arrays that a ReplayStore keeps alive. Slots are checked against its size before anything is read.
All kernels release the GIL, are compiled once for all dtypes and shapes, and are cached on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from steppe.replay.kernels import plain

F = TypeVar("F", bound=Callable[..., Any])
_COMPILATION_OFF = bool(getattr(config, "DISABLE_JIT", False))


def compiled(function: F) -> F:
    """Compile on first use and cache on disk, without fastmath: results must be bit-identical everywhere."""
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def _intrinsic_or_fallback(emitting: Callable[..., Any], otherwise: Callable[..., Any]) -> Any:
    """Return a numba intrinsic, or its plain Python equivalent if compilation is disabled."""
    return otherwise if _COMPILATION_OFF else intrinsic(emitting)


def _copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, of, size = args
        pointer = cgutils.voidptr_t
        copy: Any = cgutils.raw_memcpy
        copy(builder, builder.inttoptr(to, pointer), builder.inttoptr(of, pointer), size, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


# memcpy(target, source, count) between addresses; with a constant count it compiles to plain moves.
copy_bytes = cast(Callable[[Any, Any, Any], None], _intrinsic_or_fallback(_copy_bytes, plain.copy_bytes))


def _prefetch(typing: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, pointer = ir.IntType(32), cgutils.voidptr_t
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        insert: Any = cgutils.get_or_insert_function
        hint = insert(builder.module, kind, "llvm.prefetch.p0")
        builder.call(hint, [builder.inttoptr(args[0], pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), emit


# Prefetch the cache line at an address, without waiting for it.
prefetch = cast(Callable[[Any], None], _intrinsic_or_fallback(_prefetch, plain.prefetch))


def _load(kind: Any, otherwise: Callable[[int], Any]) -> Any:
    def load(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], context.get_value_type(kind).as_pointer())
            return builder.load(pointer)

        return kind(types.int64), emit

    return _intrinsic_or_fallback(load, otherwise)


# Load a number from an address, without numba's handling of negative indices.
load_float64 = cast(Callable[[Any], float], _load(types.float64, plain.load_float64))
load_float32 = cast(Callable[[Any], float], _load(types.float32, plain.load_float32))


def _count_not_above(typing: Any, address: Any, number: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = builder.load(builder.inttoptr(args[0], _FLOAT64X8.as_pointer()), align=64)
        bits = builder.bitcast(builder.fcmp_ordered(">=", _broadcast_to_8(builder, args[1]), numbers), ir.IntType(8))
        return builder.zext(builder.ctpop(bits), ir.IntType(64))

    return types.int64(types.int64, types.float64), emit


def _block_sum(typing: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        four, wide = ir.VectorType(ir.FloatType(), 4), ir.VectorType(ir.DoubleType(), 4)
        total = None
        for quarter in range(4):
            at = builder.add(args[0], args[0].type(16 * quarter))
            leaves = builder.fpext(builder.load(builder.inttoptr(at, four.as_pointer()), align=16), wide)
            total = leaves if total is None else builder.fadd(total, leaves)
        a, b, c, d = (builder.extract_element(total, _INT32(lane)) for lane in range(4))
        return builder.fadd(builder.fadd(a, b), builder.fadd(c, d))

    return types.float64(types.int64), emit


def _group_sum(typing: Any, nodes: Any, starts: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.DoubleType()
        total: Any = number(0.0)
        running = ir.Constant(_FLOAT64X8, [number(0.0)] * 8)
        for node in range(8):
            running = builder.insert_element(running, total, _INT32(node))
            at = builder.add(args[0], args[0].type(8 * node))
            total = builder.fadd(total, builder.load(builder.inttoptr(at, number.as_pointer())))
        begun = builder.fcmp_ordered("<", running, _broadcast_to_8(builder, total))
        found = builder.select(begun, running, ir.Constant(_FLOAT64X8, [number(math.inf)] * 8))
        builder.store(found, builder.inttoptr(args[1], _FLOAT64X8.as_pointer()), align=64)
        return total

    return types.float64(types.int64, types.int64), emit


_FLOAT64X8 = ir.VectorType(ir.DoubleType(), 8)
_INT32 = ir.IntType(32)


def _broadcast_to_8(builder: Any, number: Any) -> Any:
    blank: Any = ir.Constant(_FLOAT64X8, ir.Undefined)
    once = builder.insert_element(blank, number, _INT32(0))
    return builder.shuffle_vector(once, blank, ir.Constant(ir.VectorType(_INT32, 8), [0] * 8))


# SIMD operations, rounded exactly like their scalar equivalents in plain.py.
# count_not_above: how many of the 8 float64 at an address are <= a number; block_sum: the sum of 16 float32 at an
# address; group_sum: the sum of 8 float64, which also writes their starts (see sumtree.py).
count_not_above = cast(Callable[[Any, Any], int], _intrinsic_or_fallback(_count_not_above, plain.count_not_above))
block_sum = cast(Callable[[Any], float], _intrinsic_or_fallback(_block_sum, plain.block_sum))
group_sum = cast(Callable[[Any, Any], float], _intrinsic_or_fallback(_group_sum, plain.group_sum))


@compiled
def gather(plan: np.ndarray, num_rows: int, slots: np.ndarray, out: np.ndarray) -> bool:
    """Copy rows `slots` of every column into `out` (uint8); return False, and copy nothing, if a slot is out of range.

    Each row of `plan` describes a column: its address, its stride in bytes, the bytes of one row, and the offset of its
    copies in `out`.
    """
    for i in range(len(slots)):
        if slots[i] < 0 or slots[i] >= num_rows:
            return False
    begin = np.int64(out.ctypes.data)
    for column in range(len(plan)):
        _gather_column(plan[column, 0], plan[column, 1], plan[column, 2], slots, begin + plan[column, 3])
    return True


@compiled
def _gather_column(source: int, step: int, width: int, slots: np.ndarray, target: int) -> None:
    # Common widths use plain moves: calling memcpy for each row would take longer than copying the row.
    count = len(slots)
    if width == 1:
        for i in range(count):
            copy_bytes(target + i, source + slots[i] * step, 1)
    elif width == 4:
        for i in range(count):
            copy_bytes(target + i * 4, source + slots[i] * step, 4)
    elif width == 8:
        for i in range(count):
            copy_bytes(target + i * 8, source + slots[i] * step, 8)
    elif width == 16:
        for i in range(count):
            copy_bytes(target + i * 16, source + slots[i] * step, 16)
    elif width == 32:
        for i in range(count):
            copy_bytes(target + i * 32, source + slots[i] * step, 32)
    else:
        for i in range(count):
            copy_bytes(target + i * width, source + slots[i] * step, width)


@compiled
def gather_stacks(frames: int, width: int, ids: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    """Copy frames `ids` [columns, rows, frames] into `out`, row by row: the columns of a row share most frames."""
    begin = np.int64(out.ctypes.data)
    num_columns, num_rows, stack = ids.shape
    for row in range(num_rows):
        for column in range(num_columns):
            target = begin + offsets[column] + row * stack * width
            for frame in range(stack):
                copy_bytes(target + frame * width, frames + np.int64(ids[column, row, frame]) * width, width)
