"""Compiled merging of the updates of several workers into one table, as if the workers had learned one after another.

A worker has its current table (`local`) and a copy as of its last merge (`base`). n updates at learning rate α turn a
value v into kept · v + learned, with kept = (1 − α)ⁿ. Applied to the value that the other workers have made of v in
the meantime, they give local + kept · (shared − base). With `kept` = 1 this is the sum of all changes, which is right
for few updates; but two workers that both converged to a value would overshoot it by the full change, and more workers
would never converge. Any `kept` between 0 and 1 is right on average, so it may be an estimate.

Changed rows are appended to a log, where the other workers find them, so that no worker copies a table of which little
has changed. All tables are [rows, actions]. Where memory is shared, the caller holds the lock.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def find_changed_rows(local: np.ndarray, base: np.ndarray, candidates: np.ndarray, found: np.ndarray) -> Any:
    """Write the indices of the rows that differ into `found`, and return how many; checks all rows if no candidates."""
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
    read_until: int,
) -> int:
    """Merge the changes of these rows into `shared` and log them, then copy the rows that other workers logged.

    Returns the new head of the log. Where no other worker wrote, `shared` becomes `local` bit for bit, so a single
    worker learns as if the table were its own.
    """
    size, actions, old_head = len(log), np.uint64(shared.shape[1]), head
    for k in range(len(rows)):
        row = np.uint64(rows[k])
        for action in range(actions):
            own, previous, merged = local[row, action], base[row, action], shared[row, action]
            if own != previous:
                merged = own if merged == previous else own + kept[row, action] * (merged - previous)
                shared[row, action] = merged
            local[row, action] = merged
            base[row, action] = merged
        log[head % size] = rows[k]
        head += 1
    if old_head - read_until + len(rows) > size:  # log entries of others were overwritten: copy everything
        local[...] = shared
        base[...] = shared
        return head
    for k in range(read_until, old_head):
        row = np.uint64(log[k % size])
        if row >= np.uint64(
            shared.shape[0]
        ):  # the log is in shared memory and may be corrupt: never read out of bounds
            continue
        for action in range(actions):
            local[row, action] = base[row, action] = shared[row, action]
    return head


@numba.njit(cache=True, nogil=True)
def apply_remote_rows(shared: np.ndarray, rows: np.ndarray, kept: np.ndarray, added: np.ndarray) -> None:
    """Merge a remote worker's changes into these rows: shared becomes kept · shared + added, entry by entry."""
    for k in range(len(rows)):
        for action in range(shared.shape[1]):
            shared[rows[k], action] = kept[k, action] * shared[rows[k], action] + added[k, action]
