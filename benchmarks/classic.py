"""Tabular learning: batches, TicTacToe, playing strength, overhead in plain environments, start-up.

Beside dist_classicrl, whose names `steppe.classic` has, and beside bare compiled loops written for one task each, which are
the limit.
"""

from __future__ import annotations

from suite.claims import Claim, ratio
from suite.measuring import Case, Done, Reading, Row
from suite.ours import workload
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

BARE, ORIGINAL = "bare numba loop", "dist_classicrl"
MILLION = 1_000_000
SIZES = {"taxi": "500 × 6", "tictactoe": "19,683 × 9"}
OPPONENTS = ("random", "perfect", "self")
HOW = {"random": "playing against chance", "self": "self-play", "perfect": "playing against the perfect player"}
ALGORITHMS = (
    "OptimalQLearning", "NumpyQLearning", "MemoryOptimizedQLearning", "ListQLearning", "SARSA", "ExpectedSARSA",
    "DoubleQLearning", "NStepQLearning", "QLambda",
)  # fmt: skip


def batches(effort: Effort) -> Part:
    steps = str(effort.of(60 * MILLION))
    cases = []
    for size, shape in SIZES.items():
        cases.append(workload(f"Steppe, {shape}", "tables", "batches", "--size", size, "--steps", steps))
        cases.append(workload(f"{BARE}, {shape}", "tables", "bare-batches", "--size", size, "--steps", steps))
        states, actions = (word.replace(",", "") for word in shape.split(" × "))
        settings = (f"states={states}", f"actions={actions}")
        cases.append(
            peer(f"{ORIGINAL}, {shape}", "dist_classicrl", "learn", steps=effort.of(400_000), settings=settings)
        )
    rows = effort.measure(cases)
    claims = []
    for shape in SIZES.values():
        ours = f"Steppe, {shape}"
        limit, original = ratio(rows, ours, f"{BARE}, {shape}"), ratio(rows, ours, f"{ORIGINAL}, {shape}")
        claims.append(Claim(f"Q-learning from arrays of 1,024, table {shape} / bare compiled loop", 0.7, limit))
        claims.append(Claim(f"Q-learning from arrays of 1,024, table {shape} / {ORIGINAL}", 100, original))
    return Part(
        "Learning from batches of arrays",
        "1,024 random rows per call, again and again. Steppe checks every row before it learns from the first; the bare "
        "loop would write anywhere.",
        "updates/s",
        rows,
        claims,
    )


def tictactoe(effort: Effort) -> Part:
    steps = str(effort.of(60 * MILLION))
    cases = [
        workload(f"Steppe, {opponent} opponent", "tables", "games", "--opponent", opponent, "--steps", steps)
        for opponent in OPPONENTS
    ]
    cases += [
        workload(
            f"Steppe, {opponent}, one call per step", "tables", "games", "--opponent", opponent, "--block", "1",
            "--steps", steps,
        )
        for opponent in OPPONENTS
    ]  # fmt: skip
    cases.append(workload(f"{BARE}, random opponent", "tables", "bare-games", "--steps", steps))
    cases.append(peer(f"{ORIGINAL}, random opponent", "dist_classicrl", "tictactoe", steps=effort.of(96_000)))
    rows = effort.measure(cases)
    ours = f"Steppe, {OPPONENTS[0]} opponent"
    claims = [
        Claim(
            f"TicTacToe on one core, {opponent} opponent",
            9,
            in_millions(rows[f"Steppe, {opponent} opponent"]),
            unit="M steps/s",
        )
        for opponent in OPPONENTS
    ]
    claims.append(Claim(f"TicTacToe on one core / {ORIGINAL}", 500, ratio(rows, ours, f"{ORIGINAL}, random opponent")))
    return Part(
        "TicTacToe on one core",
        "1,024 games at once; a step is a move, the reply where there is an opponent, an ε-greedy choice (ε = 0.1) and the "
        f"update. {ORIGINAL} steps 16 games, its fastest here.",
        "env steps/s",
        rows,
        claims,
    )


