"""The sampling profiler in separate processes, compared with what the sampled code measured itself."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from steppe.records.profiling.sampler import format_collapsed, read_stacks, sample_roles

pytestmark = pytest.mark.integration

ROLES = Path(__file__).with_name("sampled_roles.py")
PARTS = {"actor-0": ("plain_python", "operators"), "learner": ("asleep", "long_call")}


def python(*words, **kwargs):
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, done.stderr
    return done


def in_function(stacks, name):
    return sum(seconds for stack, seconds in stacks.items() if any(label.endswith(f".{name}") for label in stack))


@pytest.mark.slow
def test_time_is_assigned_to_the_functions_and_roles_that_used_it(tmp_path):
    told = json.loads(python(ROLES, tmp_path / "profile", 3).stdout)
    total = sum(told.values())
    for role, parts in PARTS.items():
        stacks = read_stacks(tmp_path / "profile" / f"{role}.txt")
        for part in parts:
            assert in_function(stacks, part) / total == pytest.approx(told[part] / total, abs=0.12), (part, told)
        others = {part for parts in PARTS.values() for part in parts} - set(parts)
        assert not any(in_function(stacks, part) for part in others)


def test_stacks_begin_with_the_roles_step(tmp_path):
    python(ROLES, tmp_path / "profile", 0.5)
    stacks = read_stacks(tmp_path / "profile" / "actor-0.txt")
    assert {stack[0] for stack in stacks} == {"__main__.Worker.step"}


def test_a_resumed_run_adds_to_its_profile(tmp_path):
    earlier = {("an.earlier.life",): 100.0, ("__main__.Worker.step",): 50.0}
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "actor-0.txt").write_text(format_collapsed(earlier))
    python(ROLES, tmp_path / "profile", 0.5)
    stacks = read_stacks(tmp_path / "profile" / "actor-0.txt")
    assert stacks["an.earlier.life",] == 100.0
    assert stacks["__main__.Worker.step",] >= 50.0
    assert sum(stacks.values()) > 150.0


def test_roles_without_profiling_are_unchanged():
    roles = [object(), object()]
    with sample_roles(roles, None, "learner") as same:
        assert same == roles


def test_collapsed_stacks_are_read_back_and_incomplete_lines_skipped(tmp_path):
    stacks = {("a", "b c"): 0.25, ("a",): 1.5}
    (tmp_path / "x.txt").write_text(format_collapsed(stacks) + "half a li")
    assert format_collapsed(stacks) == "a 1500000\na;b c 250000\n"
    assert read_stacks(tmp_path / "x.txt") == stacks
    assert read_stacks(tmp_path / "none.txt") == {}


def test_the_signal_handler_is_restored_and_the_timer_stopped(tmp_path):
    script = """
        import signal, sys, time
        from pathlib import Path
        from steppe.records.profiling.sampler import Sampler
        sampler = Sampler(Path(sys.argv[1]))
        for _ in range(200):
            with sampler:
                time.sleep(0.0005)
            assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        time.sleep(0.05)  # one that still rang would end this process
    """
    python("-c", textwrap.dedent(script), tmp_path)


@pytest.mark.parametrize(
    ("preparation", "said"),
    [
        ("signal.signal(signal.SIGALRM, print)", "needs the signal SIGALRM"),
        ("make = threaded", "samples the main thread only"),
    ],
)
def test_unsupported_sampling_is_reported(tmp_path, preparation, said):
    script = f"""
        import concurrent.futures, signal, sys
        from pathlib import Path
        from steppe.core.contracts.errors import UsageError
        from steppe.records.profiling.sampler import Sampler
        make = lambda: Sampler(Path(sys.argv[1]))
        def threaded():
            with concurrent.futures.ThreadPoolExecutor() as pool:
                pool.submit(Sampler, Path(sys.argv[1])).result()
        {preparation}
        try:
            make()
        except UsageError as error:
            print(error)
    """
    assert said in python("-c", textwrap.dedent(script), tmp_path).stdout


def test_a_full_disk_or_missing_directory_does_not_end_the_run(tmp_path):
    (tmp_path / "profile").write_text("a file where the directory should be")
    done = python(ROLES, tmp_path / "profile", 0.2)
    assert "the profile could not be written" in done.stderr
