"""A running service, and a client with its admin token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.service import Served, bring_down
from tests.support.warm_host import WarmHost


@pytest.fixture(scope="session")
def brokers() -> str | None:
    """Return the Kafka address for the service's runs, if any; modules that test both override it."""
    return None


@pytest.fixture(scope="session")
def service_host() -> Iterator[WarmHost]:
    """A process whose forks serve, without importing all that a service needs each."""
    host = WarmHost(service=True)
    yield host
    host.close()


@pytest.fixture
def served(tmp_path: Path, brokers: str | None, service_host: WarmHost) -> Iterator[Served]:
    """A service that is up; whatever it started is brought down."""
    service = Served(tmp_path, brokers, host=service_host)
    service.start()
    yield service
    bring_down(service)


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