def processes(effort: Effort) -> Part:
    steps = str(effort.of(60 * MILLION))
    one, two, theirs = "Steppe, one process", "Steppe, two processes", f"{ORIGINAL}, two processes"
    rows = effort.measure(
        [
            workload(one, "tables", "processes", "--steps", steps),
            workload(two, "tables", "processes", "--processes", "2", "--steps", steps),
            peer(theirs, "dist_classicrl", "tictactoe", steps=effort.of(96_000), settings=("agents=16", "processes=2")),
        ]
    )
    return Part(
        "TicTacToe in two processes",
        "`ParallelQLearning` on `steppe/TicTacToe-v0`, with one process and with two, by the run's own clock: from the "
        "first step to the last merge into the table that all share.",
        "env steps/s",
        rows,
        [
            Claim("TicTacToe, two processes / one", 1.6, ratio(rows, two, one)),
            Claim(f"TicTacToe, two processes / {ORIGINAL} with two", 500, ratio(rows, two, theirs)),
        ],
        columns={"seconds": "with start and end, s"},
    )


def quality(effort: Effort) -> Part:
    steps = {"random": 30 * MILLION, "self": 20 * MILLION, "perfect": 40 * MILLION}
    labels = {opponent: f"Steppe, trained by {how}" for opponent, how in HOW.items()}
    rows = effort.measure(
        [
            workload(label, "tables", "quality", "--opponent", opponent, "--steps", str(steps[opponent]))
            for opponent, label in labels.items()
        ]
    )
    chance = rows[labels["random"]]
    claims = [
        Claim("TicTacToe, trained against chance: exact mean return (optimum .95983)", 0.955, chance.median, unit=""),
        Claim("the same: training time", 5, slowest(chance), unit="s", at_least=False),
    ]
    for opponent in ("self", "perfect"):
        row = rows[labels[opponent]]
        claims.append(Claim(f"TicTacToe, trained by {HOW[opponent]}: worst result of any play", 0, worst(row), unit=""))
        claims.append(Claim("the same: training time", 30, slowest(row), unit="s", at_least=False))
    return Part(
        "What is learned",
        "The return of the greedy play against a random opponent, over both seats, and the least that any play of anybody "
        "can bring it to (−1 is a loss): both over the whole game tree, not by sampling.",
        "mean return",
        rows,
        claims,
        columns={"worst": "worst", "train_s": "training, s"},
    )


def overhead(effort: Effort) -> Part:
    steps = str(effort.of(100_000, 10_000))
    rows = effort.measure(
        [
            workload(f"Steppe, {name}", "tables", "overhead", "--algorithm", name, "--steps", steps)
            for name in ALGORITHMS
        ]
    )
    return Part(
        "Overhead in a plain Python environment",
        "`train_episode` in a Gymnasium environment whose own step takes a fraction of a microsecond, less the time of "
        "the environment's own steps.",
        "µs per step",
        rows,
        [
            Claim(f"{name}: overhead per step", 3, rows[f"Steppe, {name}"].median, unit="µs", at_least=False)
            for name in ALGORITHMS
        ],
        columns={"own_us": "environment's own, µs", "whole_us": "together, µs"},
    )


def start(effort: Effort) -> Part:
    label = "Steppe, first learned step"
    rows = effort.measure([since_start(workload(label, "tables", "first"))], warm_ups=1)
    torch = [float(run.reading.extra["torch"]) for run in rows[label].runs]
    return Part(
        "To the first learned step",
        "From the start of the process, imports included, with kernels compiled before.",
        "s",
        rows,
        [
            Claim(
                "`steppe.classic`, process start to first learned step",
                1.5,
                rows[label].median,
                unit="s",
                at_least=False,
            ),
            Claim("the same: runs that imported torch", 0, sum(torch) if torch else None, unit="", at_least=False),
        ],
        columns={"torch": "imported torch"},
    )


def since_start(case: Case) -> Case:
    """Return the case with its value, a timestamp, measured from the start of its process."""

    def read(done: Done) -> Reading:
        found = case.read(done)
        return Reading(found.value - done.account["began_s"], found.settings, found.versions, extra=found.extra)

    return Case(case.label, case.command, read)


def in_millions(row: Row) -> float | None:
    return None if row.median is None else row.median / MILLION


def slowest(row: Row) -> float | None:
    """Return the longest training time of a row's runs: the limit applies to each of them."""
    return max((run.reading.extra["train_s"] for run in row.runs), default=None)


def worst(row: Row) -> float | None:
    """Return the worst of a row's runs."""
    return min((run.reading.extra["worst"] for run in row.runs), default=None)


PARTS = {
    "batches": batches, "tictactoe": tictactoe, "processes": processes, "quality": quality, "overhead": overhead,
    "start": start,
}  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))
