"""Mutation testing of modules in which a mistake would raise no error: `make mutate`.

Each mutant is a module with one operator, number or keyword changed by an operator of cosmic-ray. It is tested in a fork
of a process that has imported everything that does not depend on that module. numba's compilation is off, so that kernels
are tested as Python. An import hook gives the fork the mutated source: no file is changed. New processes that a test
starts import the unchanged module. Time limits are in CPU seconds, so that a busy machine changes nothing.

`tests/mutation.toml` names the modules, their tests, and the survivors that no test can kill, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import contextlib
import hashlib
import importlib
import importlib.util
import keyword
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeGuard

ROOT = Path(__file__).parents[1]
Position = tuple[int, int]  # line and column in a source
LEAST_CPU_S = 5.0
PATIENCE = 5.0  # limit of a mutant's CPU time, as a multiple of the unchanged module's
LONGEST_WAIT_S = 300.0  # for a mutant that neither ends nor computes
MEMORY_BYTES = 24 << 30  # of address space; a mutant that needs more gets a MemoryError, which kills it
MOST_SURVIVORS = 0.1
COMPILERS = {"compiled", "njit", "jit", "vectorize"}  # decorators without effect while compilation is off
HINTS = {"prefetch"}  # calls that only prefetch into the cache
SAME_BUT_FOR_IDENTITY = ("_Eq_Is", "_NotEq_IsNot")  # small integers and interned strings are identical when equal


@dataclass(frozen=True)
class Mutant:
    """A module's source with one change on `line_number`: `before` became `after`."""

    module: str
    operator: str
    line_number: int
    before: str
    after: str
    source: str


@dataclass(frozen=True)
class Trial:
    """One run of a module's tests, with its source replaced unless `mutant` is None."""

    module: str
    tests: Sequence[str]
    limit_cpu_s: float = 300.0
    mutant: Mutant | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a trial: "killed", "timeout" (also killed) or "survived". `log` is the output of pytest; `imported` lists the
    modules imported at the end, in order, if the module was unchanged."""

    trial: Trial
    verdict: str
    cpu_s: float
    log: str
    imported: Sequence[str] = ()


@dataclass(frozen=True)
class Summary:
    """The outcomes of one module's mutants. `explained` are survivors with the reason why no test can kill them."""

    module: str
    outcomes: Sequence[Outcome]
    survivors: Sequence[Mutant]
    explained: Sequence[tuple[Mutant, str]]
    seconds: float

    @property
    def too_many(self) -> bool:
        """Return whether more than a tenth survive without an explanation."""
        return len(self.survivors) > MOST_SURVIVORS * len(self.outcomes)

    @property
    def cpu_s(self) -> float:
        """Return the CPU time of all trials."""
        return sum(outcome.cpu_s for outcome in self.outcomes)

    def count(self, verdict: str) -> int:
        """Return how many mutants have this verdict."""
        return sum(outcome.verdict == verdict for outcome in self.outcomes)


# Mutants


def draw(module: str, source: str, count: int, seed: int) -> list[Mutant]:
    """Return up to `count` mutants: one random change at each position of the code in random order, then a second at each, …

    The order depends on the shape of each statement, not on names, texts or line numbers: renamed or moved code has the
    same mutants, and a new statement does not change those of the others.
    """
    positions = _changes(source)
    keys = _position_keys(source, positions)
    order = sorted(positions, key=lambda begin: _digest(seed, keys[begin]))
    for begin in order:
        positions[begin].sort(key=lambda change: _digest(seed, keys[begin], change[0]))
    rounds = max(map(len, positions.values()), default=0)
    changes = [positions[begin][turn] for turn in range(rounds) for begin in order if turn < len(positions[begin])]
    found: list[Mutant] = []
    for operator, occurrence in changes:
        if len(found) == count:
            break
        mutant = _mutant(module, source, operator, occurrence)
        if mutant is not None:
            found.append(mutant)
    return found


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).digest()


