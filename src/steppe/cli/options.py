"""The flags of an experiment, declared once for all commands that take them. Descriptions, types and defaults come from
the fields of RunConfig, which is imported only when a command runs or its help is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from steppe.core.contracts.errors import ConfigError

Layers = tuple[tuple[str, Mapping[str, Any]], ...]
OptionalText = str | None
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout; all other output goes to stderr.")
]
PLAIN_TEXT_KEYS = {
    "env",
    "algo",
    "name",
    "run_dir",
    "device",
    "runtime",
    "mode",
    "init_from",
    "ray.address",
    "kafka.address",
}  # used as plain strings; all other flags are parsed as TOML values


class FieldHelp(TyperCommand):
    """Command whose flags take their help from the configuration's fields when the help is shown."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from steppe.core.config.fields import FrozenConfig
        from steppe.core.config.run import FlowConfig, RunConfig

        for parameter in self.params:
            name = parameter.name or ""
            field = RunConfig.model_fields.get(name) or FlowConfig.model_fields.get(name)
            if field is not None and not isinstance(
                field.get_default(), FrozenConfig
            ):  # --kafka shares its name with a section, whose default is not its own
                choices = _choices(field.annotation)
                default = field.get_default()
                hints = [f"One of {', '.join(choices)}."] if choices else []
                hints += [] if default is None or default is False or field.is_required() else [f"[default: {default}]"]
                parameter.help = " ".join([field.description or "", *hints])  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


def experiment_flags(command: Callable[[Layers, bool], None]) -> Callable[..., None]:
    """Add the flags of an experiment to a command. The command receives the configuration layers and `as_json`."""

    def flags(
        env: Annotated[OptionalText, typer.Argument(metavar="ENV", show_default=False)] = None,
        algo: Annotated[OptionalText, typer.Option(metavar="NAME")] = None,
        runtime: Annotated[OptionalText, typer.Option(metavar="NAME")] = None,
        mode: Annotated[OptionalText, typer.Option(metavar="NAME")] = None,
        ray_address: Annotated[
            OptionalText,
            typer.Option(metavar="ADDR", help="Address of a running Ray cluster for --runtime ray: host:port or auto."),
        ] = None,
        kafka: Annotated[
            OptionalText,
            typer.Option(metavar="ADDR", help="Address of the Kafka brokers for --runtime kafka: host:port."),
        ] = None,
        actors: Annotated[OptionalText, typer.Option(metavar="N")] = None,
        envs: Annotated[OptionalText, typer.Option(metavar="N")] = None,
        steps: Annotated[OptionalText, typer.Option(metavar="N")] = None,
        seed: Annotated[OptionalText, typer.Option(metavar="N")] = None,
        target_return: Annotated[OptionalText, typer.Option(metavar="R")] = None,
        restarts: Annotated[OptionalText, typer.Option(metavar="N")] = None,
        init_from: Annotated[OptionalText, typer.Option(metavar="RUN")] = None,
        record_arrivals: Annotated[bool, typer.Option("--record-arrivals")] = False,
        profile: Annotated[bool, typer.Option("--profile")] = False,
        device: Annotated[OptionalText, typer.Option(metavar="NAME")] = None,
        pairs: Annotated[
            list[str] | None,
            typer.Option(
                "-s",
                "--set",
                metavar="KEY=VALUE",
                help="Set any other configuration key; repeatable: -s learning_rate=1e-3 -s evaluation.episodes=50. "
                "`steppe config show` lists all keys.",
            ),
        ] = None,
        config: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE", help="TOML file with configuration keys. STEPPE_* variables and flags override it."
            ),
        ] = None,
        run_dir: Annotated[OptionalText, typer.Option(metavar="DIR")] = None,
        name: Annotated[OptionalText, typer.Option(metavar="NAME")] = None,
        as_json: AsJson = False,
    ) -> None:
        given = {
            "env": env, "algo": algo, "runtime": runtime, "mode": mode, "actors": actors, "envs": envs, "steps": steps,
            "seed": seed, "target_return": target_return, "restarts": restarts, "init_from": init_from,
            "flow.record_arrivals": "true" if record_arrivals else None, "flow.profile": "true" if profile else None,
            "device": device, "run_dir": run_dir, "name": name, "ray.address": ray_address,
            "kafka.address": kafka,
        }  # fmt: skip
        command(layers({key: text for key, text in given.items() if text is not None}, pairs or [], config), as_json)

    flags.__name__, flags.__doc__ = command.__name__, command.__doc__
    return flags


def layers(given: Mapping[str, str], pairs: list[str], file: Path | None) -> Layers:
    """Return the configuration layers for `resolve_config`: file, environment variables and flags, lowest priority first."""
    from steppe.core.config.run import from_environ, from_pairs, from_toml, parse_value

    flags = {key: text if key in PLAIN_TEXT_KEYS else parse_value(text) for key, text in given.items()}
    extra = from_pairs(pairs)
    twice = flags.keys() & extra.keys()
    if twice:
        key = min(twice)
        raise ConfigError(f"{key} is set twice, by its own flag and by -s {key}=…: remove one of them")
    from_file = ((str(file), from_toml(file)),) if file else ()
    return (*from_file, ("environment", from_environ()), ("flag", {**flags, **extra}))


def _choices(annotation: Any) -> list[str]:
    """Return the values of a Literal, also inside an optional type."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for inner in get_args(annotation) if get_origin(inner) is Literal for word in _choices(inner)]
