"""Recorded facts about the machine and software of a run, compared with the tools that know them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from steppe.records import provenance as module
from steppe.records.provenance import git, hardware, provenance, versions

pytestmark = pytest.mark.unit


def run_git(cwd, *words):
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    environ = {**os.environ, **identity}
    done = subprocess.run(["git", *words], cwd=cwd, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_versions_equal_those_of_the_libraries():
    found = versions()
    assert found["numpy"] == np.__version__
    assert found["python"] == platform.python_version()
    assert all(found[name] for name in ("torch", "gymnasium", "steppe"))


def test_a_library_that_is_absent_is_none(monkeypatch):
    monkeypatch.setattr(module, "LIBRARIES", ("no-such-library",))
    assert versions()["no-such-library"] is None


def test_collecting_provenance_imports_no_heavy_library():
    script = (
        "import sys; from steppe.records.provenance import provenance; provenance(); "
        "print([name for name in ('torch', 'numba', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hardware_is_this_machine():
    found = hardware()
    assert found["cores"] == os.cpu_count()
    assert found["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found["cpu"]
    assert found["platform"] == platform.platform()


def test_gpu_names_come_from_the_driver(tmp_path, monkeypatch):
    for number, model in enumerate(("NVIDIA A100", "NVIDIA H100")):
        card = tmp_path / f"0000:0{number}:00.0"
        card.mkdir()
        (card / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t 27\n")
    monkeypatch.setattr(module, "NVIDIA_GPUS", tmp_path)
    assert hardware()["gpus"] == ["NVIDIA A100", "NVIDIA H100"]
    monkeypatch.setattr(module, "NVIDIA_GPUS", tmp_path / "absent")
    assert hardware()["gpus"] == []


def test_the_commit_and_whether_it_was_changed(tmp_path):
    assert git(tmp_path) is None
    run_git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    run_git(tmp_path, "add", "a.py")
    run_git(tmp_path, "commit", "-q", "-m", "first")
    commit = run_git(tmp_path, "rev-parse", "HEAD")
    assert git(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "a.py").write_text("2")
    assert git(tmp_path) == {"commit": commit, "dirty": True}


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git(tmp_path) is None


def test_thread_variables_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    threads = provenance()["threads"]
    assert threads["OMP_NUM_THREADS"] == "3"
    assert "MKL_NUM_THREADS" not in threads
