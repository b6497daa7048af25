"""What a trail holds when an environment raises: as little as it takes to get there again."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import numpy as np
import pytest

from steppe.core.contracts.errors import EnvironmentFault
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.roles import action_log
from steppe.roles.action_log import ActionLog

pytestmark = pytest.mark.unit

SPEC = SegmentSpec(4, 2, FieldSpec("obs", (1,), "float32"), FieldSpec("action", (), "int64"))


def segment(number):
    made = Segment.blank(SPEC)
    made["action"][...] = number
    made.state = b"state %d" % number
    return made


@pytest.fixture
def kept():
    return []


def followed(kind, kept):
    def keep(circumstances):
        kept.append(circumstances)
        return {"recording": "faults/001.bin", "reproduce": "steppe reproduce bad"}

    return ActionLog(3, SimpleNamespace(resume_kind=kind), keep)


def blame(told, actions=None):
    fault = EnvironmentFault("bad luck", {"step": 7})
    fault.__cause__ = KeyError("lost")
    return told.attach_to(fault, actions)


def test_a_world_that_can_be_read_is_followed_from_its_last_segment(kept):
    told = followed("exact", kept)
    for number in range(3):
        told.record_segment(segment(number), resumable=True)
    error = blame(told, segment(9)["action"][:2])
    (held,) = kept
    assert held["origin"] == {"state": b"state 2"}
    assert held["actions"].tolist() == [[9, 9], [9, 9]]
    assert (held["actor"], held["exception"], held["whole"]) == (3, "KeyError", True)
    assert str(error) == "bad luck; reproduce it with: steppe reproduce bad"
    assert error.details == {"step": 7, "recording": "faults/001.bin", "reproduce": "steppe reproduce bad"}


@pytest.mark.parametrize(("kind", "resumable"), [("replay", True), ("episode-boundary", False)])
def test_another_is_followed_from_its_seeds(kept, kind, resumable):
    told = followed(kind, kept)
    told.begin(after=5)
    told.record_segment(segment(0), resumable=resumable)
    told.record_segment(segment(1), resumable=resumable)
    blame(told, segment(2)["action"][:1])
    (held,) = kept
    assert held["origin"] == {"after": 5}
    assert held["actions"][:, 0].tolist() == [0] * 4 + [1] * 4 + [2]


def test_without_room_it_is_followed_from_where_it_can_be_resumed(kept, monkeypatch):
    monkeypatch.setattr(action_log, "MAX_ACTION_BYTES", 2 * segment(0)["action"].nbytes)
    told = followed("replay", kept)
    for number in range(4):
        told.record_segment(segment(number), resumable=True)
    blame(told)
    assert kept[0]["origin"] == {"state": b"state 2"}
    assert kept[0]["actions"][:, 0].tolist() == [3] * 4
    assert kept[0]["whole"]


def test_without_room_or_resuming_it_says_that_it_is_not_whole(kept, monkeypatch):
    monkeypatch.setattr(action_log, "MAX_ACTION_BYTES", 2 * segment(0)["action"].nbytes)
    told = followed("episode-boundary", kept)
    for number in range(4):
        told.record_segment(segment(number), resumable=False)
    blame(told)
    assert not kept[0]["whole"]
    assert kept[0]["actions"][:, 0].tolist() == [3] * 4
    told.resume(b"found again")
    blame(told)
    assert kept[1]["whole"]


def test_a_full_disk_does_not_hide_the_fault():
    def keep(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    error = blame(ActionLog(0, SimpleNamespace(resume_kind="exact"), keep), np.zeros((1, 2)))
    assert str(error) == "bad luck; the actions that led to it could not be saved: No space left on device"
    assert error.details == {"step": 7}


def test_where_nothing_is_kept_the_fault_stays_as_it_is():
    fault = EnvironmentFault("bad luck")
    told = ActionLog(0, SimpleNamespace(resume_kind="exact"), None)
    told.record_segment(segment(0), resumable=True)
    assert told.attach_to(fault, None) is fault
