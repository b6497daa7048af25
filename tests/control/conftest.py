"""A running service, and a client with its admin token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.service import Served, bring_down


@pytest.fixture(scope="session")
def brokers() -> str | None:
    """Return the Kafka address for the service's runs, if any; modules that test both override it."""
    return None


@pytest.fixture
def served(tmp_path: Path, brokers: str | None) -> Iterator[Served]:
    """Start a service, and stop everything that it started afterwards."""
    service = Served(tmp_path, brokers)
    service.start()
    yield service
    bring_down(service)


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
