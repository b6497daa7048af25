"""The log of arrivals: what is written is what is read, up to the last mark, whatever a kill or a full disk left."""

from __future__ import annotations

import pytest

from steppe.core.contracts.errors import DamagedFile
from steppe.records.arrivals import Arrival, ArrivalLog, AttemptStart, LearnerMark, read_arrivals

pytestmark = pytest.mark.unit

FIRST = [Arrival(0, 0, 0), Arrival(1, 0, 0)]
SECOND = [Arrival(1, 1, 0, kept=False), Arrival(0, 1, 1)]
MARK, LATER = LearnerMark(64, 10, 2, "a" * 64), LearnerMark(128, 20, 4, "b" * 64)


@pytest.fixture
def complaints():
    return []


@pytest.fixture
def path(tmp_path):
    return tmp_path / "arrivals.jsonl"


def written(path, complaints, length=0):
    return ArrivalLog(path, length, complaints.append)


def test_what_is_written_is_read(path, complaints):
    log = written(path, complaints)
    log.begin(1_000, 0, 0)
    log.take(FIRST)
    log.take(SECOND)
    assert log.mark(MARK) == path.stat().st_size
    (life,) = read_arrivals(path)
    assert life.begin == AttemptStart(1_000, 0, 0)
    assert life.batches == [FIRST, SECOND]
    assert life.end == MARK
    assert not complaints


def test_behind_the_last_mark_nothing_counts(path, complaints):
    log = written(path, complaints)
    log.begin(None, 0, 0)
    log.take(FIRST)
    log.mark(MARK)
    log.take(SECOND)
    with open(path, "ab") as file:
        file.write(b'{"mark":{"env_st')
    (life,) = read_arrivals(path)
    assert (life.batches, life.end) == ([FIRST], MARK)


def test_going_on_cuts_the_log_at_the_checkpoint(path, complaints):
    log = written(path, complaints)
    log.begin(100, 0, 0)
    log.take(FIRST)
    length = log.mark(MARK)
    log.take([Arrival(0, 1, 1)])
    log.take([Arrival(0, 2, 1)])
    again = written(path, complaints, length)
    again.begin(200, 64, 10)
    again.take(SECOND)
    again.mark(LATER)
    first, second = read_arrivals(path)
    assert (first.batches, first.end) == ([FIRST], MARK)
    assert (second.begin, second.batches, second.end) == (AttemptStart(200, 64, 10), [SECOND], LATER)


def test_an_attempt_without_a_mark_is_ignored(path, complaints):
    log = written(path, complaints)
    log.begin(100, 0, 0)
    log.take(FIRST)
    assert read_arrivals(path) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"take":[[0,0,0,true]]}\n', "does not begin"),
        ('{"begin":{"steps":1}}\nnonsense\n', "damaged in line 2"),
        ('{"begin":{"steps":1}}\n{"tkae":[]}\n', "damaged in line 2"),
        ('{"begin":{"steps":1}}\n{"take":[[0,0,"x",true]]}\n', "damaged in line 2"),
    ],
)
def test_damage_is_named(path, text, words):
    path.write_text(text)
    with pytest.raises(DamagedFile, match=words):
        read_arrivals(path)


def test_gaps_are_named(path, complaints):
    log = written(path, complaints)
    log.begin(100, 0, 0)
    log.take([Arrival(0, 0, 0), Arrival(0, 2, 0)])
    log.mark(MARK)
    with pytest.raises(DamagedFile, match="lacks segment 1 of actor 0"):
        read_arrivals(path)
    with pytest.raises(DamagedFile, match="cannot be read"):
        read_arrivals(path.with_name("absent"))


def test_a_log_that_is_too_short_or_cannot_be_written_is_given_up_with_one_complaint(path, complaints, tmp_path):
    log = written(path, complaints, length=1_000)
    log.begin(1, 0, 0)
    log.take(FIRST)
    assert log.mark(MARK) == -1
    assert len(complaints) == 1
    assert "shorter than the checkpoint says" in complaints[0]
    written(tmp_path / "absent" / "log", complaints).begin(1, 0, 0)
    assert len(complaints) == 2


def test_a_disk_that_fills_leaves_the_log_at_its_last_mark(path, complaints, monkeypatch):
    log = written(path, complaints)
    log.begin(100, 0, 0)
    log.take(FIRST)
    log.mark(MARK)
    path.rename(path.with_name("kept"))
    path.symlink_to("/dev/full")  # every write fails: no space left
    log.take(SECOND)
    log.take(SECOND)
    assert log.mark(LATER) == -1
    assert len(complaints) == 1
    assert "No space left" in complaints[0]
    (life,) = read_arrivals(path.with_name("kept"))
    assert (life.batches, life.end) == ([FIRST], MARK)
