"""Measure a reference experiment and write benchmarks/references/NAME.json.

    scripts/measure_reference.py --name lunarlander-v3-ppo --jobs 2     # a row of benchmarks/references/experiments.toml
    scripts/measure_reference.py CartPole-v1 ppo --steps 50_000 --seeds 1,2,3 -s learning_rate=1e-3
    scripts/measure_reference.py --list

An interrupted measurement continues when the same command is given again: finished seeds are JSON files of their own in the
working directory, unfinished ones continue from their newest checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from steppe.core.config.run import from_pairs
from steppe.core.contracts.errors import SteppeError, UsageError
from steppe.records.provenance import hardware, versions
from steppe.records.results.reference_results import ReferenceExperiment, make_reference, read_experiments, write_record
from steppe.training.reference_experiments.measurement import measure

REFERENCES = Path(__file__).resolve().parents[1] / "benchmarks" / "references"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?", help="environment")
    parser.add_argument("algo", nargs="?", help="algorithm")
    parser.add_argument("--name", help="row of experiments.toml, or the name of another experiment")
    parser.add_argument("--list", action="store_true", help="list the rows of experiments.toml")
    parser.add_argument("--steps", type=lambda text: int(text.replace("_", "")))
    parser.add_argument(
        "--seeds", type=parse_seeds, help="a number of seeds, or seeds with commas: 1,7,42 (7, is one seed)"
    )
    parser.add_argument("--episodes", type=int, help="episodes of the evaluations after training")
    parser.add_argument("--score", choices=("final", "best", "exact"))
    parser.add_argument("-s", "--set", dest="pairs", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once, one thread each")
    parser.add_argument("--work", type=Path, default=Path("runs/references"), help="directory of seeds' results")
    parser.add_argument("--out", type=Path, default=REFERENCES, help="directory of the reference")
    return parser.parse_args(arguments)


def parse_seeds(text: str) -> list[int]:
    """Return seeds 0 to N - 1 for a number N, or the seeds that are listed."""
    if "," in text:
        return [int(word) for word in text.split(",") if word]
    return list(range(int(text)))


def choose_experiment(arguments: argparse.Namespace) -> ReferenceExperiment:
    """Return the row of the table with the changes that were asked for, or a new experiment."""
    table = read_experiments(REFERENCES / "experiments.toml")
    if arguments.name in table and arguments.env is None:
        chosen = table[arguments.name]
    elif arguments.env and arguments.algo:
        chosen = next(
            (
                row
                for row in table.values()
                if (row.env, row.algo) == (arguments.env, arguments.algo) and not arguments.name
            ),
            ReferenceExperiment(
                arguments.name or f"{arguments.env}-{arguments.algo}".lower().replace("/", "-").replace(":", "-"),
                arguments.env,
                arguments.algo,
                1_000_000,
                [0],
            ),
        )
    else:
        raise UsageError("give ENV and ALGO, or --name of a row (see --list)")
    changes = {key: getattr(arguments, key) for key in ("steps", "seeds", "episodes", "score")}
    changes = {key: value for key, value in changes.items() if value is not None}
    settings = {**chosen.settings, **from_pairs(arguments.pairs)}
    return msgspec.structs.replace(chosen, **changes, settings=settings)


def run(arguments: argparse.Namespace) -> None:
    if arguments.list:
        for row in read_experiments(REFERENCES / "experiments.toml").values():
            done = "measured" if (REFERENCES / f"{row.name}.json").exists() else "-"
            print(f"{row.name:36} {row.steps:>10,} steps  {len(row.seeds)} seeds  {done:8}  {row.asked}")
        return
    experiment = choose_experiment(arguments)
    results = measure(
        experiment,
        seeds=experiment.seeds,
        work=arguments.work,
        jobs=arguments.jobs,
        say=lambda line: print(line, flush=True),
    )
    reference = make_reference(experiment, results, hardware(), versions())
    path = arguments.out / f"{experiment.name}.json"
    write_record(path, reference)
    scores = reference.scores
    print(f"{experiment.name}: {experiment.score} scores {[round(score, 4) for score in scores]}")
    print(f"median {statistics.median(scores):.6g}, worst {min(scores):.6g}; asked: {experiment.asked or '-'}")
    for result in results:
        best = "-" if result.best is None else f"{result.best.mean:.6g} at {result.best.env_steps:,}"
        exact = "".join(f", {key} {value:.6g}" for key, value in result.exact.items())
        print(
            f"  seed {result.seed}: final {result.final.mean:.6g} ± {result.final.std:.3g}, best {best}{exact}; "
            f"{result.wall_s:.0f} s, {result.cpu_s:.0f} s CPU"
        )
    print(f"written: {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run(parse(arguments))
    except SteppeError as error:
        print(f"measure_reference: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
