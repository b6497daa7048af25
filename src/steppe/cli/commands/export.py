"""`steppe export`: write a policy for use without Steppe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steppe.cli.commands.runs import Run
from steppe.cli.options import AsJson
from steppe.cli.output import emit


def export(
    run: Run,
    npz: Annotated[
        Path, typer.Option("--npz", metavar="FILE", help="Write the table and its greedy actions as a NumPy archive.")
    ],
    as_json: AsJson = False,
) -> None:
    """Write a learned table to a file.

    The file needs NumPy only: `q_table` has a row per state, and `greedy` the policy's action in each.
    """
    from steppe.training.export import export_table

    found = export_table(run, npz)
    if as_json:
        return emit(found)
    return print(f"written: {found['file']}, {found['states']} states and {found['actions']} actions")
