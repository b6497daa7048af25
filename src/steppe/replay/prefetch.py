"""Prefetching: a thread samples the next batch while the agent learns from the current one.

This one thread runs everything that reads or changes the store, in the order in which the learner requested it:

    learner   sample k ─┬─ learn from k ────────────────┬─ update k ─┬─ sample k + 1 …
    thread              └─ sample k + 1 → other buffer  ┘            └─ set priorities of k, then sample k + 2

Batch k + 1 is always sampled before the priorities of batch k are set, so results never depend on timing. Small batches
are sampled synchronously: handing them to a thread takes longer than sampling them (docs/replay.md has numbers).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.segment import Batch

MIN_THREADED_BYTES = 1 << 19  # smallest batch that is worth a thread


class BatchPrefetcher:
    """Run jobs in order: in a thread that samples one batch ahead if batches are large, synchronously otherwise."""

    def __init__(self, batch_bytes: int) -> None:
        self.threaded = batch_bytes >= MIN_THREADED_BYTES
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: deque[Future[object]] = deque()
        self._next: Future[Batch] | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job after all earlier ones. In a thread, its exception is raised by a later `submit` or by `settle`."""
        if not self.threaded:
            job()
            return
        self._jobs.append(self._started().submit(job))
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()

    def take(self, draw: Callable[[], Callable[[], Batch]], *, more: bool) -> Batch:
        """Return the next batch and, with `more`, start sampling the one after.

        `draw` is called in this thread and returns the job that samples one batch.
        """
        if not self.threaded:
            return draw()()
        ahead, self._next = self._next, None
        batch = (ahead or self._started().submit(draw())).result()
        if more:
            self._next = self._started().submit(draw())
        return batch

    def settle(self) -> None:
        """Wait until every job is done and end the thread; the next job starts a new one."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        while self._jobs:
            self._jobs.popleft().result()

    def state(self) -> Tree | None:
        """Return a copy of the prefetched batch, or None."""
        self.settle()
        if self._next is None:
            return None
        batch = self._next.result()
        parts = {"weights": batch.weights, "indices": batch.indices}
        columns = {name: column.copy() for name, column in batch.columns.items()}
        return {"columns": columns, **{name: part.copy() for name, part in parts.items() if part is not None}}

    def restore(self, state: Tree | None) -> None:
        """Restore what `state` returned; pending jobs are finished first and a prefetched batch is discarded."""
        self.settle()
        self._next = None
        if state is not None:
            self._next = Future()
            self._next.set_result(Batch(state["columns"], weights=state.get("weights"), indices=state.get("indices")))

    def _started(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "replay")
        return self._thread