def _position_keys(source: str, positions: Iterable[Position]) -> dict[Position, str]:
    """Return a key of each position: its statement's shape, the number of equal ones before it, its index in the statement."""
    statements = sorted((_begin(node), _shape(node)) for node in ast.walk(ast.parse(source)) if _is_statement(node))
    starts = [begin for begin, _ in statements]
    same_shape, indices = Counter[str](), Counter[int]()
    names = []
    for _, shape in statements:
        names.append(f"{shape} {same_shape[shape]}")
        same_shape[shape] += 1
    keys = {}
    for position in sorted(positions):
        number = bisect.bisect_right(starts, position) - 1
        keys[position] = f"{names[number]} {indices[number]}"
        indices[number] += 1
    return keys


def _is_statement(node: ast.AST) -> TypeGuard[ast.stmt | ast.ExceptHandler]:
    return isinstance(node, ast.stmt | ast.ExceptHandler)


def _begin(node: ast.stmt | ast.ExceptHandler) -> Position:
    """Return line and column at which a statement begins, including its decorators."""
    first = min([node, *getattr(node, "decorator_list", [])], key=lambda part: part.lineno)
    return first.lineno, max(0, first.col_offset - (first is not node))


def _shape(node: object) -> str:
    """Return a statement's syntax without names, texts, annotations and the statements in its blocks."""
    if isinstance(node, list):
        return "[" + ",".join(_shape(part) for part in node if not _is_statement(part)) + "]"
    if not isinstance(node, ast.AST):
        return "text" if isinstance(node, str) else repr(node)
    hidden = {"id", "attr", "arg", "name", "names", "module", "annotation", "returns", "ctx", "kind"}
    parts = [_shape(value) for field, value in ast.iter_fields(node) if field not in hidden]
    return f"{type(node).__name__}({','.join(parts)})"


def _changes(source: str) -> dict[Position, list[tuple[str, int]]]:
    """Return the (operator, occurrence) pairs at each (line, column), without code that is never executed."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    idle = list(_idle_ranges(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    found = defaultdict(list)
    provider = OperatorProvider()
    for name in sorted(provider):
        if provider[name].arguments() or name.endswith(SAME_BUT_FOR_IDENTITY):
            continue
        operator, occurrence = provider[name](), 0
        for node in nodes:
            for begin, _ in operator.mutation_positions(node):
                if not any(first <= begin < last for first, last in idle):
                    found[begin].append((name, occurrence))
                occurrence += 1
    return found


def _idle_ranges(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    """Return start and end of annotations, blocks for the type checker, compiler options and cache hints."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (_range(part) for part in [node.returns, *filter(_compiles, node.decorator_list)] if part)
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield _range(node.annotation)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield _range(node)
        elif isinstance(node, ast.Call) and (_compiles(node) or ast.unparse(node.func) in HINTS):
            yield from (_range(part) for part in [*node.args, *(option.value for option in node.keywords)])


def _range(node: ast.expr | ast.stmt) -> tuple[Position, Position]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    # A decorator begins with its @, which is not a node.
    return (node.lineno, max(0, node.col_offset - 1)), (node.end_lineno, node.end_col_offset)


