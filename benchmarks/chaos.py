"""Kills roles of runs at seeded random moments and writes a report: `make chaos`, `make soak`.

Every run must end with the hash of its undisturbed twin; the report has the counts and the times. `KILLS` and `SEED` are
taken from the environment. The parts are those of tests/chaos, which is the short form of this.
"""

from __future__ import annotations

import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)
os.environ["OMP_NUM_THREADS"] = "1"

from steppe.core.contracts.transport import ACTORS, EVALUATIONS, TRAINING  # noqa: E402
from steppe.core.system.process import rss_bytes  # noqa: E402
from steppe.core.system.shared_dir import make_shared_dir, remove_shared_dir  # noqa: E402
from steppe.records.run_directory import RunDirectory  # noqa: E402
from steppe.training.resume import resume  # noqa: E402
from tests.support.chaos import (  # noqa: E402
    ALGOS,
    Host,
    alive,
    child,
    events,
    kill_at,
    moments,
    newest_number,
    pace,
    recorded,
    require_ledger,
    require_single_records,
    session,
    settings,
    train,
    twin,
)
from tests.support.chaos_envs import PACE  # noqa: E402

REPORTS = ROOT / "benchmarks" / "reports"
STEPS = {"ppo": 12_800, "dqn": 6_400}
DELAY_S = 0.002
PER_RUN = 8  # kills
MARK = f"chaos{os.getpid()}-"  # prefix of the names of these runs
SOAK_STEPS = int(float(os.environ.get("SOAK_STEPS", "2e6")))


@dataclass
class Figures:
    """Counts and measurements."""

    kills: Counter[str] = field(default_factory=Counter)
    times_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    sizes: list[tuple[str, int | None]] = field(default_factory=list)  # this process after each run

    def check(self, what: str, result: Any, expected: str, path: Path) -> None:
        self.runs += 1
        self.sizes.append((what, rss_bytes()))
        if result.state != "SUCCEEDED" or result.weights_sha256 != expected:
            self.wrong.append(f"{what}: {result.state} {result.reason} {result.message} {result.weights_sha256}")
            return
        try:
            require_ledger(path)
            require_single_records(path)
        except AssertionError as error:
            self.wrong.append(f"{what}: {error}")


class Reaper:
    """Kills the processes of worker slots one after the other, at random polls, and records the times."""

    def __init__(self, places: list[str], chance: random.Random) -> None:
        self.places, self.chance = places, chance
        self.killed: list[tuple[str, float]] = []
        self._wait = 0

    def __call__(self, view: Any) -> None:
        self._wait -= 1
        if not self.places or self._wait > 0 or view.training is None:
            return
        if self.places[0] == "manager" and not recorded(view.directory.path):
            return
        victim = child(self.places[0])
        if victim is not None and victim.pid is not None:
            time.sleep(self.chance.uniform(0.0, 0.2))
            os.kill(victim.pid, signal.SIGKILL)
            self.killed.append((self.places.pop(0), time.time()))
            self._wait = self.chance.randint(2, 6)


def kill_roles(root: Path, kills: int, chance: random.Random, hashes: dict[str, str], figures: Figures) -> None:
    """Actors and the manager of runs on `processes`."""
    while (done := figures.kills["actor"] + figures.kills["manager"]) < kills:
        algo = chance.choice(list(ALGOS))
        places = chance.choices(["actor-0", "actor-1", "manager"], k=min(PER_RUN, kills - done))
        reaper, path = Reaper(places, chance), root / f"{MARK}roles-{figures.runs}"
        with pace(DELAY_S):
            result = train(settings(algo, STEPS[algo], path, runtime="processes"), [reaper])
        figures.check(f"{algo}, roles killed", result, hashes[algo], path)
        log = events(path)
        for place, killed_s in reaper.killed:
            figures.kills[place.partition("-")[0]] += 1
            later = [event for event in log if event["role"] == place and event["time_s"] >= killed_s - 0.01]
            for kind, name in (
                ("restart", "kill of a role → found and started again"),
                ("resume", "… → at work again (actors)"),
            ):
                if at := next((event["time_s"] for event in later if event["kind"] == kind), None):
                    figures.times_s[name].append(at - killed_s)
        if not reaper.killed:
            figures.wrong.append(f"{algo}: the run was over before anything was killed")
            return


def kill_learners(root: Path, kills: int, chance: random.Random, hashes: dict[str, str], figures: Figures) -> None:
    """The learner, with restarts and without."""
    while (left := kills - figures.kills["learner"]) > 0:
        algo = chance.choice(list(ALGOS))
        restarts = min(4, left - 1) if left > 1 else 0
        reaper = Reaper(["learner"] * max(1, restarts), chance)
        path = root / f"{MARK}learner-{figures.runs}"
        with pace(DELAY_S):
            result = train(settings(algo, STEPS[algo], path, runtime="processes", restarts=restarts), [reaper])
        figures.kills["learner"] += len(reaper.killed)
        if restarts:
            figures.check(f"{algo}, learner killed", result, hashes[algo], path)
            resumed = [e["time_s"] for e in events(path, "resume") if e["role"] == "supervisor"]
            for (_, killed_s), at in zip(reaper.killed, resumed, strict=False):
                figures.times_s["kill of the learner → resuming by itself"].append(at - killed_s)
            continue
        figures.runs += 1
        status = RunDirectory.open(path).store.status()
        if (status.state, status.reason) != ("FAILED", "role_died"):
            figures.wrong.append(f"{algo}, learner killed: {status}")
        (_, killed_s), ended_s = reaper.killed[0], status.changed_s or 0.0
        figures.times_s["kill of the learner → FAILED, all down"].append(ended_s - killed_s)


