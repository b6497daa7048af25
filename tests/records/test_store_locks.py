"""A store keeps its locks while other connections of the same process are opened and closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steppe.records.store import RunStore

_VISIT = """
import sqlite3, sys
visitor = sqlite3.connect(sys.argv[1])
visitor.execute("SELECT COUNT(*) FROM records").fetchall()
visitor.close()  # the last one to leave removes the log
"""


@pytest.mark.unit
def test_opening_a_store_again_keeps_its_locks(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    kept = RunStore(path)
    kept.post("topic", {"a": 1})
    RunStore(path)  # opened again, and closed when no object refers to it
    subprocess.run([sys.executable, "-c", _VISIT, str(path)], check=True, timeout=60)
    assert path.with_name("run.sqlite-wal").exists(), "the visitor must have seen that somebody else has it open"
    kept.post("topic", {"a": 2})
    assert [record["a"] for _, record in kept.read("topic")] == [1, 2]
    kept.close()
