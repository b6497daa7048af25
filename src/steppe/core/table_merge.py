"""Compiled merging of what several workers learn in one table, as if one of them had learned after the other.

A worker has the table as it learns in it (`local`) and as it was when it last looked (`base`). n updates at rate α turn a
value v into kept · v + what they learned, with kept = (1 − α)ⁿ; so they turn what others have meanwhile made of v into
local + kept · (shared − base). With `kept` 1 that is the sum of what all have added, which is right for few updates; but
two workers that both came all the way to a value would overshoot it by as much, and more of them would never settle.
Whatever lies between 0 and 1 is right on average, so `kept` may be an estimate.

Rows that a worker changed are written into a log, by which the others find them: nobody copies a table of which little
has changed. All tables here are [rows, actions]. Where memory is shared, the caller holds the lock.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def find_changed_rows(local: np.ndarray, base: np.ndarray, candidates: np.ndarray, found: np.ndarray) -> Any:
    """Write the numbers of the rows that differ into `found`, and return how many; looks at all rows if no candidates."""
    count = np.int64(0)
    for k in range(len(candidates) if len(candidates) > 0 else len(local)):
        row = np.uint64(candidates[k]) if len(candidates) > 0 else np.uint64(k)
        differs = False
        for action in range(np.uint64(local.shape[1])):
            differs |= local[row, action] != base[row, action]
        found[count] = np.int64(row)
        count += np.int64(differs)
    return count


@numba.njit(cache=True, nogil=True)
def merge_rows(
    shared: np.ndarray,
    local: np.ndarray,
    base: np.ndarray,
    kept: np.ndarray,
    rows: np.ndarray,
    log: np.ndarray,
    head: int,
    seen: int,
) -> int:
    """Put these rows' changes into `shared` and log them, then take over what others logged; returns the log's new head.

    Where nobody else wrote, `shared` becomes `local` bit for bit, so a lone worker learns as if the table were its own.
    """
    size, actions, behind = len(log), np.uint64(shared.shape[1]), head
    for k in range(len(rows)):
        row = np.uint64(rows[k])
        for action in range(actions):
            mine, old, theirs = local[row, action], base[row, action], shared[row, action]
            if mine != old:
                theirs = mine if theirs == old else mine + kept[row, action] * (theirs - old)
                shared[row, action] = theirs
            local[row, action] = theirs
            base[row, action] = theirs
        log[head % size] = rows[k]
        head += 1
    if behind - seen + len(rows) > size:  # some of what others logged is gone: look at everything
        local[...] = shared
        base[...] = shared
        return head
    for k in range(seen, behind):
        row = np.uint64(log[k % size])
        if row >= np.uint64(
            shared.shape[0]
        ):  # the log lies in shared memory: whatever is there, no other memory is read
            continue
        for action in range(actions):
            local[row, action] = base[row, action] = shared[row, action]
    return head


@numba.njit(cache=True, nogil=True)
def apply_remote_rows(shared: np.ndarray, rows: np.ndarray, kept: np.ndarray, added: np.ndarray) -> None:
    """Put what a worker elsewhere learned into these rows: shared becomes kept · shared + added, entry by entry."""
    for k in range(len(rows)):
        for action in range(shared.shape[1]):
            shared[rows[k], action] = kept[k, action] * shared[rows[k], action] + added[k, action]