def time_failures(root: Path, number: int, chance: random.Random, hashes: dict[str, str], figures: Figures) -> None:
    """Measure the time until FAILED after a learner was killed, without restarts."""
    for _ in range(number):
        kill_learners(root, figures.kills["learner"] + 1, chance, hashes, figures)


def kill_all(root: Path, kills: int, chance: random.Random, hashes: dict[str, str], figures: Figures) -> None:
    """Whole groups of real processes, on both runtimes."""
    with hosting() as host:
        while (done := figures.kills["everything"]) < kills:
            algo, runtime = chance.choice(list(ALGOS)), chance.choice(["inline", "processes"])
            path = root / f"{MARK}all-{figures.runs}"
            order: dict[str, Any] = {"run": settings(algo, STEPS[algo], path, runtime=runtime)}
            for _ in range(min(PER_RUN, kills - done)):
                life = moments(path)
                began, saved = time.monotonic(), newest_number(path)
                pid = host.start(root / "log", environ={PACE: str(DELAY_S)}, **order)
                kill_at(pid, life[chance.choice(list(life))], chance.uniform(0.0, 0.4))
                if host.wait() != -signal.SIGKILL:
                    break  # it had finished
                figures.kills["everything"] += 1
                if "resume" in order and newest_number(path) > saved:
                    figures.times_s[f"life that got on, {runtime}"].append(time.monotonic() - began)
                if (path / "run.json").exists():
                    order = {"resume": str(path)}
            began = time.monotonic()
            status = RunDirectory.open(path).store.status() if "resume" in order else None
            if status is None or status.state == "SUCCEEDED":
                continue
            progress = Progress()
            result = resume(path, observers=[progress])
            if progress.first_s is not None:
                figures.times_s[f"resume → first report of new work, {runtime}"].append(progress.first_s - began)
            figures.check(f"{algo} on {runtime}, everything killed", result, hashes[algo], path)


class Progress:
    """Observer that records the time of the first report of the restarted learner."""

    first_s: float | None = None

    def __call__(self, view: Any) -> None:
        started_s = view.status.changed_s or 0.0
        if self.first_s is None and view.training is not None and view.training.time_s > started_s:
            self.first_s = time.monotonic()


def stop_runs(root: Path, number: int, chance: random.Random, figures: Figures) -> None:
    """Send Ctrl-C to the group or SIGTERM to the supervisor; measure the time until all processes have ended."""
    with hosting() as host:
        for turn in range(number):
            algo, path = chance.choice(list(ALGOS)), root / f"{MARK}stop-{turn}"
            layer = settings(algo, 10**9, path, runtime="processes")
            life = moments(path)
            pid = host.start(root / "log", environ={PACE: str(DELAY_S)}, run=layer)
            deadline = time.monotonic() + 60.0
            while time.monotonic() < deadline and alive(pid) and not life["saved"]():
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.5))
            began = time.monotonic()
            if turn % 2:
                os.kill(pid, signal.SIGTERM)
            else:
                os.killpg(pid, signal.SIGINT)
            while session(pid) and time.monotonic() < began + 60.0:
                time.sleep(0.005)
            name = "SIGTERM to the supervisor" if turn % 2 else "Ctrl-C to the group"
            figures.times_s[f"{name} → nothing left"].append(time.monotonic() - began)
            figures.runs += 1
            host.wait()
            status = RunDirectory.open(path).store.status()
            if status.state != "STOPPED":
                figures.wrong.append(f"{name}: {status}")


@contextmanager
def hosting() -> Iterator[Host]:
    host = Host()
    try:
        yield host
    finally:
        host.close()


def rooms() -> list[str]:
    """Return what these runs have left in shared memory. The next run would remove the directories of killed ones."""
    remove_shared_dir(make_shared_dir("sweep", 1))
    return sorted(path.name for path in Path("/dev/shm").glob(f"steppe-{MARK}*"))


