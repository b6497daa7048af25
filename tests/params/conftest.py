"""Certificates and a home of their own for the tests of the parameter server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from steppe.params import wire
from steppe.params.wire import Tls

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:10.99.0.1"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPPE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(wire.TOKEN_VARIABLE, raising=False)


def certificate(directory: Path, name: str) -> Tls:
    """A certificate that signs itself, made for this session only."""
    made = Tls(directory / f"{name}.pem", directory / f"{name}.key")
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    files = ["-keyout", str(made.key), "-out", str(made.certificate), "-subj", f"/CN={name}", "-addext", NAMES]
    subprocess.run([*words, *files], check=True, capture_output=True)
    return made


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """The files of a server at localhost."""
    return certificate(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """The files of somebody else."""
    return certificate(tmp_path_factory.mktemp("stranger"), "stranger")
