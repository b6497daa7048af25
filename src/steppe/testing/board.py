"""Conformance suite for Board: inherit BoardConformance and provide a `board` fixture."""

from __future__ import annotations

import math
from typing import Any

from steppe.core.contracts.reports import ActorReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, TOPICS, TRAINING, Board


class BoardConformance:
    """Tests for every Board; `board` is a fixture with a new, empty Board."""

    def test_an_unused_topic_is_empty(self, board: Board) -> None:
        assert all(board.read(topic) == [] for topic in TOPICS)

    def test_records_come_back_in_order_with_growing_numbers(self, board: Board) -> None:
        numbers = [board.post(TRAINING, {"k": k}) for k in range(20)]
        assert numbers == sorted(set(numbers))
        assert numbers[0] > 0
        assert board.read(TRAINING) == list(zip(numbers, [{"k": k} for k in range(20)], strict=True))

    def test_topics_do_not_mix(self, board: Board) -> None:
        for k in range(3):
            board.post(TRAINING, {"k": k})
            board.post(ACTORS, {"k": -k})
        assert [record["k"] for _, record in board.read(TRAINING)] == [0, 1, 2]
        assert [record["k"] for _, record in board.read(ACTORS)] == [0, -1, -2]

    def test_a_reader_that_remembers_its_place_sees_each_record_once(self, board: Board) -> None:
        seen, after = [], 0
        for k in range(30):
            board.post(TRAINING, {"k": k})
            board.post(ACTORS, {"k": 1000})
            if k % 4 == 0:
                page = board.read(TRAINING, after)
                seen += [record["k"] for _, record in page]
                after = page[-1][0]
        seen += [record["k"] for _, record in board.read(TRAINING, after)]
        assert seen == list(range(30))
        assert board.read(TRAINING, board.read(TRAINING)[-1][0]) == []

    def test_pages_are_limited_to_the_oldest_records(self, board: Board) -> None:
        for k in range(10):
            board.post(TRAINING, {"k": k})
        page = board.read(TRAINING, limit=4)
        assert [record["k"] for _, record in page] == [0, 1, 2, 3]
        rest = board.read(TRAINING, page[-1][0], limit=100)
        assert [record["k"] for _, record in rest] == [4, 5, 6, 7, 8, 9]

    def test_plain_values_come_back_as_they_were(self, board: Board) -> None:
        record: dict[str, Any] = {
            "none": None,
            "truth": True,
            "int": 2**60,
            "float": 0.1,
            "text": "é \u2028 \" ' ; --",
            "list": [1, [2.5, "x"]],
            "map": {"a": {"b": []}},
        }
        board.post(TRAINING, record)
        assert board.read(TRAINING)[0][1] == record

    def test_numbers_that_are_not_finite_survive(self, board: Board) -> None:
        board.post(TRAINING, {"a": math.nan, "b": math.inf, "c": [-math.inf], "d": "NaN"})
        record = board.read(TRAINING)[0][1]
        assert math.isnan(record["a"])
        assert (record["b"], record["c"], record["d"]) == (math.inf, [-math.inf], "NaN")

    def test_a_record_is_as_it_was_when_it_was_posted(self, board: Board) -> None:
        record = {"k": 1}
        board.post(TRAINING, record)
        record["k"] = 2
        assert board.read(TRAINING)[0][1] == {"k": 1}

    def test_reports_come_back_typed(self, board: Board) -> None:
        training = TrainingReport(
            run="r", version=3, updates=4, env_steps=5, train_s=0.5, stats={"loss": math.nan}, lags={0: 7, 2: 1}
        )
        actor = ActorReport(run="r", actor=1, epoch=0, version=3, sequence=9, env_steps=5, episodes=[(1.5, 20)])
        board.post(TRAINING, training.record())
        board.post(ACTORS, actor.record())
        decoded = TrainingReport.read(board.read(TRAINING)[0][1])
        assert (decoded.lags, decoded.time_s) == (training.lags, training.time_s)
        assert math.isnan(decoded.stats["loss"])
        assert ActorReport.read(board.read(ACTORS)[0][1]) == actor
