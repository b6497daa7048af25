"""The direction of imports between packages and what may be imported where, read from the source with `ast`."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import steppe

pytestmark = pytest.mark.unit

ROOT = Path(steppe.__file__).parent
LEVELS = {
    "core": 0,
    "envs": 1, "algorithms": 1, "replay": 1, "params": 1, "transport": 1, "records": 1,
    "roles": 2,
    "runtimes": 3,
    "training": 4,
    "compose": 5, "control": 5, "cli": 5,
    "testing": 6, "classic.py": 6, "__init__.py": 6, "__main__.py": 6,
}  # fmt: skip
BESIDE = {"cli": {"compose", "control"}}  # packages of one level that may import each other
# Package → where it may be imported: packages, or files. A file with "()" only inside functions.
HOMES = {
    "torch": {"algorithms", "runtimes/handle.py()", "cli/commands/doctor.py()"},
    "numba": {
        "algorithms",
        "envs",
        "replay",
        "params/kernels.py",
        "core/system/random_words.py",
        "roles/tabular/game_kernels.py",
        "core/table_merge.py",
        "runtimes/preload.py",
        "runtimes/preload_tabular.py",
    },
    "gymnasium": {"envs", "training/load.py", "training/reference_experiments/exact_evaluation.py()", "cli/commands/info.py()", "cli/commands/doctor.py()", "testing"},
    "pettingzoo": {"envs"},
    "PIL": {"envs", "records"},
    "pygame": {"envs", "cli/commands/doctor.py()"},
    "tensorboard": {"records"},
    "wandb": {"records"},
    "safetensors": {"records", "replay", "params", "algorithms/tabular/io.py()"},
    "typer": {"cli"},
    "rich": {"cli"},
    "pydantic": {
        "core",
        "control",
        "algorithms/dhc/config.py",
        "algorithms/dqn/config.py",
        "algorithms/ppo/config.py",
        "algorithms/r2d2/config.py",
        "algorithms/shared/actor_critic_config.py",
        "algorithms/shared/replay_config.py",
        "algorithms/tabular/config.py",
    },
    "ray": {"transport/ray/links.py", "runtimes/ray/launch.py"},
    "mpi4py": {"transport/mpi/links.py", "runtimes/mpi/launch.py"},
    "confluent_kafka": {"transport/kafka/client.py", "runtimes/kafka/launch.py"},
    "kubernetes": {"control/backends/kube_client.py"},
    "grpc": {"params"},
    "grpc_health": {"params"},
    "google": {"params"},
    "dp_accounting": {"params/privacy.py()"},
    "fastapi": {"control"},
    "uvicorn": {"control"},
    "starlette": {"control"},
    "anyio": {"control"},
    "mcp": {"control"},
    "pytest": {"testing"},
    "scipy": {"core/system/blas.py()", "records/results/reference_results.py()"},
    "psutil": set(),
}  # fmt: skip
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "np.load", "__import__"}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def package_of(file: str) -> str:
    return file.split("/")[0]


@functools.cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), file)


@functools.cache
def imports_of(file: str) -> list[tuple[str, bool]]:
    """(module, whether only inside a function) of every import; imports that only types need are left out."""
    found: list[tuple[str, bool]] = []
    waiting: list[tuple[ast.AST, bool]] = [(tree_of(file), False)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += [(child, inside) for child in node.orelse]
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import: name the package"
            found.append((node.module or "", inside))
            if node.module == "steppe":
                found += [(f"steppe.{alias.name}", inside) for alias in node.names]
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


def test_imports_point_towards_core():
    wrong = []
    for file in FILES:
        package = package_of(file)
        assert package in LEVELS, f"{package} is a new package: give it a level here and in docs/architecture.md"
        for module, _ in imports_of(file):
            parts = module.split(".")
            if parts[0] != "steppe" or len(parts) == 1:
                continue
            other = parts[1] if parts[1] in LEVELS else f"{parts[1]}.py"
            if other == package or other not in LEVELS or other in BESIDE.get(package, set()):
                continue
            if LEVELS[other] >= LEVELS[package]:
                wrong.append(f"{file} imports {module}: {package} may not import {other}")
    assert wrong == []


def test_heavy_packages_are_imported_only_where_they_belong():
    wrong = []
    for file in FILES:
        for module, inside in imports_of(file):
            homes = HOMES.get(module.split(".")[0])
            if homes is None or package_of(file) in homes or file in homes:
                continue
            if not (inside and f"{file}()" in homes):
                wrong.append(f"{file} imports {module}; only these may: {sorted(homes)}")
    assert wrong == []


def test_nothing_unsafe():
    """No pickle, no code from data, no swallowed errors."""
    wrong = []
    for file in FILES:
        wrong += [f"{file} imports {module}" for module, _ in imports_of(file) if module.split(".")[0] in UNSAFE]
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in UNSAFE_CALLS:
                wrong.append(f"{file}:{node.lineno} calls {called}")
            if isinstance(node, ast.ExceptHandler):
                wide = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                if wide and all(isinstance(line, ast.Pass) for line in node.body):
                    wrong.append(f"{file}:{node.lineno} swallows every error")
    assert wrong == []


def test_every_file_says_what_it_is_for():
    silent = [file for file in FILES if (tree := tree_of(file)).body and not ast.get_docstring(tree)]
    assert silent == []


@pytest.mark.parametrize(
    "module",
    [
        "steppe",
        "steppe.core.config.run",
        "steppe.training.train",
        "steppe.cli.main",
        "steppe.algorithms.ppo.config",
        "steppe.algorithms.a2c.config",
        "steppe.algorithms.dhc.config",
        "steppe.algorithms.dqn.config",
        "steppe.algorithms.r2d2.config",
        "steppe.algorithms.tabular.config",
        "steppe.runtimes.processes.supervisor",
    ],
)
def test_a_supervisor_never_imports_torch(module):
    script = f"import sys, {module}; print([name for name in ('torch', 'numba', 'tensorboard') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
