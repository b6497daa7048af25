"""Fixture: run examples and code blocks in forks of a process with torch imported."""

from __future__ import annotations

import pytest

from tests.support.warm_host import WarmHost


@pytest.fixture(scope="session")
def warm_python(torch_host: WarmHost) -> WarmHost:
    """Run a script with `warm_python.run([path, …], environ, cwd, logs)`."""
    return torch_host
