"""`steppe verify`: repeat reference experiments."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steppe.cli.options import AsJson
from steppe.cli.output import emit, print_table, reserved_stdout
from steppe.cli.text_charts import count, decimal
from steppe.core.contracts.errors import UsageError

if TYPE_CHECKING:
    from steppe.records.results.reference_results import Reference
    from steppe.training.reference_experiments.verification import Verification

Algo = Annotated[
    str | None, typer.Argument(metavar="ALGO", help="Algorithm, or the name of a reference.", show_default=False)
]
Env = Annotated[str | None, typer.Argument(metavar="ENV", help="Environment.", show_default=False)]
Every = Annotated[bool, typer.Option("--all", help="Repeat all references.")]
Seeds = Annotated[
    str | None,
    typer.Option(metavar="N|LIST", help="Number of seeds, or a list. Default: as the reference says, mostly 1."),
]
Jobs = Annotated[int, typer.Option(metavar="N", min=1, help="Runs at once, with one thread each.")]
Directory = Annotated[
    Path | None,
    typer.Option("--references", metavar="DIR", help="Directory of the references. Default: of the source checkout."),
]


def verify(
    algo: Algo = None,
    env: Env = None,
    every: Every = False,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    references: Directory = None,
    as_json: AsJson = False,
) -> None:
    """Repeat a reference experiment.

    Trains with its settings and the present defaults, and says whether the score lies in the recorded band. Exit code 1 if it does not.
    Without arguments, the references are listed.
    """
    from steppe.training.reference_experiments import verification
    from steppe.training.seeds.group import parse_seeds

    found = verification.find_references(references or references_directory(), algo, env)
    if algo is None and not every:
        return _list(found, as_json=as_json)
    chosen = None if seeds is None else parse_seeds(seeds, first=1)
    with ExitStack() as stack:
        stdout = stack.enter_context(reserved_stdout()) if as_json else None
        results = [verification.verify(one, seeds=chosen, jobs=jobs) for one in found]
        if as_json:
            emit([verification.to_builtins(result) for result in results], stdout)
        else:
            print("\n".join(_line(result) for result in results))
    raise typer.Exit(0 if all(result.inside for result in results) else 1)


def references_directory() -> Path:
    """Return benchmarks/references of the source checkout."""
    directory = Path(__file__).resolve().parents[4] / "benchmarks" / "references"
    if not directory.is_dir():
        raise UsageError(
            "the installed package does not contain the reference results: give --references DIR, or use a source checkout"
        )
    return directory


def _line(result: Verification) -> str:
    word = "inside" if result.inside else "OUTSIDE"
    text = (
        f"{result.name}: {decimal(result.score)} with seeds {', '.join(map(str, result.seeds))} is {word} the "
        f"{result.band.confidence:.0%} band {decimal(result.band.low)} to {decimal(result.band.high)}"
    )
    if len(result.same_weights) == len(result.seeds):
        text += "; the weights are the recorded ones"
    for key, (before, now) in result.changed_settings.items():
        text += f"\n  {key} was {before}, is {now}"
    return text


def _list(references: list[Reference], *, as_json: bool) -> None:
    if as_json:
        return emit([_to_json(one) for one in references])
    cells = [
        [
            one.experiment.name,
            one.experiment.algo,
            one.experiment.env,
            count(one.experiment.steps),
            len(one.results),
            decimal(one.band.low),
            decimal(one.band.high),
        ]
        for one in references
    ]
    return print_table(
        ["reference", "algo", "env", "steps", "seeds", "from", "to"], cells, right=("steps", "from", "to")
    )


def _to_json(reference: Reference) -> dict[str, object]:
    experiment, band = reference.experiment, reference.band
    about = {"name": experiment.name, "algo": experiment.algo, "env": experiment.env, "steps": experiment.steps}
    return about | {"seeds": len(reference.results), "low": band.low, "high": band.high}
