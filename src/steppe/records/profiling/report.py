"""Flame graphs and tables of a profiled run, made from what its roles sampled and reported.

profile/ROLE.txt   collapsed stacks in microseconds, written by the role itself (sampler.py)
profile/ROLE.svg   its flame graph
profile/phases.md  every role's phases in seconds and shares, and the functions that took most time
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from steppe.core.io.atomic_files import write_atomic
from steppe.records.phase_times import role_order
from steppe.records.profiling.flamegraph import flame_svg, top_functions
from steppe.records.profiling.sampler import WAITING, Stack, read_stacks
from steppe.records.view import RunView, shares_of

MAX_FUNCTIONS = 8


def write_profile(view: RunView) -> None:
    """Write flame graphs and tables of the data so far. May be called again when there is more."""
    directory = view.directory.profile
    directory.mkdir(exist_ok=True)
    sampled = {path.stem: read_stacks(path) for path in sorted(directory.glob("*.txt"), key=_order)}
    for role, stacks in sampled.items():
        write_atomic(directory / f"{role}.svg", flame_svg(role, stacks).encode())
    lines = [*_phase_lines(view), *_function_lines(sampled)]
    write_atomic(directory / "phases.md", "".join(f"{line}\n" for line in lines).encode())


def _order(path: Path) -> tuple[int, str, int]:
    return role_order(path.stem)


def _phase_lines(view: RunView) -> Iterator[str]:
    config = view.config
    yield f"# Where the time of {view.directory.id} went"
    yield ""
    yield f"{config.env} with {config.algo}, {config.runtime}/{config.mode}, actors {config.actors}."
    yield ""
    yield "| role | phase | seconds | share |"
    yield "|---|---|---:|---:|"
    for role, phases in view.phases.items():
        for phase, share in shares_of(phases).items():
            yield f"| {role} | {phase} | {phases[phase]:.2f} | {100 * share:.1f} % |"


def _function_lines(sampled: dict[str, dict[Stack, float]]) -> Iterator[str]:
    yield ""
    yield "## Functions with the most time of their own"
    yield ""
    yield "Sampled; native calls count for the Python function that makes them. Shares are of a role's work, without waiting."
    yield ""
    yield "| role | function | seconds | share |"
    yield "|---|---|---:|---:|"
    for role, stacks in sampled.items():
        total = sum(seconds for stack, seconds in stacks.items() if stack != (WAITING,))
        for function, seconds in top_functions(stacks, MAX_FUNCTIONS):
            yield f"| {role} | `{function}` | {seconds:.2f} | {100 * seconds / total:.1f} % |"
