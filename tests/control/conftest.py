"""A service that is up, and a client that holds its strongest token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from control_kit import Served, until

from steppe.control import hosting
from steppe.records.directory import RunDirectory
from steppe.records.view import ENDED


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A service that is up; whatever it started is brought down."""
    service = Served(tmp_path)
    service.start()
    yield service
    if service.process is not None:
        service.stop()
    for record in (tmp_path / "runs").glob("*/run.json"):
        directory = RunDirectory(record.parent)
        hosting.kill(directory.store.status())
        until(lambda store=directory.store: store.status().state in (*ENDED, "PENDING"), "the run is gone")
    hosting.clean_up()


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
