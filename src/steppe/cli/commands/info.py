"""Read-only commands: list algorithms and environments, and show the configuration with the source of each value."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from steppe.cli.options import AsJson, Layers, experiment_flags
from steppe.cli.output import emit, print_table
from steppe.core.contracts.errors import WorldError, did_you_mean


def algos(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show the hyperparameters of this algorithm.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the algorithms, or the hyperparameters of one."""
    from steppe.core.config.algorithm_table import ALGORITHMS, config_class

    if name is not None:
        return _print_keys(config_class(name), as_json)
    rows = [
        {
            "name": algo,
            "actions": [kind.replace("_", "-").replace("box", "continuous") for kind in config.actions],
            "memory": config.memory,
            "summary": " ".join((config.__doc__ or "").split()),
        }
        for algo, config in ALGORITHMS.items()
    ]
    if as_json:
        return emit(rows)
    print_table(list(rows[0]), [[", ".join(v) if isinstance(v, list) else v for v in row.values()] for row in rows])
    return None


def _print_keys(config: Any, as_json: bool) -> None:
    rows = [
        {"key": key, "default": field.get_default(), "meaning": field.description}
        for key, field in config.model_fields.items()
    ]
    if as_json:
        return emit(rows)
    return print_table(["key", "default", "meaning"], [[_plain(value) for value in row.values()] for row in rows])


def envs(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[FILTER]", help="List only ids that contain this text.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Include older versions.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the environments.

    ENV can also be `module:Id` (an id that the module registers), `module:function` (a function that returns an environment), or a
    PettingZoo environment: `pettingzoo.sisl.pursuit_v5` or `sisl/pursuit-v5`.
    """
    from steppe.envs.catalog import list_environments

    rows = [row for row in list_environments(every=every) if pattern is None or pattern.lower() in row["id"].lower()]
    if not rows:
        known = [row["id"] for row in list_environments(every=True)]
        raise WorldError(
            f"no environment id contains {pattern!r}; `steppe envs --all` lists all ids.{did_you_mean(pattern or '', known)}"
        )
    if as_json:
        return emit(rows)
    headers = ["id", "steps per episode", "solved at", "native vector", "needs"]
    cells = [
        [row["id"], row["max_episode_steps"], row["solved_at"], "yes" if row["native_vector"] else "", row["needs"]]
        for row in rows
    ]
    return print_table(headers, cells, right=headers[1:3])


@experiment_flags
def show_config(layers: Layers, as_json: bool) -> None:
    """Show every configuration key with its value and source.

    Sources, lowest priority first: default, the --config file, environment variables (STEPPE_SEED, STEPPE_AGENT__CLIP), flags.
    """
    from steppe.core.config.run import flatten, resolve_config

    resolved = resolve_config(("not given", {"env": ""}), *layers)
    rows = {
        key: {"value": "auto" if key in resolved.auto else None if source == "not given" else value, "source": source}
        for (key, value), source in zip(flatten(resolved.config).items(), resolved.sources.values(), strict=True)
    }
    if as_json:
        return emit(rows)
    meanings = _meanings(resolved.config)
    cells = [[key, _plain(row["value"]), row["source"], meanings.get(key, "")] for key, row in rows.items()]
    return print_table(["key", "value", "source", "meaning"], cells)


def _meanings(config: Any) -> dict[str, str]:
    found = {}
    for key, field in type(config).model_fields.items():
        section = getattr(config, key)
        inner = getattr(type(section), "model_fields", None)
        if inner is None:
            found[key] = field.description
        else:
            found.update({f"{key}.{name}": leaf.description for name, leaf in inner.items()})
    return found


def _plain(value: Any) -> str:
    """Format a value as it is written after `key=`; None is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