def chaos(kills: int, seed: int) -> tuple[list[str], bool]:
    """Return the lines of the report, and whether every check passed."""
    chance, figures, began = random.Random(seed), Figures(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        hashes = {algo: twin(algo, STEPS[algo], root / f"{MARK}twin-{algo}") for algo in ALGOS}
        learners = max(4, kills // 10)
        alone = max(2, learners // 3)
        kill_all(root, kills * 2 // 5, chance, hashes, figures)
        kill_learners(root, learners - alone, chance, hashes, figures)
        time_failures(root, alone, chance, hashes, figures)
        kill_roles(root, kills - figures.kills.total(), chance, hashes, figures)
        stop_runs(root, max(4, kills // 15), chance, figures)
    left = rooms()
    return _chaos_lines(figures, left, seed, time.monotonic() - began), not figures.wrong and not left


def _chaos_lines(figures: Figures, left: list[str], seed: int, took_s: float) -> list[str]:
    total = figures.kills.total()
    lines = [
        "## Kills",
        "",
        f"{total} × kill -9 over {figures.runs} runs (PPO, and DQN with prioritized 3-step replay; sync, two actors), "
        f"seed {seed}, {took_s:.0f} s in all. Moments: while starting, while training, right after a checkpoint.",
        "",
        "| what was killed | times |",
        "|---|---:|",
        *[f"| {what} | {count} |" for what, count in sorted(figures.kills.items())],
        "",
        f"- Runs that did not end with the hash of their undisturbed twin, or with a gap or repetition in their ledger "
        f"or curves: **{len(figures.wrong)}**",
        *[f"  - {words}" for words in figures.wrong],
        f"- Shared-memory rooms left behind at the end: **{len(left)}** {', '.join(left)}",
        "",
        "| seconds from … | count | median | 90 % | longest |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, times in sorted(figures.times_s.items()):
        ordered = sorted(times)
        tenth = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        lines.append(f"| {name} | {len(times)} | {statistics.median(times):.2f} | {tenth:.2f} | {ordered[-1]:.2f} |")
    sizes = [size for _, size in figures.sizes if size]
    if sizes:
        lines += [
            "",
            f"The supervising process had {sizes[0] >> 20} MiB after the first run and {sizes[-1] >> 20} MiB after the last.",
        ]
    return lines


ROLES = {TRAINING: "learner", ACTORS: "actor-{}", EVALUATIONS: "manager"}
SOAKS: dict[str, dict[str, Any]] = {
    "ppo": {"algo": "ppo"},
    "dqn": {"algo": "dqn", "samples_per_insert": 1.0, "prioritized": True},  # a buffer of 100,000, full after 5 %
}


def soak(algo: str) -> list[str]:
    """Train for millions of steps: memory of every role over time, and the learner's time for checkpoints."""
    own: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "soak"
        layer = {
            "env": "CartPole-v1", "mode": "sync", "actors": 2, "steps": SOAK_STEPS, "runtime": "processes",
            "run_dir": str(path), "checkpoint.every_s": 2.0, **SOAKS[algo],
        }  # fmt: skip
        result = train(layer, [lambda view: own.append((time.time(), rss_bytes() or 0)) and None])
        store = RunDirectory.open(path).store
        series: dict[str, list[tuple[float, int]]] = {"supervisor": own}
        for topic, role_of in ROLES.items():
            for _, record in store.read(topic, limit=10**9):
                role = role_of.format(record.get("actor"))
                series.setdefault(role, []).append((record["time_s"], record["rss_bytes"] or 0))
        costs = [event["details"] for event in events(path, "checkpoint")]
    lines = [
        f"## {algo.upper()}, {result.env_steps:,} steps",
        "",
        f"{result.state} in {result.wall_s:.0f} s, {result.steps_per_s:,.0f} steps/s; RSS in MiB at tenths of the run:",
        "",
        "| role | " + " | ".join(f"{tenth * 10} %" for tenth in range(1, 11)) + " |",
        "|---|" + "---:|" * 10,
    ]
    for role, points in series.items():
        lines.append(f"| {role} | " + " | ".join(str(size >> 20) for size in _tenths(points)) + " |")
    writes = sorted(cost["write_s"] * 1e3 for cost in costs)
    lines += [
        "",
        f"{len(writes)} checkpoints of {costs[-1]['size_bytes'] >> 10:,} KiB; writing one stops the learner for "
        f"{statistics.median(writes):.1f} ms (median; longest {writes[-1]:.1f} ms), "
        f"{100 * sum(writes) / 1e3 / result.train_s:.2f} % of its time at one every 2 s (the default is 30 s).",
        "",
    ]
    return lines


def _tenths(points: list[tuple[float, int]]) -> list[int]:
    first, last = points[0][0], points[-1][0]
    found = []
    for tenth in range(1, 11):
        until = first + (last - first) * tenth / 10
        found.append(next(size for at, size in reversed(points) if at <= until + 1e-6))
    return found


def main(words: list[str]) -> int:
    """`chaos.py kills` or `chaos.py soak [ppo] [dqn]`."""
    kind = words[0] if words else "kills"
    head = [
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}. Written by `benchmarks/chaos.py {' '.join(words)}`.",
        "",
    ]
    if kind == "soak":
        sections, well = [line for algo in (words[1:] or SOAKS) for line in soak(algo)], True
        path, title = REPORTS / "soak.md", "# Memory over time, and what checkpoints cost"
    else:
        sections, well = chaos(int(os.environ.get("KILLS", "300")), int(os.environ.get("SEED", "0")))
        path, title = REPORTS / "chaos.md", "# Chaos"
    REPORTS.mkdir(exist_ok=True)
    path.write_text("\n".join([title, "", *head, *sections]).rstrip() + "\n")
    print(path.read_text())
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