def _compiles(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(name).rpartition(".")[2] in COMPILERS


def _mutant(module: str, source: str, operator_name: str, occurrence: int) -> Mutant | None:
    """Return None if the change has no effect or is not a valid program."""
    from cosmic_ray.ast import Visitor, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    operator = OperatorProvider()[operator_name]()

    class Change(Visitor):
        seen = 0

        def visit(self, node):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            for index, _ in enumerate(operator.mutation_positions(node)):
                self.seen += 1
                if self.seen == occurrence + 1:
                    node = operator.mutate(node, index)
            return node

    try:
        mutated = Change().walk(get_ast(source)).get_code()
        if ast.dump(_parsed(mutated)) == ast.dump(_parsed(source)):
            return None
    except (SyntaxError, AttributeError):  # cosmic-ray cannot replace an exception with a dotted name
        return None
    old, new = source.splitlines(), mutated.splitlines()
    [*_, (at, after)] = _difference(old, new)
    return Mutant(module, operator_name, at + 1, old[at].strip(), after, mutated)


def _difference(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Return changed lines by their index in `old`, with the new text, which is empty for deleted lines."""
    for kind, first, last, begin, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for at in range(first, last) if kind != "equal" else ():
            if old[at].strip():
                yield at, new[begin + at - first].strip() if begin + at - first < end else ""


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(source)


# Trials


class Substitute(MetaPathFinder):
    """Import hook that loads one module from a given source instead of its file."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=_Loader(self))


class _Loader(SourceFileLoader):
    def __init__(self, substitute: Substitute) -> None:
        super().__init__(substitute.name, str(substitute.path))
        self.source = substitute.source

    def get_code(self, fullname: str) -> CodeType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return compile(self.source, self.path, "exec", dont_inherit=True)


class Barrier(MetaPathFinder):
    """Import hook that prevents the import of one module, and therefore of those that depend on it."""

    class Stop(Exception):  # not an ImportError, since modules handle those
        pass

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name == self.name:
            raise Barrier.Stop


def preload(names: Sequence[str], without: str) -> None:
    """Import these modules, except `without`, those that depend on it, and the tests."""
    barrier = Barrier(without)
    sys.meta_path.insert(0, barrier)
    for name in names:
        if name not in sys.modules and name.partition(".")[0] not in ("tests", "conftest", "__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    sys.meta_path.remove(barrier)
    assert without not in sys.modules


def run(trials: Sequence[Trial], jobs: int) -> Iterator[Outcome]:
    """Run each trial in a fork of this process, `jobs` at a time; yield outcomes in the order in which trials end."""
    waiting, running = list(reversed(trials)), dict[int, tuple[Trial, float, Path]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                trial, room = waiting.pop(), Path(tempfile.mkdtemp(prefix="mutate-"))
                running[_start(trial, room)] = trial, time.monotonic(), room
            for pid, (trial, began, room) in list(running.items()):
                ended, status, usage = os.wait4(pid, os.WNOHANG)
                if not ended and time.monotonic() - began < LONGEST_WAIT_S + PATIENCE * trial.limit_cpu_s:
                    continue
                del running[pid]
                yield _ended(trial, pid, room, status if ended else None, usage.ru_utime + usage.ru_stime)
            time.sleep(0.02)
    finally:
        for pid, (trial, _, room) in running.items():
            _ended(trial, pid, room, None, 0.0)


def _ended(trial: Trial, pid: int, room: Path, status: int | None, cpu_s: float) -> Outcome:
    """End the processes of a trial and delete its directory. `status` is None if it had to be killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    log, imported = (room / "log").read_text(errors="replace"), room / "imported"
    names = imported.read_text().split() if imported.exists() else []
    shutil.rmtree(room, ignore_errors=True)
    out_of_time = status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    return Outcome(trial, "timeout" if out_of_time else "killed" if status else "survived", cpu_s, log, names)


def _start(trial: Trial, room: Path) -> int:
    """Fork; the child runs the tests in a new process group and directory, and exits with pytest's code."""
    log = os.open(room / "log", os.O_CREAT | os.O_WRONLY)
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # parent and child both try: the first one succeeds
            os.setpgid(pid, pid)
        os.close(log)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(log, stream)
        _limit(trial.limit_cpu_s)
        os.environ["TMPDIR"] = tempfile.tempdir = str(room)
        if trial.mutant is not None:
            sys.meta_path.insert(0, Substitute(trial.module, path_of(trial.module), trial.mutant.source))
        code = _run_tests(trial.tests, room)
        if trial.mutant is None:
            (room / "imported").write_text("\n".join(sys.modules))
    except BaseException:  # noqa: BLE001 - the fork ends here in any case
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _limit(cpu_s: float) -> None:
    """Limit this process's CPU time from now on, and its address space."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _run_tests(tests: Sequence[str], room: Path) -> int:
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutate",
        derandomize=True,
        max_examples=25,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # one failing example is enough, however large
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutate")
    sys.dont_write_bytecode = False  # test files are compiled once, not for every mutant; mutants are never written
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = [
        "-p",
        "pytest_timeout",
        "-x",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        f"--basetemp={room / 'tests'}",
    ]
    # Modules are already imported, and compiled code does not warn of overflows either.
    ignored = ("ignore::pytest.PytestAssertRewriteWarning", "ignore::RuntimeWarning")
    options += [word for warning in ignored for word in ("-W", warning)]
    return int(pytest.main([*options, *tests], plugins=[_Worker()]))


class _Worker:
    """Plugin for pytest: marks this process as a worker, so that tests/conftest.py skips what is done once per session."""

    def pytest_configure(self, config: Any) -> None:
        config.workerinput = {"workerid": "mutate"}


def path_of(module: str) -> Path:
    """Return the module's file without importing it."""
    for folder in sys.path:
        path = Path(folder, *module.split(".")).with_suffix(".py")
        if path.is_file():
            return path.resolve()
    raise SystemExit(f"There is no module {module}: correct its name in the table.")


# Running everything


def prepare() -> None:
    """Switch off compilation and threads, before anything else is imported."""
    os.environ.update(NUMBA_DISABLE_JIT="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")


def examine(
    module: str, tests: Sequence[str], explained: Sequence[dict[str, str]], args: argparse.Namespace
) -> Summary:
    """Test the unchanged module, which must pass, then its mutants. A process can examine one module only."""
    began = time.monotonic()
    [base] = run([Trial(module, tests)], 1)
    if base.verdict != "survived":
        raise SystemExit(f"{module}: its tests fail without a mutation.\n{base.log[-3000:]}")
    preload(base.imported, without=module)
    limit_cpu_s = max(LEAST_CPU_S, PATIENCE * base.cpu_s)
    mutants = draw(module, path_of(module).read_text(), args.count, args.seed)
    outcomes = list(run([Trial(module, tests, limit_cpu_s, mutant) for mutant in mutants], args.jobs))
    return summarize(module, outcomes, explained, time.monotonic() - began)


def summarize(module: str, outcomes: Sequence[Outcome], explained: Sequence[dict[str, str]], seconds: float) -> Summary:
    """Return the summary; survivors are sorted by line, those with an explanation separately."""
    survived = [o.trial.mutant for o in outcomes if o.verdict == "survived" and o.trial.mutant is not None]
    survived.sort(key=lambda mutant: mutant.line_number)
    entries = [one for one in explained if one["module"] == module]
    known = {mutant: _reason(mutant, entries) for mutant in survived}
    return Summary(
        module,
        outcomes,
        [mutant for mutant, why in known.items() if why is None],
        [(mutant, why) for mutant, why in known.items() if why is not None],
        seconds,
    )


def _reason(mutant: Mutant, explained: Sequence[dict[str, str]]) -> str | None:
    """Return why no test can kill this mutant, if the table explains this change or all changes of this line."""
    for entry in explained:
        if "becomes" not in entry:
            if _same_code([mutant.before], [entry["line"]], mutant.source):
                return entry["why"]
        elif _same_code([mutant.before, mutant.after], [entry["line"], entry["becomes"]], mutant.source):
            return entry["why"]
    return None


def _same_code(lines: Sequence[str], quoted: Sequence[str], source: str) -> bool:
    """Return whether these lines equal the quoted ones, possibly with other names.

    Other names are allowed only if the quoted line no longer exists and exactly one line of the module has its form.
    """
    if [_tokens(line) for line in lines] == [_tokens(line) for line in quoted]:
        return True
    if _form(lines) != _form(quoted):
        return False
    present = [lines[0], *(line for line in source.splitlines() if line.strip() != lines[-1])]
    forms = {tuple(_tokens(line)) for line in present if _form([line]) == _form([quoted[0]])}
    return len(forms) == 1 and tuple(_tokens(quoted[0])) not in forms


TOKEN = re.compile(r"""(?P<text>"(?:\\.|[^"])*"|'(?:\\.|[^'])*')|(?P<name>[^\W\d]\w*)|#.*|(\d[\w.]*|\S)""")


def _tokens(line: str) -> list[str]:
    """Return a line's tokens, without spaces and comments."""
    return [match[0] for match in TOKEN.finditer(line) if not match[0].startswith("#")]


def _form(lines: Sequence[str]) -> list[str]:
    """Return the tokens of lines, with names numbered in order of appearance, and without texts."""
    numbers: dict[str, str] = {}
    found = []
    for match in (match for line in lines for match in [*TOKEN.finditer(line), None]):
        if match is None:
            found.append("\n")
        elif match["text"]:
            found.append('""')
        elif match["name"] and not keyword.iskeyword(match[0]):
            found.append(numbers.setdefault(match[0], f"name{len(numbers)}"))
        elif not match[0].startswith("#"):
            found.append(match[0])
    return found


def _progress(summary: Summary) -> str:
    lines = [
        f"{summary.module}: {len(summary.outcomes)} mutants, {len(summary.survivors)} survived, "
        f"{len(summary.explained)} explained, {summary.count('timeout')} timeouts, {summary.seconds:.0f} s "
        f"({summary.cpu_s:.0f} s of CPU)"
    ]
    lines += [f"  line {m.line_number}, {m.operator}\n    - {m.before}\n    + {m.after}" for m in summary.survivors]
    return "\n".join(lines)


def report(summaries: Sequence[Summary], seed: int) -> str:
    """Return a page in Markdown: a table by module, then the survivors."""
    lines = [
        "# Mutation testing",
        "",
        "Written by `make mutate` (scripts/mutate.py). Each mutant is a module with one operator, number, keyword, condition,",
        "loop, handler or decorator changed by cosmic-ray; a module's own tests (tests/mutation.toml) run on it with numba's",
        f"compilation off. Mutants are drawn with seed {seed}, spread over the code; names and line numbers do not change the draw. A mutant that exceeds its",
        "time limit counts as killed. Left out are annotations, options of the compiler, cache hints (`prefetch`), and `is` for `==`.",
        "",
        "| module | mutants | killed | timeouts | survived | explained | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in summaries:
        cells = [one.module, len(one.outcomes), one.count("killed"), one.count("timeout")]
        cells += [len(one.survivors), len(one.explained), round(one.cpu_s)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    totals = [
        sum(len(one.outcomes) for one in summaries),
        *(sum(one.count(v) for one in summaries) for v in ("killed", "timeout")),
    ]
    totals += [sum(len(one.survivors) for one in summaries), sum(len(one.explained) for one in summaries)]
    totals.append(round(sum(one.cpu_s for one in summaries)))
    lines.append("| all | " + " | ".join(map(str, totals)) + " |")
    lines += ["", "## Survivors", "", *_survivor_lines([(m, "") for one in summaries for m in one.survivors])]
    lines += ["## Explained survivors", "", *_survivor_lines([pair for one in summaries for pair in one.explained])]
    return "\n".join(lines).rstrip() + "\n"


def _survivor_lines(survivors: Sequence[tuple[Mutant, str]]) -> Iterator[str]:
    if not survivors:
        yield from ("None.", "")
    for mutant, why in survivors:
        yield f"{mutant.module}, line {mutant.line_number}" + (f": {why}" if why else "")
        yield from ("", "```diff", f"- {mutant.before}", f"+ {mutant.after}", "```", "")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Mutation testing: see the top of this file.")
    parser.add_argument(
        "--only", nargs="+", metavar="MODULE", help="only these modules, e.g. steppe.algorithms.shared.returns"
    )
    parser.add_argument("--list", action="store_true", help="print the drawn mutants and test nothing")
    parser.add_argument("--count", type=int, default=60, help="mutants per module")
    parser.add_argument("--seed", type=int, default=19, help="of the draws")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at a time")
    parser.add_argument(
        "--table", type=Path, default=ROOT / "tests" / "mutation.toml", help="modules, tests, explanations"
    )
    parser.add_argument("--report", type=Path, help="write the result to this file, as Markdown")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    table = tomllib.loads(args.table.read_text())
    unknown = set(args.only or ()) - set(table["modules"])
    if unknown:
        raise SystemExit(f"{args.table.name} has no {', '.join(sorted(unknown))}: give names from its table `modules`.")
    modules = {name: tests for name, tests in table["modules"].items() if not args.only or name in args.only}
    if args.list:
        for module in modules:
            for mutant in draw(module, path_of(module).read_text(), args.count, args.seed):
                print(f"{module}:{mutant.line_number} {mutant.operator}\n    - {mutant.before}\n    + {mutant.after}")
        return 0
    prepare()
    summaries = []
    for module, tests in modules.items():
        with ProcessPoolExecutor(1, get_context("fork")) as process:
            summaries.append(process.submit(examine, module, tests, table.get("explained", []), args).result())
        print(_progress(summaries[-1]), flush=True)
    if args.report:
        args.report.write_text(report(summaries, args.seed))
    crowded = [summary.module for summary in summaries if summary.too_many]
    if crowded:
        print(f"More than {MOST_SURVIVORS:.0%} of the mutants survive unexplained in: {', '.join(crowded)}")
    return 1 if crowded else 0


if __name__ == "__main__":
    sys.exit(main())
