"""Runs the Python blocks of every page in order, after the set-up that the page assumes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.certificates import certificate
from tests.support.commands import free_port

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
}
ELSEWHERE = {"docs/extending.md"}  # test_extending.py

# (page, number of the block) → set-up code that runs before the block.
BEFORE = {
    ("README.md", 0): "import numpy as np; observation = np.zeros(4, np.float32)",
    ("docs/atari.md", 0): """
        from steppe import train
        short = {"steps": 1, "envs": 1, "segment_steps": 16, "minibatch_size": 16, "evaluation.episodes": 1, "environment.time_limit": 40}
        train("ALE/Pong-v5", runtime="inline", name="my-run", hidden=(8,), **short)
    """,
    ("docs/cluster.md", 0): """
        # examples/several_machines.py runs the real one on two nodes.
        from unittest.mock import create_autospec
        import steppe
        DistributedMainLoop = create_autospec(steppe.DistributedMainLoop)
        environment, replay_buffer, agent, param_server = (create_autospec(object) for _ in range(4))
    """,
    ("docs/composition.md", 1): "import numpy as np; obs = np.zeros(4, np.float32)",
    ("docs/multi-agent.md", 0): "import steppe; from steppe import FieldSpec",
    ("docs/multi-agent.md", 1): """
        import sys, types
        from steppe.envs.pathfinding.parallel import parallel_env
        sys.modules["my_module"] = types.SimpleNamespace(make_env=lambda: parallel_env(num_agents=2, size=5))
    """,
    ("docs/parameter-server.md", 0): """
        import numpy as np
        w, b = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
        dw, db = np.ones_like(w), np.ones_like(b)
    """,
    ("docs/parameter-server.md", 1): "delta0 = delta1 = delta2 = {'w': dw, 'b': db}",
    ("docs/parameter-server.md", 3): """
        from steppe import ParameterClient
        server = ParameterServer({"w": w, "b": b}, update_frequency=1)
        version, gradient = 0, np.ones(6, np.float32)
    """,
    ("docs/parameter-server.md", 5): """
        from steppe.params.rpc.protocol import Tls
        server.stop_server()
        t0, t1 = "secret-of-node-0" * 2, "secret-of-node-1" * 2
    """,
}
AFTER = {("docs/parameter-server.md", 5): "server.stop_server()", ("docs/composition.md", 3): "environment.shutdown()"}


def test_pages_are_found():
    assert sum(bool(blocks) for blocks in PAGES.values()) >= 10
    assert all(number < len(PAGES[page]) for page, number in {**BEFORE, **AFTER})


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks and page not in ELSEWHERE])
def test_blocks_run(page, warm_python, tmp_path, tmp_path_factory):
    parts = []
    for number, block in enumerate(PAGES[page]):
        parts += [dedent(BEFORE.get((page, number), "")), block, AFTER.get((page, number), "")]
    script = tmp_path / "page.py"
    script.write_text(here("\n".join(parts), tmp_path))
    environ = {
        **os.environ,
        "STEPPE_HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = warm_python.run([str(script)], environ, tmp_path, tmp_path_factory.mktemp("logs"))
    assert done.returncode == 0, done.stdout + done.stderr


def here(code: str, folder: Path) -> str:
    """Replace addresses, certificates and numbers of training steps for the test."""
    if "server.pem" in code:
        certificate(folder, "server")
        (folder / "ca.pem").write_bytes((folder / "server.pem").read_bytes())
    code = code.replace('"0.0.0.0"', '"localhost"').replace("grpcs://server:", "grpcs://localhost:")
    return code.replace("8888", str(free_port()))
