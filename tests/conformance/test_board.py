"""Every Board keeps the same promises."""

from __future__ import annotations

import pytest

from steppe.records.store import RunStore
from steppe.testing.board import BoardConformance
from steppe.transport.local import LocalBoard

pytestmark = pytest.mark.integration


class TestStore(BoardConformance):
    @pytest.fixture
    def board(self, tmp_path):
        store = RunStore(tmp_path / "run.sqlite")
        yield store
        store.close()


class TestLocalBoard(BoardConformance):
    @pytest.fixture
    def board(self):
        return LocalBoard()
