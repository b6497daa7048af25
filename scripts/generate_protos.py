"""Generate the Python modules of every .proto below src/ (`*_pb2.py` and `*_pb2.pyi`) beside it."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).parents[1] / "src"


def generate(into: Path) -> None:
    """Write the modules below `into`, in the folders of their .proto files."""
    standard = files("grpc_tools") / "_proto"
    protos = [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.proto"))]
    outputs = [f"--{kind}_out={into}" for kind in ("python", "pyi")]
    if protoc.main(["protoc", f"-I{SOURCE}", f"-I{standard}", *outputs, *protos]):
        raise SystemExit("protoc failed: see above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
