"""Runs the code of docs/extending.md, block by block, in one module."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BLOCKS = re.findall(r"## ([^\n]+)\n.*?```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_every_extension_point_has_an_example_that_runs(monkeypatch, tmp_path):
    (tmp_path / "extending_page.py").write_text("\n".join(code for _, code in BLOCKS))
    monkeypatch.syspath_prepend(tmp_path)
    page = importlib.import_module("extending_page")
    monkeypatch.delitem(sys.modules, "extending_page")
    assert page.launched == ["3 roles"]  # the page's last assertion but one: everything above it ran
    titles = [title for title, _ in BLOCKS]
    assert titles[:6] == ["Environment", "Wrapper", "Network", "Algorithm", "Callback", "Runtime"]


def test_environment_on_the_page_passes_its_conformance_suite(pytester_run):
    """Runs the page's last block with pytest, as a reader does."""
    result = pytester_run("\n".join(code.split("\nresult = ")[0] for _, code in (BLOCKS[0], BLOCKS[-1])))
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout


@pytest.fixture
def pytester_run(tmp_path):
    def run(code: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_coin.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_coin.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    return run
