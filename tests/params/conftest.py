"""Certificates and a home of their own for the tests of the parameter server."""

from __future__ import annotations

from pathlib import Path

import pytest

from steppe.params.rpc import protocol
from steppe.params.rpc.protocol import Tls
from tests.support.certificates import certificate


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPPE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(protocol.TOKEN_VARIABLE, raising=False)


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """The files of a server at localhost."""
    return certificate(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.fixture(scope="session")
def other_tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """The files of another server."""
    return certificate(tmp_path_factory.mktemp("other"), "other")
