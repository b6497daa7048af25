"""Fixtures: one control plane for all tests, and a new namespace with the base manifests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kube import ControlPlane, apply, rendered


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    made = ControlPlane(Path(os.environ["STEPPE_KUBE"]), tmp_path_factory.mktemp("kube"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    """Return the name of a new namespace with the base manifests applied."""
    name = f"t{uuid.uuid4().hex[:8]}"
    apply(plane, rendered(plane, "base", name))
    return name
