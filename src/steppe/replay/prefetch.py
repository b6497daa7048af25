"""Drawing ahead: the next batch is copied together by a thread of its own while the agent learns from this one.

Everything that reads or changes the store is done by that one thread, in the order in which the learner asked for it:

    learner   sample k ─┬─ learn from k ────────────────┬─ update k ─┬─ sample k + 1 …
    thread              └─ draw k + 1 → the other tray  ┘            └─ set priorities of k, then draw k + 2

Batch k + 1 is drawn before the priorities of k are known: a fixed place in the order, so results never depend on timing.
Small batches are drawn at once, without the thread: handing over would take longer than drawing (docs/replay.md has numbers).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.segment import Batch

MIN_THREADED_BYTES = 1 << 19  # of a batch that is worth a thread


class BatchPrefetcher:
    """Runs jobs in order: in a thread, drawing one batch ahead, if batches are large; at once otherwise."""

    def __init__(self, batch_bytes: int) -> None:
        self.threaded = batch_bytes >= MIN_THREADED_BYTES
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: deque[Future[object]] = deque()
        self._next: Future[Batch] | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job after those before it; what it raises, `settle` or the next `take` raises."""
        if not self.threaded:
            job()
            return
        self._jobs.append(self._started().submit(job))
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()

    def take(self, draw: Callable[[], Callable[[], Batch]], *, more: bool) -> Batch:
        """The next batch. `draw` is called now to make a job that draws one; with `more`, also for the one after."""
        if not self.threaded:
            return draw()()
        ahead, self._next = self._next, None
        batch = (ahead or self._started().submit(draw())).result()
        if more:
            self._next = self._started().submit(draw())
        return batch

    def settle(self) -> None:
        """Wait until every job is done, and let the thread end: the next job starts another."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        while self._jobs:
            self._jobs.popleft().result()

    def state(self) -> Tree | None:
        """The batch that was drawn ahead, in copies."""
        self.settle()
        if self._next is None:
            return None
        batch = self._next.result()
        parts = {"weights": batch.weights, "indices": batch.indices}
        columns = {name: column.copy() for name, column in batch.columns.items()}
        return {"columns": columns, **{name: part.copy() for name, part in parts.items() if part is not None}}

    def restore(self, state: Tree | None) -> None:
        """Take over what `state` returned; jobs under way are finished and forgotten."""
        self.settle()
        self._next = None
        if state is not None:
            self._next = Future()
            self._next.set_result(Batch(state["columns"], weights=state.get("weights"), indices=state.get("indices")))

    def _started(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "replay")
        return self._thread
