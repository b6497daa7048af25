"""Certificates that sign themselves, made by openssl for one test session."""

from __future__ import annotations

import subprocess
from pathlib import Path

from steppe.params.rpc.protocol import Tls

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:10.99.0.1"


def certificate(directory: Path, name: str) -> Tls:
    """NAME.pem and NAME.key in a directory."""
    made = Tls(directory / f"{name}.pem", directory / f"{name}.key")
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(made.key), "-out", str(made.certificate), "-subj", f"/CN={name}", "-addext", NAMES]
    subprocess.run(["openssl", "req", *kind, *files], check=True, capture_output=True)
    return made
