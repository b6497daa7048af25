"""Messages and logs about tables that are damaged: they are counted, and no memory but the table's is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.transport import TableDelta
from steppe.transport.tables.messages import BEGIN, CLAIM, CLAIM_EPISODES, MERGE, REPLY, MessageTable
from steppe.transport.tables.shared import ShmTable

pytestmark = pytest.mark.unit

ROWS, ACTIONS = 5, 3
LOG_AT = 4096  # bytes: behind the page of the words comes the log of changed rows


class Posted(MessageTable):
    """Keeps what it would send."""

    def __init__(self, *, owns_table: bool = True) -> None:
        super().__init__(owns_table=owns_table)
        self.posted: list[tuple[int, int, np.ndarray]] = []

    def _post(self, worker: int, what: int, data: np.ndarray) -> None:
        self.posted.append((worker, what, data))

    def arrive(self, worker: int, what: int, data: np.ndarray) -> None:
        """Hand a message on, as the transports do that carry them."""
        self._handle(worker, what, data)

    def values(self) -> np.ndarray:
        """The table as its readers see it."""
        found = np.empty((ROWS, ACTIONS), np.float32)
        self.read(found)
        return found


def message(rows: list[int], values: np.ndarray, counts: tuple[int, int, int, int] | None = None) -> np.ndarray:
    words = np.zeros(8, np.int64)
    words[:4] = counts or (0, len(rows), 1, 0)
    parts = (words, np.array(rows, np.int64), values)
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def values(count: int, parts: int = 2, fill: float = 1.0) -> np.ndarray:
    return np.full((parts, count, ACTIONS), fill, np.float32)


BAD = [
    np.zeros(0, np.uint8),
    np.zeros(63, np.uint8),
    message([10**8], values(1)),
    message([-1], values(1)),
    message([0, ROWS], values(2)),
    message([0], values(2)),
    message([0], values(1)[:1]),
    message([0], values(1, fill=np.nan)),
    message([0], values(1), (0, 10**12, 1, 0)),
    message([0], values(1), (0, -1, 1, 0)),
    message([0], values(1), (0, 1, -(10**6), 0)),
]


@pytest.mark.parametrize("data", BAD)
def test_a_merge_that_is_damaged_is_counted_and_its_steps_are_given_out_with_the_next_question(
    data: np.ndarray,
) -> None:
    table = Posted()
    table.create(np.zeros((ROWS, ACTIONS), np.float32), 2, 10)
    table.arrive(0, BEGIN, message([], values(0)))
    table.arrive(0, CLAIM, message([], values(0), (2, 0, 0, 0)))
    table.arrive(0, MERGE, data)
    assert table.dropped == {"refused": 1}
    assert not table.values().any()
    assert table.totals().steps == 0
    assert table.totals().lost_steps == 0, "the worker may have some of them yet"
    table.arrive(0, MERGE, message([4], values(1)))
    assert table.totals().steps == 1
    assert table.values()[4].tolist() == [1.0] * ACTIONS
    table.arrive(0, CLAIM, message([], values(0), (2, 0, 0, 0)))
    assert table.totals().lost_steps == 1


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_after_a_damaged_merge_a_worker_and_the_others_take_as_much_as_is_asked_for(lost: int) -> None:
    """The worker takes 2 steps and an episode a message, and one of its messages is damaged on the way."""
    owner, worker = Posted(), Posted(owns_table=False)
    owner.create(np.zeros((ROWS, ACTIONS), np.float32), 1, 20, episode_limit=10)
    local = np.zeros((ROWS, ACTIONS), np.float32)
    taken = messages = left = episodes_left = 0

    def answered(ask: Callable[[], int | None]) -> int:
        """The answer to a question, and everything that was sent before it, with one merge damaged."""
        nonlocal messages
        assert ask() is None
        for _, kind, data in worker.posted:
            messages += kind == MERGE
            damaged = kind == MERGE and messages == lost + 1
            owner.arrive(0, kind, data[:-1] if damaged else data)
        worker.posted.clear()
        ((_, _, answer),) = owner.posted
        owner.posted.clear()
        worker.arrive(0, REPLY, answer)
        found = ask()
        assert found is not None
        return found

    answered(lambda: worker.begin(0, local))
    for _ in range(20):
        left += answered(lambda: worker.claim(0, 6, 1.0)) if left == 0 else 0
        if episodes_left < 2:
            episodes_left += answered(lambda: worker.claim_episodes(0, 3))
        while left and episodes_left:
            local[taken % ROWS] += 1.0
            worker.merge(0, TableDelta(np.arange(ROWS), np.ones((ROWS, ACTIONS), np.float32), 2, 1), 1.0)
            taken, left, episodes_left = taken + 2, left - 2, episodes_left - 1
    totals = owner.totals()
    assert (totals.steps, totals.episodes, totals.lost_steps) == (20, 10, 2)
    assert taken == 22, "the lost two were taken again, and no others"


@pytest.mark.parametrize("what", [CLAIM, CLAIM_EPISODES])
def test_a_damaged_question_is_answered_with_nothing(what: int) -> None:
    table = Posted()
    table.create(np.zeros((ROWS, ACTIONS), np.float32), 2, 10, episode_limit=5)
    table.arrive(0, what, message([], values(0), (-3, 0, 0, 0)))
    ((worker, kind, data),) = table.posted
    assert (worker, kind, int(data[:8].view(np.int64)[0])) == (0, REPLY, 0)
    assert table.dropped == {"refused": 1}


def test_an_answer_that_is_damaged_is_said() -> None:
    table = Posted(owns_table=False)
    assert table.begin(0, np.zeros((ROWS, ACTIONS), np.float32)) is None
    with pytest.raises(DamagedFile, match="names rows"):
        table.arrive(0, REPLY, message([10**8], values(1, 1)))


@pytest.mark.parametrize("bad", [10**12, ROWS, -1, -5])
def test_a_log_in_shared_memory_leads_nowhere_else(bad: int, tmp_path: Path) -> None:
    table, local, other = (
        ShmTable(tmp_path),
        np.zeros((ROWS, ACTIONS), np.float32),
        np.zeros((ROWS, ACTIONS), np.float32),
    )
    table.create(local.copy(), 2, None)
    table.begin(0, local)
    table.begin(1, other)
    local[1] = 2.0
    nothing = TableDelta(np.zeros(0, np.int64), np.ones((ROWS, ACTIONS), np.float32), 1, 0)
    table.merge(0, nothing, 1.0)
    log = np.memmap(tmp_path / "table", np.int64, "r+", LOG_AT, shape=1)
    assert log[0] == 1, "the row that was changed"
    log[0] = bad
    table.merge(1, nothing, 1.0)
    assert not other.any()
